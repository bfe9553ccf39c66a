"""The event of a letter in Sentry."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from builders import a_letter
from fresh import fresh_store

from celery_dlq.errors import StoreUnavailable
from celery_dlq.events import Events
from celery_dlq.features.sentry import integration
from celery_dlq.features.sentry import observer as sentry
from celery_dlq.features.sentry.events import event_id_of, event_of, sends_values
from celery_dlq.features.sentry.integration import SentryDeduplicator
from celery_dlq.features.sentry.observer import SentryObserver
from celery_dlq.features.sentry.reports import Report, ReportCause
from celery_dlq.letters.record import DeadLetter, Reason
from celery_dlq.letters.redaction import Redaction
from celery_dlq.worker.observer import Observer

REPORT = Report(why=ReportCause.GREW, number=10, letter_ids=("a", "b"))


def event(*, with_values: bool = False, **changes: Any) -> dict[str, Any]:
    return event_of(a_letter(sentry_event_id="e" * 32, **changes), REPORT, with_values=with_values)


def test_a_death_without_an_exception_is_a_message() -> None:
    """Sentry shows it as the title of the issue."""
    made = event(
        exception_type=None, exception_message=None, reason=Reason.EXPIRED, description="too late"
    )
    assert made["logentry"]["formatted"] == "shop.charge dead-lettered: expired: too late"
    assert "exception" not in made


def test_an_exception_without_a_traceback_has_no_frames() -> None:
    """A lost process left none."""
    made = event(exception_type="billiard.exceptions.WorkerLostError", exception_message="SIGKILL")
    (value,) = made["exception"]["values"]
    assert (value["module"], value["type"]) == ("billiard.exceptions", "WorkerLostError")
    assert value["value"] == "SIGKILL"
    assert "stacktrace" not in value


def test_arguments_and_body_need_permission() -> None:
    """They are nowhere in the event otherwise."""
    secret = {"args_json": '["s3cret"]', "argsrepr": "('s3cret',)", "body": b'[["s3cret"], {}, {}]'}
    assert "s3cret" not in repr(event(**secret))
    assert event(**secret, with_values=True)["extra"] == {
        "args": '["s3cret"]',
        "kwargs": "{}",
        "body": '[["s3cret"], {}, {}]',
    }


@pytest.mark.parametrize(
    ("options", "sends"),
    [
        ({}, False),
        ({"send_default_pii": None}, False),
        ({"send_default_pii": True}, True),
        ({"send_default_pii": True, "data_collection": {"provided_by_user": False}}, True),
        (
            {
                "send_default_pii": True,
                "data_collection": {"provided_by_user": True, "queues": False},
            },
            False,
        ),
        ({"data_collection": {"provided_by_user": True, "queues": True}}, True),
    ],
)
def test_personal_data_is_sent_as_sentrys_options_allow(
    options: dict[str, Any], *, sends: bool
) -> None:
    """The newer option beats the older one, as in Sentry's own integrations."""
    assert sends_values(options) is sends


def test_a_letter_reported_twice_is_one_event() -> None:
    """The id follows from the letter, and is one that Sentry takes."""
    letter = a_letter()
    assert event_id_of(letter) == event_id_of(letter)
    assert len(event_id_of(letter)) == 32
    assert event_id_of(letter) != event_id_of(a_letter())


class Away:
    """Reports that do not answer."""

    def report_of(self, letter: DeadLetter) -> Report | None:
        raise StoreUnavailable("away")

    def close(self) -> None:
        """Nothing."""


def test_letters_are_stored_unmarked_while_nobody_can_decide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reporting is no reason to fail."""
    monkeypatch.setattr("celery_dlq.features.sentry.observer.sentry_client", object)
    letter = a_letter(redrives=0)
    store = SimpleNamespace(part=lambda _kind: Away())
    parts: Any = SimpleNamespace(events=Events(), backend=store, made={})
    assert SentryObserver(parts).before_store(letter) is letter


class GivesUp(Observer):
    """What redrove a message, and does no more."""

    def gives_up(self, letter: DeadLetter) -> str:
        """After three times."""
        return "redriven 3 of 3 times" if letter.redrives >= 3 else ""


def test_one_report_for_each_group_that_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its first letter; the others are reported as all letters are."""
    monkeypatch.setattr(sentry, "sentry_client", object)
    parts: Any = SimpleNamespace(
        events=Events(), backend=fresh_store(), made={"by_itself": GivesUp()}
    )
    observer = SentryObserver(parts)
    due: list[Report] = []
    for number in range(4):
        letter = a_letter(redrives=3 if number else 0)
        observer.before_store(letter)
        found = observer.reporter.due
        due += [found[letter.id][0]] if letter.id in found else []
    assert [report.why for report in due].count(ReportCause.USED_UP) == 1
    assert due[1].why is ReportCause.USED_UP


def test_lines_of_one_kind_pass_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next kind passes at once."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    drops = SentryDeduplicator(lambda *_: False, lambda: False)

    def passes(logger: str) -> bool:
        record = logging.LogRecord(logger, logging.ERROR, "", 1, "Process %r exited", (7,), None)
        return drops.processed({"level": "error"}, {"log_record": record}) is not None

    assert passes("multiprocessing")
    assert not passes("multiprocessing")
    assert passes("celery_dlq.worker")
    now[0] += 61.0
    assert passes("multiprocessing")


def test_the_newest_worker_of_a_process_decides_what_sentry_gets() -> None:
    """An earlier one is gone, with what it knew."""
    sdk = pytest.importorskip("sentry_sdk")
    sent: list[Any] = []
    record = logging.LogRecord("celery.worker", logging.ERROR, "", 1, "lost", (), None)
    with sdk.new_scope() as scope:
        scope.set_client(
            sdk.Client("http://key@localhost/1", before_send=lambda *of: sent.append(of))
        )
        for handles, expected in ((True, 0), (False, 1), (True, 1)):
            SentryDeduplicator(lambda *_: False, lambda handles=handles: handles).install()
            sdk.capture_event({"message": "lost"}, {"log_record": record})
            assert len(sent) == expected


def test_masking_comes_after_the_apps_before_send_and_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the app drops stays dropped; a second worker in the process adds no second mask."""
    calls = []

    def before_send(event: Any, _hint: Any) -> Any:
        calls.append(event)
        return None if event.get("drop") else {**event, "message": "card 4111111111111111"}

    app_client = SimpleNamespace(options={"before_send": before_send})
    monkeypatch.setattr(integration, "sentry_client", lambda: app_client)
    redaction = Redaction.parse([r"re:\d{16}", "kwargs.card"])
    integration.install_masking(redaction)
    integration.install_masking(redaction)
    masking = app_client.options["before_send"]

    assert app_client.options["include_local_variables"] is False
    frames = {"values": [{"stacktrace": {"frames": [{"lineno": 3}]}}]}
    job = {"celery-job": {"args": [], "kwargs": {"card": "5105"}}}
    event = masking({"exception": frames, "extra": job, "level": "error"}, {})
    assert event == {
        "message": "card [redacted]",
        "exception": {"values": [{"stacktrace": {"frames": [{"lineno": 3}]}}]},
        "extra": {"celery-job": {"args": [], "kwargs": {"card": "[redacted]"}}},
        "level": "error",
    }
    assert masking({"drop": True}, {}) is None
    assert len(calls) == 2
    deep: Any = {}
    for _ in range(10_000):
        deep = [deep]
    assert masking({"extra": deep, "level": "error"}, {}) == {"level": "error"}


def test_masking_is_not_installed_without_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The app's client stays as it is."""
    app_client = SimpleNamespace(options={"before_send": None})
    monkeypatch.setattr(integration, "sentry_client", lambda: app_client)
    integration.install_masking(Redaction())
    assert app_client.options == {"before_send": None}
