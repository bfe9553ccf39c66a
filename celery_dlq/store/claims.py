"""Claims in Redis: which operation may redrive or discard a letter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery_dlq.store.connect import translated
from celery_dlq.store.part import Part
from celery_dlq.store.records import ClaimState
from celery_dlq.store.scripts import ClaimReply, chunks

STATES = {
    ClaimReply.CLAIMED: ClaimState.CLAIMED,
    ClaimReply.RECLAIMED: ClaimState.RECLAIMED,
    ClaimReply.PUBLISHED: ClaimState.PUBLISHED,
    ClaimReply.HELD: ClaimState.HELD,
    ClaimReply.GONE: ClaimState.GONE,
}


class Claims(Part):
    """Claims of letters, wherever the letters are kept; see `Letters.claim`."""

    def claim(
        self,
        dead_letter_queue: str,
        letter_ids: Sequence[str],
        *,
        owner: str,
        lease_seconds: float,
        previous_run_prefix: str = "",
        elsewhere: bool = False,
    ) -> list[ClaimState]:
        """Claim letters for an operation, so that no two operations take the same letter.

        Idempotent: a repetition by the same owner returns the same states.
        """
        name, keys = dead_letter_queue, self._keys
        places = [keys.claims(name)]
        if not elsewhere:
            places += [keys.ids(name), keys.letters(name)]
        states: list[ClaimState] = []
        with translated(self._url):
            for some in chunks(letter_ids):
                args: list[Any] = [owner, int(lease_seconds * 1000), previous_run_prefix, *some]
                replies = self._scripts.claim(keys=places, args=args)
                states += [STATES[ClaimReply(reply)] for reply in replies]
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

    def owned(self, dead_letter_queue: str, letter_ids: Sequence[str], owner: str) -> list[str]:
        """Return those of the given letters that an owner has claimed."""
        owned: list[str] = []
        with translated(self._url):
            for some in chunks(letter_ids):
                claims = self._client.hmget(self._keys.claims(dead_letter_queue), some)
                owned += [
                    letter_id
                    for letter_id, claim in zip(some, claims, strict=True)
                    if claim is not None and _owner(claim) == owner
                ]
        return owned

    def forget(self, dead_letter_queue: str, letter_ids: Sequence[str]) -> None:
        """Delete the claims of letters that are gone."""
        with translated(self._url):
            for some in chunks(letter_ids):
                self._client.hdel(self._keys.claims(dead_letter_queue), *some)

    def _run(
        self, script: Any, dead_letter_queue: str, letter_ids: Sequence[str], *args: object
    ) -> None:
        with translated(self._url):
            for some in chunks(letter_ids):
                script(keys=[self._keys.claims(dead_letter_queue)], args=[*args, *some])


def _owner(claim: bytes) -> str:
    """Return the owner in ``state|owner|lease end``; only the owner may contain ``|``."""
    _state, _, rest = claim.decode(errors="replace").partition("|")
    return rest.rpartition("|")[0]
