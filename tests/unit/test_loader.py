"""The loader: an app whose code is somebody else's gets the plugin by an environment variable."""

from __future__ import annotations

import pytest
from builders import an_app
from celery import Celery
from celery.signals import before_task_publish
from fresh import fresh_conf

from celery_dlq import DeadLetters, Loader
from celery_dlq.plugin import ATTRIBUTE


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Celery:
    """An app whose code knows nothing of the plugin."""
    monkeypatch.setenv("CELERY_LOADER", "celery_dlq.Loader")
    return an_app(
        task_default_queue="slow",
        task_create_missing_queues=True,
        **fresh_conf(),
        dlq_queues={"slow": {"default_delay": 30}},
    )


def test_an_app_has_the_plugin_when_its_configuration_was_read(app: Celery) -> None:
    """Celery makes the loader then; a worker reads the configuration before its bootsteps."""
    assert app.conf.task_default_queue == "slow"
    assert isinstance(app.loader, Loader)
    assert isinstance(getattr(app, ATTRIBUTE), DeadLetters)
    assert any("GuardStep" in str(step) for step in app.steps["worker"])


def test_the_first_message_of_a_publisher_has_the_delay(app: Celery) -> None:
    """``Task.apply_async`` reads the configuration before it looks ``send_task`` up."""
    published = []

    def receive(headers: dict[str, object], **_: object) -> None:
        published.append(headers)

    @app.task(name="here", shared=False)
    def here() -> None:
        """Do nothing."""

    before_task_publish.connect(receive)
    try:
        assert not hasattr(app, ATTRIBUTE)
        here.delay()
    finally:
        before_task_publish.disconnect(receive)
    assert [bool(headers["eta"]) for headers in published] == [True]


def test_an_app_that_installs_the_plugin_itself_has_it_once(app: Celery) -> None:
    """The variable may be set for a fleet in which some apps have the line of code."""
    own = DeadLetters(app)
    assert isinstance(app.loader, Loader)
    assert getattr(app, ATTRIBUTE) is own
