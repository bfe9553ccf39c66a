"""What sets letters apart: few findings, the most telling first, each said once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from builders import DLQ, NOW, a_letter, key_of
from fresh import fresh_store

from celery_dlq.errors import DLQError, NotFound
from celery_dlq.features.differences.operations import Comparison, Differences, fixed_by
from celery_dlq.letters.replacing import MARKER
from celery_dlq.operations.reading import Reading
from celery_dlq.store.letters import Letters
from celery_dlq.store.store import Store

GROUP, REST = "a" * 16, "b" * 16


def fill(store: Letters, letters: int, fingerprint: str = REST, **changes: Any) -> None:
    """Store letters whose arguments are noise."""
    dice = Random(f"{fingerprint}{letters}{changes}")  # noqa: S311 - the same every time
    planted = changes.pop("kwargs", {})
    for number in range(letters):
        kwargs = {"currency": dice.choice(["EUR", "USD"]), "order": dice.randrange(10**9)}
        values = {
            "worker_hostname": f"celery@web-{dice.randrange(4)}",
            "dead_lettered_at": NOW + timedelta(minutes=dice.randrange(20_000)),
            "kwargs_json": json.dumps(kwargs | planted),
            "fingerprint": fingerprint,
            "task_id": f"{fingerprint}-{number}-{dice.random()}",
        }
        letter = a_letter(**{**values, **changes})
        store.dead_letter(letter, key_of(letter))


@pytest.fixture
def backend() -> Store:
    """No letters."""
    return fresh_store()


def assembled(backend: Store, masked: Any = None) -> Any:
    """What the operation is made of."""
    reading, redaction = Reading(backend.letters), SimpleNamespace(arguments=masked)
    return SimpleNamespace(backend=backend, reading=lambda: reading, redaction=redaction)


def differences(backend: Store, **options: Any) -> Differences:
    """What sets letters apart; the time stands still."""
    options.setdefault("fingerprint", GROUP)
    return Comparison(assembled(backend), monotonic=lambda: 0.0).differences(DLQ, **options)


def test_a_planted_cause_is_the_finding(backend: Store) -> None:
    """With its counts, in a sentence, and as conditions of a filter."""
    fill(backend.letters, 60, GROUP, kwargs={"tenant": 42})
    fill(backend.letters, 200, kwargs={"tenant": 7})
    fill(backend.letters, 10, kwargs={"tenant": 42})
    found = differences(backend)
    assert (found.letters, found.others, found.successes, found.cut) == (60, 210, 0, False)
    (one,) = found.findings
    assert (one.feature, one.value, one.against) == ("kwargs.tenant", "42", "same tasks")
    assert (one.letters, one.of_letters, one.others, one.of_others) == (60, 60, 10, 210)
    assert (one.share_here, one.share_elsewhere) == (1, pytest.approx(10 / 210))
    assert one.q_value < 1e-20
    assert one.condition == "kwargs.tenant=42"
    assert one.text == (
        "All of these letters have kwargs.tenant = 42, "
        f"against 5 % of the letters of the only cause to compare with ({REST})."
    )
    assert one.neighbour == REST
    assert one.where == {"conditions": ("kwargs.tenant=42",)}
    assert json.loads(json.dumps(found.to_json()))["findings"][0]["letters"] == 60


def test_what_all_letters_share_is_said_first(backend: Store) -> None:
    """With others of other tasks alone, arguments are compared with nothing, also in words."""
    fill(
        backend.letters,
        80,
        GROUP,
        kwargs={"tenant": "nordic"},
        worker_hostname="celery@web-1",
        args_json="[]",
    )
    ship = {"task_name": "shop.ship", "worker_hostname": "celery@web-1"}
    fill(backend.letters, 10, kwargs={"tenant": "nordic"}, **ship)
    fill(backend.letters, 30, kwargs={"tenant": "other"}, **ship)
    found = differences(backend)
    assert found.findings == ()
    assert [(one.feature, one.value, one.others, one.of_others) for one in found.shared] == [
        ("kwargs.tenant", "nordic", 0, 0),
    ]  # not the host, which all others have
    read = "sampled successes of it (dlq_sample_successes) were read."
    assert found.sentences[0].endswith(
        "; all 80 letters have kwargs.tenant = nordic, perhaps as others do."
    )
    assert found.sentences[1:] == (
        "All 80 letters have kwargs.tenant = nordic.",
        "Compared with 40 other letters of the queue (without their arguments).",
        f"Arguments were compared with nothing: neither other letters of the task nor {read}",
        "What was compared shows no difference of a tenth or more beyond chance; the rest may.",
    )
    assert json.loads(json.dumps(found.to_json()))["shared"][0]["value"] == "nordic"


def test_few_others_of_the_task_are_compared_as_well(backend: Store) -> None:
    """Fewer than twenty can show a large difference; that there is none they cannot show."""
    fill(backend.letters, 80, GROUP, kwargs={"tenant": "nordic"})
    fill(backend.letters, 15, kwargs={"tenant": "other"})
    found = differences(backend)
    assert [(one.condition, one.of_others) for one in found.findings] == [
        ("kwargs.tenant=nordic", 15)
    ]
    _headline, _all, compared, few = found.sentences
    assert compared == (
        "Compared with 15 other letters of the task and 15 other letters of the queue "
        "(without their arguments)."
    )
    assert few.startswith("With fewer than 20 others of the task only large differences show")


NOTHING = "Nothing stands out"


@pytest.mark.parametrize(
    ("inside", "outside", "others", "says_nothing"),
    [
        (60, 60, {}, True),
        (60, 0, {}, False),
        (60, 19, {}, False),
        (4, 60, {}, False),
        (60, 60, {"kwargs_json": None}, False),
        (60, 60, {"args_json": json.dumps(["x" * 70_000])}, False),
        (60, 60, {"task_name": "shop.ship"}, False),
    ],
    ids=["all", "no others", "few others", "few letters", "unread", "too large", "other tasks"],
)
def test_nothing_is_said_where_everything_was_compared(
    backend: Store, inside: int, outside: int, others: dict[str, Any], *, says_nothing: bool
) -> None:
    """What was left out, or could not show a difference, is named instead."""
    at_one = {"args_json": "[1]", "worker_hostname": "celery@web-1", "dead_lettered_at": NOW}
    fill(backend.letters, inside, GROUP, **at_one)
    fill(backend.letters, outside, **{**at_one, **others})
    found = differences(backend)
    assert found.findings == ()
    assert any(NOTHING in text for text in found.sentences) == says_nothing
    assert not found.shared or found.sentences[1].startswith(f"All {inside} letters have ")


def test_what_says_the_same_is_said_once(backend: Store) -> None:
    """What all have that have the first is named beside it."""
    fill(backend.letters, 80, GROUP, kwargs={"plan": "trial", "region": "eu", "tags": ["t"]})
    fill(backend.letters, 100, kwargs={"plan": "paid", "region": "us", "tags": ["p"]})
    fill(backend.letters, 40, worker_hostname="celery@web-9", kwargs={"plan": "paid"})
    fill(backend.letters, 40, GROUP, worker_hostname="celery@web-9", kwargs={"plan": "trial"})
    found = differences(backend)
    assert [(one.feature, one.value) for one in found.findings] == [
        ("kwargs.plan", "trial"),
    ]
    assert set(found.findings[0].also) == {"kwargs.region = eu", "kwargs.tags[] = t"}


def test_what_is_masked_is_not_compared(backend: Store) -> None:
    """Neither a finding nor the condition of a link shows what nobody may see."""
    fill(backend.letters, 60, GROUP, kwargs={"card": "4111", "at": {"card": {"no": 4111}}})
    fill(backend.letters, 60, kwargs={"card": "4222", "at": {"card": {"no": 4222}}})
    assert {one.value for one in differences(backend).findings} == {"4111"}

    def masked(args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        text = json.dumps([args, kwargs]).replace("4111", "-").replace("4222", "-")
        shown: tuple[list[Any], dict[str, Any]] = tuple(json.loads(text))
        return shown

    comparison = Comparison(assembled(backend, masked))
    found = comparison.differences(DLQ, fingerprint=GROUP, deadline_seconds=60)
    assert (found.letters, found.findings) == (60, ())


@pytest.mark.parametrize(
    ("name", "value", "condition"),
    [
        ("tenant", 12345678901234567890, "kwargs.tenant=12345678901234567890"),
        ("é-1", "two words", "kwargs.é-1=two words"),
        ("on", True, "kwargs.on=true"),
        ("at", {"city": "Ulm"}, "kwargs.at.city=Ulm"),
        ("a=b", "x", None),
        ("a", "=x", None),
        ("a", " x", None),
        ("a", "", None),
        ("a", "x" * 500, None),
        ("a", ["x"], None),
    ],
)
def test_a_condition_is_one_or_none(
    backend: Store, name: str, value: Any, condition: str | None
) -> None:
    """What the grammar of conditions would read otherwise is not offered as one."""
    fill(backend.letters, 60, GROUP, kwargs={name: value})
    other = {"city": "Bonn"} if isinstance(value, dict) else "y"
    fill(backend.letters, 60, kwargs={name: other})
    (found,) = differences(backend).findings
    assert found.condition == condition


def test_places_are_fields_of_the_filter(backend: Store) -> None:
    """A host is selected by a field; what no filter selects has neither field nor condition."""
    fill(
        backend.letters,
        60,
        GROUP,
        worker_hostname="celery@bad",
        source_queue="express",
    )
    fill(backend.letters, 200)
    fill(backend.letters, 40, source_queue="express")
    (found,) = differences(backend).findings
    assert (found.feature, found.also) == ("host", ("queue = express",))
    assert found.where == {"worker_hostname": "celery@bad"}
    assert found.text.startswith("All of these letters ran on celery@bad, against none")
    assert found.condition is None
    fill(backend.letters, 60, GROUP, source_queue="express")
    found = differences(backend).findings[0]
    assert (found.feature, found.condition, found.where) == ("queue", None, {})


def test_a_release_is_told_before_its_host(backend: Store) -> None:
    """Both have the same letters; what is at other hosts of the queue alone is not the release."""
    fill(backend.letters, 60, GROUP, worker_hostname="celery@new", release="v9")
    fill(backend.letters, 200, release="v8")
    (found,) = differences(backend).findings
    assert (found.feature, found.value, found.also) == ("release", "v9", ("host = celery@new",))


def test_what_follows_from_the_task_is_no_finding(backend: Store) -> None:
    """Letters of other tasks have other queues, publishers, retries and arguments."""
    own = {"source_queue": "payments", "origin": "gen1@web", "retries": 3, "task_name": "shop.pay"}
    fill(backend.letters, 60, GROUP, kwargs={"kind": "payment"}, args_json="[1]", **own)
    fill(backend.letters, 200, worker_hostname="celery@web-9")
    assert differences(backend).findings == ()
    fill(backend.letters, 90, GROUP, worker_hostname="celery@bad", **own)
    fill(backend.letters, 90, source_queue="payments")
    (found,) = differences(backend).findings
    assert (found.feature, found.value) == ("host", "celery@bad")


def test_a_small_difference_is_no_finding(backend: Store) -> None:
    """Among two thousand letters it is hardly ever chance, and still explains nothing."""
    fill(backend.letters, 1_000, GROUP, kwargs={"plan": "paid"})
    fill(backend.letters, 90, GROUP, kwargs={"plan": "trial"})
    fill(backend.letters, 1_500, kwargs={"plan": "paid"})
    assert differences(backend).findings == ()


def test_what_the_filter_says_is_no_finding(backend: Store) -> None:
    """A filter by host finds what else is there: the task."""
    fill(backend.letters, 60, task_name="shop.ship", worker_hostname="celery@bad")
    fill(backend.letters, 200)
    found = differences(backend, fingerprint=None, worker_hostname="celery@bad")
    assert [(one.feature, one.value) for one in found.findings] == [("task", "shop.ship")]
    assert found.findings[0].where == {"task_name": "shop.ship"}
    assert found.findings[0].against == "same queues"
    assert (
        differences(backend, fingerprint=None, task_name="shop.ship").findings[0].feature == "host"
    )


def test_what_a_filter_fixes_is_named() -> None:
    """Fields, and the paths of conditions on arguments."""
    assert fixed_by({}) == frozenset()
    assert fixed_by({"fingerprint": "a", "since": 1}) == {"task"}
    conditions = ["kwargs.tenant=42", "args[0].id != 7", "kwargs.at~=x"]
    assert fixed_by({"conditions": conditions, "grep": "x"}) == {
        "kwargs.tenant",
        "args[0].id",
        "kwargs.at",
    }


def test_successes_show_what_all_letters_share(backend: Store) -> None:
    """Without other letters, messages of the task that succeeded are what differs."""
    fill(backend.letters, 60, GROUP, kwargs={"currency": "XXX"})
    fill(backend.sampled, 100, "", kwargs={"ok": 1})
    fill(backend.sampled, 50, "", task_name="mail.send")
    for options in ({}, {"fingerprint": None}):
        found = differences(backend, **options)
        assert (found.letters, found.others, found.successes) == (60, 0, 100)
        (one,) = found.findings
        assert (one.condition, one.against) == ("kwargs.currency=XXX", "successes")
        assert one.text.endswith("against none of the sampled successes of the task.")


def test_the_newest_are_compared_and_no_more(backend: Store) -> None:
    """Of 100 messages 40 are letters, 40 others and 20 successes."""
    for store, values in ((backend.letters, {}), (backend.sampled, {"kwargs": {}})):
        fill(store, 300, **values)
        fill(store, 300, GROUP, kwargs={"old": 1})
        fill(store, 45, GROUP, kwargs={"new": 1})
    found = differences(backend, most=100)
    assert (found.letters, found.others, found.successes) == (40, 40, 20)
    assert found.findings[0].feature == "kwargs.new"
    assert (found.cut, found.selected) == (True, 345)
    newest = "All 40 letters that were looked at, the newest of 345, have kwargs.new = 1."
    assert found.sentences[0].startswith(newest)
    assert "Older letters are left out" in found.sentences[-1]
    most = differences(backend, most=1_000)
    assert (most.letters, most.cut, most.selected) == (345, False, 345)


def test_the_newest_of_so_many_that_they_are_not_counted(
    backend: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a fingerprint is counted by reading letters; without a number, none is said."""
    fill(backend.letters, 30)
    fill(backend.letters, 60, GROUP, kwargs={"plan": "trial"})
    found = differences(backend, fingerprint=GROUP[:4], most=50)
    assert found.sentences[0].startswith("All 20 letters that were looked at, the newest of 60, ")
    monkeypatch.setattr("celery_dlq.features.differences.operations.MOST_COUNTED", 50)
    found = differences(backend, fingerprint=GROUP[:4], most=50)
    assert (found.letters, found.cut, found.selected) == (20, True, None)
    assert found.sentences[0].startswith("All 20 letters that were looked at, the newest, have ")


def test_what_all_others_have_and_what_is_masked_is_no_difference(backend: Store) -> None:
    """Neither the release of everybody nor a card that nobody may see."""
    kwargs = {"card": MARKER}
    fill(backend.letters, 60, GROUP, kwargs=kwargs, release="2026.11", args_json="[]")
    fill(backend.letters, 60, kwargs={}, release="2026.11", args_json="[]")
    found = differences(backend)
    assert found.shared == ()
    assert "2026.11" not in " ".join(found.sentences)
    assert "not in all others" in found.sentences[1]
    assert not [one for one in found.findings if MARKER in one.text]


def test_letters_of_several_tasks_are_compared_each_with_its_own(backend: Store) -> None:
    """What is said of the others of a task holds for the letters that have such others."""
    same = {"worker_hostname": "celery@web-1", "args_json": "[1]"}
    ship = {"task_name": "shop.ship", **same}
    fill(backend.letters, 80, kwargs={"tenant": "nordic"}, **same)
    fill(backend.letters, 10, kwargs={"tenant": "nordic", "by": "air"}, **ship)
    fill(backend.letters, 30, kwargs={"tenant": "other", "by": "sea"}, **ship)
    found = differences(backend, fingerprint=None, conditions=["kwargs.tenant=nordic"])
    by_air, of_charge = (one.text for one in sorted(found.findings, key=lambda one: one.letters))
    assert by_air == (
        "Of those with others of their task, all of these letters have kwargs.by = air, "
        f"against none of the letters of the only cause to compare with ({REST})."
    )
    assert of_charge == (
        "89 % of these letters are of the task shop.charge, "
        f"against none of the letters of the only cause to compare with ({REST})."
    )
    assert {(one.letters, one.of_letters) for one in found.findings} == {(10, 10), (80, 90)}
    _headline, shared, compared, alone = found.sentences
    assert shared == "All 90 letters have args[0] = 1."
    assert compared == (
        "Compared with 30 other letters of the task (only 10 of these letters) and 30 other "
        "letters of the queue (without their arguments)."
    )
    assert alone.startswith(
        "Arguments of 80 letters (shop.charge) were compared with nothing: neither other letters "
    )


def ticking() -> Iterator[float]:
    """A second passes with every thousandth look."""
    return (number / 1_000 for number in count())


def test_a_deadline_cuts_and_says_so(backend: Store) -> None:
    """What was read in time is compared."""
    fill(backend.letters, 400, kwargs={"plan": "paid"})
    fill(backend.letters, 400, GROUP, kwargs={"plan": "trial"})
    clock = ticking()
    comparison = Comparison(assembled(backend), monotonic=lambda: next(clock))
    found = comparison.differences(DLQ, fingerprint=GROUP, deadline_seconds=1.0)
    assert found.cut
    assert found.letters == 400
    assert 100 < found.others < 300
    assert found.findings[0].condition == "kwargs.plan=trial"
    assert found.selected == 400
    assert found.sentences[0].startswith("All 400 letters have ")
    cut = "Older letters are left out: the limit of time or number was reached."
    assert cut in found.sentences
    late = comparison.differences(DLQ, fingerprint=GROUP, deadline_seconds=1e-6)
    assert (late.letters, late.cut, late.findings) == (0, True, ())
    assert late.sentences[0] == "There are no letters to compare."


def test_a_group_that_died_long_ago_is_found_at_once(backend: Store) -> None:
    """After enough others reading skips to its newest letter, and ends with its last one."""
    fill(backend.letters, 150, kwargs={"plan": "paid"})
    fill(backend.letters, 50, GROUP, kwargs={"plan": "trial"})
    fill(backend.letters, 2_000)
    clock = ticking()
    comparison = Comparison(assembled(backend), monotonic=lambda: next(clock))
    found = comparison.differences(DLQ, fingerprint=GROUP, most=250, deadline_seconds=0.3)
    assert (found.letters, found.others, found.cut) == (50, 100, False)
    assert found.findings[0].feature == "kwargs.plan"
    part = comparison.differences(DLQ, fingerprint=GROUP[:8], most=250, deadline_seconds=0.3)
    assert (part.letters, part.cut) == (0, True)  # digits may be of several groups


def test_hostile_arguments_are_bounded(backend: Store) -> None:
    """Deep, wide, long and odd arguments neither raise nor hide the cause."""
    odd = [
        "[" * 50_000,
        '{"a' + "b" * 90_000,
        json.dumps({f"k{n}": {"x": n} for n in range(3_000)}),
    ]
    odd += ['{"\\ud800": "\\udfff\\u0000"}', '{"a.b=c": "(given)"}', "NaN", '"[open"']
    for number, text in enumerate(odd * 5):
        fill(backend.letters, 1, GROUP, args_json=text, kwargs_json=text, release=f"v{number}")
    fill(backend.letters, 30, GROUP, kwargs={"plan": "x" * 500, "a=b": "c"})
    fill(backend.letters, 60)
    found = differences(backend)
    assert found.letters == 65
    assert found.findings
    for one in found.findings:
        assert len(one.text) < 800
        assert one.condition is None
    json.dumps(found.to_json()).encode()


@pytest.mark.parametrize("options", [{"most": 4}, {"deadline_seconds": 0}])
def test_unusable_options_are_refused(backend: Store, options: dict[str, Any]) -> None:
    """The error says what was expected."""
    fill(backend.letters, 1)
    with pytest.raises(DLQError, match="expected most of 5 or more and deadline_seconds above 0"):
        differences(backend, **options)


def test_an_unknown_queue_is_named(backend: Store) -> None:
    """As in every operation; a filter that nothing matches is no error."""
    with pytest.raises(NotFound, match="expected the name of a dead-letter queue"):
        differences(backend)
    fill(backend.letters, 30)
    assert differences(backend) == Differences(
        dead_letter_queue=DLQ,
        letters=0,
        others=30,
        successes=0,
        cut=False,
        selected=0,
        sentences=("There are no letters to compare.",),
        findings=(),
    )


def test_the_answer_is_the_same_each_time() -> None:
    """It depends on no order of sets, which differs from process to process."""
    folders = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    code = (
        f"import sys; sys.path += {folders}\n"
        "from test_differences import *\n"
        "backend = fresh_store()\n"
        "many = {name: 1 for name in 'abcdefghijklmnop'}\n"
        "fill(backend.letters, 60, GROUP, kwargs=many, release='v2')\n"
        "fill(backend.letters, 60, kwargs={'x': 1}, release='v1')\n"
        "print(differences(backend))"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert len(set(said)) == 1
    assert "also=('kwargs.a', 'kwargs.b', 'kwargs.c'" in said[0]
