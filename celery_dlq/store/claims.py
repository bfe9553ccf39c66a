"""Claims of letters, and their messages that are published again.

A letter is claimed by one operation at a time. Where letters and broker share a Redis, one script
publishes the message and removes the letter; else the claim says what is on the broker. A
redriven message is watched, and begins with its old count, in the hash of its deliveries.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import redis
from redis.exceptions import NoScriptError, RedisClusterException, ResponseError

from celery_dlq.errors import StoreUnavailable
from celery_dlq.letters.record import Delivery, to_micros
from celery_dlq.logs import get_logger
from celery_dlq.store.cluster import LazyCluster
from celery_dlq.store.connect import translated
from celery_dlq.store.keys import Keys, spelled
from celery_dlq.store.part import Part
from celery_dlq.store.records import ClaimState, MessageKey, QueueEntry, RedriveOutcome
from celery_dlq.store.scripts import ClaimReply, chunks
from celery_dlq.store.stream import ReadAhead

logger = get_logger("celery_dlq.store")

_MARKER_MILLIS = 60_000

_REPLIES = {
    ClaimReply.CLAIMED: ClaimState.CLAIMED,
    ClaimReply.RECLAIMED: ClaimState.RECLAIMED,
    ClaimReply.PUBLISHED: ClaimState.PUBLISHED,
    ClaimReply.HELD: ClaimState.HELD,
    ClaimReply.GONE: ClaimState.GONE,
}
_STATES = {ord("0") + reply: state for reply, state in _REPLIES.items()}  # by digit of the reply


class Claims(Part):
    """Claims letters and publishes their messages; marks and reads redriven ones."""

    def __init__(self, client: Any, url: str, keys: Keys, ttl_seconds: float) -> None:
        super().__init__(client, url, keys)
        self._ttl_millis = int(ttl_seconds * 1000)
        self._idle: list[ReadAhead] = []  # connections for calls

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
        name, keys = dead_letter_queue, self._keys
        places = [keys.claims(name), keys.ids(name), keys.letters(name)]
        states: list[ClaimState] = []
        with translated(self._url):
            for some in chunks(letter_ids):
                args: list[Any] = [owner, int(lease_seconds * 1000), previous_run_prefix, *some]
                replies = self._scripts.claim(keys=places, args=args)
                states += [_REPLIES[ClaimReply(reply)] for reply in replies]
        return states

    def mark_published(
        self, dead_letter_queue: str, letter_ids: Sequence[str], *, owner: str
    ) -> None:
        """Record that the messages are on the broker: any operation may now remove the letters."""
        self._run(self._scripts.mark_published, dead_letter_queue, letter_ids, owner)

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
        self._run(self._scripts.release, dead_letter_queue, letter_ids, owner, int(doubtful))

    def marker(self) -> str | None:
        """Write a key that expires after a minute, and return its name.

        A broker's client that sees the key reaches the same database. ``None`` if letters are
        never kept in a broker's database.
        """
        if isinstance(self._client, LazyCluster):
            return None
        key = self._keys.marker(uuid4().hex)
        with translated(self._url):
            self._client.set(key, 1, px=_MARKER_MILLIS)
        return key

    def redrive(
        self,
        dead_letter_queue: str,
        entries: Sequence[QueueEntry],
        *,
        job_id: str,
        owner: str,
        previous_run_prefix: str = "",
    ) -> RedriveCall:
        """Publish the messages of letters and remove the letters, in one atomic step.

        Only if the letters are in the broker's database; see `marker`. No letter has to be
        claimed before; the claims of others are respected as by `claim`.
        """
        name, keys = dead_letter_queue, self._keys
        places: list[str | bytes] = [
            keys.letters(name),
            keys.ids(name),
            keys.tally(name),
            keys.claims(name),
            keys.groups(name),
            keys.ends(name),
            keys.newest_groups(name),
            keys.gone_groups(name),
            keys.redriven(name, job_id),
        ]
        numbers: dict[bytes, int] = {}
        for entry in entries:
            numbers.setdefault(entry.list_key, len(places) + 1 + len(numbers))
        places += numbers
        # The call has an id, so that it can be made again if its reply is lost.
        args: list[Any] = [owner, previous_run_prefix, uuid4().hex, len(places), self._ttl_millis]
        for letter_id, position, reason, fingerprint, list_key, entry_text, seed in entries:
            text = ""
            if seed is not None:
                places.append(self._keys.run(seed.key))
                text = json.dumps([len(places), *_flat(*seed)])
            letter = (spelled(letter_id), position, reason, fingerprint)
            args += (*letter, numbers[list_key], entry_text, text)
        return RedriveCall(self._url, self._scripts.redrive, places, args, self._idle)

    def close(self) -> None:
        """Close connections. Never raises."""
        while self._idle:
            self._idle.pop().close()

    def redriven(self, dead_letter_queue: str, job_id: str) -> dict[ClaimState, int]:
        """Return how many letters `redrive` has found in each state for a job.

        Exact, also if the job's process was killed before it had counted them.
        """
        key = self._keys.redriven(dead_letter_queue, job_id)
        with translated(self._url):
            counts = self._client.hgetall(key)
        return {state: int(counts.get(b"%d" % reply, 0)) for reply, state in _REPLIES.items()}

    def watch(self, keys: Sequence[MessageKey]) -> None:
        """Mark messages that are about to be redriven, for `outcomes`."""
        with translated(self._url):
            pipe = self._client.pipeline(transaction=False)
            for key in keys:
                pipe.hset(self._keys.run(key), "watched", 1)
                pipe.pexpire(self._keys.run(key), self._ttl_millis)
            pipe.execute()

    def outcomes(self, keys: Sequence[MessageKey]) -> list[RedriveOutcome]:
        """Read the hashes: a worker deletes them on success, and records a death in them."""
        with translated(self._url):
            pipe = self._client.pipeline(transaction=False)
            for key in keys:
                pipe.hkeys(self._keys.run(key))
            return [_outcome(names) for names in pipe.execute()]

    def seed(self, key: MessageKey, deliveries: int, last: Delivery) -> None:
        """Write the count with an ended last delivery, which must not look vanished."""
        run = self._keys.run(key)
        with translated(self._url):
            self._scripts.seed(keys=[run], args=[self._ttl_millis, *_flat(key, deliveries, last)])

    def _run(
        self, script: Any, dead_letter_queue: str, letter_ids: Sequence[str], *args: object
    ) -> None:
        with translated(self._url):
            for some in chunks(letter_ids):
                script(keys=[self._keys.claims(dead_letter_queue)], args=[*args, *some])


@dataclass(slots=True)
class RedriveCall:
    """A call of `Claims.redrive`. It does nothing twice, however often it is made."""

    url: str  # Shown in messages, without its password
    script: Any  # The script
    keys: list[str | bytes]  # Its keys
    args: list[Any]  # Its arguments
    idle: list[ReadAhead]  # Connections of earlier calls
    sent: ReadAhead | None = None  # The connection on which the reply will come

    def send(self) -> None:
        """Send the call over a connection of its own; if that fails, `states` makes it."""
        ahead = self.idle.pop() if self.idle else ReadAhead(self.script.registered_client, self.url)
        try:
            ahead.ask("EVALSHA", self.script.sha, len(self.keys), *self.keys, *self.args)
        except StoreUnavailable:
            ahead.close()
        else:
            self.sent = ahead

    def states(self) -> list[ClaimState] | None:
        """Wait for the reply. If it is lost, make the call again: it does nothing twice."""
        reply = self._reply()
        with translated(self.url):
            try:
                if reply is None:
                    reply = self._again()
            except (ResponseError, RedisClusterException) as exc:
                logger.info("Letters cannot be redriven in one step: %s", exc)
                return None
        return [_STATES[digit] for digit in reply]

    def _reply(self) -> bytes | None:
        """The reply to what was sent; ``None`` if there is none."""
        reply: bytes | None = None
        ahead, self.sent = self.sent, None
        if ahead is not None:
            try:
                with suppress(StoreUnavailable, NoScriptError):
                    reply = ahead.answer()
            finally:  # also on Ctrl-C
                if reply is None:
                    ahead.close()
                else:
                    self.idle.append(ahead)
        return reply

    def _again(self) -> bytes:
        """Call the script, once more if its reply is lost: redis-py before 6 does not."""
        try:
            reply: bytes = self.script(keys=self.keys, args=self.args)
        except (redis.ConnectionError, redis.TimeoutError):
            reply = self.script(keys=self.keys, args=self.args)
        return reply


def _flat(key: MessageKey, deliveries: int, last: Delivery) -> list[str]:
    """Return the names and values of a seeded count, in turn."""
    place = f"{key.retries}:{deliveries}"
    end = json.dumps(last.to_json(), separators=(",", ":"))
    start = f"{to_micros(last.started_at)}|{last.worker_pid or 0}@{last.worker_hostname}#0"
    count = (f"count:{key.retries}", str(deliveries))
    return [*count, f"start:{place}", start, f"end:{place}", end]


def _outcome(names: Sequence[bytes]) -> RedriveOutcome:
    if not names:
        return RedriveOutcome.SUCCEEDED
    return (
        RedriveOutcome.DIED
        if any(name.startswith(b"dead:") for name in names)
        else RedriveOutcome.OPEN
    )
