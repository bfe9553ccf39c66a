"""A change of a policy that is about letters: shown before, put off for a minute, undone after."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import intervals
import pytest
from builders import DLQ, a_letter, an_app, key_of
from waiting import poll
from web_pages import SAME_SITE, SECRET, Pages, form_of, get, post

from celery_dlq import DeadLetters, registry
from celery_dlq.errors import DLQError, NotFound
from celery_dlq.events import Events
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.operations.policies import PolicyAdmin
from celery_dlq.operations.redrive.message import RedriveOptions
from celery_dlq.operations.removal import Removal
from celery_dlq.operations.retention import Retention
from celery_dlq.operations.retention_round import RetentionRound
from celery_dlq.policies import overrides
from celery_dlq.store.instructions import Override
from celery_dlq.web.http import Permission, User

HOUR = timedelta(hours=1)
LETTERS = 9
TTL = {"dead_letter_ttl": 0.1}
MOST = {"dead_letter_max_length": 1}
REDRIVING = {
    key: found.example for key, (_, found) in registry.policy_keys().items() if found.redrives
}


@pytest.fixture
def make(redis_url: str) -> Iterator[Callable[..., DeadLetters]]:
    """Make an app with a policy of ``orders``; all share one store."""
    made: list[DeadLetters] = []

    def an_operator(**policy: Any) -> DeadLetters:
        app = an_app(dlq_url=redis_url, broker_url=redis_url, dlq_queues={"orders": policy})
        app.conf.task_default_queue = "orders"
        made.append(DeadLetters(app))
        return made[-1]

    yield an_operator
    for dlq in made:
        dlq.close()


@pytest.fixture
def dlq(make: Callable[..., DeadLetters]) -> DeadLetters:
    """An app with letters, and without a policy for them."""
    made = make()
    put(made, LETTERS)
    aged(made)
    return made


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is changed begins now."""
    intervals.change(monkeypatch, grace=timedelta(0))


def put(dlq: DeadLetters, count: int, **changes: Any) -> list[str]:
    """Store letters."""
    letters = [a_letter(**changes) for _ in range(count)]
    for letter in letters:
        dlq.store.dead_letter(letter, key_of(letter))
    return [letter.id for letter in letters]


def aged(dlq: DeadLetters) -> None:
    """Wait until what is there is older than those policies let it become."""
    stored = dlq.store.now()
    poll(lambda: dlq.store.now() - stored > timedelta(seconds=0.15))


def a_worker_trims(dlq: DeadLetters) -> int:
    """How many letters are left when a worker has been round."""
    retention = Retention(dlq.store, dlq.registry, Events(), "celery@web-1")
    one = RetentionRound(lambda: retention, dlq.store, PolicyAdmin(dlq.assembly).in_force)
    for _ in range(9):
        one.tick()
    return dlq.store.length(DLQ)


def effect(dlq: DeadLetters, **values: Any) -> str:
    """What a change would do, in words."""
    admin = PolicyAdmin(dlq.assembly)
    after = admin.after(admin.check_override("orders", HOUR, **values))
    return str(Removal(dlq.assembly).policy_effect_on("orders", frozenset(values), after))


@pytest.mark.parametrize("values", [TTL, MOST])
def test_a_change_can_be_taken_back_for_a_minute(dlq: DeadLetters, values: Any) -> None:
    """Nothing is lost meanwhile or afterwards, in whichever process."""
    dlq.override_policy("orders", HOUR, **values)
    assert a_worker_trims(dlq) == LETTERS
    with pytest.raises(DLQError, match="changed more than a minute ago"):
        dlq.trim(DLQ)
    assert dlq.trim() == []
    (warning,) = dlq.policies().warnings
    assert "policy of queue 'orders' changes at 2" in warning
    dlq.lift_policy("orders")
    with pytest.raises(NotFound, match="found none"):
        dlq.lift_policy("orders")
    assert a_worker_trims(dlq) == LETTERS
    assert "is then as configured" in dlq.policies().warnings[0]


@pytest.mark.parametrize("earlier", [False, True])
def test_nothing_configured_acts_between_two_overrides(
    make: Callable[..., DeadLetters], monkeypatch: pytest.MonkeyPatch, earlier: bool
) -> None:
    """An override that spares letters is replaced or lifted: these stay for the minute."""
    dlq = make(**MOST)
    with monkeypatch.context() as begun:
        intervals.change(begun, grace=timedelta(0))
        dlq.override_policy("orders", HOUR, dead_letter_max_length=None)
    put(dlq, LETTERS)
    assert a_worker_trims(dlq) == LETTERS
    if earlier:
        dlq.override_policy("orders", HOUR, dead_letter_max_length=LETTERS)
    else:
        dlq.lift_policy("orders")
    assert a_worker_trims(dlq) == LETTERS


@pytest.mark.parametrize("values", [TTL, MOST])
def test_what_an_operator_has_removed_can_be_restored(
    dlq: DeadLetters, at_once: None, values: Any
) -> None:
    """The audit says until when."""
    ids = {letter.id for letter in dlq.letters(DLQ)}
    dlq.override_policy("orders", HOUR, **values)
    left = a_worker_trims(dlq)
    (change,) = [one for one in dlq.changes() if one.action == "trimmed"]
    assert (change.letters, "kept_until" in change.detail) == (LETTERS - left, True)
    dlq.lift_policy("orders")
    for letter_id in ids - {letter.id for letter in dlq.letters(DLQ)}:
        assert dlq.restore(letter_id) == DLQ
    assert {letter.id for letter in dlq.letters(DLQ)} == ids


@pytest.mark.parametrize("by_hand", [False, True])
def test_only_a_persons_trimming_goes_to_the_bin(
    make: Callable[..., DeadLetters], by_hand: bool
) -> None:
    """What the settings say is done for good by workers."""
    dlq = make(**TTL)
    put(dlq, LETTERS)
    aged(dlq)
    if by_hand:
        assert [change.letters for change in dlq.trim(DLQ)] == [LETTERS]
    assert a_worker_trims(dlq) == 0
    assert len(list(Removal(dlq.assembly).discarded(DLQ))) == (LETTERS if by_hand else 0)


def test_what_the_end_of_an_override_removes_can_be_restored(
    make: Callable[..., DeadLetters], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator's word, too: the configured policy acts because an override was lifted."""
    intervals.change(monkeypatch, grace=timedelta(seconds=0.3))
    dlq = make(**TTL)
    put(dlq, LETTERS)
    dlq.override_policy("orders", HOUR, dead_letter_ttl=86_400)
    aged(dlq)
    assert a_worker_trims(dlq) == LETTERS
    dlq.lift_policy("orders")
    poll(lambda: a_worker_trims(dlq) == 0, timeout_seconds=20)
    assert len(list(Removal(dlq.assembly).discarded(DLQ))) == LETTERS
    with pytest.raises(NotFound, match="found none"):
        dlq.lift_policy("orders")


def test_a_change_says_what_it_does_to_letters(dlq: DeadLetters) -> None:
    """Those that are there; a letter that two rules remove counts once."""
    assert effect(dlq, **TTL) == f"removes 9 letters of {DLQ}"
    assert effect(dlq, dead_letter_ttl="1h") == effect(dlq, max_deliveries=1) == ""
    assert effect(dlq, **MOST) == f"removes 8 letters of {DLQ}"
    assert effect(dlq, **TTL, **MOST) == f"removes 9 letters of {DLQ}"
    for key, value in REDRIVING.items():
        assert effect(dlq, **{key: value}) == f"redrives 9 letters of {DLQ}"


def test_a_job_of_a_policy_whose_feature_is_gone_redrives_nothing(
    dlq: DeadLetters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took some of the letters by a rule; without the rule it must not take them all."""
    options = RedriveOptions(due={"redrives": 0, "reasons": None})
    jobs = dlq.assembly.jobs()
    run = jobs.new("redrive", DLQ, LetterFilter(), options)
    monkeypatch.setattr(registry, "policy_keys", dict)
    with pytest.raises(DLQError, match="has changed since it made this job"):
        jobs.run(run)
    assert dlq.store.length(DLQ) == LETTERS


def test_the_letters_of_a_long_queue_are_counted_up_to_a_bound(
    dlq: DeadLetters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than one page of them, and no more than the bound."""
    put(dlq, 1100)
    assert effect(dlq, **TTL) == f"removes 1,109 letters of {DLQ}"
    monkeypatch.setattr("celery_dlq.operations.removal.MOST_COUNTED", 600)
    for key, value in REDRIVING.items():
        assert effect(dlq, **TTL, **{key: value}) == (
            f"removes at least 600 letters of {DLQ} and redrives at least 600 letters of {DLQ}"
        )


# -- the page ------------------------------------------------------------------------------


def a_page(dlq: DeadLetters, *may: Permission) -> Callable[..., tuple[int, str]]:
    """The pages for somebody who may do these things; returns what sends a form to them."""
    user = User(name="vera", permissions={Permission.VIEW, Permission.EDIT_POLICIES, *may})
    web = Pages(dlq, access=lambda _: user, secret=SECRET)

    def send(path: str, fields: dict[str, str]) -> tuple[int, str]:
        if not fields:
            answer = web.handle(get(path))
        else:
            cookie, token = form_of()
            text = "&".join(f"{name}={value}" for name, value in fields.items())
            answer = web.handle(post(path, cookie, token, fields=text, headers=SAME_SITE))
        return answer.status, answer.body.decode()

    return send


@pytest.mark.parametrize(
    ("key", "value", "needed"),
    [
        ("dead_letter_ttl", "1", Permission.DISCARD),
        ("dead_letter_max_length", "1", Permission.DISCARD),
        *((key, json.dumps(value), Permission.REDRIVE) for key, value in REDRIVING.items()),
    ],
)
def test_who_may_edit_policies_only_neither_discards_nor_redrives(
    dlq: DeadLetters, key: str, value: str, needed: Permission
) -> None:
    """Neither by an override nor by its end; who may do both sees what it does, first."""
    fields = {"queue": "orders", "key": key, "value": value, "for": "1h", "confirmed": "yes"}
    vera, olga = a_page(dlq), a_page(dlq, needed)
    status, text = vera("/policies", fields)
    assert (status, f"expected the permission {needed}" in text) == (403, True)
    assert dlq.assembly.backend.instructions.in_force(Override) == []
    assert vera("/policies", {**fields, "key": "max_deliveries", "value": "1"})[0] == 303
    assert f"<option>{key}" not in vera("/policies", {})[1]

    status, text = olga("/policies", {**fields, "confirmed": ""})
    assert status == 200
    assert f" letters of {DLQ}" in text
    assert "in one minute" in text
    assert olga("/policies", fields)[0] == 303
    assert f"End the override of {key}" in olga("/policies", {})[1]
    assert f"End the override of {key}" not in vera("/policies", {})[1]
    assert vera("/policies/unset", fields)[0] == 403
    assert key in {one.key for one in dlq.assembly.backend.instructions.in_force(Override)}
    assert olga("/policies/unset", fields)[0] == 303
    assert f"End the override of {key}" not in olga("/policies", {})[1]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, "off") for key in overrides.overridable_keys()),
        ("max_deliveries", "null"),  # each word with each key: tests/unit/test_policy_admin.py
        ("max_deliveries", "none"),
    ],
)
def test_the_page_ends_every_key(make: Callable[..., DeadLetters], key: str, value: str) -> None:
    """And shows what is off."""
    dlq = make()
    send = a_page(dlq, Permission.DISCARD, Permission.REDRIVE)
    fields = {"queue": "orders", "key": key, "value": value, "for": "1h"}
    status, text = send("/policies", fields)
    assert (status, '<dd class="said">off</dd>' in text) == (200, True)
    assert send("/policies", {**fields, "confirmed": "yes"})[0] == 303
    assert ">off</td>" in send("/policies", {})[1]
