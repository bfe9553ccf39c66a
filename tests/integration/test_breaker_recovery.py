"""However the release of a circuit breaker ends, workers go on with the breaker by themselves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import intervals
import pytest
import redis
from builders import a_letter, an_app, key_of
from servers import RedisServer
from waiting import poll

from celery_dlq import DeadLetters
from celery_dlq.errors import DLQError
from celery_dlq.features.circuit_breaker import policy, recovery
from celery_dlq.features.circuit_breaker.operations import Breakers
from celery_dlq.features.circuit_breaker.policy import (
    Happened,
)
from celery_dlq.features.hold.operations import Holds
from celery_dlq.letters.record import Reason
from celery_dlq.operations.job import JobRun
from celery_dlq.operations.jobs import Jobs
from celery_dlq.operations.redrive.publisher import GrowingPace
from celery_dlq.store.giving import Instructions
from celery_dlq.store.holds import Hold

TASK = "shop.charge"
POLICIES = {name: {"max_deliveries": 3, "circuit_breaker": {}} for name in ("orders", "mail")}


@pytest.fixture
def dlq(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeadLetters]:
    """An app whose workers notice everything at once, and do not wait after an error."""
    intervals.change(monkeypatch, hold_noticed=timedelta(0), release_retry=timedelta(0), probe=0.01)
    monkeypatch.setattr(policy, "PROBES", 1)
    monkeypatch.setattr(GrowingPace, "rate", 20.0)
    with ExitStack() as stack:
        made = DeadLetters(an_app(broker_url=server.url, dlq_url=server.url, dlq_queues=POLICIES))

        @made.app.task(name=TASK, shared=False)
        def charge() -> None:
            """Is the task of all held messages here."""

        stack.callback(made.close)
        yield made


def releasing(dlq: DeadLetters, count: int, queue: str = "orders") -> list[str]:
    """Let a breaker hold messages and then release them; their ids, oldest first."""
    hold = dlq.open_breaker(TASK, queue)
    ids = put(dlq, hold, count, queue)
    dlq.close_breaker(TASK, queue)
    return ids


def put(dlq: DeadLetters, hold: Hold, count: int, queue: str = "orders") -> list[str]:
    """Hold messages; their ids, oldest first."""
    ids = [f"{queue}-{number}" for number in range(count)]
    for task_id in ids:
        letter = a_letter(
            task_id=task_id,
            task_name=TASK,
            source_queue=queue,
            dead_letter_queue=hold.id,
            reason=Reason.HELD,
            headers=json.dumps({"id": task_id, "task": TASK}),
            properties="{}",
        )
        dlq.assembly.backend.held.dead_letter(letter, key_of(letter))
    return ids


def queued(client: redis.Redis, queue: str = "orders") -> list[str]:
    """The task ids of the messages in a queue, the next one first."""
    return [json.loads(raw)["headers"]["id"] for raw in reversed(client.lrange(queue, 0, -1))]


def recover(dlq: DeadLetters, stopping: Callable[[], bool] = lambda: False) -> None:
    """What each worker does every two seconds, and every five for holds that have ended."""
    recovery.recover(dlq.assembly, stopping)
    Holds(dlq.assembly).release_ended(stopping)


def states(dlq: DeadLetters) -> list[str]:
    """The states of the breakers that are not closed."""
    return [one.state for one in dlq.breakers()]


def goes_on(dlq: DeadLetters, client: redis.Redis, ids: list[str]) -> None:
    """From here workers alone, whose probes succeed, close the breaker and release everything."""
    circuits = Breakers(dlq.assembly).circuits

    def closed() -> bool:
        recover(dlq)
        if states(dlq) == ["open"]:
            circuits.change_breaker(TASK, "orders", Happened.PROBE_SUCCEEDED)
        return states(dlq) == []

    poll(closed, timeout_seconds=30, every_seconds=0.05)
    assert sorted(queued(client)) == sorted(ids), "each once"


def cancel_once_begun(dlq: DeadLetters) -> threading.Thread:
    """Cancel the release as soon as it runs."""

    def cancel() -> None:
        poll(lambda: bool(dlq.jobs()))
        dlq.cancel(dlq.jobs()[0].id)

    thread = threading.Thread(target=cancel)
    thread.start()
    return thread


# -- cancelled -------------------------------------------------------------------------


def test_a_release_that_is_cancelled_while_it_runs_opens_the_breaker_again(
    dlq: DeadLetters, client: redis.Redis
) -> None:
    """It probes again, log and audit say so, and in the end all is released."""
    ids = releasing(dlq, 60)
    thread = cancel_once_begun(dlq)
    recover(dlq)
    thread.join()
    assert dlq.jobs()[0].state == "cancelled"
    assert states(dlq) == ["releasing"]

    recover(dlq)

    (one,) = dlq.breakers()
    assert (one.state, one.hold.circuit and one.hold.circuit.probe_every) == ("open", 0.01)
    assert one.hold.reason == f"its release, job {dlq.jobs()[0].id}, was cancelled"
    assert dlq.changes()[0].action.value == "circuit_opened"
    goes_on(dlq, client, ids)


@pytest.mark.parametrize("state", ["waiting", "interrupted"])
def test_a_release_that_is_cancelled_while_no_worker_runs_it(
    dlq: DeadLetters, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """After a worker has left it, or was killed."""
    ids = releasing(dlq, 20)
    if state == "waiting":
        asked = iter([False])
        recover(dlq, lambda: next(asked, True))
    else:
        intervals.change(monkeypatch, job_silent=timedelta(0))
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(Jobs, "run", lambda *_: sys.exit())
            recover(dlq)
    assert dlq.jobs()[0].state == state
    dlq.cancel(dlq.jobs()[0].id)
    recover(dlq)
    assert states(dlq) == ["open"]
    goes_on(dlq, client, ids)


def test_a_release_by_hand_that_is_cancelled_opens_the_breaker_again(
    dlq: DeadLetters, client: redis.Redis
) -> None:
    """Its messages would wait in a hold that has ended, and a later death would hide them."""
    hold = dlq.open_breaker(TASK, "orders")
    ids = put(dlq, hold, 30)
    thread = cancel_once_begun(dlq)
    assert dlq.release(hold.id, rate=5).state == "cancelled"
    thread.join()
    recover(dlq)
    assert states(dlq) == ["open"]
    goes_on(dlq, client, ids)


# -- killed, or ended by an error --------------------------------------------------------

STEPS = {
    "before the hold names the job": (Instructions, "replace"),
    "before the job begins": (JobRun, "send_heartbeat"),
    "before the first message": (Jobs, "run"),
    "before the job is done": (JobRun, "end"),
    "before the breaker closes": (recovery, "emptied"),
    "before an earlier job is resumed": (Jobs, "begin_again"),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("error", [SystemExit, DLQError])
def test_an_error_at_any_step_delays_the_release_only(
    dlq: DeadLetters,
    client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    error: type[BaseException],
) -> None:
    """The next look of any worker goes on."""
    intervals.change(monkeypatch, job_silent=timedelta(0))
    ids = releasing(dlq, 2)
    if step == "before an earlier job is resumed":
        asked = iter([False] * 2)
        recover(dlq, lambda: next(asked, True))

    def fails(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as patch, suppress(error):
        patch.setattr(*STEPS[step], fails)
        recover(dlq)
    assert states(dlq) == ["releasing"]
    goes_on(dlq, client, ids)


WORKER = """
import sys
sys.path.insert(0, sys.argv[2])
from builders import an_app
from celery_dlq import DeadLetters
from celery_dlq.features.circuit_breaker.recovery import recover
from celery_dlq.operations.redrive import one_step, redrive
one_step.OneStep.batch_size = redrive.MOST_AT_ONCE = 3
dlq = DeadLetters(an_app(broker_url=sys.argv[1], dlq_url=sys.argv[1]))
print("ready", flush=True)
recover(dlq.assembly, lambda: False)
"""


def test_workers_that_are_killed_again_and_again_release_everything_in_order(
    dlq: DeadLetters, server: RedisServer, client: redis.Redis
) -> None:
    """A restart of all workers, without mercy; the next one goes on with the same job."""
    ids = releasing(dlq, 60)
    tests = str(Path(__file__).parents[1])
    ends: list[int] = []
    while states(dlq) != []:
        left = dlq.breakers()[0].held
        with subprocess.Popen(
            [sys.executable, "-c", WORKER, server.url, tests], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            if len(ends) < 4:
                poll(lambda: sum(one.held for one in dlq.breakers()) < left)  # noqa: B023
                os.kill(process.pid, signal.SIGKILL)
            ends.append(process.wait(60))
    assert ends.count(-signal.SIGKILL) == 4
    assert queued(client) == ids
    (one,) = dlq.jobs()
    assert (one.state, one.run) == ("done", len(ends))


# -- what one breaker has does not stop another one ------------------------------------


def test_an_error_of_one_breaker_does_not_stop_the_others(
    dlq: DeadLetters, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older one cannot be released at all."""
    releasing(dlq, 3, "mail")
    other = dlq.breakers()[0].hold.id
    ids = releasing(dlq, 3)
    run = Jobs.run

    def refuses(self: Jobs, one: JobRun, *args: Any, **named: Any) -> Any:
        if one.job.queue == other:
            raise DLQError("the queue takes nothing")
        return run(self, one, *args, **named)

    monkeypatch.setattr(Jobs, "run", refuses)
    with suppress(DLQError):
        recover(dlq)
    assert queued(client) == ids


def test_a_long_release_does_not_stop_the_probes_of_another_breaker(
    dlq: DeadLetters, client: redis.Redis
) -> None:
    """Where there is one worker, one thread does both."""
    releasing(dlq, 80, "mail")
    hold = dlq.open_breaker(TASK, "orders")

    def stopping() -> bool:
        if queued(client, "mail") and not held():
            put(dlq, hold, 1)
        return bool(queued(client))

    def held() -> int:
        return sum(one.held for one in dlq.breakers() if one.hold.id == hold.id)

    recover(dlq, stopping)
    assert queued(client) == ["orders-0"]
    assert len(queued(client, "mail")) < 80


def test_an_entry_that_cannot_be_read_does_not_stop_the_probes(
    dlq: DeadLetters, client: redis.Redis
) -> None:
    """The oldest message that can be published is the probe."""
    hold = dlq.open_breaker(TASK, "orders")
    client.xadd(f"dlq:held:{{{hold.id}}}:letters", {"nonsense": "x"})
    put(dlq, hold, 2)
    poll(lambda: recover(dlq) or queued(client) != [], timeout_seconds=5, every_seconds=0.05)
