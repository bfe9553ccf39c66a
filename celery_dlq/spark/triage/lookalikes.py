"""Causes with nearly the same message: perhaps one bug in two places.

The driver compares one message per cause, and only with messages that share a rare word, so the
work grows with the number of causes, not with its square.

Source: S. Chaudhuri et al., "A Primitive Operator for Similarity Joins in Data Cleaning",
ICDE 2006, for why two similar texts share one of their few rarest words.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

COMPARED = (
    "fingerprint",
    "letters",
    "task_name",
    "exception_type",
    "example_description",
    "main_reason",
)
"""The columns of `celery_dlq.spark.triage.groups` that `alike` reads."""

DDL = (
    "fingerprint STRING, other_fingerprint STRING, similarity DOUBLE, letters BIGINT, "
    "other_letters BIGINT, task_name STRING, other_task_name STRING, message STRING, "
    "other_message STRING"
)
MAX_COMPARED = 2_000
MOST_IN_BLOCK = 50
"""At most this many causes, the largest, are compared with others that share a rare word."""

_MAX_MESSAGE_CHARS = 2_000
_NUMBER = re.compile(r"0x[0-9a-f]+|[0-9a-f]{8,}(?:-[0-9a-f]{4,})*|[0-9]+")
_WORD = re.compile(r"(?:[^\W\d]|#)+")


def alike(causes: Sequence[Mapping[str, Any]], threshold: float = 0.6) -> list[dict[str, Any]]:
    """The rows of `celery_dlq.spark.triage.similar`."""
    messages = [_message(cause) for cause in causes]
    found = []
    for *places, similarity in pairs(messages, threshold):
        one, other = sorted(places, key=lambda place: str(causes[place]["fingerprint"]))
        row = {"fingerprint": causes[one]["fingerprint"]}
        row |= {"other_fingerprint": causes[other]["fingerprint"], "similarity": similarity}
        for name in ("letters", "task_name"):
            row |= {name: causes[one][name], f"other_{name}": causes[other][name]}
        found.append({**row, "message": messages[one], "other_message": messages[other]})
    found.sort(key=lambda row: (-row["similarity"], row["fingerprint"], row["other_fingerprint"]))
    return found


def pairs(messages: Sequence[str], threshold: float) -> Iterator[tuple[int, int, float]]:
    """Find pairs of similar messages.

    Messages with the same words are each paired with the first of them, which alone is compared
    with other messages.
    """
    first: dict[frozenset[str], int] = {}
    for place, text in enumerate(messages):
        words = _words(text)
        if words and (known := first.setdefault(words, place)) != place:
            yield known, place, 1.0
    frequency = Counter(chain.from_iterable(first))
    blocks: dict[str, list[tuple[frozenset[str], int]]] = defaultdict(list)
    for words, place in first.items():
        rarest = sorted(words, key=lambda word: (frequency[word], word))
        # Two texts with this similarity share one of these words.
        prefix = rarest[: len(words) - math.ceil(threshold * len(words) - 1e-9) + 1]
        candidates = {other: at for word in prefix for other, at in blocks[word]}
        for other, at in candidates.items():
            common = len(words & other)
            similarity = common / (len(words) + len(other) - common)
            if similarity >= threshold:
                yield at, place, similarity
        for word in prefix:
            if len(blocks[word]) < MOST_IN_BLOCK:
                blocks[word].append((words, place))


def _message(cause: Mapping[str, Any]) -> str:
    """The exception type and text of the cause's newest letter."""
    parts = (cause["exception_type"], cause["example_description"] or cause["main_reason"])
    return " ".join(part for part in parts if part)[:_MAX_MESSAGE_CHARS]


def _words(text: str) -> frozenset[str]:
    """The set of words; all numbers, ids and addresses become one word."""
    found: Iterable[str] = _WORD.findall(_NUMBER.sub("#", text.lower()))
    return frozenset(found)
