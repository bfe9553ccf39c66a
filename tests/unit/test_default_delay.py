"""Default delays: which messages get one, on every way of publishing."""

from __future__ import annotations

import logging
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from math import ceil
from types import FrameType
from typing import Any

import pytest
from builders import an_app
from celery import Celery, chain, group
from celery.beat import ScheduleEntry, Scheduler
from celery.signals import before_task_publish
from kombu import Exchange, Queue

from celery_dlq import DeadLetters, dead_letter_policy
from celery_dlq.letters.headers import DELAY_HEADER, DELAY_SOURCE_HEADER
from celery_dlq.policies import policy
from celery_dlq.transport.default_delay import MAX_CACHED_NAMES, DefaultDelays

DELAY = 30.0
SOURCE = "dlq_queues['slow']"

QUEUES = [
    Queue("fast"),
    Queue("slow"),
    Queue("slow-topic", Exchange("news", type="topic"), routing_key="slow.#"),
    Queue("slow-direct", Exchange("shop", type="direct"), routing_key="later"),
    Queue("plain"),
    Queue("own"),
]
SETTINGS: dict[str, Any] = {
    "task_queues": QUEUES,
    "task_default_queue": "fast",
    "task_routes": {"routed": "slow", "by_exchange": {"exchange": "shop", "routing_key": "later"}},
    "dlq_queues": {
        "slow": {"default_delay": DELAY},
        "slow-*": {"default_delay": timedelta(seconds=DELAY)},
        "plain": {"default_delay": {"seconds": 0, "always": True}},
        "own": {"default_delay": {"seconds": DELAY, "always": True}},
    },
}

Published = list[dict[str, Any]]


@pytest.fixture
def published() -> Iterator[Published]:
    """The headers of every message that is published meanwhile."""
    found: Published = []

    def receive(headers: dict[str, Any], **_: Any) -> None:
        found.append(headers)

    before_task_publish.connect(receive)
    yield found
    before_task_publish.disconnect(receive)


@pytest.fixture
def app() -> Celery:
    """An app with delayed and other queues, on kombu's in-memory broker."""
    return delaying_app()


def delaying_app(**settings: Any) -> Celery:
    """An app whose tasks are named as they are routed."""
    app = an_app(**{**SETTINGS, **settings})
    for name in ("here", "routed", "by_exchange"):
        app.task(name=name)(nothing)
    DeadLetters(app)
    return app


def nothing(*_args: Any) -> None:
    """The body of the tasks."""


def seconds_of(headers: dict[str, Any]) -> float | None:
    """The delay of a message, from its headers, in whole seconds; less than one has passed."""
    if headers["eta"] is None:
        return None
    eta = datetime.fromisoformat(headers["eta"])
    return ceil((eta - datetime.now(timezone.utc)).total_seconds())


Publish = Callable[[Celery], Any]


@pytest.mark.parametrize(
    "publish",
    [
        lambda app: app.tasks["routed"].delay(),
        lambda app: app.tasks["routed"].apply_async(),
        lambda app: app.send_task("routed"),
        lambda app: app.send_task("routed", (), {}, None, None, "an-id"),
        lambda app: app.send_task("unregistered", queue="slow"),
        lambda app: app.tasks["here"].apply_async(queue="slow"),
        lambda app: app.tasks["here"].apply_async(queue=QUEUES[1]),
        lambda app: app.tasks["here"].apply_async(
            exchange="news", routing_key="slow.mail", exchange_type="topic"
        ),
        lambda app: app.tasks["here"].apply_async(exchange=QUEUES[3].exchange, routing_key="later"),
        lambda app: app.tasks["by_exchange"].delay(),
        lambda app: app.tasks["routed"].si().apply_async(),
        lambda app: app.tasks["routed"].signature().delay(),
        lambda app: chain(app.tasks["routed"].si(), app.tasks["here"].si()).apply_async(),
        lambda app: group([app.tasks["routed"].si()], app=app).apply_async(),
        lambda app: app.tasks["routed"].starmap([(1,), (2,)]).apply_async(),
        lambda app: app.tasks["routed"].chunks([(1,), (2,)], 2).apply_async(queue="slow"),
        lambda app: app.tasks["here"].subtask(queue="slow").delay(),
    ],
)
def test_a_message_without_its_own_delay_gets_the_queues(
    app: Celery, published: Published, publish: Publish
) -> None:
    """Each way of publishing has it; its headers say how long and why."""
    publish(app)
    (headers,) = published
    assert seconds_of(headers) == DELAY
    assert headers[DELAY_HEADER] == DELAY
    assert headers[DELAY_SOURCE_HEADER] in {SOURCE, "dlq_queues['slow-*']"}


def test_a_beat_schedule_is_delayed_too(app: Celery, published: Published) -> None:
    """Beat publishes as everybody does."""
    scheduler = Scheduler(app, lazy=True)
    entry = ScheduleEntry("nightly", "routed", schedule=timedelta(days=1), app=app)
    scheduler.apply_async(entry, advance=False)
    assert seconds_of(published[0]) == DELAY


def test_routes_by_setting_default_queue(published: Published) -> None:
    """The default queue may be delayed."""
    delaying_app(task_default_queue="slow").send_task("here")
    assert seconds_of(published[0]) == DELAY


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"countdown": 0}, 0),
        ({"countdown": 5}, 5),
        ({"eta": datetime(2100, 1, 1, tzinfo=timezone.utc)}, None),
        ({"retries": 1}, None),
    ],
)
def test_a_messages_own_delay_wins(
    app: Celery, published: Published, options: dict[str, Any], expected: float | None
) -> None:
    """``countdown=0`` says now; a retry says what it says."""
    app.send_task("routed", **options)
    (headers,) = published
    assert DELAY_HEADER not in headers
    if expected is None:
        assert headers["eta"] == (eta.isoformat() if (eta := options.get("eta")) else None)
    else:
        assert abs((seconds_of(headers) or 0) - expected) <= 5


@pytest.mark.parametrize(
    ("options", "expected"), [({}, None), ({"countdown": 7}, 7)], ids=["none", "own"]
)
def test_a_queue_without_a_delay_is_untouched(
    app: Celery, published: Published, options: dict[str, Any], expected: float | None
) -> None:
    """Celery's own countdown works as always."""
    app.send_task("here", **options)
    assert seconds_of(published[0]) == expected
    assert DELAY_HEADER not in published[0]


def test_a_queue_may_drop_the_delays_of_messages(
    app: Celery, published: Published, caplog: pytest.LogCaptureFixture
) -> None:
    """``always``, with a line in the debug log; never for a retry."""
    with caplog.at_level(logging.DEBUG, "celery_dlq.transport.default_delay"):
        app.send_task("here", queue="plain", countdown=60)
        app.send_task("here", queue="plain", eta=datetime.now(timezone.utc) + timedelta(hours=1))
    app.send_task("here", queue="plain", countdown=60, retries=1)
    app.send_task("here", queue="own", eta=datetime.now(timezone.utc) + timedelta(hours=1))
    assert [seconds_of(headers) for headers in published] == [None, None, 60, DELAY]
    assert caplog.text.count("of queue plain replaces its delay") == 2


def test_a_tasks_policy_beats_its_queues(published: Published) -> None:
    """Field by field, as everywhere."""
    app = delaying_app()
    task = dead_letter_policy(default_delay=3)(app.task(name="routed.three")(nothing))
    task.apply_async(queue="slow")
    task.apply_async(queue="fast")
    assert [seconds_of(headers) for headers in published] == [3, 3]
    assert published[0][DELAY_SOURCE_HEADER] == "dead_letter_policy of routed.three"


def test_a_task_that_is_not_made_yet_has_its_policys_delay(published: Published) -> None:
    """Also when it is published by name; no queue of the app has a delay."""
    app = an_app(dlq_queues={})
    DeadLetters(app)
    dead_letter_policy(default_delay=3)(app.task(name="lazy", shared=False)(nothing))
    app.send_task("lazy")
    app.send_task("another")
    assert [seconds_of(headers) for headers in published] == [3, None]


def test_a_registry_of_tasks_needs_no_get(published: Published) -> None:
    """Celery 5.7 publishes with one that has none."""

    class Registry:
        def __init__(self, tasks: Any) -> None:
            self._tasks = tasks

        def __getitem__(self, name: str) -> Any:
            return self._tasks[name]

        def __contains__(self, name: str) -> bool:
            return name in self._tasks

    app = Celery("own", broker="memory://", set_as_current=False)
    app.conf.update(SETTINGS)
    DeadLetters(app)
    app.finalize()
    app._tasks = Registry(app._tasks)
    app.send_task("nobody.knows", queue="slow")
    assert published[-1][DELAY_HEADER] == DELAY


def test_an_app_that_its_user_finalizes_is_left_alone(published: Published) -> None:
    """Publishing by name needs no finalized app in Celery either."""
    app = Celery("manual", broker="memory://", set_as_current=False, autofinalize=False)
    app.conf.dlq_queues = {"slow": {"default_delay": DELAY}}
    DeadLetters(app)
    app.send_task("unregistered", queue="slow")
    assert seconds_of(published[0]) == DELAY
    assert not app.finalized


def test_a_route_that_draws_lots_is_asked_once(published: Published) -> None:
    """Otherwise the delay would be that of one queue and the message go to another."""
    asked: list[str] = []

    def route(name: str, *_: Any, **__: Any) -> dict[str, str]:
        asked.append(name)
        return {"queue": random.choice(["fast", "slow"])}  # noqa: S311 - no secret

    app = delaying_app(task_routes=[route])
    to: list[str] = []

    def receive(routing_key: str, **_: Any) -> None:
        to.append(routing_key)

    before_task_publish.connect(receive)
    for _ in range(40):
        app.send_task("here")
    before_task_publish.disconnect(receive)

    assert len(asked) == 40
    assert set(to) == {"fast", "slow"}
    assert [headers["eta"] is not None for headers in published] == [q == "slow" for q in to]


def test_an_expiry_before_the_delay_ends_is_warned_of(
    app: Celery, published: Published, caplog: pytest.LogCaptureFixture
) -> None:
    """It would never run; the message is published all the same."""
    app.send_task("routed", expires=DELAY)
    app.send_task("routed", expires=datetime.now(timezone.utc) + timedelta(seconds=5))
    app.send_task("here", countdown=20, expires=10)
    app.send_task("routed", expires=DELAY + 60)
    assert len(published) == 4
    warnings = [
        r.getMessage() for r in caplog.records if r.name == "celery_dlq.transport.default_delay"
    ]
    assert len(warnings) == 3
    assert all("will never run: it expires at 20" in warning for warning in warnings)
    assert warnings[0].startswith("Task routed ")


@pytest.mark.parametrize(
    "settings",
    [{"dlq_queues": {}}, {"dlq_queues": {"slow": {"max_deliveries": 3}}}],
    ids=["no policy", "no delay"],
)
def test_an_app_without_delays_asks_nothing(
    settings: dict[str, Any], published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The price of the plugin for a publisher that needs none of it: no look at queues."""
    monkeypatch.setattr(
        "celery_dlq.transport.default_delay.routed_once", lambda *_: pytest.fail("asked")
    )
    monkeypatch.setattr(
        "celery_dlq.transport.default_delay.PolicyTable", lambda *_: pytest.fail("asked")
    )
    delaying_app(**settings).send_task("routed", countdown=4)
    assert seconds_of(published[0]) == 4


def test_many_made_up_queues_do_not_fill_the_memory(app: Celery) -> None:
    """The rules of queue names made up at run time are dropped again."""
    delays = DefaultDelays(app, DeadLetters.of(app).settings)
    for number in range(MAX_CACHED_NAMES + 1000):
        delays.changes("here", (), {"queue": Queue(f"queue-{number}")})
    for kept in (delays.rule, delays.mapped_queue):
        assert kept.cache_info().currsize == MAX_CACHED_NAMES


def route_by_function(
    name: str, _args: Any, _kwargs: Any, options: dict[str, Any], task: Any = None
) -> dict[str, Any] | None:
    """Look at all that Celery shows to a route."""
    if name == "unrouted":
        return None
    if name == "by_exchange":
        return {"exchange": "shop", "routing_key": "later", "priority": 1}
    urgent = (options.get("priority") or 0) > 5
    return {"queue": "fast" if urgent else "slow", "priority": 3, "compression": task and "gzip"}


@pytest.mark.filterwarnings("ignore::celery.exceptions.CDeprecationWarning")  # a task's own queue
@pytest.mark.parametrize(
    "routes",
    [
        SETTINGS["task_routes"],
        [[(re.compile("rou.*"), "slow"), *SETTINGS["task_routes"].items()]],
        [route_by_function],
        "test_default_delay:route_by_function",
    ],
)
@pytest.mark.parametrize(
    "publish",
    [
        lambda app: app.send_task("here"),
        lambda app: app.send_task("here", priority=7),
        lambda app: app.send_task("own_queue"),
        lambda app: app.send_task("own_queue", queue=None),
        lambda app: app.tasks["own_queue"].apply_async(queue=None),
        lambda app: app.tasks["here"].apply_async((1,), priority=7),
        lambda app: app.tasks["here"].apply_async(priority=None, expires=900),
        lambda app: app.tasks["by_exchange"].delay(),
        lambda app: app.send_task("by_exchange", routing_key="sooner"),
        lambda app: app.send_task("here", exchange="news", routing_key="slow.x", priority=0),
        lambda app: app.send_task("unrouted", queue="slow", headers={"a": "b"}),
        lambda app: app.send_task("unrouted", None, None, None, None, "id", None, None, None),
        lambda app: app.send_task("here", route_name="routed", router=app.amqp.Router()),
    ],
)
def test_a_message_goes_where_it_would_go_without_the_plugin(routes: Any, publish: Publish) -> None:
    """All options that come from publisher, task and routes are the same but for the delay."""

    def options_of(*, with_plugin: bool) -> dict[str, Any]:
        app = an_app(**{**SETTINGS, "task_routes": routes})
        for name in ("here", "by_exchange"):
            app.task(name=name, shared=False)(nothing)
        app.task(name="own_queue", shared=False, queue="slow")(nothing)
        app.finalize()
        if with_plugin:
            DeadLetters(app)
        sent: list[dict[str, Any]] = []
        app.amqp.send_task_message = lambda *_, **options: sent.append(options)
        publish(app)
        (found,) = sent
        found["headers"] = {
            key: value
            for key, value in (found.get("headers") or {}).items()
            if key not in {DELAY_HEADER, DELAY_SOURCE_HEADER}
        }
        return found

    assert options_of(with_plugin=True) == options_of(with_plugin=False)


def calls_of(publish: Callable[[], object]) -> Counter[str]:
    """Count the function calls, Python's and built-in ones, until a message is published.

    The fewest of several times: once in a while something else is done on the way.
    """
    counts: list[Counter[str]] = []

    def profile(frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            counts[-1][frame.f_code.co_name] += 1
        elif event == "c_call":
            counts[-1][getattr(arg, "__qualname__", repr(arg))] += 1

    before = sys.getprofile()
    for _ in range(10):
        counts.append(Counter())
        sys.setprofile(profile)
        try:
            publish()
        finally:
            sys.setprofile(before)
    return min(counts, key=Counter.total)


@pytest.mark.parametrize(
    ("queues", "most"),
    [({}, 15), ({"slow": {"max_deliveries": 3}}, 15), ({"slow": {"default_delay": 30}}, 40)],
    ids=["no policy", "no delay", "another queue"],
)
def test_a_message_without_a_delay_costs_a_handful_of_calls_more(
    queues: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, not timed: a publish through Redis makes about 1,500.

    Without the policies of shared tasks that other tests have left: they cost a call more.
    """
    monkeypatch.setattr(policy, "SHARED_POLICIES", [])

    def publisher(*, with_plugin: bool) -> Callable[[], object]:
        app = an_app(**{**SETTINGS, "dlq_queues": queues})
        task = app.task(name="here")(nothing)
        if with_plugin:
            DeadLetters(app)
        return lambda: task.apply_async(())

    publisher(with_plugin=True)  # what the plugin does once in a process is there for both
    plain = calls_of(publisher(with_plugin=False))
    more = calls_of(publisher(with_plugin=True))
    assert more.total() - plain.total() <= most, more - plain
