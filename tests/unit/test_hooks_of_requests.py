"""Celery's hooks in a guarded request: the table that tells them, and the two kinds of pools."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from celery.concurrency import prefork, solo, thread
from celery.exceptions import TaskRevokedError
from celery.worker import state
from celery.worker.request import Request
from guarded_worker import Pool, Worker

from celery_dlq.worker import request as hooks
from celery_dlq.worker.in_process import InProcessRequest
from celery_dlq.worker.request import (
    ChildProcessRequest,
    DeadLetterRequest,
    kind_of_request,
)
from celery_dlq.worker.settling import SettlingRequest
from celery_dlq.writing.lifecycle import DeliveryState

WRAPPED = {"execute_using_pool": "dlq_execute", "on_success": "dlq_on_success"}
"""What the class that Celery derives defines itself, and the method of ours that is called."""

NEWER = frozenset({"_announce_cancelled", "_retry_worker_lost", "_success_was_stored"})
"""Hooks that only newer versions of Celery have."""


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Celery remembers requests that run for the whole process."""
    yield
    state.reset_state()


def table(module: ModuleType) -> dict[str, str]:
    """The hooks in a module's table, and what is said of pools in this process."""
    rows = [line.split("|") for line in (module.__doc__ or "").splitlines() if "| `" in line]
    return {name: row[4].strip() for row in rows for name in re.findall(r"`(\w+)`", row[1])}


def test_the_table_of_hooks_has_each_one_that_is_overridden() -> None:
    """And none that is not; in the lower half, nothing of Celery is."""
    of_celery = set(vars(Request)) | NEWER
    kinds = (DeadLetterRequest, ChildProcessRequest, InProcessRequest)
    overridden = {name for kind in kinds for name in vars(kind) if not name.startswith("__")}
    assert set(table(hooks)) == (overridden & of_celery) | set(WRAPPED)
    assert not of_celery & {name for name in vars(SettlingRequest) if not name.startswith("__")}


def test_a_hook_that_is_the_same_in_both_kinds_is_defined_once() -> None:
    """A kind of pool overrides no hook of which the table says so."""
    own = {*vars(ChildProcessRequest), *vars(InProcessRequest)}
    same = [name for name, here in table(hooks).items() if here == "the same"]
    assert same
    assert not [name for name in same if WRAPPED.get(name, name) in own]


def test_the_kind_of_a_request_follows_from_the_pool() -> None:
    """A pool that is not known may start its tasks anywhere: they are counted before."""
    own = type("TaskPool", (thread.TaskPool,), {"__module__": "shop.pools"})
    pools = [prefork.TaskPool, own, solo.TaskPool, thread.TaskPool]
    child, here = ChildProcessRequest, InProcessRequest
    assert [kind_of_request(pool) for pool in pools] == [child, child, here, here]


class Greenlets(Pool):
    """A pool of greenlets; one that is killed reports a success of its own form at once."""

    is_green = True
    request: Any = None

    def terminate_job(self, *_: Any) -> None:
        """Kill it."""
        self.request.on_success((False, None, None))


@pytest.mark.parametrize(
    ("how", "said", "expected"),
    [
        ("cancel", [], DeliveryState.RELEASED),
        ("terminate", ["ack"], DeliveryState.DONE),  # Celery revokes it
    ],
)
def test_a_greenlet_that_is_killed_has_not_succeeded(
    tmp_path: Any, how: str, said: list[str], expected: DeliveryState
) -> None:
    """What it reports acknowledges nothing."""
    worker, pool = Worker(tmp_path, kind=InProcessRequest), Greenlets()
    pool.request = request = worker.start()
    succeeded: list[Any] = []
    worker.guard.record_returned = succeeded.append  # type: ignore[method-assign]
    getattr(request, how)(pool)
    assert (worker.said, request.dlq_state, succeeded) == (said, expected, [])


def test_a_greenlet_that_was_never_killed_has_succeeded(tmp_path: Any) -> None:
    """Whatever form its success has: a task of the same worker was killed."""
    worker, pool = Worker(tmp_path, kind=InProcessRequest), Greenlets()
    pool.request = worker.start()
    pool.request.cancel(pool)
    request = worker.start(retries=1)
    request.on_success((0, "fine", 0.1))
    assert (worker.said, request.dlq_state) == (["ack"], DeliveryState.DONE)


@pytest.mark.parametrize("kind", [ChildProcessRequest, InProcessRequest])
@pytest.mark.parametrize("limits", [("soon", None), (1, 2, 3)])
def test_time_limits_that_a_pool_cannot_read_are_a_letter(
    tmp_path: Any, kind: type[DeadLetterRequest], limits: tuple[Any, ...]
) -> None:
    """A pool of processes would fail on a text; one in this process never reads it."""
    worker = Worker(tmp_path, kind=kind)
    request = worker.receive(timelimit=limits)
    if kind is InProcessRequest and len(limits) == 2:
        request.execute_using_pool(Pool())
        assert worker.said == []
        return
    with pytest.raises(TaskRevokedError):
        request.execute_using_pool(Pool())
    assert worker.said == ["letter", "ack"]


def test_a_pool_in_this_process_counts_the_start_where_the_task_starts(tmp_path: Any) -> None:
    """Not when it is given the task, which may wait long for a thread."""
    worker = Worker(tmp_path, kind=InProcessRequest)
    request = worker.receive()
    request.execute_using_pool(Pool())
    assert (request.dlq_state, request.dlq_in_flight) == (DeliveryState.NEW, None)
    request.on_accepted(1, 0.0)
    assert request.dlq_state is DeliveryState.RUNNING
    assert request.dlq_in_flight.charged


def test_what_a_thread_refused_is_skipped_in_the_solo_pool(tmp_path: Any) -> None:
    """The start is refused in the midst of Celery's call, which must release the slot."""

    class Solo(Pool):
        """Accepts a job while it is given one."""

        def apply_async(self, *_: Any, accept_callback: Any, **__: Any) -> None:
            """Start it."""
            accept_callback(1, 0.0)

    worker = Worker(tmp_path, Solo(), kind=InProcessRequest)
    worker.receive().execute_using_pool(Pool())
    request = worker.receive(redelivered=True)
    with pytest.raises(TaskRevokedError):
        request.execute_using_pool(Pool())
    assert worker.said == ["letter", "ack"]
