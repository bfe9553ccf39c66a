"""What operators should know before letters of a cause are redriven, beside what is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from celery_dlq.letters.fingerprint import SHOWN_DIGITS
from celery_dlq.letters.printable import shortened, some_of
from celery_dlq.letters.record import iso

if TYPE_CHECKING:
    from celery_dlq.operations.jobs import Jobs
    from celery_dlq.store.records import Group

_MOST_CAUSES = 3  # of a redrive, the largest
_MOST_NAMES = 3
_MAX_NOTE_CHARS = 300
_PASSED = ("passed", "running", None)


@dataclass(frozen=True, slots=True)
class Remarks:
    """What is known of the causes of a redrive."""

    warnings: tuple[str, ...] = ()  # What speaks against it
    notes: tuple[str, ...] = ()  # The newest note on each cause


def remarks_of(jobs: Jobs, queue: str, fingerprints: Sequence[str]) -> Remarks:
    """Look at the live workers, at notes and at earlier redrives of the first causes."""
    causes = jobs.backend.letters.overviews.groups(queue, fingerprints[:_MOST_CAUSES])
    return Remarks(
        warnings=(*_of_releases(jobs, causes), *_of_canaries(jobs, queue, causes)),
        notes=tuple(_newest_notes(jobs, queue, causes)),
    )


def _of_releases(jobs: Jobs, causes: Sequence[Group]) -> Iterator[str]:
    """The workers that still run a release in which a cause died, while none is known without."""
    workers = jobs.backend.workers.workers(with_tasks=False)
    for cause in causes:
        same = [worker for worker in workers if worker.release in cause.releases]
        if same:
            releases = some_of(sorted({worker.release for worker in same}), _MOST_NAMES)
            names = some_of([worker.hostname for worker in same], _MOST_NAMES)
            yield (
                f"{len(same)} of {len(workers)} live workers run release {releases}, in which "
                f"letters of {cause.digits} died: {names}"
            )


def _of_canaries(jobs: Jobs, queue: str, causes: Sequence[Group]) -> Iterator[str]:
    """The last redrive of each cause whose canary did not pass."""
    earlier = [job for job in jobs.jobs() if job.canary]
    for cause in causes:
        for job in earlier:
            if job.is_of_cause(queue, cause.fingerprint):
                verdict = job.canary.get("verdict")
                if verdict not in _PASSED:
                    yield (
                        f"the last canary of {cause.digits} ended with {verdict!r}, at "
                        f"{iso(job.started_at)} by {job.actor}: see job {job.id}"
                    )
                break


def _newest_notes(jobs: Jobs, queue: str, causes: Sequence[Group]) -> Iterator[str]:
    names = [cause.fingerprint for cause in causes]
    for name, note in jobs.backend.notes.newest(queue, names).items():
        text = jobs.settings.redaction.shown(note, "text").text
        text = shortened(" ".join(text.split()), _MAX_NOTE_CHARS)
        yield f"{note.actor} on {name[:SHOWN_DIGITS]}, {note.at:%Y-%m-%d %H:%M} UTC: {text}"
