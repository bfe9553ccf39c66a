"""Installations on one app share; other processes have their own."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
from builders import NOW, a_letter, an_app, key_of
from celery import Celery
from fresh import fresh_conf, fresh_store

from celery_dlq import DeadLetters
from celery_dlq.assembly import backend_for
from celery_dlq.config import Settings
from celery_dlq.errors import SettingsError
from celery_dlq.events import DeadLettered, Event
from celery_dlq.registry import features
from celery_dlq.store.letters import Letters
from celery_dlq.store.store import Store

NOWHERE = "redis://127.0.0.1:1/0"


def test_a_second_installation_is_the_first_one() -> None:
    """Its letters, its events and its clock: a worker feeds one bus, whoever listens."""
    app = an_app(**fresh_conf())
    first = DeadLetters(app, clock=lambda: NOW)
    second = DeadLetters(app)
    heard: list[Event] = []
    second.events.subscribe(heard.append)
    letter = a_letter()
    first.store.dead_letter(letter, key_of(letter))
    event = DeadLettered(at=NOW, letter=letter)
    first.events.emit(event)

    assert heard == [event]
    assert list(second.letters("orders-DLQ")) == [letter]
    second.override_policy("orders", timedelta(hours=1), max_deliveries=3)
    assert first.changes() == second.changes() != []
    assert DeadLetters.of(app) is first


def test_a_forked_process_has_connections_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that write on one connection would read each other's replies."""
    dlq = DeadLetters(an_app(dlq_url=NOWHERE))
    parents = dlq.assembly.backend
    assert dlq.assembly.backend is parents
    child = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: child)
    own = dlq.assembly.backend
    assert own is not parents
    assert own.letters is not parents.letters
    assert dlq.assembly.backend is own


def test_for_a_while_everything_is_kept_elsewhere() -> None:
    """And then nothing of it is left: neither letters nor jobs."""
    app = an_app(dlq_url=NOWHERE)
    dlq = DeadLetters(app)
    before = dlq.assembly.backend, dlq.settings
    app.conf.update(conf := fresh_conf())
    backend = fresh_store()
    with dlq.assembly.using(backend):
        assert dlq.settings.key_prefix == conf["dlq_key_prefix"]
        parts = [dlq.store, dlq.registry, dlq.job_store]
        assert parts == [backend.letters, backend.workers, backend.jobs]
    assert (dlq.assembly.backend, dlq.settings) == before


def test_the_settings_choose_the_backend() -> None:
    """Nothing is sent before the first use."""

    def made(**settings: object) -> Store:
        app = an_app(**settings)
        return backend_for(Settings.from_conf(app.conf), app)

    assert isinstance(made(**fresh_conf()), Store)
    redis = made(dlq_url=NOWHERE, dlq_key_prefix="shop")
    assert isinstance(redis, Store)
    assert isinstance(redis.letters, Letters)
    assert redis.keys.prefix == redis.separate().keys.prefix == "shop"
    with pytest.raises(SettingsError, match="expected dlq_url to be set"):
        made()


def test_validate_reads_the_settings_anew() -> None:
    """A check must not answer for settings that were changed since."""
    app = an_app(**fresh_conf(), dlq_queues={"orders": {"max_deliveries": 3}})
    DeadLetters(app).validate()
    app.conf.dlq_queues = {"orders": {"max_deliveries": 0}}
    with pytest.raises(SettingsError, match="max_deliveries"):
        DeadLetters(app).validate()


def test_a_visibility_timeout_is_that_of_the_broker_that_workers_read() -> None:
    """Publishers may write to one that has none."""
    app = an_app(
        broker_read_url="redis://localhost:1/0",
        broker_write_url="memory://",
        **fresh_conf(),
        dlq_reliable_fetch=False,
        dlq_queues={"orders": {"default_delay": 7200}},
    )
    with pytest.raises(SettingsError, match=r"visibility timeout \(3600 s\)"):
        DeadLetters(app).validate()


def test_the_store_is_the_broker_that_is_written_to() -> None:
    """Also where ``broker_url`` is not set; one URL for publishers, workers and operators."""
    app = Celery(set_as_current=False)
    app.conf.update(broker_read_url="redis://a/0", broker_write_url="redis://b/1")
    address, prefix = Settings.from_conf(app.conf).store_at(app.conf)
    assert (str(address), prefix) == ("redis://b/1", "dlq")


def test_features_add_methods() -> None:
    """The registry names them; they have the signature and the docstring of what they call."""
    dlq = DeadLetters(an_app())
    names = {name for feature in features() for name in feature.operations}
    assert {"hold", "release", "differences"} <= names
    for name in names:
        assert getattr(dlq, name).__doc__, name
    assert not hasattr(dlq, "tripled")
