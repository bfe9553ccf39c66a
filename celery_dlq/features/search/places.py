"""Looks ids and fingerprints up in the indexes of many queues, for a limited time."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from celery_dlq.letters.fingerprint import DIGITS
from celery_dlq.letters.packed import decompressed
from celery_dlq.operations.reading import ID_LENGTH, SHORTEST_PREFIX
from celery_dlq.store.keys import spelled, text_of
from celery_dlq.store.part import Part, of_each
from celery_dlq.store.scripts import script_text

MOST_SEARCHED, MOST_BYTES = 1_000, 4 * 1024 * 1024
"""Letters of all queues in which a task is looked for, some 10 us each; and bytes of a queue."""

_SEARCHED, _LEAST_SEARCHED = 1_000, 2  # of a queue
_AT_ONCE = 1_000
_DIGITS = re.compile(r"[0-9a-f]+", re.ASCII)
_ID = re.compile(r"[0-9a-f][0-9a-f-]*", re.ASCII)


class Places(Part):
    """Where a letter or a cause is; an index is read as far as the time goes."""

    lua = "celery_dlq.features.search"

    def of_letter(
        self, queues: Sequence[str], word: str, until: float
    ) -> Iterator[tuple[str, str]]:
        """Yield the queue and the id of letters whose ids are, or begin with, a word."""
        if ID_LENGTH > len(word) >= SHORTEST_PREFIX and _ID.fullmatch(word):
            for queue in queues:
                scan = self._client.hscan
                for name in _scanned(scan, self._keys.ids(queue), word, until):
                    yield queue, name
        elif len(word) >= ID_LENGTH:
            yield from (
                (queue, word) for queue in self._store.letters.overviews.holders(queues, word)
            )

    def of_task(self, queues: Sequence[str], task_id: str) -> Iterator[tuple[str, bool, list[str]]]:
        """Yield what the newest letters of each queue have: if there are more, ids of some.

        Those that name a task. All queues share `MOST_SEARCHED` letters, whatever the time: no
        index has the ids of tasks, which are no keys of letters.
        """
        script, keys = script_text("of_task", self.lua), self._keys
        each = max(_LEAST_SEARCHED, min(_SEARCHED, MOST_SEARCHED // max(1, len(queues))))
        args = (spelled(task_id), each, MOST_BYTES)
        self._client.script_load(script.text)
        asked = of_each(
            self._client,
            queues,
            lambda pipe, name: pipe.execute_command(
                "EVALSHA", script.digest, 1, keys.letters(name), *args
            ),
        )
        for queue, ((more, found),) in asked:
            pairs = zip(found[::2], found[1::2], strict=True)
            named = (one for one, packed in pairs if not packed or _has(packed, task_id))
            yield queue, bool(more), [*map(text_of, named)]

    def of_cause(self, queues: Sequence[str], word: str, until: float) -> Iterator[tuple[str, str]]:
        """Yield the queue and the fingerprint of causes whose fingerprints are, or begin with, it.

        Also of one without letters that has a note or a state, if it is the whole fingerprint.
        """
        if not _DIGITS.fullmatch(word):
            return
        keys = self._keys
        if len(word) == DIGITS:
            known, client = False, self._client
            here = of_each(client, queues, lambda pipe, name: pipe.zscore(keys.groups(name), word))
            for queue, (score,) in here:
                if score is not None:
                    known = True
                    yield queue, word
            decided = of_each(
                client,
                () if known else queues,
                lambda pipe, name: pipe.hexists(keys.states(name), word),
                lambda pipe, name: pipe.hexists(keys.notes(name), word),
            )
            yield from ((queue, word) for queue, about in decided if any(about))
        elif SHORTEST_PREFIX <= len(word) < DIGITS:
            for queue in queues:
                for name in _scanned(self._client.zscan, keys.groups(queue), word, until):
                    yield queue, name


def _has(packed: bytes, text: str) -> bool:
    """True if what is compressed in a letter has a text."""
    with suppress(ValueError):
        return text.encode() in decompressed(packed)
    return False


def _scanned(scan: Callable[..., Any], key: str, prefix: str, until: float) -> Iterator[str]:
    """Yield the names of an index that begin with a prefix, until a time."""
    cursor = 0
    while time.monotonic() < until:
        cursor, found = scan(key, cursor, match=f"{prefix}*", count=_AT_ONCE)
        names = found if isinstance(found, dict) else (name for name, _score in found)
        yield from map(text_of, names)
        if not cursor:
            return
