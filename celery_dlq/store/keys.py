"""The names of all Redis keys; no other module builds one.

``{name}`` is the hash tag: all keys of one dead-letter queue are on one slot, so that
counting, storing and removing are single atomic scripts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from celery_dlq.store.worker_records import MessageKey

FORMAT = 1
"""The format of the keys and their values; a version that reads them otherwise writes another."""


class AppKey:
    """A key that an app has once; called without arguments. The text begins with its type."""

    def __init__(self, text: str, name: str = "") -> None:
        self.__doc__ = text
        self.name = name

    def __set_name__(self, _owner: object, name: str) -> None:
        self.name = self.name or name

    def __get__(self, keys: Keys, _owner: object = None) -> Callable[..., str]:
        return partial(keys.app, self.name)


class QueueKey(AppKey):
    """A key that each dead-letter queue has; called with the name of the queue."""

    def __get__(self, keys: Keys, _owner: object = None) -> Callable[..., str]:
        return partial(keys.of, name=self.name)


@dataclass(frozen=True, slots=True)
class Keys:
    """Key names under one prefix."""

    prefix: str = "dlq"  # The setting `dlq_key_prefix`
    # Use the samples of successes in place of letters; for a store that an export reads
    successes_only: bool = False

    format = AppKey(
        "STRING: the format of all these keys; written when a worker starts. Without one: 1."
    )
    nodes = AppKey("ZSET: all workers by their last heartbeat.")
    worker_infos = AppKey("HASH: worker to its info, as JSON.", "workers")
    tasks = AppKey("HASH: worker to the names of its tasks, as JSON; may be large.")
    instructions = AppKey(
        "HASH: ``kind:id`` to a hold, demand or override, as JSON; and ``revision``; bounded."
    )
    identity = AppKey("STRING: random id of this store, by which exports know whose folder it is.")
    changes = AppKey("STREAM: the audit log; bounded.")
    open_changes = AppKey("HASH: operation to its change, as JSON, until it has ended; bounded.")
    counts = AppKey("HASH: metric and its labels as JSON to a count; bounded.")
    gauges = AppKey("HASH: worker to ``time|gauges as JSON``; bounded.")
    jobs = AppKey("HASH: job id to its state, as JSON; bounded.")
    waiting_jobs = AppKey("ZSET: ids of jobs that wait, by when they may start (milliseconds).")
    cancel_requests = AppKey("HASH: job id to who cancels it; bounded like jobs.")
    unread = AppKey(
        "HASH: hold to how many it could not read; bounded; expires.", "unread_by_holds"
    )
    revoked = AppKey(
        "ZSET: ``id:…`` of a task, or ``stamp:name=value``, by when an operator revoked it "
        "(microseconds); bounded; expires."
    )
    successes = AppKey("HASH: redrive to how many of its messages succeeded; bounded like jobs.")

    ids = QueueKey("HASH: letter id to stream entry id.")
    tally = QueueKey(
        "HASH: ``reason:…`` to letters; ``group:…`` to times, example, course and facts; "
        "``restored`` to how often a letter came back from the bin; ``exported`` once it was "
        "exported; ``large`` to the position of the last letter above 16 KiB."
    )
    groups = QueueKey("ZSET: fingerprints by their number of letters.")
    newest_groups = QueueKey("ZSET: fingerprints by when their newest letters died (microseconds).")
    gone_groups = QueueKey(
        "STREAM: fingerprint to the tally of an emptied group; bounded; expires."
    )
    notes = QueueKey("HASH: fingerprint to the notes on its group, lines of JSON; bounded.")
    noted = QueueKey(
        "ZSET: fingerprints with notes, a state or an owner, by their last letter or note."
    )
    states = QueueKey(
        "HASH: fingerprint to the state of its group; kept like notes. Without one: open. "
        "``resolved|release, or nothing|releases before|microseconds|JSON``, "
        "``regressed|microseconds|release|letter id|JSON of the resolution``, or one that stops "
        "reports, as ``muted|until in milliseconds, or nothing|||JSON``; ``owner:…`` to its owner."
    )
    arrivals = QueueKey("HASH: ``minute of the hour:reason`` to ``minute:letters``; expires.")
    ends = QueueKey("ZSET: letter ids by the expiry of their messages; only of those that expire.")
    claims = QueueKey("HASH: letter id to ``state|owner|lease end`` of a redrive or discard.")
    receipts = QueueKey(
        "HASH: digits of a digest to the digests of redriven letters that may be in files, too; "
        "bounded; expires."
    )
    bin = QueueKey("STREAM: discarded letters; expires.")
    binned = QueueKey("HASH: id of a discarded letter to its entry id in the bin; expires as that.")
    samples = QueueKey("STREAM: a sample of the messages that succeeded; bounded; expires.")
    leases = QueueKey(
        "HASH: target of an export, or another right, to ``owner|lease end|state``; expires.",
        "export_leases",
    )
    outbox = QueueKey(
        "ZSET: entries for a dead-letter exchange, as JSON, by the time of the next attempt."
    )
    allowance = QueueKey("HASH: the number of reports that this queue may make now; expires.")
    workers = QueueKey("ZSET: workers that guard messages of this queue, by their last heartbeat.")
    late_copies = QueueKey(
        "ZSET: ids of the letters of messages of which no copy runs any more, because they died or "
        "were retried (``retried:id``), by until when (milliseconds); expires."
    )

    def queues(self) -> str:
        """SET: names of all dead-letter queues."""
        return f"{self.prefix}:queues"

    def letters(self, dead_letter_queue: str) -> str:
        """STREAM: one entry per letter; see `celery_dlq.letters.packed`."""
        return self.of(dead_letter_queue, "samples" if self.successes_only else "letters")

    def breaker_ends(self, breaker: str) -> str:
        """HASH: step of a circuit breaker's window to its ends, as JSON; bounded; expires."""
        return self.app(f"breaker_ends:{breaker}")

    def marker(self, token: str) -> str:
        """STRING: tells the broker's client if its database is on this server; expires."""
        return self.app(f"marker:{token}")

    def report(self, dead_letter_queue: str, fingerprint: str) -> str:
        """HASH: the last report of a group to an error tracker; expires."""
        return self.of(dead_letter_queue, f"report:{fingerprint}")

    def operation(self, dead_letter_queue: str, job_id: str) -> str:
        """HASH: what a job did, e.g. ``removed``, to letters; ``open:…`` messages; expires."""
        return self.of(dead_letter_queue, f"operation:{job_id}")

    def check(self, dead_letter_queue: str, token: str) -> str:
        """HASH, ZSET, STREAM, SET or STRING: what a worker's start tries; removed at once."""
        return self.of(dead_letter_queue, f"check:{token}")

    def run(self, key: MessageKey) -> str:
        """HASH: counts, starts and ends of the deliveries of one task (and redrive); expires."""
        # Task ids come over the wire and may hold characters that UTF-8 cannot encode.
        task_id = key.task_id if key.task_id.isascii() else spelled(key.task_id)
        which = f"{key.redrives}.{key.nesting}" if key.nesting else key.redrives
        return f"{_beginning(self.prefix, key.dead_letter_queue)}:run:{which}:{task_id}"

    def app(self, name: str) -> str:
        """Return the key of what an app has once."""
        return f"{self.prefix}:{{app}}:{name}"

    def of(self, dead_letter_queue: str, name: str) -> str:
        """Return a key of one dead-letter queue, on the slot of its letters."""
        return f"{_beginning(self.prefix, dead_letter_queue)}:{name}"

    def places(self, names: Sequence[str], *queue: str, **given: str) -> list[str]:
        """Return the keys of a script, by the names that its header has for them."""
        places = _places(self, tuple(names), queue, tuple(name for name in given if given[name]))
        return [given.get(name) or place for name, place in zip(names, places, strict=True)]


@lru_cache(maxsize=1024)
def _places(
    keys: Keys, names: tuple[str, ...], queue: tuple[str, ...], given: tuple[str, ...]
) -> list[str]:
    """Each letter asks for the same ten."""
    return ["" if name in given else getattr(keys, name)(*queue) for name in names]


@lru_cache(maxsize=1024)
def _beginning(prefix: str, dead_letter_queue: str) -> str:
    name = spelled(dead_letter_queue)
    if name[:1] in ("}", "%"):  # "{}" is not a tag: the keys would be on many slots
        name = f"%{ord(name[0]):02X}{name[1:]}"
    return f"{prefix}:{{{name}}}"


def compact(value: Any) -> str:
    """Return a value as JSON text without spaces; equal for equal values."""
    return spelled(json.dumps(value, separators=(",", ":"), ensure_ascii=False, sort_keys=True))


def spelled(text: str) -> str:
    """Return text with the characters that UTF-8 cannot encode escaped."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def text_of(value: bytes | str) -> str:
    """Decode a reply, escaping what is not UTF-8."""
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value
