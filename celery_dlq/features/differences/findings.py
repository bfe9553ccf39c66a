"""Findings of `DeadLetters.differences`, and how their letters are selected."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from celery_dlq.letters.comparison import (
    GIVEN,
    MAX_VALUE_CHARS,
    PAIR,
    RANGE,
    TASK,
    VALUE,
    Significant,
)

_FILTER_FIELDS = {"host": "worker_hostname", "release": "release", TASK: "task_name"}
# The plain paths and values of a condition; quotes in it would mean a text only.
_PATH = re.compile(r'(args|kwargs)(\.[^\s.\[\]=!<>~"]+|\[[0-9]+\])+')
_VALUE = re.compile(r'[^\s=!<>~"\[{](.*\S)?')


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(Significant):
    """A property that is more frequent among the letters than chance makes it.

    A correlation, not yet a cause: a host that got all the bad orders is found as well as the
    orders.

    Attributes:
        kind: ``value``, ``set`` (several values of a feature), ``range`` (of numbers) or ``pair``
            (values of two features).
        feature: The property: ``kwargs.order.ship.country``, ``args[0].id``, ``kwargs.items[]`` (an
            item of a list), ``size`` (characters of args and kwargs as JSON), ``release``,
            ``queue``, ``origin``, ``host``, ``retries`` or ``task``; of a pair both.
        value: Its value as text, at most 200 characters; ``(given)``: the argument was given. Of
            other kinds in words, such as ``12 values``.
        values: Of a set, the most frequent first, at most 20.
        parts: Of a pair, both features and values.
        low: The begin of a range, included; ``None``: it has none.
        high: Its end, included.
        against: With what the letters were compared: ``same tasks``, ``same queues`` or
            ``successes``.
        letters: Letters that have the value.
        of_letters: Letters that could: all, or those that have the argument.
        others: Others that have the value.
        of_others: Others that could.
        share_here: ``letters`` divided by ``of_letters``.
        share_elsewhere: The share of the others that have it; of other causes the median of their
            shares, so that a large one counts no more than a small one.
        lift: The first share divided by the second; if no other has the value, as if half of one
            had.
        p_value: The probability that chance alone makes it as frequent.
        q_value: The same after correction for all values tested (Benjamini and Hochberg).
        text: The finding as a sentence.
        condition: The value as a condition, ``kwargs.tenant=42``; ``None`` if there is none.
        where: Fields of `LetterFilter` that select the letters with it; empty if it has no such
            fields.
        also: What nearly the same letters have, or what follows from it, e.g.
            ``kwargs.plan = trial``; at most 5.
        causes: Other causes that the letters were compared with; 0: successes.
        neighbour: The fingerprint of the only cause to compare with; ``None``: there are several,
            or it was compared with successes.
    """

    text: str
    condition: str | None = None
    where: Mapping[str, Any] = field(default_factory=dict)


def finding(one: Significant, text: str) -> Finding:
    """A finding with its sentence, and how to select its letters."""
    condition = condition_of(one.feature, one.value) if one.kind == VALUE else None
    found = {each.name: getattr(one, each.name) for each in fields(one)}
    return Finding(**found, text=text, condition=condition, where=_where_of(one))


def _where_of(one: Significant) -> dict[str, Any]:
    conditions, where = list[str](), dict[str, Any]()
    parts = one.parts if one.kind == PAIR else [(one.feature, one.value)]
    for feature, value in parts if one.kind in {VALUE, PAIR} else ():
        name = _FILTER_FIELDS.get(feature)
        condition = condition_of(feature, value)
        if name is not None and len(value) < MAX_VALUE_CHARS:
            where[name] = value
        elif condition is not None:
            conditions.append(condition)
        else:
            return {}
    if one.kind == RANGE:
        conditions += _range_ends(one)
    return where | ({"conditions": tuple(conditions)} if conditions else {})


def _range_ends(one: Significant) -> Iterator[str]:
    if _PATH.fullmatch(one.feature):
        yield from (f"{one.feature}>={low}" for low in [one.low] if low is not None)
        yield from (f"{one.feature}<={high}" for high in [one.high] if high is not None)


def condition_of(feature: str, value: str) -> str | None:
    """A value of an argument as a condition; ``None`` if there is none for it."""
    found = f"{feature}={value}"
    plain = _PATH.fullmatch(feature) is not None and _VALUE.fullmatch(value) is not None
    return found if plain and value != GIVEN and len(found) <= MAX_VALUE_CHARS else None
