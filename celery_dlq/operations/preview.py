"""What a plan shows before anything happens: a dry run that ends in time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from celery_dlq.operations.redrive.dry_run import Check, DryRun, Progress
from celery_dlq.operations.redrive.selection import RawEntry

_MOST_EXAMPLES = 10
_MOST_NAMES = 20
_MOST_COUNTED = 1000


class _LateError(Exception):
    """The time is over."""


class Preview:
    """Reads letters until a deadline, for a dry run, and counts what the dry run does not."""

    def __init__(
        self,
        select: Callable[[Progress], Iterable[RawEntry]],
        *,
        seconds: float,
        scanned: Progress | None = None,
    ) -> None:
        self.exact = True
        self._select = select
        self._seconds = seconds
        self._scanned = scanned
        self._examples: list[str] = []
        self._groups: Counter[str] = Counter()
        self._tasks: Counter[str] = Counter()

    def entries(self) -> Iterator[RawEntry]:
        """The letters, until the deadline."""
        deadline = time.monotonic() + self._seconds

        def check(entries: int = 0) -> None:
            if entries and self._scanned is not None:
                self._scanned(entries)
            if time.monotonic() >= deadline:
                raise _LateError

        try:
            for found in self._select(check):
                check()
                self._count(found)
                yield found
        except _LateError:
            self.exact = False

    def removal(self) -> DryRun:
        """The effect of a removal: as a redrive's, but nothing needs to be there."""
        letters = corrupt = size = 0
        for found in self.entries():
            letters, corrupt = letters + found.is_letter, corrupt + (not found.is_letter)
            size += len(found.fields.get(b"body", b""))
        tasks = tuple(
            Check(name=name, letters=count, found=None, why="")
            for name, count in self._tasks.most_common()
        )
        return DryRun(letters=letters, corrupt=corrupt, bytes=size, tasks=tasks)

    def to_json(self, dry_run: DryRun) -> dict[str, Any]:
        """A JSON-ready mapping, bounded: what is missing comes first, then the most frequent."""
        shown = dry_run.to_json()
        for name in ("queues", "tasks"):
            shown[name] = sorted(shown[name], key=lambda each: each["found"] is not False)
            shown[name] = shown[name][:_MOST_NAMES]
        shown["waits_for"] = dict([*dry_run.waits_for.items()][:_MOST_NAMES])
        groups = [
            {"fingerprint": fingerprint, "letters": count}
            for fingerprint, count in self._groups.most_common(_MOST_NAMES)
        ]
        return {**shown, "exact": self.exact, "groups": groups, "examples": self._examples}

    def _count(self, found: RawEntry) -> None:
        if len(self._examples) < _MOST_EXAMPLES:
            self._examples.append(found.key)
        if found.is_letter:
            for counts, name in ((self._groups, "fingerprint"), (self._tasks, "task_name")):
                text = found.text(name)
                if text in counts or len(counts) < _MOST_COUNTED:
                    counts[text] += 1


def dry_run_of(preview: Mapping[str, Any]) -> DryRun:
    """The dry run that a plan shows; of its queues and tasks, the first ones."""
    queues, tasks = (
        tuple(Check(**each) for each in preview.get(name, ())) for name in ("queues", "tasks")
    )
    return DryRun(
        letters=int(preview.get("letters", 0)),
        corrupt=int(preview.get("corrupt", 0)),
        bytes=int(preview.get("bytes", 0)),
        queues=queues,
        tasks=tasks,
        waits_for=preview.get("waits_for", {}),
    )
