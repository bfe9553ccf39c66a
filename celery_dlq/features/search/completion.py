"""Completes the word that somebody types: names of the filter, and values that letters have."""

from __future__ import annotations

import json
import shlex
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING

from celery_dlq.errors import CorruptLetter
from celery_dlq.features.search.finding import NAMES_SECONDS
from celery_dlq.features.search.words import MAX_CHARS, WORDS
from celery_dlq.letters.printable import printable
from celery_dlq.letters.record import DeadLetter, Reason

if TYPE_CHECKING:
    from celery_dlq import DeadLetters

MOST = 20
_KEPT_SECONDS = 10
_MOST_QUEUES, _NAMED_QUEUES, _CAUSES, _LETTERS = 20, 500, 50, 10
_MOST_VALUE_CHARS = 60

Known = Mapping[str, Mapping[str, None]]
"""Values by word, the newest first, each once."""


def completions(dead_letters: DeadLetters, typed: str) -> list[str]:
    """What somebody may want to type, each with what is there already."""
    if len(typed) > MAX_CHARS:
        return []
    before, space, word = typed.rpartition(" ")
    known = _known(dead_letters, int(time.monotonic() // _KEPT_SECONDS))
    name, sign, part = word.partition("=")
    if sign:
        found = [f"{name}={shlex.quote(one)}" for one in _fitting(known.get(name, ()), part)]
    else:
        names = (f"{one}=" for one in (*WORDS, *(one for one in known if ":" in one)))
        found = _fitting([*names, *known.get("task", ()), *known.get("queue", ())], word)
    # What cannot be seen cannot be chosen.
    shown = (one for one in found if printable(one) == one)
    return [f"{before}{space}{one}" for one in islice(shown, MOST)]


def _fitting(values: Iterable[str], part: str) -> list[str]:
    """The values that begin with a text, then those that have it elsewhere."""
    low = part.casefold()
    found = [one for one in values if low in one.casefold()]
    return sorted(found, key=lambda one: not one.casefold().startswith(low))


@lru_cache(maxsize=4)
def _known(dead_letters: DeadLetters, _period: int) -> Known:
    """What the newest causes and letters of the busiest queues have; kept for some seconds."""
    reading, until = dead_letters.assembly.reading(), time.monotonic() + NAMES_SECONDS
    busiest = [*reading.busiest()]
    found = defaultdict[str, dict[str, None]](dict)
    found["reason"] = dict.fromkeys(one.value for one in Reason)
    found["queue"] = dict.fromkeys(busiest[:_NAMED_QUEUES])
    for queue in busiest[:_MOST_QUEUES]:
        for group in reading.groups(queue, by="newest", limit=_CAUSES):
            for word, value in (
                ("task", group.task_name),
                ("exception", group.exception_type or ""),
                ("fingerprint", group.digits),
                *(("release", one) for one in group.releases),
            ):
                if value:
                    found[word][value] = None
        for entry in reading.entries(queue, newest_first=True, limit=_LETTERS):
            with suppress(CorruptLetter):
                for name, value in _arguments(dead_letters.redaction.letter(entry.letter())):
                    found[name][value] = None
        if time.monotonic() >= until:
            break
    return found


def _arguments(letter: DeadLetter) -> Iterator[tuple[str, str]]:
    """The arguments of a letter that have a name and a short value, and what else it has."""
    if letter.worker_hostname:
        yield "worker", letter.worker_hostname
    with suppress(ValueError, RecursionError, AttributeError):
        for name, value in json.loads(letter.kwargs_json or "{}").items():
            text = value if isinstance(value, str) else json.dumps(value)
            plain = name.isidentifier() and not isinstance(value, (dict, list))
            if plain and 0 < len(text) <= _MOST_VALUE_CHARS:
                yield f"arg:{name}", text
