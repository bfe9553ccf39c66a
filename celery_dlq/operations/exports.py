"""Export letters to Parquet files; see `celery_dlq.export`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from celery_dlq.errors import ExportError, SettingsError
from celery_dlq.events import Action
from celery_dlq.letters.filters import FilterFields, LetterFilter, filter_of
from celery_dlq.letters.printable import some_of
from celery_dlq.letters.redaction import Redaction
from celery_dlq.operations.files import ExportedFiles, opened
from celery_dlq.operations.instructions import Audit, CountedChange

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from celery_dlq.assembly import Assembly
    from celery_dlq.export.exporter import ExportReport


class Exports:
    """Writes letters to Parquet files, and forgets folders that are gone."""

    def __init__(self, assembly: Assembly) -> None:
        self._backend = assembly.backend
        self._reading = assembly.reading()
        self._events = assembly.events

    def export(
        self,
        /,
        destination: str | Path,
        dead_letter_queues: str | Iterable[str] | None = None,
        where: LetterFilter | None = None,
        *,
        redact: Sequence[str] = (),
        redact_key: bytes | None = None,
        follow: threading.Event | None = None,
        roll_seconds: float | None = None,
        then_trim: bool = False,
        successes: bool = False,
        take_over: bool = False,
        filesystem: Any | None = None,
        progress: Callable[[int], None] | None = None,
        expected: Callable[[int], None] | None = None,
        **fields: Unpack[FilterFields],
    ) -> ExportReport:
        """Write the letters to Parquet files; later exports write only new letters.

        The files contain each letter once, however often exports are killed. A folder keeps
        the filter and the redaction of its first export. An export stops before the first
        letter that died at or after ``until``; a later one continues there. With ``follow`` a file
        is closed after ``roll_seconds`` (60), or earlier if it is large. A folder belongs to one
        store. If that came back from an older snapshot, its letters are compared with the
        files, and only those that are new are written. ``then_trim`` leaves what another folder
        in use lacks; what such an export removed before this one came is in ``missing``.
        """
        from celery_dlq.export.exporter import SUCCESSES, ParquetExport, Rolling  # noqa: PLC0415 - pyarrow is an extra

        chosen = self._queues_to_export(dead_letter_queues)
        chosen_letters = filter_of(where, fields)
        if successes and (chosen_letters or then_trim):
            raise SettingsError(
                "expected no filter and no then_trim with successes, which are no letters"
            )
        export = ParquetExport(
            self._backend.sampled if successes else self._backend.letters,
            destination,
            where=chosen_letters,
            of=SUCCESSES if successes else None,
            rolling=None if roll_seconds is None else Rolling(seconds=roll_seconds),
            redaction=Redaction.with_key(redact, redact_key) if redact else None,
            filesystem=filesystem,
            take_over=take_over,
            **(self._audited(str(destination)) if then_trim else {}),
        )
        if follow is not None:
            return export.follow(chosen, follow, progress=progress)
        return export.run(chosen(), progress=progress, expected=expected)

    def files(self, /, destination: str | Path, *, filesystem: Any | None = None) -> ExportedFiles:
        """The letters in the files of an export, to read them as those in Redis.

        Args:
            destination: The folder or URL that was exported to.
            filesystem: A file system of pyarrow or fsspec, on which the folder is.

        Raises:
            ExportError: It is no folder or URL; a later call: a file is damaged.
        """
        return opened(destination, self._backend.letters, self._reading.redaction, filesystem)

    def forget_export(self, /, destination: str | Path) -> list[str]:
        """Keep no more letters for a folder, which may be gone; return the dead-letter queues.

        Its next export keeps letters for it again.

        Args:
            destination: The folder or URL, or its name in ``kept_for`` of an `ExportReport`.

        Raises:
            ExportError: No letters are kept for such a folder.
        """
        from celery_dlq.export.checkpoint import local_name  # noqa: PLC0415 - pyarrow is an extra
        from celery_dlq.export.destination import shown  # noqa: PLC0415 - pyarrow is an extra

        text, letters = shown(destination).rstrip("/"), self._backend.letters
        wanted, found, others = {text, local_name(os.path.abspath(text))}, [], set[str]()  # noqa: PTH100 - does not resolve links
        for queue in letters.names():
            for folder in letters.lacking(queue):
                if folder.name.rstrip("/") in wanted:
                    letters.lease(queue, folder.key, "", 0).request("forget")
                    found.append(queue)
                else:
                    others.add(folder.name)
        if not found:
            raise ExportError(
                f"expected a folder for which letters are kept, got {text}; "
                f"they are kept for {some_of(sorted(others)) or 'none'}"
            )
        return list(dict.fromkeys(found))

    def _queues_to_export(self, given: str | Iterable[str] | None) -> Callable[[], list[str]]:
        """The queues to export; without names all, also those that come while it follows."""
        if given is None:
            return self._backend.letters.names
        names = [given] if isinstance(given, str) else list(given)
        for name in names:
            self._reading.check_queue(name)
        return lambda: names

    def _audited(self, destination: str) -> dict[str, Any]:
        """What records the letters that an export removes, from the first one on."""
        from celery_dlq.export.destination import shown  # noqa: PLC0415 - pyarrow is an extra

        audit, letters = Audit(self._backend.workers, self._events), self._backend.letters
        changes: dict[str, CountedChange] = {}

        def trims(dead_letter_queue: str) -> str:
            operation, detail = f"export-{uuid4().hex}", {"exported_to": shown(destination)}
            change = audit.counted(letters, operation, Action.TRIMMED, dead_letter_queue, detail)
            changes[dead_letter_queue] = change
            change.open()
            return operation

        def trimmed(dead_letter_queue: str, _letters: int) -> None:
            changes.pop(dead_letter_queue).close()

        return {"trims": trims, "trimmed": trimmed}
