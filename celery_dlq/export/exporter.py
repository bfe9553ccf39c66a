"""Export to a folder of Parquet files: each letter once, however often the exporter is killed.

The folder::

    dlq=<queue>/day=<YYYY-MM-DD>/letters-<first>-<last>.parquet
    _celery_dlq/        state; see `celery_dlq.export.checkpoint`
    _celery_dlq/schema  the columns of all files; see `celery_dlq.export.published`

`celery_dlq.export.roll` explains the order of a commit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery_dlq import timing
from celery_dlq.errors import CorruptLetter, DLQError, ExportError, StoreUnavailable
from celery_dlq.export import checkpoint, published, table
from celery_dlq.export.arrow import pa
from celery_dlq.export.checkpoint import Checkpoint, ExportLeases
from celery_dlq.export.destination import Destination
from celery_dlq.export.roll import Background, Roll, earlier_ids, trim_exported
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.packed import letter_from
from celery_dlq.letters.printable import get_logger
from celery_dlq.letters.record import REQUIRED_FIELDS, from_micros, iso, to_micros
from celery_dlq.letters.redaction import Redaction
from celery_dlq.store.records import FIRST_POSITION, ordered, position_at, stored_at

if TYPE_CHECKING:
    from celery_dlq.store.letters import Letters

logger = get_logger("celery_dlq.export")

SUCCESSES = "successes"
"""The kind of rows in an export of messages that succeeded."""

PAGE = 500
"""Letters read at a time; the store returns fewer if they are large."""

MAX_LISTED_ENTRIES = 20
"""Positions of at most this many unreadable entries are listed; the count covers all."""

_MAX_FAILURES = 3  # named in one message
_MAX_BUFFERED_BYTES = 64 * 1024 * 1024

RawLetter = tuple[str, Mapping[bytes, bytes]]
Progress = Callable[[int], None]


@dataclass(slots=True)
class ExportReport:
    """The result of an export."""

    destination: str  # The folder, without credentials
    letters: int = 0  # Letters written by this run
    files: int = 0  # Files written by this run
    bytes: int = 0  # Their size
    by_queue: dict[str, int] = field(default_factory=dict)  # Letters written, by dead-letter queue
    trimmed: int = 0  # Letters removed from their queues after their files were read back
    # Entries that are not letters or cannot be read: they are left out of the files and stay in
    # their queue
    unreadable: int = 0
    # The first `MAX_LISTED_ENTRIES` of them, as `queue position`
    unreadable_at: list[str] = field(default_factory=list)
    # Queues with letters that died at or after `until`; a later run exports them
    waiting: list[str] = field(default_factory=list)
    # Queues that were read again, because the store came back from a snapshot, was replaced, or
    # took the folder over; letters that the files have were left out
    compared: list[str] = field(default_factory=list)
    # Names in the folder that no export made; some readers fail on them
    foreign: list[str] = field(default_factory=list)
    # By dead-letter queue, of a first export without filters: how many letters at most left it
    # before, beside those in `missing`; empty before Redis 7.0, which does not count them
    gone: dict[str, int] = field(default_factory=dict)
    # Letters that exports to other folders removed before this one had them: each with
    # `dead_letter_queue`, `letters` (at most so many; 0: not known), `until` (when they were
    # stored) and `folder`
    missing: list[dict[str, Any]] = field(default_factory=list)
    # The same for a folder with a filter: nobody knows whether it matches any of them
    maybe_missing: list[dict[str, Any]] = field(default_factory=list)
    # By dead-letter queue: the folders in use for which letters were not trimmed
    kept_for: dict[str, list[str]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping with the attribute names."""
        return {name: getattr(self, name) for name in self.__slots__}

    def missing_text(self) -> str:
        """What the folder lacks because of exports to other folders; empty if nothing."""
        return "; ".join(
            f"{'up to ' if one['letters'] else ''}{one['letters'] or 'some'} of "
            f"{one['dead_letter_queue']}, stored until {one['until']}, which {one['folder']} has"
            for one in self.missing
        )

    def leave_out(self, queue: str, position: str) -> None:
        """Count an entry that cannot be read."""
        self.unreadable += 1
        if len(self.unreadable_at) < MAX_LISTED_ENTRIES:
            self.unreadable_at.append(f"{queue} {position}")

    def count(self, queue: str, letters: int, files: int, size: int) -> None:
        """Count the committed letters and files of one queue."""
        self.letters += letters
        self.files += files
        self.bytes += size
        if letters:
            self.by_queue[queue] = self.by_queue.get(queue, 0) + letters


@dataclass(frozen=True, slots=True, kw_only=True)
class Rolling:
    """The limits at which files are closed and put in place, whichever is reached first."""

    rows: int = 500_000  # Letters in one range
    bytes: int = 256 * 1024 * 1024  # Their bytes before compression
    seconds: float = 60.0  # Time since the range was begun; used only by `ParquetExport.follow`

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:  # true for NaN, too
                raise ExportError(
                    f"expected roll {name} to be more than 0, got {getattr(self, name)}"
                )


class ParquetExport:
    """Writes the new letters of a store to a folder."""

    def __init__(
        self,
        store: Letters,
        destination: str | Path,
        *,
        where: LetterFilter | None = None,
        rolling: Rolling | None = None,
        redaction: Redaction | None = None,
        filesystem: Any | None = None,
        of: str | None = None,
        trimmed: Callable[[str, int], None] | None = None,
        trims: Callable[[str], str] = lambda _queue: "",
        take_over: bool = False,
    ) -> None:
        self.store = store
        self.where = where or LetterFilter()
        self.rolling = rolling or Rolling()
        # `since` and `until` move on, so such a folder can have the letters that come
        self.filtered = bool(replace(self.where, since=None, until=None))
        self.redaction = redaction
        self.trimmed = trimmed
        self.trims = trims  # called before; gives the operation for which letters are counted
        self.destination = Destination(destination, filesystem)
        self.required = table.SUCCESS if of == SUCCESSES else REQUIRED_FIELDS
        self._of = of
        self._take_over = take_over
        # Of one run; see `_open_export`
        self.report: ExportReport
        self.pool: Background
        self.leases: ExportLeases
        self.progress: Progress
        self._queues: dict[str, _QueueExport] = {}
        self._failures: dict[str, DLQError] = {}

    def run(
        self,
        dead_letter_queues: Sequence[str],
        *,
        progress: Progress | None = None,
        expected: Progress | None = None,
    ) -> ExportReport:
        """Export the letters that are in the queues now; see `DeadLetters.export`."""
        with self._open_export(progress):
            if expected is not None and self._is_first(dead_letter_queues):
                expected(sum(self.store.length(name) for name in dead_letter_queues))
            for name in dead_letter_queues:
                self._export_queue(name)
            self._raise_failures()
        return self.report

    def follow(
        self,
        dead_letter_queues: Callable[[], Sequence[str]],
        stop: threading.Event,
        *,
        progress: Progress | None = None,
    ) -> ExportReport:
        """Export letters as they arrive, until ``stop`` is set; then write those already read.

        It waits for a store that does not answer.
        """
        with self._open_export(progress):
            poll, reported, away = timing.current.poll, set[str](), False
            backoff = timing.Backoff(2 * poll, timing.current.max_poll)
            names: Sequence[str] = ()
            while True:
                last_round = stop.is_set()
                try:
                    if away:  # it may be another store now
                        self._begin_folder()
                        away = False
                    names = dead_letter_queues()
                    for name in names:
                        self._export_queue(name, older=0.0 if last_round else self.rolling.seconds)
                    pause = poll
                    backoff.worked()
                except StoreUnavailable as exc:
                    if last_round:
                        raise
                    self._begin_anew()
                    away = True
                    pause = backoff.failed()
                    if backoff.failures == 1:
                        logger.warning("the export waits, the store does not answer: %s", exc)
                if last_round or (names and self._failures.keys() >= set(names)):
                    self._raise_failures()
                    return self.report
                for name in self._failures.keys() - reported:
                    logger.error("%s is not exported any more: %s", name, self._failures[name])
                    reported.add(name)
                missing = self.report.missing_text()
                if missing and missing not in reported:
                    logger.error("%s lacks letters: %s", self.destination.name, missing)
                    reported.add(missing)
                stop.wait(pause)

    def _is_first(self, dead_letter_queues: Sequence[str]) -> bool:
        with suppress(ExportError):  # of one queue, which fails alone
            read = partial(Checkpoint.read, self.destination, leases=self.leases)
            return all(read(name).last_position is None for name in dead_letter_queues)
        return False

    @contextmanager
    def _open_export(self, progress: Progress | None) -> Iterator[None]:
        name = self.destination.name
        try:
            with (
                self.destination.locked(),
                Background() as self.pool,
            ):
                self.destination.open()
                self.leases = self._begin_folder()
                published.publish(self.destination)
                self.report = ExportReport(destination=name, foreign=self.destination.foreign())
                self.progress = progress or (lambda _count: None)
                self._failures.clear()
                try:
                    yield
                finally:
                    self._begin_anew()
                    self.leases.release()
        except (OSError, pa.ArrowException) as exc:
            reason = getattr(exc, "strerror", None) or str(exc).strip().partition("\n")[0]
            raise ExportError(
                f"expected {name} to be a folder that can be written, got {type(exc).__name__}: "
                f"{reason}; nothing is lost, run the export again once it can"
            ) from exc

    def _begin_folder(self) -> ExportLeases:
        """Begin the folder or check that it is the same; return its leases."""
        store_id = self.store.identity()
        folder = checkpoint.agree_on_folder(
            self.destination,
            self.where,
            self.redaction.rules_and_key_id() if self.redaction is not None else {},
            self._of,
            store=store_id,
            take_over=self._take_over,
        )
        about = {"folder": folder, "of": self._of, "filtered": self.filtered}
        return ExportLeases(self.store, self.destination, store_id, about)

    def _export_queue(self, name: str, older: float = 0.0) -> None:
        """Read a queue; commit what was read ``older`` seconds ago. It fails alone."""
        if name in self._failures:
            return
        with self._alone_in_queue(name):
            if name not in self._queues:
                self._queues[name] = _QueueExport(self, name)
                self._queues[name].begin()
            queue = self._queues[name]
            before = queue.buffered_bytes
            queue.read()
            if not older or queue.is_old(older):
                queue.commit()
            elif queue.buffered_bytes > before:
                self._limit_buffers()

    @contextmanager
    def _alone_in_queue(self, name: str) -> Iterator[None]:
        try:
            yield
        except DLQError as exc:
            if name in self._queues:
                self._queues.pop(name).abandon()
            if isinstance(exc, StoreUnavailable) or self.leases.refused:
                raise
            self._failures[name] = exc

    def _limit_buffers(self) -> None:
        """Commit the largest queues until all together buffer few enough bytes."""
        queues = sorted(self._queues.values(), key=lambda queue: -queue.buffered_bytes)
        while queues and sum(queue.buffered_bytes for queue in queues) > _MAX_BUFFERED_BYTES:
            largest = queues.pop(0)
            with self._alone_in_queue(largest.name):
                largest.commit()

    def _begin_anew(self) -> None:
        """Begin all queues anew: the store may have come back older, and without their leases."""
        for queue in self._queues.values():
            queue.abandon()
        self._queues.clear()

    def _raise_failures(self) -> None:
        """Raise the errors of the queues that failed, as one."""
        failures = list(self._failures.values())
        if len(failures) == 1:
            raise failures[0]
        if failures:
            more = len(failures) - _MAX_FAILURES
            texts = [*map(str, failures[:_MAX_FAILURES]), *([f"{more} more"] if more > 0 else [])]
            raise ExportError(f"{len(failures)} queues were not exported: {'; '.join(texts)}")


class _QueueExport:
    """The export of one dead-letter queue."""

    def __init__(self, export: ParquetExport, name: str) -> None:
        self._export = export
        self.name = name
        self._earlier: set[str] | None = None  # ids in files of earlier generations
        self._roll: Roll | None = None
        self._begun_at = 0.0
        self._checkpoint, known = Checkpoint.taken(export.destination, name, export.leases)
        self._read_to = self._checkpoint.position
        end, last = export.store.last_position(name), self._checkpoint.last_position
        if known is not None or _is_before(end, last):
            self._begin_again(known, end)

    @property
    def buffered_bytes(self) -> int:
        return self._roll.buffered_bytes if self._roll is not None else 0

    def is_old(self, seconds: float) -> bool:
        return self._roll is not None and time.monotonic() - self._begun_at >= seconds

    def read(self) -> None:
        """Read all letters that are there now; commit whenever a limit is reached."""
        end = self._export.store.last_position(self.name)
        if _is_before(end, self._read_to):
            self.commit()
            self._begin_again(None, end)
        if end is None:
            return
        for page in self._pages_until(end):
            early = self._before_until(page)
            if early:
                self._take_page(early, replace(self._export.where, until=None))
                if self._has_enough():
                    self.commit()
            if len(early) < len(page):
                if self.name not in self._export.report.waiting:
                    self._export.report.waiting.append(self.name)
                return
        if self._roll is None and self._read_to != end:  # the letters up to there are gone
            self._checkpoint.pass_to(end)
            self._read_to = end

    def commit(self) -> None:
        """Put the files of the letters read in place, and move the checkpoint."""
        roll, self._roll = self._roll, None
        if roll is not None and self._read_to is not None:
            try:
                files, size = roll.commit(self._read_to, self._export.where.since)
            except BaseException:
                self._roll = roll  # for abandon()
                raise
            self._export.report.count(self.name, roll.rows, files, size)
        self._trim_exported()

    def abandon(self) -> None:
        if self._roll is not None:
            self._roll.abandon()

    def begin(self) -> None:
        """Say that the folder is in use, and what it lacks; finish a killed export."""
        checkpoint = self._checkpoint
        checkpoint.to_store_state()  # first: who removes letters looks for folders after saying so
        if self._export.required is REQUIRED_FIELDS:
            self._export.store.note_export(self.name)
        self._find_missing()
        if checkpoint.intent is None:
            return
        # The filter of the killed export: some of its files may be in place.
        since = None if checkpoint.since is None else from_micros(checkpoint.since)
        where = replace(self._export.where, since=since, until=None)
        self._roll = self._new_roll()
        for page in self._pages_until(checkpoint.intent):
            self._take_page(page, where)
        self._read_to = checkpoint.intent
        self.commit()

    def _begin_again(self, known: Checkpoint | None, end: str | None) -> None:
        """Read the queue again, from where store and folder agree."""
        logger.warning(
            "%s: Redis lacks letters that %s has (Redis came back from a snapshot or was replaced, "
            "the queue was deleted, or the folder was taken over). The queue is read again from "
            "%s; letters that the files have are left out",
            self.name,
            self._export.destination.name,
            (known and known.position) or "its beginning",
        )
        self._checkpoint.begin_again(known, end)
        self._read_to, self._earlier = self._checkpoint.position, None
        if self.name not in self._export.report.compared:
            self._export.report.compared.append(self.name)

    def _pages_until(self, end: str) -> Iterator[Sequence[RawLetter]]:
        if self._read_to != end:
            size = min(PAGE, self._export.rolling.rows)
            yield from self._export.store.fields(
                self.name, after=self._read_to, until=end, page_size=size
            )

    def _before_until(self, page: Sequence[RawLetter]) -> Sequence[RawLetter]:
        """The letters before the first one that died at or after ``until``.

        A letter that was stored before ``until`` also died before it, even if a wrong clock says
        otherwise; it must not hold up the letters after it.
        """
        until = self._export.where.until
        if until is None:
            return page
        micros, stored = to_micros(until), ordered(position_at(until))
        for number, (position, fields) in enumerate(page):
            died_at = _integer(fields.get(b"dead_lettered_at"))
            if died_at is not None and died_at >= micros and ordered(position) >= stored:
                return page[:number]
        return page

    def _take_page(self, page: Sequence[RawLetter], where: LetterFilter) -> None:
        chosen = self._not_in_files(page)
        if where or self._export.redaction:
            chosen = self._chosen_letters(chosen, where)
        if self._roll is None:
            self._roll = self._new_roll()
        if chosen:
            rows = table.table(
                [fields for _position, fields in chosen],
                lambda number, exc: self._leave_out(chosen[number][0], exc),
                required=self._export.required,
            )
            self._roll.add_page(rows)
        self._read_to = page[-1][0]
        self._export.progress(len(page))

    def _not_in_files(self, page: Sequence[RawLetter]) -> Sequence[RawLetter]:
        """The letters that no file of an earlier generation has."""
        if not self._checkpoint.comparing:
            self._earlier = None
            return page
        if self._earlier is None:
            self._earlier = earlier_ids(self._export.destination, self._checkpoint)
        earlier = self._earlier
        return [
            one for one in page if one[1].get(b"id", b"").decode("utf-8", "replace") not in earlier
        ]

    def _chosen_letters(self, page: Sequence[RawLetter], where: LetterFilter) -> list[RawLetter]:
        chosen: list[RawLetter] = []
        for position, fields in page:
            try:
                if where:
                    letter_from(fields)  # a filter would leave out what cannot be read, unseen
                if where.matches_fields(fields):
                    redaction = self._export.redaction
                    chosen.append((position, redaction.exported(fields) if redaction else fields))
            except CorruptLetter as exc:
                self._leave_out(position, exc)
        return chosen

    def _leave_out(self, position: str, exc: CorruptLetter) -> None:
        self._export.report.leave_out(self.name, position)
        if self._export.report.unreadable <= MAX_LISTED_ENTRIES:
            logger.error(
                "%s: entry %s is not a readable letter and is not exported: %s",
                self.name,
                position,
                exc,
            )

    def _new_roll(self) -> Roll:
        self._begun_at = time.monotonic()
        return Roll(self._export.destination, self._checkpoint, self._export.pool)

    def _has_enough(self) -> bool:
        rolling, roll = self._export.rolling, self._roll
        return roll is not None and (
            roll.rows >= rolling.rows or roll.bytes >= rolling.bytes or roll.too_many_days
        )

    def _find_missing(self) -> None:
        """Report the letters that left the queue before this folder had them."""
        checkpoint, export = self._checkpoint, self._export
        compared = checkpoint.compared or (FIRST_POSITION, FIRST_POSITION)
        have = max(checkpoint.last_position or FIRST_POSITION, compared[1], key=ordered)
        since, known = export.where.since, 0
        found = export.report.maybe_missing if export.filtered else export.report.missing
        for other in export.store.export_folders(self.name):
            if other.key == export.leases.place or ordered(other.trimmed) <= ordered(have):
                continue
            if since is not None and ordered(other.trimmed) < ordered(position_at(since)):
                continue
            known = max(known, other.trimmed_letters)  # several folders may have the same ones
            missing = {
                "dead_letter_queue": self.name,
                "letters": 0 if export.where else other.trimmed_letters,
                "until": iso(stored_at(other.trimmed)),
                "folder": other.name,
            }
            if missing not in found:
                found.append(missing)
        if have == FIRST_POSITION and not export.where and export.required is REQUIRED_FIELDS:
            left = export.store.left_count(self.name) - known
            if left > 0:
                export.report.gone[self.name] = left

    def _trim_exported(self) -> None:
        """Remove the letters that are in files, except those that another folder in use lacks."""
        export, checkpoint = self._export, self._checkpoint
        done, known = checkpoint.trimmed or FIRST_POSITION, checkpoint.trimming
        if export.trimmed is None or checkpoint.position == checkpoint.trimmed:
            return
        if ordered(until := self._trimmable()) <= ordered(done):
            return
        checkpoint.trimming = max(known or FIRST_POSITION, until, key=ordered)
        checkpoint.to_store_state()
        until = self._trimmable()  # a folder that came before it could read the note is seen now
        checkpoint.trimming = max(known or FIRST_POSITION, until, key=ordered)
        if ordered(until) <= ordered(done):
            checkpoint.to_store_state()
            return
        begin = partial(export.trims, self.name)
        count = trim_exported(export.store, export.destination, checkpoint, until, begin)
        export.report.trimmed += count
        if count:
            export.trimmed(self.name, count)

    def _trimmable(self) -> str:
        """The position up to which letters are in files, and no other folder in use lacks them."""
        export, checkpoint = self._export, self._checkpoint
        position = checkpoint.position or FIRST_POSITION
        others = [
            one
            for one in export.store.lacking(self.name, but=export.leases.place)
            if ordered(one.position) < ordered(position)
        ]
        if not others:
            return position
        export.report.kept_for[self.name] = [one.name for one in others]
        # Positions in the names of earlier generations are those of a store that went back.
        return FIRST_POSITION if checkpoint.generation else others[0].position


def _is_before(end: str | None, position: str | None) -> bool:
    """True if a queue ends before a position, which it therefore cannot have given."""
    return position is not None and (end is None or ordered(end) < ordered(position))


def _integer(value: bytes | None) -> int | None:
    try:
        return int(value or b"")
    except ValueError:
        return None
