"""Findings of `DeadLetters.differences`: what says the same put together, in plain English."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from celery_dlq.letters.comparison import (
    GIVEN,
    MAX_VALUE_CHARS,
    SAME_QUEUES,
    SAME_TASKS,
    SUCCESSES,
    TASK,
    Pair,
    Significant,
    ranked,
)
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.printable import shortened

MOST_FINDINGS = 10

_MOST_WEIGHED = 200  # findings, before those that say the same are put together
_SAME = 0.9  # common messages, divided by all that have either value
_MOST_ALSO = 5
_MAX_SHOWN_CHARS = 80
_FILTER_FIELDS = {"host": "worker_hostname", "release": "release", TASK: "task_name"}
# The plain paths and values of a condition; quotes in it would mean a text only.
_PATH = re.compile(r'(args|kwargs)(\.[^\s.\[\]=!<>~"]+|\[[0-9]+\])+')
_VALUE = re.compile(r'[^\s=!<>~"\[{](.*\S)?')
_PHRASES = {
    "host": "ran on {}",
    "release": "ran on release {}",
    "queue": "came from the queue {}",
    "origin": "were published by {}",
    TASK: "are of the task {}",
}
_OTHERS = {
    SAME_TASKS: "the other letters of the task",
    SAME_QUEUES: "the other letters of the queue",
    SUCCESSES: "the sampled successes of the task",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A value that is more frequent among the letters than chance makes it.

    A correlation, not yet a cause: a host that got all the bad orders is found as well as the
    orders.

    Attributes:
        feature: The property: ``kwargs.currency``, ``args[0].id``, ``kwargs.items[]`` (an item of a
            list), ``release``, ``queue``, ``origin``, ``host``, ``retries`` or ``task``.
        value: Its value as text, at most 200 characters; ``(given)``: the argument was given.
        against: With what the letters were compared: ``same tasks``, ``same queues`` or
            ``successes``.
        letters: Letters that have the value.
        of_letters: Letters that could: all, or those that have the argument.
        others: Others that have the value.
        of_others: Others that could.
        share_here: ``letters`` divided by ``of_letters``.
        share_elsewhere: ``others`` divided by ``of_others``.
        lift: The first share divided by the second; if no other has the value, as if half of one
            had.
        p_value: The probability that chance alone makes it as frequent (Fisher's exact test).
        q_value: The same after correction for all values tested (Benjamini and Hochberg).
        text: The finding as a sentence.
        condition: The value as a condition, ``kwargs.tenant=42``; ``None`` if there is none.
        where: Fields of `LetterFilter` that select the letters with the value; empty if it has no
            such field.
        also: Other values that nearly the same messages have, e.g. ``kwargs.plan = trial``.
    """

    feature: str
    value: str
    against: str
    letters: int
    of_letters: int
    others: int
    of_others: int
    share_here: float
    share_elsewhere: float
    lift: float
    p_value: float
    q_value: float
    text: str
    condition: str | None = None
    where: Mapping[str, str] = field(default_factory=dict)
    also: tuple[str, ...] = ()


class Message(NamedTuple):
    """A message: its task, and what it is compared by."""

    task: str
    pairs: frozenset[Pair]


def distinct(
    found: list[Significant], messages: list[Message], letters: int
) -> tuple[Finding, ...]:
    """Put findings together that say the same: nearly the same messages have their values."""
    kept: list[tuple[Significant, set[int], list[str]]] = []
    # Of those that say the same, one that can be selected is told.
    weighed = ranked(found[:_MOST_WEIGHED], last=lambda one: not _selects(one))
    holders = _holders({_pair(one) for one in weighed}, messages)
    for one in weighed:
        holding = holders[_pair(one)]
        for other, held, also in kept:
            alike = len(holding & held)
            if alike >= _SAME * (len(holding) + len(held) - alike):
                named = _named(one.counts.feature, one.counts.value)
                if _pair(one) != _pair(other) and named not in also and len(also) < _MOST_ALSO:
                    also.append(named)
                break
        else:
            if len(kept) < MOST_FINDINGS:
                kept.append((one, holding, []))
    return tuple(_finding(one, also, letters) for one, _held, also in kept)


def _holders(pairs: set[Pair], messages: list[Message]) -> dict[Pair, set[int]]:
    """The numbers of the messages that have each pair."""
    found: dict[Pair, set[int]] = {pair: set() for pair in pairs}
    for number, message in enumerate(messages):
        for pair in message.pairs & pairs:
            found[pair].add(number)
    return found


def _pair(one: Significant) -> Pair:
    counts = one.counts
    return counts.feature, None if counts.value == GIVEN else counts.value


def _finding(one: Significant, also: list[str], letters: int) -> Finding:
    counts = one.counts
    return Finding(
        feature=counts.feature,
        value=counts.value,
        against=one.against,
        letters=counts.a,
        of_letters=counts.n,
        others=counts.c,
        of_others=counts.m,
        share_here=one.share_here,
        share_elsewhere=one.share_elsewhere,
        lift=one.lift,
        p_value=one.p_value,
        q_value=one.q_value,
        text=_sentence(one, letters),
        condition=_condition(counts.feature, counts.value),
        where=_where(counts.feature, counts.value),
        also=tuple(also),
    )


def _selects(one: Significant) -> bool:
    feature, value = one.counts[:2]
    return bool(_condition(feature, value) or _where(feature, value))


def _where(feature: str, value: str) -> dict[str, str]:
    name = _FILTER_FIELDS.get(feature)
    cut = len(value) >= MAX_VALUE_CHARS
    return {name: value} if name in LetterFilter.__slots__ and not cut else {}


def _condition(feature: str, value: str) -> str | None:
    found = f"{feature}={value}"
    plain = _PATH.fullmatch(feature) is not None and _VALUE.fullmatch(value) is not None
    return found if plain and value != GIVEN and len(found) <= MAX_VALUE_CHARS else None


def _named(feature: str, value: str) -> str:
    return feature if value == GIVEN else f"{feature} = {shortened(value, _MAX_SHOWN_CHARS)}"


def _sentence(one: Significant, letters: int) -> str:
    feature, value, a, c, n, m = one.counts
    if value == GIVEN:
        phrase = f"have {feature}"
    elif feature.endswith("[]"):
        phrase = f"have {shortened(value, _MAX_SHOWN_CHARS)} in {feature[:-2]}"
    elif feature in _PHRASES:
        phrase = _PHRASES[feature].format(shortened(value, _MAX_SHOWN_CHARS))
    else:
        phrase = f"have {_named(feature, value)}"
    # The shares of an argument's values are shares of the messages that have the argument.
    start = f"Of those with {feature.removesuffix('[]')}, " if n < letters else ""
    here, there = _share(a, n), _share(c, m)
    here = here if start else here.capitalize()
    return f"{start}{here} of these letters {phrase}, against {there} of {_OTHERS[one.against]}."


def _share(part: int, whole: int) -> str:
    """A share in words; neither 0 % nor 100 % unless it is exact."""
    if part in {0, whole}:
        return "all" if part else "none"
    return f"{min(99, max(1, round(100 * part / whole)))} %"
