"""Source queues: found from exchange and routing key."""

from __future__ import annotations

import re
from typing import Any

import pytest
from builders import an_app
from kombu import Exchange, Queue, binding

from celery_dlq.policies.queue_names import KnownQueues, QueueNames

DIRECT = Exchange("shop", type="direct")
TOPIC = Exchange("news", type="topic")
FANOUT = Exchange("all", type="fanout")
LONE_TOPIC = Exchange("lone", type="topic")

QUEUES = [
    Queue("orders"),
    Queue("mail", DIRECT, routing_key="send"),
    Queue("bills", DIRECT, routing_key="pay"),
    Queue("many", [binding(DIRECT, routing_key="a"), binding(DIRECT, routing_key="b")]),
    Queue("sport", TOPIC, routing_key="sport.#"),
    Queue("local", TOPIC, routing_key="*.local"),
    Queue("lone", LONE_TOPIC, routing_key="a.*.c"),
    Queue("copies", FANOUT),
]


@pytest.fixture
def names() -> QueueNames:
    """Names the queues above, as a worker's app knows them."""
    return QueueNames(an_app(task_queues=QUEUES).amqp.queues)


@pytest.mark.parametrize(
    ("exchange", "routing_key", "queue"),
    [
        ("", "orders", "orders"),
        ("", "mail", "mail"),
        ("shop", "send", "mail"),
        ("shop", "pay", "bills"),
        ("shop", "b", "many"),
        ("news", "sport.football.women", "sport"),
        ("news", "sport", "sport"),
        ("news", "weather.local", "local"),
        ("lone", "a.b.c", "lone"),
        ("all", "", "copies"),
        ("all", "whatever", "copies"),
    ],
)
def test_a_queue_is_found_by_its_binding(
    names: QueueNames, exchange: str, routing_key: str, queue: str
) -> None:
    """Default exchange, direct, topic with wildcards, and fanout."""
    assert names.queue_of(exchange, routing_key) == queue


def test_the_default_queue_of_celery_is_found() -> None:
    """Celery's own queue is bound to an exchange of its name."""
    queues = an_app().amqp.queues
    assert QueueNames(queues).queue_of("celery", "celery") == "celery"
    assert QueueNames(queues).queue_of("", "celery") == "celery"


@pytest.mark.parametrize(("exchange", "routing_key"), [("", "unknown"), ("other", "unknown")])
def test_without_a_known_queue_the_routing_key_is_the_name(
    names: QueueNames, exchange: str, routing_key: str
) -> None:
    """It is the name with the default exchange, and the best guess otherwise."""
    assert names.queue_of(exchange, routing_key) == routing_key


def test_asking_for_a_name_adds_no_queue() -> None:
    """Celery creates queues on access; a worker must not start to consume another one."""
    queues = an_app(task_queues=QUEUES).amqp.queues
    before = set(queues)
    QueueNames(queues).queue_of("", "unknown")
    assert set(queues) == before


@pytest.mark.parametrize(
    ("routing_key", "queue"),
    [("sport.football", "sport"), ("a.b.c", "lone"), ("send", "mail")],
)
def test_a_message_that_waited_in_rabbitmq_is_found(
    names: QueueNames, routing_key: str, queue: str
) -> None:
    """Celery's native delayed delivery changes exchange and routing key on the way."""
    native = pytest.importorskip(
        "kombu.transport.native_delayed_delivery", reason="native delays came with kombu 5.5"
    )
    delayed = native.calculate_routing_key(5, routing_key)
    assert names.queue_of("celery_delayed_delivery", delayed) == queue


def router(*_: object, **__: object) -> str:
    """Name a queue that no configuration does."""
    raise AssertionError("a router function sees messages only")


@pytest.mark.parametrize(
    ("routes", "names", "complete"),
    [
        (None, set(), True),
        ({"a": "mail", "b.*": {"queue": Queue("bills")}}, {"mail", "bills"}, True),
        ([[("a", "mail"), (re.compile("b"), {"queue": "bills"})]], {"mail", "bills"}, True),
        (({"a": "mail"}, (("b.*", {"queue": "bills"}),)), {"mail", "bills"}, True),
        ({"a": {"exchange": "shop", "routing_key": "pay"}}, set(), True),
        ([router, {"a": "mail"}], {"mail"}, False),
        (router, set(), False),
        ("test_queue_names:router", set(), False),
    ],
)
def test_the_queues_of_routes_are_known(routes: Any, names: set[str], complete: bool) -> None:
    """All spellings of ``task_routes``; a function may name any, and is not called."""
    found = KnownQueues.from_app(an_app(task_routes=routes))
    assert found == KnownQueues(frozenset({"celery", *names}), complete)


@pytest.mark.filterwarnings("ignore::celery.exceptions.CDeprecationWarning")  # a task's own queue
def test_the_queues_of_tasks_and_of_the_schedule_are_known() -> None:
    """Nobody has to declare them a second time."""
    entries = {"nightly": {"task": "t", "options": {"queue": "night"}}, "hourly": {"task": "t"}}
    app = an_app(beat_schedule=entries)
    app.task(name="t", queue="own", shared=False)(router)
    assert KnownQueues.from_app(app).names == {"celery", "own", "night"}
