"""Users' own parts work beside ours, and an app without a policy is as without the plugin."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import redis
from celery import chord
from celery.exceptions import ChordError, Reject
from waiting import poll
from workers import Worker, run_python

from celery_dlq import DeadLetter, Reason
from celery_dlq.errors import MaxDeliveriesExceeded

Letters = Callable[..., list[DeadLetter]]
Start = Callable[..., Worker]


def python(redis_url: str, code: str) -> Any:
    """Run code in a process of its own and read the JSON it prints."""
    done = run_python(redis_url, "-c", code)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_own_requests_tasks_calls_and_signals_work_beside_ours(
    poison: ModuleType, start_worker: Start, letters: Letters, redis_url: str
) -> None:
    """With Django-style settings, two apps in one process, shared and late tasks."""
    worker = start_worker(app="own_app")
    ids = python(
        redis_url,
        "import json, own_app as o\n"
        "ids = {'own': o.own.delay('x').id, 'shared': o.shared.delay('x').id,\n"
        "       'late': o.app.send_task('late', ('x',)).id}\n"
        "assert o.plain.delay('fine').get(timeout=20) == 'fine'\n"
        "print(json.dumps(ids))",
    )

    found = {letter.task_id: letter for letter in letters(count=3)}

    assert {name: found[task_id].reason for name, task_id in ids.items()} == {
        "own": Reason.FAILED,
        "shared": Reason.MAX_DELIVERIES_EXCEEDED,
        "late": Reason.FAILED,
    }, worker.output
    assert found[ids["shared"]].max_deliveries == 1
    expected = {
        f"request.on_failure {ids['own']}",
        "task.__call__",
        f"task.on_failure {ids['own']}",
        f"signal.task_failure {ids['own']}",
        f"signal.task_prerun {ids['late']}",
        f"task_cls.before_start {ids['late']}",
        f"signal.task_failure {ids['shared']}",
    }
    with redis.Redis.from_url(f"{redis_url.rpartition('/')[0]}/2") as client:
        # The letter is stored first, then Celery's own handlers are called.
        poll(
            lambda: expected <= {item.decode() for item in client.lrange("own", 0, -1)},
            timeout_seconds=30,
        )


def test_an_app_without_a_policy_leaves_nothing_in_redis(
    poison: ModuleType, start_worker: Start, redis_url: str
) -> None:
    """No counters, no letters: but the worker is registered, so that an override can reach it."""
    worker = start_worker({"dlq_queues": {}})
    decorated = "poison_app.once"
    for name in ("healthy", "fails", "drops", "requeues"):
        if name != "requeues":
            getattr(poison, name).delay(name)
    assert poison.healthy.delay("after").get(timeout=10) == "after"
    poll(lambda: "no price" in worker.output)
    with redis.Redis.from_url(redis_url) as client:
        left = {key for key in client.scan_iter("dlq:*") if not key.startswith(b"dlq:{app}:")}
        assert left == set()
    assert decorated not in worker.output.partition("ready.")[2]


def test_errbacks_run_and_chords_fail_as_they_do_for_a_task_that_raised(
    poison: ModuleType, start_worker: Start, letters: Letters, ran: Callable[[str], int]
) -> None:
    """Dead means settled: callers do not wait forever."""
    start_worker()
    poison.requeues.apply_async(("x",), link_error=poison.healthy.si("errback"))
    chords = {
        name: chord([poison.healthy.s("a"), getattr(poison, name).s("b")])(
            poison.healthy.si("body")
        )
        for name in ("fails", "requeues", "requeues_early")
    }
    early = poison.requeues_early.apply_async(("x",), link_error=poison.healthy.si("errback"))
    letters(count=5)
    poll(lambda: ran("errback") == 2)
    ends = {}
    for name, body in chords.items():
        with pytest.raises(Exception) as raised:
            body.get(timeout=20)
        ends[name] = raised.type
    assert (ends["fails"] is LookupError) == (ends["requeues"] is MaxDeliveriesExceeded), ends
    assert (ends["fails"] is LookupError) == (ends["requeues_early"] is Reject), ends
    with pytest.raises(Reject, match="not requeued"):
        early.get(timeout=20)
    assert ends["fails"] in (LookupError, ChordError)
    assert ran("body") == 0


def test_stamped_headers_survive_a_death_and_a_redrive(
    poison: ModuleType, start_worker: Start, letters: Letters, redis_url: str
) -> None:
    """Stamps are headers like any other."""
    start_worker()
    signature = poison.fails.s("stamped")
    signature.stamp(customer="acme")
    sent = signature.apply_async()
    (letter,) = letters()
    assert letter.task_id == sent.id
    assert letter.decoded("headers")["stamps"] == {"customer": "acme"}
    poison.dlq.redrive("orders-DLQ")
    again = poll(lambda: [x for x in poison.dlq.letters("orders-DLQ") if x.redrives == 1])
    assert again[0].decoded("headers")["stamps"] == {"customer": "acme"}
