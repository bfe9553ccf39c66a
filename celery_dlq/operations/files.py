"""Letters in the files of an export: read as those in Redis, and found again by a job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qsl, urlencode

from celery_dlq.errors import DLQError
from celery_dlq.letters.redaction import NO_REDACTION, Redaction
from celery_dlq.operations.reading import Reading

if TYPE_CHECKING:
    from celery_dlq.export.exported import ExportedLetters
    from celery_dlq.store.letters import Letters

_KEPT = ("endpoint_override", "region", "scheme")
"""Options of a URL that are no secrets, and without which nobody finds the files."""


class ExportedFiles:
    """The letters in a folder that `DeadLetters.export` wrote.

    Its methods are those of `DeadLetters`: `letters`, `entries`, `get`, `entry`, `groups`, `group`
    and `arguments`. They read the files, and give the same records. A call opens only the files of
    the queue and of the days that its filter wants.
    """

    def __init__(self, source: ExportedLetters, place: str, redaction: Redaction) -> None:
        self.source = source
        self.place = place  # The folder as a job keeps it, without credentials
        reading = Reading(cast("Letters", source), redaction)
        self.check_queue = reading.check_queue
        self.letters = reading.letters
        self.entries = reading.entries
        self.get = reading.get
        self.entry = reading.entry
        self.groups = reading.groups
        self.group = reading.group
        self.arguments = reading.arguments

    @property
    def names(self) -> list[str]:
        """The names of the dead-letter queues of which there are files."""
        return self.source.names()


def opened(
    place: str | Path | ExportedFiles,
    letters: Letters,
    redaction: Redaction = NO_REDACTION,
    filesystem: Any | None = None,
) -> ExportedFiles:
    """The letters in a folder; nothing is read yet.

    Raises:
        DLQError: It is no folder or URL.
    """
    from celery_dlq.export.destination import Destination  # noqa: PLC0415 - pyarrow is an extra
    from celery_dlq.export.exported import ExportedLetters  # noqa: PLC0415 - the same

    if isinstance(place, ExportedFiles):
        return place
    if not isinstance(place, (str, Path)):
        raise DLQError(
            f"expected files to be a folder or a URL, got {type(place).__name__}; "
            f"pass a file system to DeadLetters.files()"
        )
    destination = Destination(place, filesystem)
    kept = _kept(str(place)) if filesystem is None else ""
    local = destination.shared is None
    return ExportedFiles(
        ExportedLetters(destination, letters), destination.root if local else kept, redaction
    )


def check_reachable(files: str) -> None:
    """Refuse files of this machine for a job that another process may run."""
    if files and "://" not in files:
        raise DLQError(
            f"expected files that every worker reaches, such as s3://bucket/letters, for a job "
            f"that waits, got {files}; redrive from it here and now"
        )


def _kept(place: str) -> str:
    """A URL without its credentials."""
    from celery_dlq.export.destination import shown  # noqa: PLC0415 - pyarrow is an extra

    given = dict(parse_qsl(place.partition("?")[2]))
    kept = {name: given[name] for name in _KEPT if name in given}
    return f"{shown(place)}?{urlencode(kept)}" if kept else shown(place)
