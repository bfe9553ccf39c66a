"""The canary: a redrive first redrives a few letters and watches how they end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import islice
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import DLQError
from celery_dlq.operations.redrive.select import RawEntry
from celery_dlq.store.letters import Letters
from celery_dlq.store.records import RedriveOutcome

if TYPE_CHECKING:
    from celery_dlq.operations.job import Job
    from celery_dlq.operations.redrive.message import Outgoing
    from celery_dlq.operations.redrive.redrive import Redrive

MOST_DIED_IDS = 20
POLL_SECONDS = 0.25
_MAX_MARKERS_SCANNED = 200_000
_MAX_LETTERS = 1000
_MAX_ENTRIES_SCANNED = 100_000
_MAX_GROUPS = 1000

PASSED = "passed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """The options of a canary."""

    letters: int  # Number of letters to redrive first
    max_failures: int = 0  # Continue if at most this many of them die again or do not end in time
    wait_seconds: float = 60.0  # Seconds to watch them
    passed: bool = False  # True in a job whose canary passed: resumed, it needs no other

    def __post_init__(self) -> None:
        if not 1 <= self.letters <= _MAX_LETTERS:
            raise DLQError(f"expected canary to be 1 to {_MAX_LETTERS} letters, got {self.letters}")
        if self.max_failures < 0:
            raise DLQError(f"expected max_failures to be 0 or more, got {self.max_failures}")
        if not 0 < self.wait_seconds < float("inf"):
            raise DLQError(
                f"expected canary_wait to be more than 0 seconds, got {self.wait_seconds}"
            )

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping, for the job."""
        shown = asdict(self)
        return shown if self.passed else {k: v for k, v in shown.items() if k != "passed"}

    @classmethod
    def from_json(cls, value: object) -> Canary | None:
        """Read what `to_json` wrote; ``None`` if it is none."""
        if not isinstance(value, Mapping):
            return None
        return cls(**{f.name: value[f.name] for f in fields(cls) if f.name in value})


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryResult:
    """The outcome of a canary, in numbers of letters."""

    redriven: int  # Redriven and watched
    succeeded: int  # Their tasks succeeded
    died: int  # They have a new letter
    open: int  # They had not ended when the watch did
    held: int = 0  # Of these, the number that a hold has, or an open circuit breaker
    holds: tuple[str, ...] = ()  # The ids of those holds

    @classmethod
    def of(cls, outcomes: Sequence[RedriveOutcome], holds: Sequence[str] = ()) -> CanaryResult:
        """Count outcomes, and the holds that have some of the messages."""
        return cls(
            redriven=len(outcomes),
            succeeded=outcomes.count(RedriveOutcome.SUCCEEDED),
            died=outcomes.count(RedriveOutcome.DIED),
            open=outcomes.count(RedriveOutcome.OPEN),
            held=len(holds),
            holds=tuple(sorted(set(holds))),
        )

    def verdict(self, max_failures: int) -> str:
        """One of ``passed``, ``died again``, ``held`` and ``not finished``."""
        if self.died + self.open <= max_failures:
            return PASSED
        if self.died > max_failures:
            return "died again"
        return "held" if self.died + self.open - self.held <= max_failures else "not finished"

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping with the attribute names."""
        return {**asdict(self), "holds": list(self.holds)}


def why_stopped(canary: Mapping[str, Any]) -> str:
    """Why a canary stopped its redrive, from its job."""
    letters, verdict = canary.get("letters", 0), canary.get("verdict")
    if verdict == "died again":
        return f"{canary['died']:,} of {letters:,} letters of the canary died again"
    if verdict == "held":
        holds = ", ".join(canary["holds"])
        return f"the canary is held by {holds}; after its release, resume this job"
    unfinished, seconds = canary.get("open", 0), canary.get("wait_seconds", 0)
    return f"{unfinished:,} of {letters:,} letters of the canary did not end in {seconds:g} s"


def died_again(store: Letters, job: Job) -> Iterator[str]:
    """Ids of new letters whose headers name a redrive; scans a bounded number."""
    marker, scanned = f'"{job.id}"'.encode(), 0
    for page in store.fields(job.queue, after=job.until, until=None, page_size=500):
        for _position, raw in page:
            if marker in raw.get(b"headers", b""):
                yield raw.get(b"id", b"").decode("utf-8", "replace")
        scanned += len(page)
        if scanned >= _MAX_MARKERS_SCANNED:
            return


class CanaryWatch:
    """Watches the messages of a canary, from before each is published until all have ended."""

    def __init__(self, redrive: Redrive, canary: Canary) -> None:
        self._redrive = redrive
        self._canary = canary
        self._messages: list[Outgoing] = []

    def before(self, message: Outgoing) -> None:
        """Have the store note how a message ends; it may be executed as soon as it is published."""
        self._redrive.store.claims.watch([self._redrive.key_of(message)])

    def published(self, messages: Iterable[Outgoing]) -> None:
        """Count on messages that the broker has."""
        self._messages += messages

    def result(self) -> CanaryResult:
        """Wait until the messages have ended, too many died, or time is over."""
        redrive, canary, job = self._redrive, self._canary, self._redrive.run
        keys = [redrive.key_of(message) for message in self._messages]
        began, died = time.monotonic(), 0
        died_ids: list[str] = []
        while True:
            outcomes = [
                RedriveOutcome.SUCCEEDED
                if outcome is RedriveOutcome.OPEN and self._succeeded(message.task_id)
                else outcome
                for message, outcome in zip(
                    self._messages, redrive.store.claims.outcomes(keys), strict=True
                )
            ]
            left = [
                (key, message)
                for key, message, outcome in zip(keys, self._messages, outcomes, strict=True)
                if outcome is RedriveOutcome.OPEN
            ]
            result = CanaryResult.of(outcomes, redrive.held(left))
            if result.died > died and len(died_ids) < MOST_DIED_IDS:
                died_ids = [*islice(died_again(redrive.store, job.job), MOST_DIED_IDS)]
            died, waited = result.died, time.monotonic() - began
            job.tell(canary=_live(canary, result, waited, died_ids))
            late = waited >= canary.wait_seconds
            if result.open <= result.held or result.died > canary.max_failures or late:
                return result
            redrive.beat()
            time.sleep(POLL_SECONDS)

    def _succeeded(self, task_id: str) -> bool:
        """Ask the result backend; queues without a policy record no successes."""
        try:
            return bool(self._redrive.app.AsyncResult(task_id).state == "SUCCESS")
        except Exception:  # noqa: BLE001 - no result backend, or no answer: unknown
            return False


def _live(
    canary: Canary, result: CanaryResult, waited: float, died_ids: list[str]
) -> dict[str, Any]:
    """A canary that runs, for its job."""
    shown = result.to_json()
    return {
        "letters": shown.pop("redriven"),
        **shown,
        "waited_seconds": round(waited, 1),
        "wait_seconds": canary.wait_seconds,
        "verdict": "running",
        "died_ids": died_ids,
    }


def chosen(entries: Iterable[RawEntry], letters: int) -> list[str]:
    """Ids of letters, one group after the other in turn; scans a bounded number of entries."""
    groups: dict[str, list[str]] = {}
    for found in islice(entries, _MAX_ENTRIES_SCANNED):
        if not found.is_letter:
            continue
        fingerprint = found.text("fingerprint")
        if fingerprint not in groups and len(groups) >= _MAX_GROUPS:
            continue
        group = groups.setdefault(fingerprint, [])
        if len(group) < letters:
            group.append(found.key)
    picked: list[str] = []
    for place in range(letters):
        for group in groups.values():
            if place < len(group) and len(picked) < letters:
                picked.append(group[place])
    return picked
