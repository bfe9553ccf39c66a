"""Every death, on every broker and in every pool where it can occur."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import redis
from celery import VERSION
from waiting import poll
from workers import Place, Worker, run_python

from celery_dlq import DeadLetter, Outcome, Reason

LOST, REQUEUED, RETRIED, LIMIT = (
    Outcome.WORKER_LOST,
    Outcome.REQUEUED,
    Outcome.RETRIED,
    Outcome.TIME_LIMIT,
)
FAILED, REJECTED = Outcome.FAILED, Outcome.REJECTED
MAX = Reason.MAX_DELIVERIES_EXCEEDED

Deaths = dict[str, tuple[Reason, list[Outcome]]]
"""By task: the letter's reason and the outcomes of its deliveries."""

EVERYWHERE: Deaths = {
    "fails": (Reason.FAILED, [FAILED]),
    "fails_early": (Reason.FAILED, [FAILED]),
    "autoretries": (Reason.MAX_RETRIES_EXCEEDED, [RETRIED, RETRIED, FAILED]),
    "retries": (Reason.MAX_RETRIES_EXCEEDED, [RETRIED, FAILED]),
    "requeues": (MAX, [REQUEUED] * 3),
    "requeues_early": (Reason.REJECTED, [REQUEUED]),
    "drops": (Reason.REJECTED, [REJECTED]),
    "to_dlq": (Reason.REJECTED, [REJECTED]),
    "retry_not_published": (Reason.RETRY_NOT_PUBLISHED, [REJECTED]),
    "retry_not_published_early": (Reason.RETRY_NOT_PUBLISHED, [REJECTED]),
    "unspeakable": (Reason.FAILED, [FAILED]),
}
PREFORK: Deaths = {
    "killed": (MAX, [LOST] * 3),
    "segfault": (MAX, [LOST] * 3),
    "exits": (MAX, [LOST] * 3),
    "killed_acked": (Reason.WORKER_LOST, [LOST]),
    "killed_early": (Reason.WORKER_LOST, [LOST]),
    "too_long": (Reason.TIME_LIMIT_EXCEEDED, [LIMIT]),
    "too_long_requeued": (MAX, [LIMIT] * 3),
    "too_long_early": (Reason.TIME_LIMIT_EXCEEDED, [LIMIT]),
}
if VERSION < (5, 5):
    # Celery then dropped what is past its time and not to be acknowledged.
    PREFORK["too_long_requeued"] = (Reason.TIME_LIMIT_EXCEEDED, [LIMIT])


def publish(redis_url: str, place: Place, names: list[str]) -> dict[str, str]:
    """Publish one task of each name from a process of its own; ids by name."""
    code = (
        "import json, sys, poison_app as p\n"
        "names = json.loads(sys.argv[1])\n"
        "print(json.dumps({n: p.app.send_task(f'poison_app.{n}', (n,)).id for n in names}))"
    )
    done = run_python(redis_url, "-c", code, json.dumps(names), **place.env)
    assert done.returncode == 0, done.stderr
    ids: dict[str, str] = json.loads(done.stdout)
    return ids


@pytest.fixture
def all_end_as_one_letter(
    poison: ModuleType,
    redis_url: str,
    start_worker: Callable[..., Worker],
    letters: Callable[..., list[DeadLetter]],
    ran: Callable[[str], int],
) -> Callable[..., list[DeadLetter]]:
    """Start a worker, let tasks die there, and compare their letters; returns the letters."""

    def check(
        place: Place, expected: Deaths, conf: dict[str, Any] | None = None, **worker_options: Any
    ) -> list[DeadLetter]:
        worker = start_worker(
            conf, env={**place.env, **worker_options.pop("env", {})}, **worker_options
        )
        ids = publish(redis_url, place, [*expected, "healthy"])

        found = letters(count=len(expected), timeout_seconds=60)

        assert sorted(x.task_id for x in found) == sorted(ids[name] for name in expected), (
            worker.output[-3000:]
        )
        by_name = {letter.task_name.rpartition(".")[2]: letter for letter in found}
        outcomes = {
            name: (letter.reason, [d.outcome for d in letter.history])
            for name, letter in by_name.items()
        }
        assert outcomes == expected
        assert {name: ran(name) for name in expected} == {
            name: len(deliveries) for name, (_reason, deliveries) in expected.items()
        }
        poll(lambda: ran("healthy") == 1)
        return found

    return check


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent", "eventlet"])
def test_every_death_ends_as_one_letter(
    all_end_as_one_letter: Callable[..., list[DeadLetter]], place: Place, pool: str
) -> None:
    """It has its reason and the outcome of each delivery; no task ran more often than allowed."""
    expected = {**EVERYWHERE, **(PREFORK if pool == "prefork" else {})}

    found = all_end_as_one_letter(place, expected, pool=pool)

    assert {letter.source_queue for letter in found} == {"orders"}
    for letter in found:
        assert json.loads(letter.body)[0] == [letter.task_name.rpartition(".")[2]]
        assert letter.decoded("headers")["id"] == letter.task_id


@pytest.mark.parametrize("conf", [{"result_backend": "disabled://"}, {"task_ignore_result": True}])
def test_every_death_ends_as_one_letter_where_no_result_is_kept(
    all_end_as_one_letter: Callable[..., list[DeadLetter]],
    start_worker: Callable[..., Worker],
    poison: ModuleType,
    ran: Callable[[str], int],
    conf: dict[str, Any],
) -> None:
    """And a redrive whose first messages are watched knows that they succeeded."""
    all_end_as_one_letter(Place("redis"), {**EVERYWHERE, **PREFORK}, conf)
    with redis.Redis.from_url(f"{poison.URL}/2") as client:
        client.set("fixed", 1)

    report = poison.dlq.redrive("orders-DLQ", task_name="poison_app.fails", canary=1)

    assert report.published == report.canary["succeeded"] == 1
    assert ran("fails") == 2


def test_every_death_of_a_coroutine_ends_as_one_letter(
    all_end_as_one_letter: Callable[..., list[DeadLetter]],
) -> None:
    """In the pool of celery-aio-pool, beside ordinary tasks."""
    pytest.importorskip("celery_aio_pool")
    coroutines = {
        "fails_async": EVERYWHERE["fails"],
        "rejects_async": EVERYWHERE["to_dlq"],
        "requeues_async": EVERYWHERE["requeues"],
        "retries_async": EVERYWHERE["retries"],
    }
    all_end_as_one_letter(
        Place("redis"),
        {**EVERYWHERE, **coroutines},
        {"imports": ["async_tasks"]},
        pool="custom",
        env={"CELERY_CUSTOM_WORKER_POOL": "celery_aio_pool:AsyncIOPool"},
    )


def test_a_killed_worker_charges_what_it_ran_and_nothing_else(
    poison: ModuleType,
    place: Place,
    redis_url: str,
    start_worker: Callable[..., Worker],
    letters: Callable[..., list[DeadLetter]],
    ran: Callable[[str], int],
    grown_old: Callable[[], None],
) -> None:
    """Prefetched neighbours of a message that kills whole workers are bystanders."""
    conf: dict[str, Any] = {"worker_prefetch_multiplier": 8}
    if place.name == "redis":
        conf["broker_transport_options"] = {"visibility_timeout": 1}
    bystanders = ["healthy"] * 3
    env = place.env
    if place.name == "redis":
        env["POISON_MESSAGES"] = str(1 + len(bystanders))
    if place.name == "sqs":
        options = {**json.loads(env["POISON_OPTIONS"]), "visibility_timeout": 3}
        env["POISON_OPTIONS"] = json.dumps(options)
    ids = publish(redis_url, place, ["kills_worker", *bystanders])
    for _ in range(8):
        worker = start_worker(conf, env=env, arguments=("--concurrency", "1"), wait=False)
        if worker.lives_until(lambda: bool(poison.dlq.queues()), timeout_seconds=20):
            break
        worker.kill()
        grown_old()

    (letter,) = letters()

    assert (letter.task_id, letter.reason) == (ids["kills_worker"], MAX)
    assert ran("kills_worker") == 3
    assert [d.outcome for d in letter.history] == [Outcome.VANISHED] * 3
    poll(lambda: ran("healthy") == 3)
