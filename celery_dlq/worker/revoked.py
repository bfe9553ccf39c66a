"""Revoked tasks: what was redriven after its revocation runs, what was revoked later does not.

Celery remembers ids that are not to run: those that operators revoked, and those of messages that
expired. It keeps them for hours, tells them to workers that start (mingle), and keeps them over a
restart (``--statedb``), but not when they were revoked. A redriven message has the id that its
letter had. So each worker that gets the command ``revoke`` notes in Redis when; the message says
when it was redriven; both by the clock of Redis.

1. The command comes: the ids are known here at once, in the store after the next tick, or before
   it is asked.
2. A redriven message comes whose id is in Celery's set. The store knows no later revocation: it
   runs. Else, and while the store does not answer, it is revoked, and becomes a letter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

from celery.utils.functional import maybe_list
from celery.worker import state
from celery.worker.control import Panel

from celery_dlq.errors import StoreUnavailable
from celery_dlq.letters.headers import redriven_at
from celery_dlq.letters.printable import get_logger
from celery_dlq.letters.record import to_micros
from celery_dlq.store.revoked import MOST_REVOKED, RevokedTasks

logger = get_logger("celery_dlq.worker")

COMMANDS = ("revoke", "terminate", "revoke_by_stamped_headers")
"""Celery's commands that revoke."""


class Revocations:
    """What this worker was told to revoke, until the store has it."""

    def __init__(self, store: RevokedTasks) -> None:
        self._store = store
        self._unsent: dict[str, float] = {}  # name to when, in monotonic seconds

    def note_command(self, command: Mapping[str, Any]) -> None:
        """Note the tasks of a command."""
        now = time.monotonic()
        for name in _names_of(command):
            self._unsent.pop(name, None)  # the newest are the last ones
            self._unsent[name] = now
        while len(self._unsent) > MOST_REVOKED:
            del self._unsent[next(iter(self._unsent))]

    def send_to_store(self) -> None:
        """Send the store what it does not have; called once a second."""
        if not self._unsent:
            return
        now, sent = time.monotonic(), dict(self._unsent)
        self._store.note_tasks({name: now - at for name, at in sent.items()})
        for name, at in sent.items():
            if self._unsent.get(name) == at:
                del self._unsent[name]

    def are_older(self, request: Any) -> bool:
        """True if a message was redriven after all revocations of it that this worker knows."""
        redriven = redriven_at(request.request_dict)
        names = [] if redriven is None else _revoked_names(request)
        if redriven is None or not names:
            return False
        try:
            if any(name in self._unsent for name in names):
                self.send_to_store()  # the message may have been redriven since, within this second
            last = self._store.last_revoked_at(names)
        except StoreUnavailable as exc:
            logger.warning("Task %s counts as revoked until the store answers: %s", request.id, exc)
            return False
        return last <= to_micros(redriven)


def listen_for_revocations() -> None:
    """Note what Celery's commands revoke, in this process; a second call changes nothing.

    Source: https://github.com/celery/celery/blob/main/celery/worker/control.py
    """
    for name in COMMANDS:
        command = Panel.data[name]
        if not hasattr(command, "dlq_noted"):
            Panel.data[name] = _noting(command)


def _noting(command: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(command)
    def noted(control: Any, *args: Any, **kwargs: Any) -> Any:
        worker = getattr(getattr(control, "consumer", None), "controller", None)
        guard = getattr(worker, "dead_letter_guard", None)
        if guard is not None:
            guard.run_guarded("revoke", guard.revocations.note_command, kwargs)
        return command(control, *args, **kwargs)

    noted.dlq_noted = command  # type: ignore[attr-defined]
    return noted


def _names_of(command: Mapping[str, Any]) -> Iterable[str]:
    for task_id in maybe_list(command.get("task_id")) or ():
        yield f"id:{task_id}"
    stamps = command.get("headers") or {}
    if isinstance(stamps, list):  # from the command line
        yield from (f"stamp:{stamp}" for stamp in stamps)
    else:
        for stamp, values in stamps.items():
            yield from (f"stamp:{stamp}={value}" for value in maybe_list(values))


def _revoked_names(request: Any) -> list[str]:
    """The names by which Celery may know a message as revoked."""
    names = [f"id:{request.id}"] if request.id in state.revoked else []
    for stamp in request.stamped_headers if state.revoked_stamps else ():
        if stamp in state.revoked_stamps:
            names += [f"stamp:{stamp}={value}" for value in maybe_list(request.stamps.get(stamp))]
    return names
