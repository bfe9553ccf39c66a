"""A redrive checks first: what would be lost stays, the rest goes; on Redis and RabbitMQ."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from builders import DLQ, NOW, a_letter, a_request, an_app, key_of
from kombu import Exchange, Queue

from celery_dlq import DeadLetter, DeadLetters
from celery_dlq.errors import RedriveError
from celery_dlq.events import Action
from celery_dlq.operations.edit import Edit
from celery_dlq.operations.redrive import checks as module
from celery_dlq.store.claims import Claims
from celery_dlq.store.worker_records import WorkerInfo

QUEUES = ("orders", "other", "ordres", "empty")


@dataclass
class Shop:
    """An app with its broker."""

    dlq: DeadLetters
    declares: Callable[[str], None]
    publishing_makes_queues: bool

    def put(self, **changes: Any) -> DeadLetter:
        """Store a letter."""
        letter = a_letter(**changes)
        headers = a_request(id=letter.task_id, task=letter.task_name)
        letter = a_letter(**changes, task_id=letter.task_id, headers=json.dumps(headers))
        self.dlq.store.dead_letter(letter, key_of(letter))
        return letter

    def works(self, *queues: str, tasks: tuple[str, ...] = ("shop.charge",)) -> None:
        """Register a live worker."""
        info = WorkerInfo(
            hostname="celery@one",
            pid=1,
            version="0.1.0",
            started_at=NOW,
            queues=queues,
            tasks=tasks,
        )
        self.dlq.registry.register(info)
        self.dlq.registry.heartbeat(info.hostname)

    def waiting(self, queue: str) -> int:
        """How many messages are in a queue."""
        with self.dlq.app.connection_for_read() as connection:
            if connection.transport.driver_type == "redis":
                return int(connection.default_channel._size(queue))
            declared = connection.default_channel.queue_declare(queue=queue, passive=True)
            return int(declared.message_count)

    @property
    def left(self) -> int:
        """How many letters are left."""
        return self.dlq.store.length(DLQ)


@pytest.fixture(params=["redis", "classic", "quorum"])
def shop(request: pytest.FixtureRequest, redis_url: str) -> Iterator[Shop]:
    """The queue `orders` is on the broker; the app declares none."""
    broker = redis_url
    if request.param != "redis":
        server = request.getfixturevalue("rabbit_server")
        server.delete_queues(*QUEUES)
        broker = server.url
    app = an_app(broker_url=broker, dlq_url=redis_url, task_default_queue="default")
    made = DeadLetters(app)

    def declares(name: str) -> None:
        arguments = {} if request.param == "redis" else {"x-queue-type": request.param}
        with app.connection_for_write() as connection:
            queue = Queue(name, Exchange(name), name, queue_arguments=arguments)
            queue.bind(connection.default_channel).declare()

    declares("orders")
    yield Shop(made, declares, request.param == "redis")
    made.close()


@pytest.mark.parametrize("worker", [False, True])
def test_nothing_goes_to_a_queue_that_nobody_knows(shop: Shop, worker: bool) -> None:
    """Whether a worker lives or not; no letter is touched, no job and no change is recorded."""
    shop.put()
    if worker:
        shop.works("orders")
    with pytest.raises(RedriveError, match=r"queue 'ordres' is neither .*did you mean 'orders'"):
        shop.dlq.redrive(DLQ, to_queue="ordres")
    with pytest.raises(RedriveError, match="nothing was redriven"):
        shop.dlq.edit(next(shop.dlq.letters(DLQ)).id, Edit(args=[2]), to_queue="ordres")
    assert shop.left == 1
    assert shop.dlq.jobs() == shop.dlq.changes() == []
    if shop.publishing_makes_queues:
        assert shop.waiting("ordres") == 0


def test_force_publishes_all_the_same_and_is_in_the_job_and_the_audit(shop: Shop) -> None:
    """RabbitMQ returns such messages; then the letters stay and the failures say so."""
    shop.put()
    report = shop.dlq.redrive(DLQ, to_queue="ordres", force=True)
    (job,) = shop.dlq.jobs()
    (change,) = shop.dlq.changes()
    assert job.options == {"to_queue": "ordres", "force": True}
    assert change.action is Action.REDRIVEN
    assert change.detail["options"] == {"to_queue": "ordres", "force": True}
    if shop.publishing_makes_queues:
        assert (report.published, shop.waiting("ordres")) == (1, 1)
    else:
        assert (report.published, report.failures, shop.left) == (0, 1, 1)


def test_letters_that_would_be_lost_stay_and_are_counted_by_name(shop: Shop) -> None:
    """A task whose code is gone, and a queue that is gone; the others go."""
    shop.works("orders", "empty")
    for _ in range(3):
        shop.put()
        shop.put(task_name="shop.gone")
    shop.put(source_queue="other")
    report = shop.dlq.redrive(DLQ)
    assert (report.published, report.refused, report.failures) == (3, 4, 0)
    why = {text.partition(" is ")[0]: count for text, count in report.refused_by.items()}
    assert why == {"task 'shop.gone'": 3, "queue 'other'": 1}
    assert (shop.left, shop.waiting("orders")) == (4, 3)
    (change,) = shop.dlq.changes()
    assert change.detail["counts"] == {"published": 3, "refused": 4}
    forced = shop.dlq.redrive(DLQ, force=True, task_name="shop.gone")
    assert (forced.published, forced.refused) == (3, 0)


def test_a_plan_whose_letters_stay_does_not_say_that_they_had_gone(shop: Shop) -> None:
    """They were refused; with a limit, no others go instead."""
    shop.works("orders")
    for name in ("shop.gone", "shop.charge", "shop.charge"):
        shop.put(task_name=name)
    plan = shop.dlq.plan("redrive", DLQ, limit=2)
    shop.dlq.start(plan.id)
    job = shop.dlq.assembly.jobs().run_next(lambda: False)
    assert job is not None
    assert (job.counts["published"], job.counts["refused"], job.note) == (1, 1, "")
    assert shop.left == 2


def test_a_limit_counts_what_goes(shop: Shop) -> None:
    """Letters that stay do not use it up."""
    shop.works("orders")
    for name in ("shop.gone", "shop.charge", "shop.gone", "shop.charge"):
        shop.put(task_name=name)
    report = shop.dlq.redrive(DLQ, limit=1)
    assert (report.published, report.refused) == (1, 1)


def test_an_empty_queue_that_a_worker_consumes_is_there(shop: Shop) -> None:
    """In Redis it has no key."""
    shop.declares("empty")
    shop.works("empty")
    shop.put(source_queue="empty")
    assert shop.dlq.redrive(DLQ).published == 1


def test_without_workers_letters_go_where_they_came_from(shop: Shop) -> None:
    """Their queue is on the broker; which tasks its workers have is not known."""
    shop.put(task_name="shop.gone")
    assert shop.dlq.redrive(DLQ).published == 1


def test_a_canary_takes_only_letters_that_arrive(shop: Shop) -> None:
    """Else nothing would be tried before all others go."""
    shop.works("orders")
    for n in range(5):
        shop.put(task_name="shop.gone", fingerprint=f"{n:016x}")
    shop.put(fingerprint="f" * 16)
    report = shop.dlq.redrive(DLQ, canary=1, canary_wait=0.1, max_failures=0)
    assert report.canary is not None
    assert (report.state, report.canary["redriven"]) == ("stopped", 1)


def test_a_canary_tries_letters_that_no_other_command_has(shop: Shop) -> None:
    """A killed command's claims outlive it: to choose its letters would try nothing."""
    shop.works("orders")
    letters = [shop.put(fingerprint="f" * 16) for _ in range(4)]
    _claim(shop, letters[:3])
    report = shop.dlq.redrive(DLQ, canary=1, canary_wait=0.1, max_failures=0)
    assert report.canary is not None
    assert (report.state, report.canary["redriven"], shop.left) == ("stopped", 1, 3)


def test_a_canary_that_tried_nothing_stops_the_redrive(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No letter goes untried; a resume takes another canary."""
    shop.works("orders")
    _claim(shop, [shop.put(), shop.put()])
    report = shop.dlq.redrive(DLQ, canary=1, canary_wait=0.1, max_failures=0)
    assert report.canary is not None
    assert (report.state, report.canary["verdict"]) == ("stopped", "nothing tried")
    assert "no letter to try" in report.note

    shop.put()
    with monkeypatch.context() as patch:  # another command is faster than the canary
        patch.setattr(Claims, "held_by_others", lambda *a, **_: _claim(shop, a[2]) or set())
        late = shop.dlq.redrive(DLQ, canary=1, canary_wait=0.1, max_failures=0)
    assert late.canary is not None
    assert (late.state, late.canary["verdict"], shop.left) == ("stopped", "nothing tried", 3)

    shop.dlq.store.claims.release(DLQ, [one.id for one in shop.dlq.letters(DLQ)], owner="other")
    again = shop.dlq.resume(report.redrive_id)
    assert (again.state, again.canary["redriven"], shop.left) == ("stopped", 1, 2)


def _claim(shop: Shop, letters: Sequence[DeadLetter | str]) -> None:
    """Let another command have letters."""
    ids = [one if isinstance(one, str) else one.id for one in letters]
    shop.dlq.store.claims.claim(DLQ, ids, owner="other", lease_seconds=60)


def test_the_broker_is_asked_once_for_each_queue(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many letters there are."""
    asked: list[str] = []
    inner = module.on_broker
    monkeypatch.setattr(
        module, "on_broker", lambda app, name: (asked.append(name), inner(app, name))[1]
    )
    for _ in range(300):
        shop.put()
    shop.put(source_queue="other")
    shop.works("elsewhere")
    report = shop.dlq.redrive(DLQ)
    assert (report.published, report.refused) == (300, 1)
    assert sorted(asked) == ["orders", "other"]


def test_a_job_that_is_resumed_checks_again(shop: Shop) -> None:
    """The queue is gone by now."""
    shop.put(fingerprint="a" * 16)
    shop.put(fingerprint="b" * 16)
    shop.works("ordres")
    if not shop.publishing_makes_queues:
        shop.declares("ordres")
    stopped = shop.dlq.redrive(DLQ, to_queue="ordres", canary=1, canary_wait=0.1)
    assert (stopped.state, stopped.published) == ("stopped", 1)
    shop.works("orders")
    if shop.publishing_makes_queues:
        with shop.dlq.app.connection_for_write() as connection:
            connection.default_channel.client.delete("ordres")
    else:
        with shop.dlq.app.connection_for_write() as connection:
            connection.default_channel.queue_delete("ordres")
    with pytest.raises(RedriveError, match="nothing was redriven"):
        shop.dlq.resume(stopped.redrive_id)
    assert shop.dlq.job(stopped.redrive_id).state == "failed"
    assert shop.left == 1


def test_a_queue_of_another_broker_is_found_by_its_declaration() -> None:
    """Kombu's virtual transports answer a passive one, and make no queue of it."""
    app = an_app(broker_url="memory://")
    with app.connection_for_write() as connection:
        connection.default_channel.queue_declare("orders")
        assert [module.on_broker(app, name) for name in ("orders", "ordres", "ordres")] == [
            (True, True),
            (False, True),
            (False, True),
        ]


def test_the_prefix_of_all_keys_is_known(redis_url: str) -> None:
    """Kombu sends EXISTS without `global_keyprefix`; a queue of it is found."""
    options = {"global_keyprefix": "shop:"}
    app = an_app(broker_url=redis_url, dlq_url=redis_url, broker_transport_options=options)
    with app.connection_for_write() as connection:
        Queue("orders", Exchange("orders"), "orders").bind(connection.default_channel).declare()
        connection.default_channel.client.lpush("listed", "x")
    assert [module.on_broker(app, name) for name in ("orders", "listed", "ordres")] == [
        (True, True),
        (True, True),
        (False, True),
    ]
