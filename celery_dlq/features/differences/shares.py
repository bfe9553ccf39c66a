"""What most newest letters of a cause have in common, for a list of causes: a cheap sample.

The page of a cause compares; a list of a hundred causes has no time for it.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from itertools import islice
from typing import NamedTuple

from celery_dlq.letters.comparison import FeatureValue, Masked, pairs_of
from celery_dlq.letters.explanation import named_value
from celery_dlq.operations.reading import Reading

MOST_LETTERS, SECONDS = 300, 0.007
"""The newest letters of a queue that are looked at, and how long: time of this thread."""

_OF_EACH = 40  # letters of a cause
_LEAST = 3
_SHARE, _RARER = 0.5, 0.75


class Share(NamedTuple):
    """The argument's value that most of the letters of a cause have."""

    text: str  # ``kwargs.tenant = nordic``
    letters: int  # That have it
    of_letters: int  # That were looked at


def shares(
    reading: Reading, masked: Masked | None, queue: str, fingerprints: Collection[str]
) -> tuple[Mapping[str, Share], bool]:
    """The share of each cause's largest value, of its letters among the newest of the queue.

    And whether all of these letters were looked at in time.
    """
    found, in_time = defaultdict[str, list[set[FeatureValue]]](list), True
    until = time.thread_time() + SECONDS
    for entry in islice(reading.entries(queue, newest_first=True), MOST_LETTERS):
        sample = found[entry.text("fingerprint")]
        if len(sample) < _OF_EACH:
            texts = {name: entry.text(name) for name in ("args_json", "kwargs_json")}
            pairs = pairs_of(texts.get, masked)
            sample.append({pair for pair in pairs if pair[1] and pair[0].startswith(("args", "k"))})
        if time.thread_time() >= until:
            in_time = False
            break
    counts = {
        name: Counter(pair for pairs in some for pair in pairs) for name, some in found.items()
    }
    everywhere = Counter[FeatureValue]()
    for count in counts.values():
        everywhere.update(count)  # a sum would copy what it has for each of them
    of_all = sum(map(len, found.values()))
    largest = {
        name: _largest(counts[name], len(found[name]), everywhere, of_all)
        for name in fingerprints
        if name in found
    }
    return {name: share for name, share in largest.items() if share is not None}, in_time


def _largest(
    here: Counter[FeatureValue], letters: int, everywhere: Counter[FeatureValue], of_all: int
) -> Share | None:
    """The value that most letters of a cause have, and other letters have less often.

    Without others: one that not all have. What all letters have says nothing of this cause.
    """
    others = of_all - letters
    found = []
    for pair, count in here.items():
        share = count / letters
        elsewhere = (everywhere[pair] - count) / others if others else 1.0
        tells = elsewhere < _RARER * share if others else share < 1
        if count >= _LEAST and share >= _SHARE and tells:
            found.append((share - elsewhere, share, pair))
    if not found:
        return None
    _lift, _share, (feature, value) = max(found)
    return Share(named_value(feature, value or ""), here[feature, value], letters)
