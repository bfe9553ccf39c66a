"""Which letters an operation is about: one value object for API and command line."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime

from celery_dlq.errors import DLQError
from celery_dlq.record import DeadLetter, Reason, check_aware


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterFilter:
    """Matches letters; every field that is set must match.

    Attributes:
        ids: Letter ids.
        reason: A `Reason` or its name.
        task_name: Registered task name, exact.
        fingerprint: The fingerprint, or the first digits of it.
        exception_type: Dotted name of the exception, or its last part.
        worker_hostname: Node name of the worker that saw the death.
        since: Dead-lettered at or after this aware time.
        until: Dead-lettered before this aware time.
        grep: Text to find in the description, the exception's message or the body.
    """

    ids: frozenset[str] | None = None
    reason: Reason | str | None = None
    task_name: str | None = None
    fingerprint: str | None = None
    exception_type: str | None = None
    worker_hostname: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    grep: str | None = None

    def __post_init__(self) -> None:
        check_aware("since", self.since)
        check_aware("until", self.until)
        if self.reason is not None and str(self.reason) not in {r.value for r in Reason}:
            known = ", ".join(sorted(r.value for r in Reason))
            message = f"expected reason to be one of {known}, got {str(self.reason)!r}"
            raise DLQError(message)

    def __bool__(self) -> bool:
        return any(getattr(self, f.name) is not None for f in fields(self))

    def matches(self, letter: DeadLetter) -> bool:
        """Whether a letter fits all fields that are set."""
        return (
            (self.ids is None or letter.id in self.ids)
            and (self.reason is None or letter.reason.value == str(self.reason))
            and (self.task_name is None or letter.task_name == self.task_name)
            and (self.fingerprint is None or letter.fingerprint.startswith(self.fingerprint))
            and (self.worker_hostname is None or letter.worker_hostname == self.worker_hostname)
            and (self.since is None or letter.dead_lettered_at >= self.since)
            and (self.until is None or letter.dead_lettered_at < self.until)
            and self._matches_exception(letter)
            and self._matches_text(letter)
        )

    def _matches_exception(self, letter: DeadLetter) -> bool:
        if self.exception_type is None:
            return True
        full = letter.exception_type or ""
        return self.exception_type in (full, full.rpartition(".")[2])

    def _matches_text(self, letter: DeadLetter) -> bool:
        if self.grep is None:
            return True
        return (
            self.grep in letter.description
            or self.grep in (letter.exception_message or "")
            or self.grep.encode("utf-8", "surrogatepass") in letter.body
        )
