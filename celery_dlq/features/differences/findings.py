"""Findings of `DeadLetters.differences`: what says the same put together, in plain English."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from celery_dlq.letters.comparison import (
    GIVEN,
    MAX_VALUE_CHARS,
    TASK,
    Pair,
    Significant,
    ranked,
)
from celery_dlq.letters.explanation import named
from celery_dlq.letters.filters import LetterFilter

MOST_FINDINGS = 10

_MOST_WEIGHED = 200  # findings, before those that say the same are put together
_SAME = 0.9  # common messages, divided by all that have either value
_MOST_ALSO = 5
_FILTER_FIELDS = {"host": "worker_hostname", "release": "release", TASK: "task_name"}
# The plain paths and values of a condition; quotes in it would mean a text only.
_PATH = re.compile(r'(args|kwargs)(\.[^\s.\[\]=!<>~"]+|\[[0-9]+\])+')
_VALUE = re.compile(r'[^\s=!<>~"\[{](.*\S)?')


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(Significant):
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

    text: str
    condition: str | None = None
    where: Mapping[str, str] = field(default_factory=dict)
    also: tuple[str, ...] = ()


class Message(NamedTuple):
    """A message: its task, and what it is compared by."""

    task: str
    pairs: frozenset[Pair]


def distinct(
    found: Sequence[Significant], messages: list[Message], text: Callable[[Significant], str]
) -> tuple[Finding, ...]:
    """Put findings together that say the same: nearly the same messages have their values."""
    kept: list[tuple[Significant, set[int], list[str]]] = []
    # Of those that say the same, one that can be selected is shown.
    weighed = ranked(list(found[:_MOST_WEIGHED]), last=lambda one: not _selects(one))
    holders = _holders({_pair(one) for one in weighed}, messages)
    for one in weighed:
        holding = holders[_pair(one)]
        for other, held, also in kept:
            alike = len(holding & held)
            if alike >= _SAME * (len(holding) + len(held) - alike):
                name = named(one.feature, one.value)
                if _pair(one) != _pair(other) and name not in also and len(also) < _MOST_ALSO:
                    also.append(name)
                break
        else:
            if len(kept) < MOST_FINDINGS:
                kept.append((one, holding, []))
    return tuple(_finding(one, also, text(one)) for one, _held, also in kept)


def _holders(pairs: set[Pair], messages: list[Message]) -> dict[Pair, set[int]]:
    """The numbers of the messages that have each pair."""
    found: dict[Pair, set[int]] = {pair: set() for pair in pairs}
    for number, message in enumerate(messages):
        for pair in message.pairs & pairs:
            found[pair].add(number)
    return found


def _pair(one: Significant) -> Pair:
    return one.feature, None if one.value == GIVEN else one.value


def _finding(one: Significant, also: list[str], text: str) -> Finding:
    return Finding(
        **asdict(one),
        text=text,
        condition=_condition(one),
        where=_where(one),
        also=tuple(also),
    )


def _selects(one: Significant) -> bool:
    return bool(_condition(one) or _where(one))


def _where(one: Significant) -> dict[str, str]:
    name = _FILTER_FIELDS.get(one.feature)
    cut = len(one.value) >= MAX_VALUE_CHARS
    return {name: one.value} if name in LetterFilter.__slots__ and not cut else {}


def _condition(one: Significant) -> str | None:
    found = f"{one.feature}={one.value}"
    plain = _PATH.fullmatch(one.feature) is not None and _VALUE.fullmatch(one.value) is not None
    return found if plain and one.value != GIVEN and len(found) <= MAX_VALUE_CHARS else None
