"""Dead-letters the message of a task because an operator wants it, wherever the message is."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any

from celery_dlq import timing
from celery_dlq.errors import DLQError, NotFound
from celery_dlq.events import Action, whoami
from celery_dlq.features.dead_letter.demand import Demand
from celery_dlq.letters.printable import get_logger, shortened
from celery_dlq.letters.record import iso
from celery_dlq.operations.instructions import Audit
from celery_dlq.store.instructions import reason_of

if TYPE_CHECKING:
    from celery_dlq.assembly import Assembly

logger = get_logger("celery_dlq")

_MAX_ID_CHARS = 500
MOST_DEMANDS = 10_000
"""Demands at a time; each worker has all of them in memory."""

DEMAND_KEPT = timedelta(hours=72)
"""A demand waits so long for a worker that gets the task, as the counts of messages do."""
_LETTERS_SECONDS, _MOST_PAGES = 5.0, 40  # of 500 letters, in each dead-letter queue
_MET_SECONDS, _LOOK_SECONDS = 6.0, 0.25  # workers learn it within 2 s, and say so 2 s later

DEAD_LETTERED, DEMANDED = "dead_lettered", "demanded"
_ACTIVE = "active"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandReport:
    """What was done with the message of a task."""

    task_id: str  # The task
    # `dead_lettered`: it is a letter now. `demanded`: it will be one instead of being executed,
    # if it comes to a worker before `until`
    state: str
    worker: str | None = None  # The worker that has, or had, the message; `None` if none said so
    running: bool = False  # True if it runs, or ran, there
    until: datetime | None = None  # End of the demand; `None` if that is not needed any more

    @property
    def text(self) -> str:
        """The same in a sentence."""
        end = f"{self.until:%Y-%m-%d %H:%M} UTC" if self.until else ""
        if self.state == DEAD_LETTERED:
            was = "ran" if self.running else "waited"
            return f"{self.task_id} is a letter now. It {was} on {self.worker or 'a worker'}."
        if self.running:
            return (
                f"{self.task_id} still runs on {self.worker}: only a prefork pool can end it. It "
                f"becomes a letter if it fails or comes back before {end}."
            )
        if self.worker is not None:
            return f"{self.task_id} has not started on {self.worker}, and will become a letter."
        return (
            f"Nothing was stopped yet: no worker has {self.task_id}. If a worker receives it "
            f"before {end}, it becomes a letter and does not start."
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping with the attribute names."""
        return {**asdict(self), "until": iso(self.until)}


class DemandRun:
    """Dead-letters single messages; see `DeadLetters.dead_letter`."""

    def __init__(self, assembly: Assembly) -> None:
        self._app = assembly.app
        self._backend = assembly.backend
        self._names = assembly.known_names()
        self._instructions = assembly.backend.instructions
        self._audit = Audit(assembly.backend.workers, assembly.events)

    def dead_letter(self, task_id: str, reason: str = "") -> DemandReport:
        """Make a letter of the message of a task, instead of letting it be executed.

        A message that waits for its ETA in a worker becomes a letter within seconds. A running
        task is terminated, in a prefork pool. A message that is in no worker becomes a letter
        when a worker is given it, before it starts; the demand is kept for 72 hours.
        Workers know it within 2 seconds. Its task gets a failure as its result, with a
        ``TaskRevokedError``.
        """
        if not task_id.strip() or len(task_id) > _MAX_ID_CHARS:
            raise DLQError(
                f"expected the id of a task, of at most {_MAX_ID_CHARS} characters, got "
                f"{shortened(task_id, 50)!r}"
            )
        worker, running = self._worker_of(task_id)
        if worker is None and self._names.is_task(task_id):
            raise DLQError(
                f"expected the id of one message, got {task_id!r}, the name of a task; nothing was "
                f"done. `dlq hold --task {task_id}` keeps all its messages from starting"
            )
        if worker is None:
            self._refuse_ended(task_id)
        demand = self._make_demand(task_id, reason)
        met = self._wait_until_met(task_id)
        return DemandReport(
            task_id=task_id,
            state=DEAD_LETTERED if met else DEMANDED,
            worker=worker,
            running=running,
            until=None if met else demand.until,
        )

    def withdraw(self, task_id: str) -> None:
        """Take back a demand of `dead_letter` that no worker has met."""
        demand = self._instructions.get(Demand, task_id)
        if demand is None or not self._instructions.forget([demand]):
            raise NotFound(
                f"expected an ID that waits to become a letter, got {task_id!r}: it is a letter "
                f"already, or nobody asked for it"
            )
        self._audit.record(Action.DEMAND_WITHDRAWN, task_id, {})

    # -- workers --------------------------------------------------------------------

    def _worker_of(self, task_id: str) -> tuple[str | None, bool]:
        """The worker that has the message, if one says so, and whether it runs there."""
        replies: Mapping[str, Any] = {}
        try:
            inspect = self._app.control.inspect(timeout=timing.current.remote_control)
            replies = inspect.query_task(task_id) or {}
        except Exception as exc:  # noqa: BLE001 - remote control is optional, and broker-dependent
            logger.debug("Workers cannot be asked for task %s: %r", task_id, exc)
        states = {
            host: reply[task_id][0]
            for host, reply in sorted(replies.items())
            if isinstance(reply, Mapping) and task_id in reply
        }
        active = [host for host, state in states.items() if state == _ACTIVE]
        waiting = [host for host, state in states.items() if state in ("reserved", "scheduled")]
        return next(iter([*active, *waiting]), None), bool(active)

    def _wait_until_met(self, task_id: str) -> bool:
        """Wait until a live worker has met a demand; True if one has."""
        if not self._backend.workers.workers(with_tasks=False):
            return False
        deadline = time.monotonic() + _MET_SECONDS
        while time.monotonic() < deadline:
            if self._instructions.get(Demand, task_id) is None:
                return True
            time.sleep(_LOOK_SECONDS)
        return False

    def _refuse_ended(self, task_id: str) -> None:
        """Refuse a task that has ended."""
        letter = self._letter_of(task_id)
        if letter is not None:
            raise DLQError(
                f"expected a task that has not ended, got {task_id!r}, which is letter "
                f"{letter[1]} of {letter[0]}; nothing was done"
            )
        state = None
        with suppress(Exception):  # no result backend, or it is down
            state = self._app.AsyncResult(task_id).state
        if state == "SUCCESS":
            raise DLQError(
                f"expected a task that has not ended, got {task_id!r}, which has succeeded and "
                f"is in no worker; nothing was done"
            )

    def _letter_of(self, task_id: str) -> tuple[str, str] | None:
        """The queue and id of the letter of a task, or with this id; the newest are looked at."""
        store, wanted = self._backend.letters, task_id.encode("utf-8", "backslashreplace")
        deadline = time.monotonic() + _LETTERS_SECONDS
        for name in store.names():
            pages = store.fields(name, after=None, until=None, page_size=500, newest_first=True)
            for page in islice(pages, _MOST_PAGES):
                for _position, fields in page:
                    if wanted in (fields.get(b"task_id"), fields.get(b"id")):
                        return name, fields.get(b"id", b"").decode("utf-8", "replace")
                if time.monotonic() > deadline:
                    return None
        return None

    # -- the demand -------------------------------------------------------------------

    def _make_demand(self, task_id: str, reason: str) -> Demand:
        now = self._instructions.now()
        demand = Demand(
            id=task_id, reason=reason_of(reason), actor=whoami(), since=now, until=now + DEMAND_KEPT
        )
        self._audit.record(Action.DEMANDED, task_id, {"reason": demand.reason} if reason else {})
        if not self._instructions.give(demand, MOST_DEMANDS):
            raise DLQError(
                f"expected fewer than {MOST_DEMANDS:,} tasks that are to be dead-lettered, got as "
                f"many; withdraw some, or wait until workers have met them"
            )
        return demand
