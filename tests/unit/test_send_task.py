"""Any replacement of ``send_task``, before or after `DeadLetters`, is called as without us."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock, call, patch

import pytest
from builders import an_app
from celery import Celery
from celery.signals import before_task_publish

from celery_dlq import DeadLetters

DELAY = 30
POLICIES = {"slow": {"default_delay": DELAY}}


@pytest.fixture
def published() -> Iterator[list[dict[str, Any]]]:
    """The headers of every message that is really published meanwhile."""
    found: list[dict[str, Any]] = []

    def receive(headers: dict[str, Any], **_: Any) -> None:
        found.append(headers)

    before_task_publish.connect(receive)
    yield found
    before_task_publish.disconnect(receive)


def with_plugin(app: Celery) -> Celery:
    """The app with a delayed queue, and with its `DeadLetters`, made twice."""
    app.conf.dlq_queues = POLICIES
    DeadLetters(app)
    DeadLetters(app)
    return app


SENTRY = """
import json, sentry_sdk
from celery import Celery
from celery.signals import before_task_publish
from sentry_sdk.integrations.celery import CeleryIntegration
from celery_dlq import DeadLetters

def sentry():
    sentry_sdk.init(
        dsn="http://key@127.0.0.1:9/1", traces_sample_rate=1.0, transport=lambda *_: None,
        default_integrations=False, integrations=[CeleryIntegration()],
    )

app, plain = Celery("shop", broker="memory://"), Celery("plain", broker="memory://")
{first}
{then}
found = []
before_task_publish.connect(lambda headers, **_: found.append(headers), weak=False)
with sentry_sdk.start_transaction(name="checkout"):
    app.send_task("charge")
    plain.send_task("charge")
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    "order", [("sentry()", "DeadLetters(app)"), ("DeadLetters(app)", "sentry()")]
)
def test_sentry_gives_its_trace_whoever_comes_first(order: tuple[str, str]) -> None:
    """Its SDK replaces ``Celery.send_task`` at its start; here in a process of its own."""
    script = SENTRY.format(first=order[0], then=order[1])
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    headers, of_plain_app = json.loads(done.stdout)
    assert set(headers) == set(of_plain_app)
    from sentry_sdk.integrations import celery

    if hasattr(celery, "_patch_celery_send_task"):  # not yet in the oldest that we support
        assert {"sentry-trace", "baggage", "sentry-task-enqueued-time"} <= set(headers)


@pytest.mark.parametrize("plugin_first", [True, False], ids=["after", "before"])
def test_a_mock_of_the_class_is_asked_and_nothing_is_published(
    published: list[dict[str, Any]], *, plugin_first: bool
) -> None:
    """As users' tests do it; a mock is not bound, and takes what was given as it was given."""
    app = an_app()
    if plugin_first:
        with_plugin(app)
    with patch("celery.Celery.send_task") as send_task:
        with_plugin(app)
        app.send_task("charge", (1,), expires=60)
        app.send_task("charge", (1,), queue="slow")
    slow = {"queue": "slow", "countdown": DELAY}
    assert send_task.call_args_list[0] == call("charge", (1,), expires=60)
    assert slow.items() <= send_task.call_args_list[1].kwargs.items()
    assert not published

    app.send_task("charge")
    assert len(published) == 1


def test_a_mock_of_the_app_is_asked_and_taken_away_again(published: list[dict[str, Any]]) -> None:
    """It is called before us if it came later, and after us if it was there."""
    app = an_app()
    app.send_task = earlier = Mock()
    with_plugin(app)
    app.send_task("charge", queue="slow")
    assert earlier.call_args.kwargs["countdown"] == DELAY
    with patch.object(app, "send_task") as later:
        app.send_task("charge")
    later.assert_called_once_with("charge")
    assert earlier.call_count == 1
    assert not published


def nothing() -> None:
    """The body of the task."""


class Narrow(Celery):  # type: ignore[misc]
    """An app whose ``send_task`` names few of the arguments."""

    def send_task(self, name: str, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Add a header."""
        options["headers"] = {**(options.get("headers") or {}), "tenant": "blue"}
        return super().send_task(name, args, kwargs, **options)


class Open(Celery):  # type: ignore[misc]
    """One that names none."""

    def send_task(self, *args: Any, **options: Any) -> Any:
        """Add a header."""
        options["headers"] = {**(options.get("headers") or {}), "tenant": "blue"}
        return super().send_task(*args, **options)


@pytest.mark.parametrize("kind", [Narrow, Open])
def test_an_app_with_a_send_task_of_its_own_keeps_it(
    kind: type[Celery], published: list[dict[str, Any]]
) -> None:
    """It may name few of the arguments; the delays are there as well."""
    app = with_plugin(kind("shop", broker="memory://", set_as_current=False))
    app.send_task("charge", (1,), {})
    app.send_task("charge", args=(1,), queue="slow")
    app.task(name="charge", shared=False)(nothing).apply_async(queue="slow")
    assert [headers["tenant"] for headers in published] == ["blue"] * 3
    assert [headers["eta"] is not None for headers in published] == [False, True, True]


def test_a_static_method_and_a_class_method_are_called_as_such() -> None:
    """Python binds it as without us."""
    sent: list[Any] = []
    app = with_plugin(an_app())
    with patch.object(Celery, "send_task", staticmethod(lambda *args, **_: sent.append(args))):
        app.send_task("charge")
    with patch.object(Celery, "send_task", classmethod(lambda *args, **_: sent.append(args))):
        app.send_task("charge")
    assert sent == [("charge",), (Celery, "charge")]


def test_the_plugin_on_the_current_app_belongs_to_that_app(
    published: list[dict[str, Any]],
) -> None:
    """``celery.current_app`` is a proxy, and may be another app a moment later."""
    from celery import current_app

    app, other = an_app(), an_app()
    app.set_current()
    try:
        current_app.conf.dlq_queues = POLICIES
        dlq = DeadLetters(current_app)
        other.set_current()
        app.send_task("charge", queue="slow")
    finally:
        other.close()
        app.close()
    assert dlq.app is app
    assert published[0]["eta"] is not None
