"""What Redis keeps of dead-letter queues on the broker: positions, claims, counts; no letter."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from celery_dlq.backends.base import ClaimState, MessageKey, ordered
from celery_dlq.backends.redis.connect import translated
from celery_dlq.backends.redis.keys import spelled
from celery_dlq.backends.redis.letters import CLAIMS, RedisStore, chunks, last_hour
from celery_dlq.backends.redis.scripts import ClaimReply

PATIENCE_SECONDS = 600.0
"""How long a letter that has a position is waited for: so long its worker may take to store it."""

_GIVEN_AGAIN_SECONDS = 300.0
_BEFORE = 10**9


class PositionIndex(RedisStore):
    """Positions, claims and counts of queues whose letters are elsewhere.

    A letter gets its position before it is put into its queue. Several workers put theirs at
    once, so the queue is known to have all letters only up to the first that is still on its
    way: this is what `settled` says, and what an export reads up to.
    """

    def place(self, dead_letter_queue: str, letter_id: str) -> str:
        """Give a letter its position."""
        keys, name = self._keys, dead_letter_queue
        with translated(self._url):
            # The name first: a letter in a queue that no list shows would be lost to people.
            self._client.sadd(keys.queues(), spelled(name))
            position = self._scripts.place(
                keys=[keys.last(name), keys.placing(name), keys.claims(name)],
                args=[spelled(letter_id), int(_GIVEN_AGAIN_SECONDS * 1000)],
            )
        return str(position.decode())

    def placed(self, dead_letter_queue: str, letter_id: str, key: MessageKey) -> None:
        """Note that a letter is in its queue, and forget the message's counters."""
        keys, name = self._keys, dead_letter_queue
        with translated(self._url):
            self._scripts.placed(
                keys=[keys.placing(name), keys.arrivals(name), keys.run(key)],
                args=[spelled(letter_id), key.retries, self._ttl],
            )

    def last(self, dead_letter_queue: str) -> str | None:
        """The newest position that was given; ``None``: none ever was."""
        return self._positions(dead_letter_queue)[0]

    def settled(self, dead_letter_queue: str) -> str | None:
        """The position up to which no letter is still on its way."""
        last, placing, now = self._positions(dead_letter_queue)
        if last is None:
            return None
        oldest = (now - PATIENCE_SECONDS) * 1000
        waited = sorted(ordered(text) for text in placing if ordered(text)[0] > oldest)
        if not waited:
            return last
        first, second = waited[0]
        return f"{first}-{second - 1}" if second else f"{first - 1}-{_BEFORE}"

    def state(self, dead_letter_queue: str) -> object:
        """Something that changes whenever a letter is stored."""
        last, placing, _now = self._positions(dead_letter_queue)
        return last, sorted(placing)

    def exported(self, dead_letter_queue: str) -> str | None:
        """What was noted as exported."""
        with translated(self._url):
            noted = self._client.get(self._keys.exported(dead_letter_queue))
        return None if noted is None else noted.decode()

    def last_hours(self, dead_letter_queues: Sequence[str]) -> list[tuple[str, int]]:
        """How many letters of each queue were stored in the last hour."""
        minute = int(self.now().timestamp()) // 60
        with translated(self._url):
            found = self._of_each(
                dead_letter_queues, lambda pipe, name: pipe.hvals(self._keys.arrivals(name))
            )
            return [(name, last_hour(slots, minute)) for name, (slots,) in found]

    def claim_all(
        self,
        dead_letter_queue: str,
        letter_ids: Sequence[str],
        *,
        owner: str,
        lease_seconds: float,
        previous_run_prefix: str,
    ) -> list[ClaimState]:
        """Claim letters that are known to be there."""
        states: list[ClaimState] = []
        with translated(self._url):
            for some in chunks(letter_ids):
                replies = self._scripts.claim(
                    keys=[self._keys.claims(dead_letter_queue)],
                    args=[owner, int(lease_seconds * 1000), previous_run_prefix, *some],
                )
                states += [CLAIMS[ClaimReply(reply)] for reply in replies]
        return states

    def owned(self, dead_letter_queue: str, letter_ids: Sequence[str], owner: str) -> list[str]:
        """Those of some letters that an owner has claimed."""
        ours: list[str] = []
        with translated(self._url):
            for some in chunks(letter_ids):
                claims = self._client.hmget(self._keys.claims(dead_letter_queue), some)
                ours += [
                    letter_id
                    for letter_id, claim in zip(some, claims, strict=True)
                    if claim is not None and _owner(claim) == owner
                ]
        return ours

    def unclaim(self, dead_letter_queue: str, letter_ids: Sequence[str]) -> None:
        """Forget the claims of letters that are gone."""
        with translated(self._url):
            for some in chunks(letter_ids):
                self._client.hdel(self._keys.claims(dead_letter_queue), *some)

    def _positions(self, dead_letter_queue: str) -> tuple[str | None, list[str], float]:
        with translated(self._url):
            pipe = self._client.pipeline(transaction=True)
            pipe.get(self._keys.last(dead_letter_queue))
            pipe.hvals(self._keys.placing(dead_letter_queue))
            pipe.time()
            last, placing, (seconds, micros) = pipe.execute()
        texts = [text.decode() for text in placing]
        return (None if last is None else last.decode()), texts, seconds + micros / 1e6


def _owner(claim: bytes) -> str:
    with suppress(ValueError):
        return claim.decode().split("|", 1)[1].rpartition("|")[0]
    return ""
