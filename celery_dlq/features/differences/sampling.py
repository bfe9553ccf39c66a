"""Samples messages that succeeded, which the triage compares letters with.

A sample has the fields of a letter, so that the exporter, the redaction and every reader of
letters can read it: ``reason`` is ``succeeded``,
``dead_lettered_at`` is the time of success; fingerprint, body and original headers are missing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from celery_dlq.features.differences.samples import SUCCEEDED, Samples
from celery_dlq.letters.headers import SAMPLE_HEADER
from celery_dlq.letters.record import Reason
from celery_dlq.policies.decisions import Die
from celery_dlq.worker.housekeeping import Task
from celery_dlq.worker.observer import Ended, Observer, WorkerParts
from celery_dlq.writing.capture import Message
from celery_dlq.writing.lifecycle import GuardedRequest, InFlight

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


def observer(parts: WorkerParts) -> Observer | None:
    """The observer of a worker that samples."""
    return Sampler(parts) if parts.settings.sample_successes else None


class Sampler(Observer):
    """Samples a share of the guarded messages that succeeded.

    A message that is not chosen costs one random number. Samples are sent with a tick.
    """

    def __init__(self, parts: WorkerParts, chance: Callable[[], float] = random.random) -> None:
        self._samples = parts.backend.part(Samples)
        self._share = parts.settings.sample_successes
        self._mark = json.dumps({SAMPLE_HEADER: self._share}).encode()
        self._make = parts.make
        self._chance = chance

    @property
    def tasks(self) -> Sequence[Task]:
        """Send new samples, and the last ones."""
        return [Task(name="samples", work=self._samples.flush, close=self._samples.flush)]

    def after_end(self, request: GuardedRequest, in_flight: InFlight, ended: Ended) -> None:
        """Sample a message whose task returned, if it is chosen."""
        if ended.succeeded and self._chance() < self._share:
            self._samples.add(in_flight.key.dead_letter_queue, self._fields(request, in_flight))

    def _fields(self, request: GuardedRequest, in_flight: InFlight) -> dict[str, bytes]:
        message = Message.of(request.message, request.request_dict)
        message = replace(
            message, args_json=_short(message.args_json), kwargs_json=_short(message.kwargs_json)
        )
        letter = self._make(
            message,
            in_flight.resolved,
            Die(Reason.FAILED, ""),  # success is not a `Reason`
            history=(in_flight.delivery,),
            deliveries=in_flight.delivery.number,
            pid=request.worker_pid,
        )
        fields = replace(letter, history=()).to_fields()
        kept = {name: fields[name] for name in _KEPT if name in fields}
        return {**kept, "reason": SUCCEEDED.encode(), "headers": self._mark}


def _short(text: str | None) -> str | None:
    return None if text is None or len(text) > LONGEST_ARGUMENTS else text
