"""The policy key ``auto_redrive``: what it takes, how it combines, what its letters say."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from builders import DLQ, a_letter, a_message, key_of
from fresh import fresh_store

from celery_dlq.errors import SettingsError
from celery_dlq.events import Events
from celery_dlq.features.auto_redrive import REDRIVES_USED_UP
from celery_dlq.features.auto_redrive.observer import AutoRedriveObserver
from celery_dlq.features.auto_redrive.policy import AutoRedrive
from celery_dlq.letters.record import Reason
from celery_dlq.policies.overrides import checked
from celery_dlq.policies.policy import Policy
from celery_dlq.policies.table import PolicyTable
from celery_dlq.store.metrics import Counts
from celery_dlq.writing.spool import Spool
from celery_dlq.writing.writer import LetterWriter, PendingLetter

HOUR = timedelta(hours=1)
RULE = {"after": "30m", "times": 3}
NOON = datetime(2026, 1, 31, 12, 0, 30, tzinfo=timezone.utc)


def parsed(value: Any) -> Any:
    """The value of the key as a policy has it."""
    return Policy.parse({"auto_redrive": value}, "dlq_queues['orders']").of("auto_redrive")


def test_texts_numbers_and_timedeltas_are_durations() -> None:
    """They are seconds; what is not given has its default."""
    expected = AutoRedrive(after=1800.0, times=3)
    assert parsed(RULE) == parsed({**RULE, "after": 1800}) == expected
    assert parsed({**RULE, "after": timedelta(minutes=30), "canary": None}) == expected
    assert (expected.backoff, expected.reasons, expected.canary) == (2.0, None, None)
    assert parsed(False) is False
    assert parsed(None) is None


def test_what_is_written_is_read_again() -> None:
    """Overrides and the infos of workers keep policies as JSON."""
    policy = Policy.parse(
        {"auto_redrive": {**RULE, "backoff": 1, "reasons": ["failed"], "canary": 5}}, "x"
    )
    assert Policy.parse(policy.to_json(), "x") == policy
    assert policy.to_json() == {
        "auto_redrive": {
            "after": 1800.0,
            "times": 3,
            "backoff": 1.0,
            "reasons": ["failed"],
            "canary": 5,
        }
    }
    assert Policy(features=(("auto_redrive", False),)).to_json() == {"auto_redrive": False}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "to be off, or a mapping such as"),
        ("30m", "to be off, or a mapping such as"),
        ({"after": "30m"}, "to be a mapping with 'times'"),
        ({"times": 3}, "to be a mapping with 'after'"),
        ({**RULE, "backof": 2}, "got 'backof'; did you mean 'backoff'"),
        ({**RULE, "after": 0}, "['after'] to be a duration of more than 0 seconds, got 0"),
        ({**RULE, "after": "soon"}, "14d, got 'soon'"),
        ({**RULE, "times": 0}, "['times'] to be a whole number of 1 to 100, got 0"),
        ({**RULE, "times": 2.5}, "['times'] to be a whole number of 1 to 100, got 2.5"),
        ({**RULE, "backoff": 0.5}, "['backoff'] to be a factor of 1 to 100, got 0.5"),
        ({**RULE, "backoff": float("nan")}, "a factor of 1 to 100, got nan"),
        ({**RULE, "reasons": ["faild"]}, "got 'faild'; did you mean 'failed'"),
        ({**RULE, "reasons": []}, "['reasons'] to be at least one reason, or left out for all"),
        (AutoRedrive(after=1, times=0), "['times'] to be a whole number of 1 to 100, got 0"),
        ({**RULE, "canary": True}, "['canary'] to be a whole number of 1 to 1000, got True"),
    ],
)
def test_a_mistake_is_one_sentence(value: Any, text: str) -> None:
    """At the start: what was expected, where, and what was there."""
    with pytest.raises(SettingsError) as caught:
        parsed(value)
    assert text in str(caught.value)
    assert "dlq_queues['orders']" in str(caught.value)


def test_it_is_shown_in_words() -> None:
    """`dlq policies` and the web page print it."""
    rule = parsed({**RULE, "reasons": ["failed", "expired"], "canary": 5})
    expected = "after 0:30:00, times 3, backoff 2, reasons expired or failed, canary 5"
    assert str(rule) == expected


def test_each_wait_is_longer_and_none_is_for_ever() -> None:
    """The factor counts once for each redrive."""
    rule = AutoRedrive(after=60, times=3, backoff=3)
    assert [rule.wait_seconds(n) for n in range(3)] == [60, 180, 540]
    assert AutoRedrive(after=60, times=100, backoff=100).wait_seconds(99) == 366 * 86400


def test_an_exact_name_ends_what_a_pattern_began() -> None:
    """``False`` is a value; an override counts before it."""
    queues = {
        "*": Policy.parse({"auto_redrive": RULE}, "x"),
        "cards": Policy.parse({"auto_redrive": False}, "x"),
    }
    table = PolicyTable(queues)
    table.check()
    assert table.value_of("orders-DLQ", "auto_redrive") == AutoRedrive(after=1800, times=3)
    assert table.value_of("cards-DLQ", "auto_redrive") is None
    assert len(table.values_of("auto_redrive")) == 1
    override = Policy.parse({"auto_redrive": {**RULE, "times": 1}}, "x")
    table = PolicyTable(queues, {}, {"cards": (override, "ann")})
    rule = table.value_of("cards-DLQ", "auto_redrive")
    assert rule is not None
    assert rule.times == 1


def test_one_queue_has_one_rule() -> None:
    """Two would redrive each other's letters; a task's rule needs a queue of its own."""
    one, two = (
        Policy.parse({"auto_redrive": {**RULE, "times": n}, "dead_letter_queue": "dead"}, "x")
        for n in (1, 2)
    )
    with pytest.raises(SettingsError, match="one auto_redrive for the dead-letter queue 'dead'"):
        PolicyTable({"a": one, "b": two}).check()
    with pytest.raises(SettingsError, match="auto_redrive of task t beside a dead_letter_queue"):
        PolicyTable({}, {"t": Policy.parse({"auto_redrive": RULE}, "x")}).check()
    PolicyTable({}, {"t": one}).check()


def test_an_override_is_json_or_off() -> None:
    """As a person types it."""
    values = ['{"after": "10m", "times": 1}', "off", "false", False]
    made = [checked("orders", "auto_redrive", v, HOUR, "ann", NOON).value for v in values]
    assert made == [{"after": 600.0, "times": 1, "backoff": 2.0}, False, False, False]
    with pytest.raises(SettingsError, match="or a mapping"):
        checked("orders", "auto_redrive", "on", HOUR, "ann", NOON)


# -- the last one ---------------------------------------------------------------------------


class Waits:
    """The owner of a message."""

    def dlq_wait_is_over(self, state: Any) -> None:
        """Do nothing."""

    message = a_message()


@pytest.mark.parametrize(
    ("redrives", "end"),
    [
        (0, ""),
        (2, ""),
        (3, "; redriven 3 of 3 times by auto_redrive"),
        (5, "; redriven 5 times, and auto_redrive ends at 3"),
    ],
)
def test_the_last_letter_says_so(tmp_path: Any, redrives: int, end: str) -> None:
    """In its description, which all that shows letters has; and it is counted once."""
    backend, counts, events = fresh_store(), Counts(), Events()
    table = PolicyTable({"orders": Policy.parse({"auto_redrive": {**RULE, "after": 1}}, "orders")})
    parts: Any = SimpleNamespace(
        policies=SimpleNamespace(policies=table), events=events, counts=counts
    )
    writer = LetterWriter(
        backend.letters,
        Spool(str(tmp_path), "here"),
        counts=counts,
        events=events,
        change=AutoRedriveObserver(parts).before_store,
    )
    letter = a_letter(redrives=redrives)
    for _ in range(2):
        writer.store_or_wait(PendingLetter(letter, key_of(letter), False, Waits()))
    found = backend.letters.get(DLQ, letter.id)
    assert found is not None
    assert found.description == f"bad order{end}"
    counts.flush(backend.metrics.add_counts)
    series = (REDRIVES_USED_UP.name, "orders", DLQ)
    assert backend.metrics.read_all().counts.get(series, 0) == int(bool(end))


def test_other_reasons_are_not_used_up() -> None:
    """The policy never redrove them."""
    rule = AutoRedrive(after=1, times=3, reasons=frozenset({Reason.FAILED}))
    assert rule.used_up(3, Reason.EXPIRED) == ""
    assert rule.used_up(3, Reason.FAILED) != ""


def test_without_reasons_it_leaves_what_an_operator_ended() -> None:
    """Who ended or revoked a task does not want it back by itself; a policy may name the reason."""
    rule = AutoRedrive(after=1, times=1)
    assert [rule.redrives_reason(reason) for reason in (Reason.FAILED, Reason.OPERATOR)] == [
        True,
        False,
    ]
    named = AutoRedrive(after=1, times=1, reasons=frozenset({Reason.OPERATOR}))
    assert named.redrives_reason(Reason.OPERATOR)
