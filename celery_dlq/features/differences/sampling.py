"""Samples messages that succeeded, which the triage compares letters with.

A sample has the fields of a letter, so that the exporter, the redaction and every reader of
letters can read it: ``reason`` is ``succeeded``,
``dead_lettered_at`` is the time of success; fingerprint, body and original headers are missing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from celery_dlq.features.redaction.masking import NO_REDACTION, Redaction
from celery_dlq.letters.headers import SAMPLE_HEADER
from celery_dlq.letters.record import DeadLetter, Reason
from celery_dlq.logs import get_logger
from celery_dlq.store.records import Clock
from celery_dlq.store.samples import SUCCEEDED, Samples
from celery_dlq.writing.capture import captured

if TYPE_CHECKING:
    from celery_dlq.writing.lifecycle import GuardedRequest, InFlight

logger = get_logger("celery_dlq.worker")

LONGEST_ARGUMENTS = 8192
"""Args or kwargs with more characters of JSON are left out of a sample."""

_KEPT = (
    "schema_version",
    "id",
    "task_id",
    "task_name",
    "source_queue",
    "dead_letter_queue",
    "dead_lettered_at",
    "first_delivered_at",
    "deliveries",
    "retries",
    "redrives",
    "max_deliveries",
    "max_retries",
    "args_json",
    "kwargs_json",
    "root_id",
    "parent_id",
    "group_id",
    "origin",
    "worker_hostname",
    "worker_pid",
    "release",
)


class Sampler:
    """Samples a share of the guarded messages that succeeded.

    A message that is not chosen costs one random number. Samples are sent with a tick.
    """

    def __init__(
        self,
        samples: Samples,
        share: float,
        clock: Clock,
        *,
        hostname: str,
        release: str | None = None,
        chance: Callable[[], float] = random.random,
        redaction: Redaction = NO_REDACTION,
    ) -> None:
        self._samples = samples
        self._share = share
        self._mark = json.dumps({SAMPLE_HEADER: share}).encode()
        self._clock = clock
        self._hostname = hostname
        self._release = release
        self._chance = chance
        self._redaction = redaction

    def __call__(self, request: GuardedRequest, in_flight: InFlight) -> None:
        """Sample a message whose task returned, if it is chosen; never raises."""
        if self._chance() >= self._share:
            return
        try:
            self._samples.add(in_flight.key.dead_letter_queue, self._fields(request, in_flight))
        except Exception:
            logger.exception("Task %s succeeded, but could not be sampled", request.id)

    def tick(self) -> None:
        """Send new samples."""
        self._samples.flush()

    def close(self) -> None:
        """Send the last samples; never raises."""
        self._samples.flush()

    def _fields(self, request: GuardedRequest, in_flight: InFlight) -> dict[str, bytes]:
        key, resolved = in_flight.key, in_flight.resolved
        message = captured(request.message, request.request_dict)
        noted = DeadLetter(
            id=key.letter_id,
            task_id=key.task_id,
            task_name=message.task_name,
            source_queue=resolved.queue,
            dead_letter_queue=key.dead_letter_queue,
            reason=Reason.FAILED,  # replaced below: success is not a `Reason`
            dead_lettered_at=self._clock(),
            first_delivered_at=in_flight.delivery.started_at,
            deliveries=in_flight.delivery.number,
            retries=key.retries,
            redrives=key.redrives,
            max_deliveries=resolved.policy.max_deliveries if resolved.policy else None,
            max_retries=resolved.max_retries,
            fingerprint="",
            args_json=_short(message.args_json),
            kwargs_json=_short(message.kwargs_json),
            root_id=message.root_id,
            parent_id=message.parent_id,
            group_id=message.group_id,
            origin=message.origin,
            worker_hostname=self._hostname,
            worker_pid=request.worker_pid,
            release=self._release,
        )
        fields = self._redaction.captured(noted).to_fields()
        kept = {name: fields[name] for name in _KEPT if name in fields}
        return {**kept, "reason": SUCCEEDED.encode(), "headers": self._mark}


def _short(text: str | None) -> str | None:
    return None if text is None or len(text) > LONGEST_ARGUMENTS else text
