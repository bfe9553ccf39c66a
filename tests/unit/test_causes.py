"""What sets a cause apart: planted properties are found, and nothing that mirrors a neighbour."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import product
from math import comb
from random import Random
from typing import Any

import pytest

from celery_dlq.letters.causes import ComparedMessage, explain_causes
from celery_dlq.letters.comparison import SUCCESSES, pairs_of
from celery_dlq.letters.contrasts import CauseGroup, Fourfold, against, rivals_of
from celery_dlq.letters.course import Course
from celery_dlq.letters.explanation import Explanation

DAY = 86_400.0
DAYS = 7
BEGIN = 1_790_000_000 // DAY * DAY
BAD_USERS = [str(number * 4_001) for number in range(12)]

Change = Callable[[Random, dict[str, Any]], None]
"""Makes what a cause has of a message that could be any."""


def steady(_dice: Random, _message: dict[str, Any]) -> None:
    """Nothing."""


def fields(dice: Random) -> dict[str, Any]:
    """A message of a shop that could be any."""
    at = dice.random() * DAYS * DAY
    return {
        "at": BEGIN + at,
        "release": dice.choices(["v6", "v7"], [6, 4])[0],
        "host": f"celery@web-{dice.randrange(20)}",
        "tenant": str(dice.randrange(200)),
        "user": str(dice.randrange(50_000)),
        "amount": dice.randrange(1, 20_000),
        "currency": dice.choices(["EUR", "USD", "CHF"], [60, 30, 10])[0],
        "provider": dice.choice(["first", "mid", "last"]),
        "library": dice.choices(["2.1", "2.2"], [85, 15])[0],
        "country": dice.choices(["DE", "FR", "CH"], [70, 25, 5])[0],
        "id": int(at * 10) + dice.randrange(10),
        "note": "x" * int(dice.lognormvariate(4, 1)),
    }


def message(
    cause: str | None, values: dict[str, Any], task: str = "shop.charge"
) -> ComparedMessage:
    """A letter of a cause, or a success."""
    order = {"id": values["id"], "ship": {"country": values["country"]}}
    plain = ("tenant", "user", "amount", "currency", "provider", "library", "note")
    kwargs = {name: values[name] for name in plain} | {"order": order} | values.get("more", {})
    text = {
        "release": values["release"],
        "worker_hostname": values["host"],
        "source_queue": "orders",
        "args_json": "[]",
        "kwargs_json": json.dumps(kwargs),
    }
    return ComparedMessage(cause, task, "orders", values["at"], frozenset(pairs_of(text.get)))


def letters(
    causes: dict[str, Change], count: int = 400, *, successes: int = 0, seed: int = 1
) -> list[ComparedMessage]:
    """Letters of some causes of one task, and successes of it."""
    dice = Random(f"{seed}{sorted(causes)}")  # noqa: S311 - the same every time
    found = []
    for cause, change in causes.items():
        for _ in range(count):
            values = fields(dice)
            change(dice, values)
            found.append(message(cause, values))
    return found + [message(None, fields(dice)) for _ in range(successes)]


def explained(
    causes: dict[str, Change], count: int = 400, *, successes: int = 0, seed: int = 1
) -> dict[str, Explanation]:
    """The explanations of all causes."""
    return explain_causes(letters(causes, count, successes=successes, seed=seed), {}, [*causes])


def found(one: Explanation) -> set[tuple[str, str]]:
    """The features and values of all findings."""
    pairs = set()
    for each in one.findings:
        pairs |= set(each.parts or [(each.feature, each.value)])
    return pairs


def having(**values: Any) -> Change:
    """A cause of messages with some values."""
    return lambda _dice, message: message.update(values)


SOME = {"steady a": steady, "steady b": steady}

VALUES = {
    "tenant": (having(tenant="137"), ("kwargs.tenant", "137")),
    "host": (having(host="celery@web-7"), ("host", "celery@web-7")),
    "release": (having(release="v7"), ("release", "v7")),
    "library": (having(library="2.2"), ("kwargs.library", "2.2")),
    "deep": (having(country="CH"), ("kwargs.order.ship.country", "CH")),
    "given": (having(more={"coupon": 1}), ("kwargs.coupon", "(given)")),
}


@pytest.mark.parametrize("successes", [0, 300])
@pytest.mark.parametrize("name", list(VALUES))
def test_a_value_is_found_and_its_neighbours_have_no_mirror_image(
    name: str, successes: int
) -> None:
    """Also three levels deep; what the other causes lack by it is no finding."""
    change, expected = VALUES[name]
    every = explained({name: change, **SOME}, successes=successes)
    assert found(every[name]) == {expected}
    (one,) = every[name].findings
    assert (one.letters, one.of_letters, one.share_here) == (400, 400, 1.0)
    assert one.share_elsewhere < 0.5
    assert (one.against == SUCCESSES) == bool(successes)
    assert one.causes == (0 if successes else 2)
    for steady_one in SOME:
        assert every[steady_one].findings == ()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_of_two_causes_of_a_task_the_special_one_is_found(seed: int) -> None:
    """The other one is of all values; that it lacks none is no finding."""
    for name in ("tenant", "release", "library"):
        change, expected = VALUES[name]
        every = explained({name: change, "other": steady}, seed=seed)
        assert found(every[name]) == {expected}
        assert every[name].findings[0].neighbour == "other"
        assert every["other"].findings == ()


def test_one_neighbour_of_four_times_the_letters_makes_no_finding() -> None:
    """Each other cause weighs the same."""
    some = letters({"v7": having(release="v7")}, 2_000) + letters(SOME | {"c": steady}, 500)
    every = explain_causes(some, {}, ["v7", *SOME, "c"])
    assert {name: len(one.findings) for name, one in every.items()} == {
        "v7": 1,
        "steady a": 0,
        "steady b": 0,
        "c": 0,
    }


def test_a_set_of_rare_values_is_one_finding() -> None:
    """Twelve of 50,000 users, each a twelfth of the letters."""

    def change(dice: Random, message: dict[str, Any]) -> None:
        message["user"] = dice.choice(BAD_USERS)

    for successes, count in ((0, 60), (0, 600), (300, 600)):
        (one,) = explained({"users": change, **SOME}, count, successes=successes)["users"].findings
        assert (one.kind, one.feature) == ("set", "kwargs.user")
        assert set(one.values) <= set(BAD_USERS)
        assert len(one.values) > 9
        assert one.share_elsewhere < 0.02
        (few,) = explained({"users": change, **SOME}, count)["users"].findings
        assert few.kind == "set"


def test_a_range_of_numbers_is_one_finding() -> None:
    """Its ends are those of the letters; a range that others reach only from below has no end."""

    def of_amounts(dice: Random, message: dict[str, Any]) -> None:
        message["amount"] = dice.randrange(9_000, 9_100)

    def large(dice: Random, message: dict[str, Any]) -> None:
        message["note"] = "".join(dice.choices("abc", k=dice.randrange(6_000, 9_000)))

    for count in (30, 400):
        every = explained({"range": of_amounts, "large": large, **SOME}, count)
        (one,) = every["range"].findings
        assert (one.kind, one.feature) == ("range", "kwargs.amount")
        assert one.low is not None
        assert one.high is not None
        assert 9_000 <= float(one.low) < float(one.high) < 9_100
        (one,) = every["large"].findings
        assert (one.kind, one.feature, one.high) == ("range", "size", None)
        assert "characters of JSON" in every["large"].headline
        assert every["steady a"].findings == every["steady b"].findings == ()


def test_two_values_that_only_together_set_letters_apart_are_a_pair() -> None:
    """Each alone is as frequent in none, but many messages with one of them succeed."""
    every = explained({"pair": having(currency="CHF", provider="last"), **SOME})
    (one,) = every["pair"].findings
    assert one.kind == "pair"
    assert set(one.parts) == {("kwargs.currency", "CHF"), ("kwargs.provider", "last")}
    assert one.share_elsewhere < 0.1
    assert "kwargs.currency = CHF and kwargs.provider = last" in every["pair"].headline


def test_a_fingerprint_of_three_causes_has_three_findings() -> None:
    """Each is a third of the letters."""

    def change(dice: Random, message: dict[str, Any]) -> None:
        message.update(dice.choice([{"tenant": "7"}, {"country": "CH"}, {"library": "2.2"}]))

    every = explained({"three": change, **SOME}, 800)
    expected = {("kwargs.tenant", "7"), VALUES["deep"][1], VALUES["library"][1]}
    assert found(every["three"]) == expected


def test_a_cause_with_two_fingerprints_is_found_twice() -> None:
    """Of three causes two are of one tenant: that is their reason, not that of the third."""
    tenant, expected = VALUES["tenant"]
    every = explained({"one": tenant, "two": tenant, "other": steady})
    assert found(every["one"]) == found(every["two"]) == {expected}
    assert every["other"].findings == ()


def test_a_few_successes_are_compared_with_where_a_task_has_no_other_cause() -> None:
    """Also where letters of other tasks of the queue are there: these have other arguments."""
    alone = letters({"dear": having(currency="XXX")}, 12, successes=24)
    near = [
        one._replace(cause=f"near {number}", task="shop.ship")
        for number, one in enumerate(letters({"near": steady}, 13))
    ]
    one = explain_causes([*alone, *near], {}, ["dear"])["dear"]
    assert ("kwargs.currency", "XXX") in found(one)
    assert "kwargs.currency = XXX, against none of the sampled successes" in one.headline


def test_what_follows_from_a_finding_stands_beside_it() -> None:
    """The plan of a tenant: with the tenant held constant it says nothing."""
    dice = Random(1)  # noqa: S311 - the same every time
    some = []
    for cause, number in product(("tenant", "a", "b"), range(600)):
        values = fields(dice) | {"tenant": str(number % 10)}
        if cause == "tenant":
            values["tenant"] = "3"
        plan = "trial" if values["tenant"] in {"3", "4", "5"} else "paid"
        some.append(message(cause, values | {"more": {"plan": plan}}))
    (one,) = explain_causes(some, {}, ["tenant"])["tenant"].findings
    assert (one.feature, one.value, one.also) == ("kwargs.tenant", "3", ("kwargs.plan = trial",))


@pytest.mark.parametrize("successes", [0, 600])
def test_what_is_of_the_time_alone_is_no_finding(successes: int) -> None:
    """The release of the last day, its date and the ids that are counted up."""

    def dated(dice: Random, one: dict[str, Any]) -> None:
        del dice
        day = int((one["at"] - BEGIN) // DAY)
        one.update(release=f"v{day // 3}", host=f"celery@pod-{day}", more={"date": f"day {day}"})
        one["id"] = int((one["at"] - BEGIN) * 10)

    def lately(dice: Random, one: dict[str, Any]) -> None:
        one["at"] = BEGIN + (6 + dice.random()) * DAY
        dated(dice, one)

    some = letters({"lately": lately, "a": dated, "b": dated}, 600)
    dice = Random(5)  # noqa: S311 - the same every time
    for _ in range(successes):
        values = fields(dice)
        dated(dice, values)
        some.append(message(None, values))
    every = explain_causes(some, {}, ["lately", "a", "b"])
    assert [one.findings for one in every.values()] == [(), (), ()]
    assert every["lately"].onset is not None


@pytest.mark.parametrize(("count", "successes"), [(15, 0), (200, 0), (200, 200)])
def test_noise_has_no_findings(count: int, successes: int) -> None:
    """And what was looked at is all: nothing stands out."""
    for seed in range(4):
        every = explained(
            {f"c{n}": steady for n in range(6)}, count, successes=successes, seed=seed
        )
        assert [one.findings for one in every.values()] == [()] * 6
        assert count < 20 or all(one.complete for one in every.values())
        for one in every.values():
            assert count < 20 or "nothing sets its letters apart" in one.headline.lower()


def test_nothing_is_said_to_stand_out_only_if_all_was_looked_at() -> None:
    """A cause alone in its task has nothing to be compared with."""
    alone = explained({"alone": steady})["alone"]
    assert not alone.complete
    assert not any("Nothing stands out" in text for text in alone.sentences)
    compared = explained({"alone": steady}, successes=200)["alone"]
    assert any("Nothing stands out" in text for text in compared.sentences)


def test_the_headline_says_how_many_were_looked_at_how_sure_and_what_a_redrive_would_do() -> None:
    """It stands first."""
    tenant, _expected = VALUES["tenant"]
    some = letters({"tenant": tenant, **SOME})
    course = Course(letters=143_201, again=(11, 1))
    one = explain_causes(some, {"tenant": course}, ["tenant"])["tenant"]
    assert one.sentences[0] == one.headline
    assert "all of these letters have kwargs.tenant = 137, against " in one.headline.lower()
    assert "(400 of 143,201 letters looked at)" in one.headline
    assert "by chance in less than 1 of 1,000,000 such reports" in one.headline
    assert one.headline.endswith(
        "11 of 12 redriven messages died again, so 65 to 99 % of the next ones likely will."
    )
    assert one.sentences[1].startswith("All 400 letters looked at, of 143,201, have ")


def test_an_explanation_survives_json() -> None:
    """Executors make it, and the driver reads it."""
    changes = {name: change for name, (change, _expected) in VALUES.items()}
    for one in explained(changes | SOME, 60, successes=60).values():
        text = json.dumps(one.to_json())
        assert Explanation.from_json(json.loads(text)) == one
        assert len(text) < 8_000


def test_small_causes_are_one_rival() -> None:
    """A large one is not put together with them, which it would outweigh."""
    groups = [
        CauseGroup(name, [(0.0, "t", frozenset())] * size)
        for name, size in {"large": 100, "a": 12, "b": 9, "c": 8, "middle": 40}.items()
    ]
    assert [sorted(one.name for one in rival) for rival in rivals_of(groups)] == [
        ["large"],
        ["middle"],
        ["a", "b", "c"],
    ]


def test_a_test_in_strata_is_exact_or_errs_on_the_safe_side() -> None:
    """The sum over all ways of all strata."""
    strata = [Fourfold(3, 5, 1, 7), Fourfold(2, 4, 2, 9), Fourfold(4, 6, 0, 5)]
    ways: Counter[int] = Counter()
    for each in product(*(range(n + 1) for _a, n, _c, _m in strata)):
        many = 1
        for k, (a, n, c, m) in zip(each, strata, strict=True):
            many *= comb(n, k) * comb(m, a + c - k) if 0 <= a + c - k <= m else 0
        ways[sum(each)] += many
    least = sum(one.a for one in strata)
    exact = sum(many for k, many in ways.items() if k >= least) / ways.total()
    assert against((), strata).chance == pytest.approx(exact)
    many_strata = [Fourfold(30, 60, 10, 60)] * 3
    assert 1e-20 < against((), many_strata).chance < 1e-5


def test_wide_arguments_hide_no_other() -> None:
    """Level by level: a list of a thousand items does not leave out what comes behind it."""
    kwargs = {"items": [{"sku": n, "price": {"net": n}} for n in range(1_000)], "currency": "EUR"}
    text = {"args_json": "[]", "kwargs_json": json.dumps(kwargs)}
    found = pairs_of(text.get)
    assert ("kwargs.currency", "EUR") in found
    assert ("kwargs.items[].sku", "0") in found
    assert ("unread", None) in found
    deep = {"kwargs_json": json.dumps({"a": {"b": {"c": {"d": 1}}}}), "args_json": "[]"}
    assert ("kwargs.a.b.c", '{"d":1}') in pairs_of(deep.get)


@pytest.mark.parametrize("values", [{"library": "3.0"}, {"country": "AT"}])
def test_a_set_is_no_mirror_image_of_the_only_neighbour(values: dict[str, Any]) -> None:
    """The neighbour has one value, which none other has: the usual values are no set."""
    every = explained({"one": having(**values), "steady": steady})
    assert every["one"].findings
    assert every["steady"].findings == ()


def test_users_that_repeat_are_no_mirror_image_of_a_few_users() -> None:
    """A cause of few users beside one of all the others, of which many have several letters."""

    def few(dice: Random, message: dict[str, Any]) -> None:
        message["user"] = f"bad {dice.randrange(12)}"

    def any_of_many(dice: Random, message: dict[str, Any]) -> None:
        message["user"] = str(dice.randrange(300))

    every = explained({"few": few, "many": any_of_many}, 700)
    assert [one.kind for one in every["few"].findings] == ["set"]
    assert every["many"].findings == ()


def test_a_neighbour_of_one_host_makes_no_release_of_a_cause() -> None:
    """A canary host has a release of its own, and the neighbour is all of another host."""

    def of_host(dice: Random, message: dict[str, Any]) -> None:
        message["host"] = f"celery@web-{dice.randrange(4)}"
        if message["host"] == "celery@web-0":
            message["release"] = "canary"

    def of_one(dice: Random, message: dict[str, Any]) -> None:
        of_host(dice, message)
        message.update(host="celery@web-3", release=dice.choice(["v6", "v7"]))

    every = explained({"one host": of_one, "any": of_host})
    assert found(every["any"]) == set()


def test_the_values_of_a_range_are_no_set_beside_it() -> None:
    """A hundred numbers in a row, each of several letters, beside successes of 2,000 numbers."""

    def number(least: int, most: int) -> Change:
        return lambda dice, message: message.update(more={"number": dice.randrange(least, most)})

    dice, found = Random(3), list[ComparedMessage]()  # noqa: S311 - the same every time
    for cause, change in (("range", number(333, 433)), (None, number(0, 2000))):
        for _ in range(500 if cause else 300):
            values = fields(dice)
            change(dice, values)
            found.append(message(cause, values))
    (one,) = explain_causes(found, {}, ["range"])["range"].findings
    assert (one.kind, one.feature) == ("range", "kwargs.number")
