"""What Celery logs about a message that it cannot read, and about a failure, under dlq_redact."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from unittest.mock import Mock

import pytest
from celery.worker.consumer import consumer

from celery_dlq.letters.redaction import NO_REDACTION, Redaction
from celery_dlq.worker import masked_log
from celery_dlq.worker.dropped import dumping, watch_dropped_messages
from celery_dlq.writing.lifecycle import DeliveryState

CARD = "4111111111111111"


@pytest.fixture(params=["kwargs.card", r"re:\b\d{16}\b"])
def _redacting(request: pytest.FixtureRequest) -> Iterator[None]:
    masked_log.install(Redaction.parse([request.param]))
    yield
    masked_log.install(NO_REDACTION)


@pytest.mark.usefixtures("_redacting")
@pytest.mark.parametrize(
    ("template", "args"),
    [
        (consumer.UNKNOWN_FORMAT, (f"body: {CARD}",)),
        (consumer.UNKNOWN_TASK_ERROR, (KeyError("shop.gone"), CARD, {"x": CARD}, {})),
        (consumer.INVALID_TASK_ERROR, (TypeError(f"got {CARD}"), f"{{'card': {CARD}}}")),
        (consumer.MESSAGE_DECODE_ERROR, (ValueError(CARD), "a/b", "utf-8", CARD, CARD)),
    ],
)
def test_a_dump_of_a_message_is_hidden(
    template: str, args: tuple[object, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody can tell the arguments in it; the name of an unknown task stays."""
    try:
        raise TypeError(f"got {CARD}")
    except TypeError:
        dumping(logging.getLogger("celery.worker.consumer.consumer").exception)(template, *args)
    assert CARD not in caplog.text
    assert "[redacted]" in caplog.text
    assert ("shop.gone" in caplog.text) is (template is consumer.UNKNOWN_TASK_ERROR)


@pytest.mark.usefixtures("_redacting")
@pytest.mark.parametrize(
    ("handler", "also"),
    [
        ("on_unknown_message", ()),
        ("on_unknown_task", (KeyError("shop.gone"),)),
        ("on_invalid_task", (TypeError(f"got {CARD}"),)),
        ("on_decode_error", (ValueError(CARD),)),
    ],
)
def test_celery_drops_a_message_without_showing_it(
    handler: str, also: tuple[Exception, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Celery's own handlers, as they are called for a message whose queue keeps no letters."""
    guard, message = Mock(), Mock(headers={"id": "1", "task": "shop.gone", "card": CARD})
    message.body = message.payload = CARD
    guard.decide_dropped.return_value = DeliveryState.DONE
    worker = Mock(spec=consumer.Consumer, app=Mock(), connection_errors=(), dlq_watched=False)
    worker.blueprint, worker.event_dispatcher = Mock(), Mock(enabled=False)
    worker._message_report = partial(consumer.Consumer._message_report, worker)
    for name in ("on_unknown_message", "on_unknown_task", "on_invalid_task", "on_decode_error"):
        setattr(worker, name, partial(getattr(consumer.Consumer, name), worker))
    watch_dropped_messages(worker, guard)
    first = () if handler == "on_decode_error" else ({"card": CARD},)
    getattr(worker, handler)(*first, message, *also)
    assert "[redacted]" in caplog.text
    assert CARD not in caplog.text
    assert message.reject_log_error.called or message.ack.called
    logging.getLogger("celery.worker.consumer.consumer").error("%s: %s", "broker", "is away")
    assert caplog.messages[-1] == "broker: is away"


@pytest.mark.usefixtures("_redacting")
def test_what_hides_nothing_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """A lost connection keeps its text and its arguments."""
    logger = logging.getLogger("celery.worker.consumer.consumer")
    logger.error("Connection to %s lost: %s", "broker", ConnectionError("reset"))
    assert caplog.messages == ["Connection to broker lost: reset"]


@pytest.mark.usefixtures("_redacting")
@pytest.mark.parametrize("name", ["celery.app.trace", "celery.pool", "celery.worker.loops"])
def test_every_logger_of_celery_hides_it(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also one that no line of this package knows."""
    dumping(logging.getLogger(name).error)("got %s: %s", "it", CARD)
    assert CARD not in caplog.text
    assert "got " in caplog.text


def test_without_rules_nothing_is_touched(caplog: pytest.LogCaptureFixture) -> None:
    """No filter is left by an earlier worker of the process either."""
    masked_log.install(Redaction.parse(["kwargs.card"]))
    masked_log.install(NO_REDACTION)
    logging.getLogger("celery.app.trace").error("got %s", CARD)
    assert caplog.records[0].args == (CARD,)
