"""Reports in Redis: one small hash per group of letters; it expires."""

from __future__ import annotations

from typing import Any

from celery_dlq.letters.record import DeadLetter
from celery_dlq.store.base.reports import (
    BURST,
    GAP_SECONDS,
    MOST_IDS,
    QUIET_SECONDS,
    REFILL_SECONDS,
    Report,
    Why,
)
from celery_dlq.store.connect import translated
from celery_dlq.store.keys import Keys
from celery_dlq.store.overviews import release_text
from celery_dlq.store.part import RedisPart
from celery_dlq.store.pipelined import PipelinedConnection
from celery_dlq.store.scripts import ReportReply

_WHY = {
    ReportReply.NEW: Why.NEW,
    ReportReply.CAME_BACK: Why.CAME_BACK,
    ReportReply.GREW: Why.GREW,
    ReportReply.REGRESSED: Why.REGRESSED,
}


class RedisReports(RedisPart):
    """The `Reports` in Redis."""

    def __init__(
        self,
        client: Any,
        url: str,
        keys: Keys,
        connection: PipelinedConnection | None = None,
        gap_seconds: float = GAP_SECONDS,
    ) -> None:
        super().__init__(client, url, keys, connection)
        self._options = [
            *(int(seconds * 1000) for seconds in (QUIET_SECONDS, gap_seconds)),
            BURST,
            int(REFILL_SECONDS * 1000),
            MOST_IDS,
        ]

    def of(self, letter: DeadLetter) -> Report | None:
        """Decide about a letter."""
        self._raise_if_away()
        queue, fingerprint = letter.dead_letter_queue, letter.fingerprint
        places = [
            self._keys.report(queue, fingerprint),
            self._keys.tally(queue),
            self._keys.allowance(queue),
            self._keys.states(queue),
        ]
        with translated(self._url):
            state, number, ids = self._scripts.report(
                keys=places,
                args=[
                    letter.id,
                    fingerprint,
                    *self._options,
                    letter.redrives,
                    release_text(letter.release),
                ],
            )
        if state == ReportReply.NONE:
            return None
        return Report(
            why=_WHY[ReportReply(state)], number=number, letter_ids=tuple(ids.decode().split())
        )
