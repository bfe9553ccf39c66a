"""The kinds of causes: which messages each lets through, and what is true of its letters.

A kind takes a shop and a task, and gives one cause or more. `STEADY` causes let every message
through alike, whatever its contents, its host and its time: all that is said of them is false.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from benchmarks.planted.shops import BIN, DAY, HOUR, Messages, Numbers, Shop, Task
from benchmarks.planted.truths import (
    Began,
    Ended,
    Flap,
    Growth,
    Hours,
    Pair,
    Range,
    Returned,
    Several,
    Truth,
    Value,
    Weekday,
)

STEADY = "steady"

Let = Callable[[Messages], Numbers]


@dataclass(kw_only=True)
class Cause:
    """The letters of one fingerprint."""

    kind: str
    task: Task
    truths: tuple[Truth, ...] = ()
    change: Callable[[Messages], None] = lambda _messages: None
    """Gives messages the contents that the cause is after."""
    let: Let = lambda messages: np.ones(len(messages.at), bool)
    """Of messages, those that die."""
    weights: Numbers | None = None
    """Beside the load of the task: how likely the cause is at each time."""
    follows: frozenset[str] = frozenset()
    """Features of which all that is said follows from the truth."""
    also: frozenset[str] = frozenset()
    """Kinds of statements on time that are true as well, or follow."""
    holds: tuple[Callable[[Messages], Numbers], ...] = field(default=())
    """Of each truth about contents: the messages that it is true of."""


Kind = Callable[[Shop, Task], list[Cause]]
KINDS: dict[str, Kind] = {}
TIME = frozenset({"began", "ended", "returned", "growing", "hour", "weekday", "intermittent"})


def kind(name: str) -> Callable[[Kind], Kind]:
    def add(make: Kind) -> Kind:
        KINDS[name] = make
        return make

    return add


def _having(name: str, task: Task, role: str, code: int, share: float = 1.0) -> Cause:
    """A cause of one value, or of which a share is."""
    argument = task.arguments[role]
    dice = np.random.default_rng(code)

    def change(messages: Messages) -> None:
        chosen = dice.random(len(messages.at)) < share
        messages.codes[role] = np.where(chosen, code, messages.codes[role])

    return Cause(
        kind=name,
        task=task,
        truths=(Value(feature=argument.feature, value=argument.value(code)),),
        change=change,
        holds=(lambda messages: messages.codes[role] == code,),
    )


def _some(shop: Shop, task: Task, role: str) -> int:
    """A value of an argument, as often as it is drawn."""
    return int(task.arguments[role].draw(shop.dice, shop.times[:1])[0])


@kind("tenant")
def _tenant(shop: Shop, task: Task) -> list[Cause]:
    return [_having("tenant", task, "tenant", _some(shop, task, "tenant"))]


@kind("tenant, 70 % of the letters")
def _most(shop: Shop, task: Task) -> list[Cause]:
    code = _some(shop, task, "tenant")
    return [_having("tenant, 70 % of the letters", task, "tenant", code, 0.7)]


@kind("two levels deep")
def _deep(shop: Shop, task: Task) -> list[Cause]:
    return [_having("two levels deep", task, "deep", _some(shop, task, "deep"))]


@kind("three levels deep")
def _deeper(shop: Shop, task: Task) -> list[Cause]:
    return [_having("three levels deep", task, "deeper", _some(shop, task, "deeper"))]


@kind("library's version")
def _library(shop: Shop, task: Task) -> list[Cause]:
    return [_having("library's version", task, "library", _some(shop, task, "library"))]


@kind("flag")
def _flag(_shop: Shop, task: Task) -> list[Cause]:
    return [_having("flag", task, "flag", 1)]


@kind("item of a list")
def _tag(shop: Shop, task: Task) -> list[Cause]:
    bit, argument = int(shop.dice.integers(6)), task.arguments["tags"]
    name = argument.text(np.array([1 << bit]))[0].strip('[]"')

    def change(messages: Messages) -> None:
        messages.codes["tags"] |= 1 << bit

    return [
        Cause(
            kind="item of a list",
            task=task,
            truths=(Value(feature=f"{argument.feature}[]", value=name),),
            change=change,
            holds=(lambda messages: (messages.codes["tags"] >> bit & 1).astype(bool),),
        )
    ]


@kind("optional argument")
def _given(_shop: Shop, task: Task) -> list[Cause]:
    return [
        Cause(
            kind="optional argument",
            task=task,
            truths=(Value(feature=task.optional.feature, value=None),),
            let=lambda messages: messages.codes["optional"] >= 0,
            holds=(lambda messages: messages.codes["optional"] >= 0,),
        )
    ]


@kind("12 of 50,000 users")
def _users(shop: Shop, task: Task) -> list[Cause]:
    codes, argument = shop.dice.choice(50_000, 12, replace=False), task.arguments["user"]
    dice = np.random.default_rng(codes)

    def change(messages: Messages) -> None:
        messages.codes["user"] = dice.choice(codes, len(messages.at))

    return [
        Cause(
            kind="12 of 50,000 users",
            task=task,
            truths=(
                Several(
                    feature=argument.feature, values=tuple(argument.value(one) for one in codes)
                ),
            ),
            change=change,
            holds=(lambda messages: np.isin(messages.codes["user"], codes),),
        )
    ]


def _range(name: str, task: Task, role: str, low: int, high: int | None, scale: int) -> Cause:
    dice, top = np.random.default_rng(low), high if high is not None else 3 * low

    def change(messages: Messages) -> None:
        messages.codes[role] = dice.integers(low, top + 1, len(messages.at))

    return Cause(
        kind=name,
        task=task,
        truths=(
            Range(
                feature=task.arguments[role].feature,
                low=low / scale,
                high=None if high is None else high / scale,
            ),
        ),
        change=change,
        holds=(lambda messages: (messages.codes[role] >= low) & (messages.codes[role] <= top),),
    )


@kind("range of amounts")
def _amounts(shop: Shop, task: Task) -> list[Cause]:
    _label, low, high, decimals = shop.trade["amount"]
    begin = int(low + (high - low) * (0.3 + 0.5 * shop.dice.random()))
    width = max(99, int((high - low) * 0.01))
    return [_range("range of amounts", task, "amount", begin, begin + width, 10**decimals)]


@kind("large number")
def _large(shop: Shop, task: Task) -> list[Cause]:
    seen = task.arguments["size"].draw(shop.dice, np.repeat(shop.times[:1], 4000))
    return [_range("large number", task, "size", int(np.quantile(seen, 0.97)), None, 1)]


@kind("payload's size")
def _payload(_shop: Shop, task: Task) -> list[Cause]:
    dice = np.random.default_rng(7)

    def change(messages: Messages) -> None:
        count = len(messages.at)
        messages.codes["note"] = 10_000 * dice.integers(0, 3000, count) + dice.integers(
            700, 1500, count
        )

    return [
        Cause(
            kind="payload's size",
            task=task,
            truths=(Range(feature="", low=700, high=None),),
            change=change,
            holds=(lambda messages: messages.codes["note"] % 10_000 >= 700,),
        )
    ]


@kind("pair")
def _pair(shop: Shop, task: Task) -> list[Cause]:
    roles = ("first", "second")
    codes = [_some(shop, task, role) for role in roles]

    def holds(messages: Messages) -> Numbers:
        first, second = (messages.codes[role] == c for role, c in zip(roles, codes, strict=True))
        return first & second

    arguments = [task.arguments[role] for role in roles]
    values = [one.value(code) for one, code in zip(arguments, codes, strict=True)]
    truth = Pair(
        features=(arguments[0].feature, arguments[1].feature), values=(values[0], values[1])
    )
    found = Cause(kind="pair", task=task, truths=(truth,), let=holds, holds=(holds,))
    if arguments[1].feature in task.grows:  # from a moment on there are more or fewer such messages
        found.also = frozenset({"growing", "shrinking", "began", "ended"})
    return [found]


@kind("host")
def _host(shop: Shop, task: Task) -> list[Cause]:
    host = int(shop.of_pool[task.pool][int(shop.dice.integers(2))])
    return [_on_host("host", shop, task, host)]


@kind("canary")
def _canary(shop: Shop, task: Task) -> list[Cause]:
    """One host runs the next release a day before the others."""
    host = int(shop.of_pool[task.pool][-1])
    found = _on_host("canary", shop, task, host)
    found.follows = frozenset({"release"})
    return [found]


def _on_host(name: str, shop: Shop, task: Task, host: int) -> Cause:
    def holds(messages: Messages) -> Numbers:
        return messages.host == host

    return Cause(
        kind=name,
        task=task,
        truths=(Value(feature="host", value=shop.hosts[host]),),
        let=holds,
        holds=(holds,),
    )


@kind("publisher")
def _publisher(shop: Shop, task: Task) -> list[Cause]:
    def holds(messages: Messages) -> Numbers:
        return messages.origin == 2

    truth = Value(feature="origin", value=shop.origins[2])
    return [Cause(kind="publisher", task=task, truths=(truth,), let=holds, holds=(holds,))]


@kind("three causes of one fingerprint")
def _three(shop: Shop, task: Task) -> list[Cause]:
    parts = [
        _having("", task, role, _some(shop, task, role)) for role in ("deeper", "user", "library")
    ]
    dice = np.random.default_rng(3)

    def change(messages: Messages) -> None:
        which = dice.integers(0, 3, len(messages.at))
        for number, role in enumerate(("deeper", "user", "library")):
            changed = Messages(*(messages.at,) * 4, {role: messages.codes[role].copy()})
            parts[number].change(changed)
            messages.codes[role] = np.where(
                which == number, changed.codes[role], messages.codes[role]
            )

    return [
        Cause(
            kind="three causes of one fingerprint",
            task=task,
            truths=tuple(truth for one in parts for truth in one.truths),
            change=change,
            holds=tuple(holds for one in parts for holds in one.holds),
        )
    ]


@kind("one cause with two fingerprints")
def _two(shop: Shop, task: Task) -> list[Cause]:
    code = _some(shop, task, "tenant")
    return [_having("one cause with two fingerprints", task, "tenant", code) for _ in range(2)]


def _at(shop: Shop, low: float, high: float) -> float:
    """A moment of the middle of the shop's time."""
    return float(shop.begin + (shop.end - shop.begin) * (low + (high - low) * shop.dice.random()))


def _timed(name: str, task: Task, weights: Numbers, truths: tuple[Truth, ...]) -> Cause:
    also = {
        "began": {"growing"},
        "ended": {"shrinking"},
        "returned": {"began"},
        "growing": {"began"},
    }
    return Cause(
        kind=name,
        task=task,
        truths=truths,
        weights=weights * 1.0,
        follows=task.grows,
        also=frozenset(more for one in truths for more in also.get(one.kind, set())),
    )


@kind("hour of the day")
def _hour(shop: Shop, task: Task) -> list[Cause]:
    hour = int(shop.dice.integers(24))
    weights = (shop.times % DAY) // HOUR == hour
    found = _timed("hour of the day", task, weights, (Hours(hour=hour),))
    found.follows, found.also = frozenset(), frozenset({"intermittent"})
    return [found]


@kind("weekday")
def _weekday(shop: Shop, task: Task) -> list[Cause]:
    day = int(shop.dice.integers(7))
    weights = (shop.times // DAY + 3) % 7 == day
    found = _timed("weekday", task, weights, (Weekday(day=day),))
    found.also = frozenset({"intermittent"})
    if shop.days <= 14:  # one or two such days: whether it is over is a matter of taste
        found.also |= {"began", "ended", "returned", "growing", "shrinking"}
    return [found]


@kind("flap, every sixth hour")
def _flap(shop: Shop, task: Task) -> list[Cause]:
    first = int(shop.dice.integers(6))
    found = _timed("flap, every sixth hour", task, (shop.times // HOUR) % 6 == first, (Flap(),))
    found.follows, found.also = frozenset(), frozenset({"hour"})
    return [found]


@kind("flap, an hour of six by chance")
def _flaky(shop: Shop, task: Task) -> list[Cause]:
    on = np.repeat(shop.dice.random(len(shop.times) * BIN // HOUR + 2) < 1 / 6, HOUR // BIN)
    found = _timed("flap, an hour of six by chance", task, on[: len(shop.times)], (Flap(),))
    found.follows = frozenset()
    return [found]


@kind("ramp")
def _ramp(shop: Shop, task: Task) -> list[Cause]:
    return [_timed("ramp", task, np.linspace(0.02, 1, len(shop.times)), (Growth(),))]


@kind("began, with no release")
def _began(shop: Shop, task: Task) -> list[Cause]:
    at = _at(shop, 0.3, 0.8)
    while np.min(np.abs(shop.starts - at)) < DAY:
        at = _at(shop, 0.3, 0.8)
    truths = (Began(at=at, release=None),)
    return [_timed("began, with no release", task, shop.times >= at, truths)]


@kind("flood of some hours")
def _flood(shop: Shop, task: Task) -> list[Cause]:
    at = _at(shop, 0.25, 0.75) // BIN * BIN
    until = at + HOUR * (2 + 4 * shop.dice.random()) // BIN * BIN
    weights = (shop.times >= at) & (shop.times < until)
    truths = (Began(at=at, release=None), Ended(at=until, release=None))
    return [_timed("flood of some hours", task, weights, truths)]


@kind("came back")
def _back(shop: Shop, task: Task) -> list[Cause]:
    gone, at = _at(shop, 0.2, 0.35), _at(shop, 0.65, 0.8)
    weights = (shop.times < gone) | (shop.times >= at)
    return [_timed("came back", task, weights, (Returned(gone=gone, at=at),))]


def _released(name: str, shop: Shop, task: Task, number: int, let: Let, truth: Truth) -> Cause:
    return Cause(
        kind=name,
        task=task,
        truths=(truth,),
        let=let,
        follows=frozenset({"release", *task.grows}),
        also=frozenset({"growing" if isinstance(truth, Began) else "shrinking"}),
    )


@kind("release")
def _release(shop: Shop, task: Task) -> list[Cause]:
    """Only the last release fails."""
    number = len(shop.releases) - 1
    truth = Began(at=shop.first(number), release=shop.releases[number], latest=shop.last(number))

    def let(messages: Messages) -> Numbers:
        return messages.release == number

    return [_released("release", shop, task, number, let, truth)]


@kind("a deploy mended one and began another")
def _mended(shop: Shop, task: Task) -> list[Cause]:
    number = max(1, len(shop.releases) // 2)
    at, latest, name = shop.first(number), shop.last(number), shop.releases[number]

    def before(messages: Messages) -> Numbers:
        return messages.release < number

    def after(messages: Messages) -> Numbers:
        return messages.release >= number

    title = "a deploy mended one and began another"
    return [
        _released(title, shop, task, number, before, Ended(at=at, release=name, latest=latest)),
        _released(title, shop, task, number, after, Began(at=at, release=name, latest=latest)),
    ]


def steady(task: Task, name: str = STEADY) -> Cause:
    return Cause(kind=name, task=task)


NOISE = "noise"


@kind(NOISE)
def _noise(_shop: Shop, task: Task) -> list[Cause]:
    return [steady(task, NOISE)]


ALONE, ONE_OTHER = "a task with no other cause", "a task with one other cause"
"""Kinds that have a task of their own."""


@kind(ONE_OTHER)
def _one_other(shop: Shop, task: Task) -> list[Cause]:
    return [
        _having(ONE_OTHER, task, "tenant", _some(shop, task, "tenant")),
        steady(task, f"{ONE_OTHER}: the other"),
    ]


@kind(ALONE)
def _alone(shop: Shop, task: Task) -> list[Cause]:
    return [_having(ALONE, task, "deep", _some(shop, task, "deep"))]


def chosen(seed: int) -> list[str]:
    """Half of the kinds: two seeds that follow each other have all."""
    names: list[Any] = list(KINDS)
    np.random.default_rng(1000 + (seed + 1) // 2).shuffle(names)
    return [str(name) for name in names[seed % 2 :: 2]]
