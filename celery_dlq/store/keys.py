"""The names of all Redis keys; no other module builds one.

``{name}`` is the hash tag: all keys of one dead-letter queue are on one slot, so that
counting, storing and removing are single atomic scripts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from celery_dlq.store.records import MessageKey

FORMAT = 1
"""The format of the keys and their values; a version that reads them otherwise writes another."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Key names under one prefix."""

    prefix: str = "dlq"  # The setting `dlq_key_prefix`
    # Use the samples of successes in place of letters, with an export position of their own; for
    # a store that an export reads
    successes_only: bool = False

    def app(self, name: str) -> str:
        """Return the key of what an app has once."""
        return f"{self.prefix}:{{app}}:{name}"

    def of(self, dead_letter_queue: str, name: str) -> str:
        """Return a key of one dead-letter queue, on the slot of its letters."""
        return f"{_beginning(self.prefix, dead_letter_queue)}:{name}"

    def queues(self) -> str:
        """SET: names of all dead-letter queues."""
        return f"{self.prefix}:queues"

    def format(self) -> str:
        """STRING: the format of all these keys; written when a worker starts. Without one: 1."""
        return self.app("format")

    def nodes(self) -> str:
        """ZSET: all workers by their last heartbeat."""
        return self.app("nodes")

    def worker_infos(self) -> str:
        """HASH: worker to its info, as JSON."""
        return self.app("workers")

    def tasks(self) -> str:
        """HASH: worker to the names of its tasks, as JSON; may be large."""
        return self.app("tasks")

    def instructions(self) -> str:
        """HASH: ``kind:id`` to a hold, demand or override, as JSON; and ``revision``; bounded."""
        return f"{self.prefix}:{{app}}:instructions"

    def breaker_ends(self, breaker: str) -> str:
        """HASH: step of a circuit breaker's window to its ends, as JSON; bounded; expires."""
        return self.app(f"breaker_ends:{breaker}")

    def identity(self) -> str:
        """STRING: random id of this store, by which exports know whose folder it is."""
        return self.app("identity")

    def changes(self) -> str:
        """STREAM: the audit log; bounded."""
        return self.app("changes")

    def marker(self, token: str) -> str:
        """STRING: tells the broker's client if this is the broker's database; expires."""
        return self.app(f"marker:{token}")

    def counts(self) -> str:
        """HASH: metric and its labels as JSON to a count; bounded."""
        return self.app("counts")

    def gauges(self) -> str:
        """HASH: worker to ``time|gauges as JSON``; bounded."""
        return self.app("gauges")

    def report(self, dead_letter_queue: str, fingerprint: str) -> str:
        """HASH: the last report of a group to an error tracker; expires."""
        return self.of(dead_letter_queue, f"report:{fingerprint}")

    def allowance(self, dead_letter_queue: str) -> str:
        """HASH: the number of reports that this queue may make now; expires."""
        return self.of(dead_letter_queue, "allowance")

    def jobs(self) -> str:
        """HASH: job id to its state, as JSON; bounded."""
        return self.app("jobs")

    def waiting_jobs(self) -> str:
        """ZSET: ids of jobs that wait, by when they may start (milliseconds)."""
        return self.app("waiting_jobs")

    def cancel_requests(self) -> str:
        """HASH: job id to ``cancel``; bounded like jobs."""
        return self.app("cancel_requests")

    def successes(self) -> str:
        """HASH: id of a redrive to the number of its messages that succeeded; bounded like jobs."""
        return self.app("successes")

    def letters(self, dead_letter_queue: str) -> str:
        """STREAM: one entry per letter; see `celery_dlq.letters.packed`."""
        return f"{self._of(dead_letter_queue)}:{'samples' if self.successes_only else 'letters'}"

    def ids(self, dead_letter_queue: str) -> str:
        """HASH: letter id to stream entry id."""
        return self.of(dead_letter_queue, "ids")

    def tally(self, dead_letter_queue: str) -> str:
        """HASH: ``reason:…`` to letters; ``group:…`` to times, example, course and facts."""
        return self.of(dead_letter_queue, "tally")

    def groups(self, dead_letter_queue: str) -> str:
        """ZSET: fingerprints by their number of letters."""
        return self.of(dead_letter_queue, "groups")

    def newest_groups(self, dead_letter_queue: str) -> str:
        """ZSET: fingerprints by when their newest letters died (microseconds, to the second)."""
        return self.of(dead_letter_queue, "newest_groups")

    def gone_groups(self, dead_letter_queue: str) -> str:
        """STREAM: fingerprint to the tally of a group whose last letter left; bounded; expires."""
        return self.of(dead_letter_queue, "gone_groups")

    def notes(self, dead_letter_queue: str) -> str:
        """HASH: fingerprint to the notes on its group, as lines of JSON; bounded per group."""
        return self.of(dead_letter_queue, "notes")

    def noted(self, dead_letter_queue: str) -> str:
        """ZSET: fingerprints with notes or a state, by when they last got one or had letters."""
        return self.of(dead_letter_queue, "noted")

    def states(self, dead_letter_queue: str) -> str:
        """HASH: fingerprint to the state of its group; kept like notes. Without one: open.

        ``muted|until in milliseconds, or nothing|||JSON``, ``resolved|release, or
        nothing|releases before|microseconds|JSON`` or ``regressed|microseconds|release|letter
        id|JSON of the resolution``.
        """
        return self.of(dead_letter_queue, "states")

    def arrivals(self, dead_letter_queue: str) -> str:
        """HASH: ``minute of the hour:reason`` to ``minute:letters stored in it``; expires."""
        return self.of(dead_letter_queue, "arrivals")

    def ends(self, dead_letter_queue: str) -> str:
        """ZSET: letter ids by the expiry of their messages; only of messages that expire."""
        return self.of(dead_letter_queue, "ends")

    def claims(self, dead_letter_queue: str) -> str:
        """HASH: letter id to ``state|owner|lease end`` of a redrive or discard."""
        return self.of(dead_letter_queue, "claims")

    def redriven(self, dead_letter_queue: str, job_id: str) -> str:
        """HASH: state to letters that a redrive found in it; ``last`` to its reply; expires."""
        return self.of(dead_letter_queue, f"redriven:{job_id}")

    def bin(self, dead_letter_queue: str) -> str:
        """STREAM: discarded letters; expires."""
        return self.of(dead_letter_queue, "bin")

    def binned(self, dead_letter_queue: str) -> str:
        """HASH: id of a discarded letter to its entry id in the bin; expires with the bin."""
        return self.of(dead_letter_queue, "binned")

    def exported(self, dead_letter_queue: str) -> str:
        """STRING: entry id up to which letters are exported to files."""
        start = self._of(dead_letter_queue)
        return f"{start}:samples:exported" if self.successes_only else f"{start}:exported"

    def samples(self, dead_letter_queue: str) -> str:
        """STREAM: a sample of the messages that succeeded; bounded; expires."""
        return self.of(dead_letter_queue, "samples")

    def leases(self, dead_letter_queue: str) -> str:
        """HASH: target of an export, or another right, to ``owner|lease end|state``; expires."""
        return self.of(dead_letter_queue, "export_leases")

    def outbox(self, dead_letter_queue: str) -> str:
        """ZSET: entries for a dead-letter exchange, as JSON, by the time of the next attempt."""
        return self.of(dead_letter_queue, "outbox")

    def workers(self, dead_letter_queue: str) -> str:
        """ZSET: workers that guard messages of this queue, by their last heartbeat."""
        return self.of(dead_letter_queue, "workers")

    def run(self, key: MessageKey) -> str:
        """HASH: counts, starts and ends of the deliveries of one task (and redrive); expires."""
        # Task ids come over the wire and may hold characters that UTF-8 cannot encode.
        task_id = key.task_id if key.task_id.isascii() else spelled(key.task_id)
        which = f"{key.redrives}.{key.nesting}" if key.nesting else key.redrives
        return f"{_beginning(self.prefix, key.dead_letter_queue)}:run:{which}:{task_id}"

    def check(self, dead_letter_queue: str, token: str) -> str:
        """HASH, ZSET, STREAM, SET or STRING: what a worker's start tries; removed at once."""
        return self.of(dead_letter_queue, f"check:{token}")

    def _of(self, dead_letter_queue: str) -> str:
        """Return the start of all keys of a queue, with its name as the hash tag."""
        return _beginning(self.prefix, dead_letter_queue)


@lru_cache(maxsize=1024)
def _beginning(prefix: str, dead_letter_queue: str) -> str:
    name = spelled(dead_letter_queue)
    if name[:1] in ("}", "%"):  # "{}" is not a tag: the keys would be on many slots
        name = f"%{ord(name[0]):02X}{name[1:]}"
    return f"{prefix}:{{{name}}}"


def spelled(text: str) -> str:
    """Return text with the characters that UTF-8 cannot encode escaped."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
