"""Claims of letters, and their messages that are published again.

A letter is claimed by one operation at a time. Where letters and broker share a Redis, one script
publishes the message and removes the letter; else the claim says what is on the broker. A
redriven message is watched, and begins with its old count, in the hash of its deliveries.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from redis.exceptions import NoScriptError, RedisClusterException, ResponseError

from celery_dlq.errors import StoreUnavailable
from celery_dlq.letters.printable import get_logger
from celery_dlq.letters.record import Delivery, to_micros
from celery_dlq.store.connect import is_cluster
from celery_dlq.store.keys import Keys, compact, spelled
from celery_dlq.store.part import Part
from celery_dlq.store.records import QueueEntry, RedriveOutcome
from celery_dlq.store.scripts import MOST_IDS, Script, script_text
from celery_dlq.store.worker_records import MessageKey

if TYPE_CHECKING:
    from celery_dlq.store.store import Store
    from celery_dlq.store.stream import ReadAhead

logger = get_logger("celery_dlq.store")

REMOVES = "#removes"
"""Ends the owners of claims that publish nothing: whoever takes them over has no doubt."""

_ADOPTED_MILLIS = 30 * 86_400_000
_CHANGED = (b"1", b"2", b"3", b"removed", b"restored", b"adopted")  # the first three by `redrive`


class ClaimState(Enum):
    """State of a letter after an operation tried to claim it."""

    CLAIMED = 1  # the caller has it; it was never published
    RECLAIMED = 2  # the caller has it; an earlier operation may have published it
    PUBLISHED = 3  # the caller has it; it was published and is only to be removed
    HELD = 4  # another operation has it
    GONE = 5  # there is no such letter


_STATES = {ord(str(state.value)): state for state in ClaimState}  # by the digit of a reply


class Claims(Part):
    """Claims letters and publishes their messages; marks and reads redriven ones."""

    def __init__(
        self, store: Store, keys: Keys | None, ttl_millis: int, *, filed: bool = False
    ) -> None:
        super().__init__(store, keys)
        self._ttl_millis = ttl_millis
        self._filed = filed
        self._idle: list[ReadAhead] = []  # connections for calls

    def of_files(self) -> Claims:
        """Return the claims of letters that are in files, and perhaps in Redis, too.

        A receipt in Redis says that such a letter was redriven, wherever it was read.
        """
        return Claims(self._store, self._keys, self._ttl_millis, filed=True)

    def claim(
        self,
        dead_letter_queue: str,
        letter_ids: Sequence[str],
        *,
        owner: str,
        lease_seconds: float,
        previous_run_prefix: str = "",
    ) -> list[ClaimState]:
        """Claim letters for an operation, so that no two operations take the same letter.

        Idempotent: a repetition by the same owner returns the same states.
        """
        states: list[ClaimState] = []
        for some in chunks(letter_ids):
            lease_millis = int(lease_seconds * 1000)
            args = (owner, lease_millis, previous_run_prefix, int(self._filed), *some)
            states += map(ClaimState, self._run_script("claim", *args, queue=dead_letter_queue))
        return states

    def held_by_others(
        self, dead_letter_queue: str, letter_ids: Sequence[str], *, previous_run_prefix: str = ""
    ) -> set[str]:
        """Return the letters that `claim` would find held by another operation now."""
        key, now, held = self._keys.claims(dead_letter_queue), to_micros(self.now()), set[str]()
        for some in chunks(letter_ids):
            for letter_id, claim in zip(some, self._client.hmget(key, some), strict=True):
                _state, _, claimed = (claim or b"").decode("utf-8", "replace").partition("|")
                owner, _, until = claimed.rpartition("|")
                ours = previous_run_prefix and owner.startswith(previous_run_prefix)
                if until.isdecimal() and int(until) * 1000 > now and not ours:
                    held.add(letter_id)
        return held

    def gone(self, dead_letter_queue: str, letter_ids: Sequence[str]) -> set[str]:
        """Return the letters of files that were redriven before; letters in Redis are there."""
        gone = b""
        for some in chunks(letter_ids):
            gone += self._run_script("gone", *map(spelled, some), queue=dead_letter_queue)
        return {one for one, digit in zip(letter_ids, gone, strict=True) if digit == ord("1")}

    def mark_published(
        self, dead_letter_queue: str, letter_ids: Sequence[str], *, owner: str
    ) -> None:
        """Record that the messages are on the broker: any operation may now remove the letters."""
        for some in chunks(letter_ids):
            args = (owner, "published", int(self._filed), *some)
            self._run_script("settle", *args, queue=dead_letter_queue)

    def release(
        self,
        dead_letter_queue: str,
        letter_ids: Sequence[str],
        *,
        owner: str,
        doubtful: bool = False,
    ) -> None:
        """Give back this owner's claims, except on published letters.

        With ``doubtful`` the next owner gets `ClaimState.RECLAIMED`: the messages may have been
        published.
        """
        outcome = "reclaimed" if doubtful else "free"
        for some in chunks(letter_ids):
            args = (owner, outcome, int(self._filed), *some)
            self._run_script("settle", *args, queue=dead_letter_queue)

    def marker(self, database: int) -> str | None:
        """Write a key that expires soon into a database of the letters' server; return its name.

        A broker's client that sees the key reaches it. ``None``: letters are never beside a broker.
        """
        if is_cluster(self._client):
            return None
        key, script = self._keys.marker(uuid4().hex), script_text("marker")
        self._client.execute_command(*script.command([key], self._database, database))
        return key

    def redrive(
        self,
        dead_letter_queue: str,
        entries: Sequence[QueueEntry],
        *,
        job_id: str,
        owner: str,
        database: int,
        previous_run_prefix: str = "",
    ) -> RedriveCall:
        """Publish the messages of letters and remove the letters, in one atomic step.

        Only if the broker's database has this number on the server of letters and receipts; see
        `marker`. No letter has to be claimed before; the claims of others are respected.
        """
        script, operation = script_text("redrive"), self._keys.operation(dead_letter_queue, job_id)
        places: list[Any]
        places = [*self._keys.places(script.keys, dead_letter_queue, operation=operation)]
        lists = dict.fromkeys(entry.list_key for entry in entries)
        numbers = {key: number for number, key in enumerate(lists, len(places) + 1)}
        places += numbers
        # The call has an id, so that it can be made again if its reply is lost.
        args: list[Any] = [owner, previous_run_prefix, uuid4().hex, len(places), self._ttl_millis]
        args += [self._database, database]
        for letter_id, position, reason, fingerprint, list_key, entry_text, seed in entries:
            text = ""
            if seed is not None:
                places.append(self._keys.run(seed.key))
                text = json.dumps([len(places), *_flat_seed(*seed)])
            letter = (spelled(letter_id), "" if self._filed else position, reason, fingerprint)
            args += (*letter, numbers[list_key], entry_text, text)
        call = (len(places), *places, *args)
        return RedriveCall(self._client, self._store.url, script, call, self._idle)

    @property
    def _database(self) -> int:
        return int(self._client.get_connection_kwargs().get("db") or 0)

    def close(self) -> None:
        """Close connections. Never raises."""
        while self._idle:
            self._idle.pop().close()

    def redriven(self, dead_letter_queue: str, job_id: str) -> dict[ClaimState, int]:
        """Return how many letters `redrive` has found in each state for a job.

        Exact, also if the job's process was killed before it had counted them.
        """
        counts = self._client.hgetall(self._keys.operation(dead_letter_queue, job_id))
        return {state: int(counts.get(b"%d" % state.value, 0)) for state in ClaimState}

    def changed(self, dead_letter_queue: str, operation_id: str) -> int:
        """Return how many letters an operation has removed, restored or adopted.

        Exact, also if its process was killed: they are counted in the step that changes them.
        """
        counts = self._client.hgetall(self._keys.operation(dead_letter_queue, operation_id))
        return sum(int(counts.get(name, 0)) for name in _CHANGED)

    def count_adopted(self, dead_letter_queue: str, operation_id: str) -> None:
        """Count a letter that an operation has just stored."""
        key = self._keys.operation(dead_letter_queue, operation_id)
        pipe = self._client.pipeline(transaction=False)
        pipe.hincrby(key, "adopted", 1)
        pipe.pexpire(key, _ADOPTED_MILLIS)
        pipe.execute()

    def forget(self, dead_letter_queue: str, operation_id: str) -> None:
        """Delete what was counted of an operation that is over."""
        self._client.unlink(self._keys.operation(dead_letter_queue, operation_id))

    def watch_messages(self, keys: Sequence[MessageKey]) -> None:
        """Mark messages that are about to be redriven, for `outcomes`."""
        pipe = self._client.pipeline(transaction=False)
        for key in keys:
            pipe.hset(self._keys.run(key), "watched", 1)
            pipe.pexpire(self._keys.run(key), self._ttl_millis)
        pipe.execute()

    def outcomes(self, keys: Sequence[MessageKey]) -> list[RedriveOutcome]:
        """Read the hashes: a worker deletes them on success, and records a death in them."""
        pipe = self._client.pipeline(transaction=False)
        for key in keys:
            pipe.hkeys(self._keys.run(key))
        return [_outcome(names) for names in pipe.execute()]

    def seed_count(self, key: MessageKey, deliveries: int, last: Delivery) -> None:
        """Write the count with an ended last delivery, which must not look vanished."""
        run = self._keys.run(key)
        # In one write, so that the hash gets its end. A cluster of redis-py 5 has no transactions.
        pipe = self._client.pipeline(transaction=False)
        pipe.execute_command("HSET", run, *_flat_seed(key, deliveries, last))
        pipe.pexpire(run, self._ttl_millis)
        pipe.execute()


@dataclass(slots=True)
class RedriveCall:
    """A call of `Claims.redrive`. It does nothing twice, however often it is made."""

    client: Any
    url: str  # Shown in messages, without its password
    script: Script
    call: Sequence[Any]  # Its keys and arguments
    idle: list[ReadAhead]  # Connections of earlier calls
    sent: ReadAhead | None = None  # The connection on which the reply will come

    def send(self) -> None:
        """Send the call over a connection of its own; if that fails, `wait_for_states` makes it."""
        from celery_dlq.store.stream import ReadAhead  # noqa: PLC0415 - a worker reads no letters

        ahead = self.idle.pop() if self.idle else ReadAhead(self.client, self.url)
        try:
            ahead.send_ahead("EVALSHA", self.script.digest, *self.call)
        except StoreUnavailable:
            ahead.close()
        else:
            self.sent = ahead

    def wait_for_states(self) -> list[ClaimState] | None:
        """Wait for the reply. If it is lost, make the call again: it does nothing twice."""
        try:
            # The client makes it once more if this reply is lost, too.
            reply: bytes = self._wait_for_reply() or self.client.eval(self.script.text, *self.call)
        except StoreUnavailable as exc:
            if not isinstance(exc.__cause__, (ResponseError, RedisClusterException)):
                raise
            logger.info("Letters cannot be redriven in one step: %s", exc.__cause__)
            return None
        return [_STATES[digit] for digit in reply]

    def _wait_for_reply(self) -> bytes | None:
        """The reply to what was sent; ``None`` if there is none."""
        reply: bytes | None = None
        ahead, self.sent = self.sent, None
        if ahead is not None:
            try:
                with suppress(StoreUnavailable, NoScriptError):
                    reply = ahead.wait_for_reply()
            finally:  # also on Ctrl-C
                if reply is None:
                    ahead.close()
                else:
                    self.idle.append(ahead)
        return reply


def _flat_seed(key: MessageKey, deliveries: int, last: Delivery) -> list[str]:
    """Return the names and values of a seeded count, in turn."""
    place = f"{key.place}:{deliveries}"
    end = compact(last.to_json())
    start = f"{to_micros(last.started_at)}|{last.worker_pid or 0}@{last.worker_hostname}#0"
    count = (f"count:{key.place}", str(deliveries))
    return [*count, f"start:{place}", start, f"end:{place}", end]


def _outcome(names: Sequence[bytes]) -> RedriveOutcome:
    if not names:
        return RedriveOutcome.SUCCEEDED
    return RedriveOutcome.DIED if b"died" in names else RedriveOutcome.OPEN


def chunks(letter_ids: Sequence[str], size: int = MOST_IDS) -> Iterator[list[str]]:
    """Split ids into lists for one call each, with unencodable characters escaped."""
    for start in range(0, len(letter_ids), size):
        yield [spelled(letter_id) for letter_id in letter_ids[start : start + size]]
