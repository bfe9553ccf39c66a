"""Samples messages that succeeded, which the triage compares letters with.

They lie in one bounded stream per dead-letter queue.

A sample has the fields of a letter, so that the exporter, the redaction and every reader of
letters can read it: ``reason`` is ``succeeded``,
``dead_lettered_at`` is the time of success; fingerprint, body and original headers are missing.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from celery_dlq.letters.headers import EARLIER_HEADER, SAMPLE_HEADER
from celery_dlq.letters.packing import packed
from celery_dlq.letters.record import Reason
from celery_dlq.letters.redriven import lives_of
from celery_dlq.policies.decisions import Die
from celery_dlq.store.part import Part
from celery_dlq.store.pipelined import Command
from celery_dlq.worker.housekeeping import Task
from celery_dlq.worker.observer import Ended, Observer, WorkerParts
from celery_dlq.writing.capture import Message
from celery_dlq.writing.lifecycle import GuardedRequest, InFlight

if TYPE_CHECKING:
    from celery_dlq.store.keys import Keys
    from celery_dlq.store.store import Store

SUCCEEDED = "succeeded"
"""The value of the ``reason`` field in a sample."""

MOST_SAMPLES = 10_000
"""Approximate number of samples kept per queue, the newest."""

KEPT_SECONDS = 30 * 24 * 3600
"""A sample stream expires this many seconds after its last entry."""


class Samples(Part):
    """Records samples of messages that succeeded."""

    _MAX_WAITING = 1000  # between two flushes; further samples are dropped
    _SAMPLES_PER_WRITE = 50

    def __init__(self, store: Store, keys: Keys | None = None) -> None:
        super().__init__(store, keys)
        self._waiting: deque[tuple[str, Mapping[str, bytes]]] = deque()

    def add_sample(self, dead_letter_queue: str, fields: Mapping[str, bytes]) -> None:
        """Queue a sample, in the storage form of a letter. Sends nothing, never raises."""
        if len(self._waiting) < self._MAX_WAITING:
            self._waiting.append((dead_letter_queue, fields))

    def send_samples(self) -> None:
        """Send queued samples without waiting; drop them if that fails. Never raises."""
        while self._waiting:
            count = min(self._SAMPLES_PER_WRITE, len(self._waiting))
            some = [self._waiting.popleft() for _ in range(count)]
            commands = [self._add_command(queue, fields) for queue, fields in some]
            queues = {queue for queue, _fields in some}
            commands += [("EXPIRE", self._keys.samples(name), KEPT_SECONDS) for name in queues]
            if not self._connection.send_unanswered(commands):
                self._waiting.clear()

    def _add_command(self, queue: str, fields: Mapping[str, bytes]) -> Command:
        flat = [part for pair in packed(fields).items() for part in pair]
        return ("XADD", self._keys.samples(queue), "MAXLEN", "~", MOST_SAMPLES, "*", *flat)


LONGEST_ARGUMENTS = 8192
"""Args or kwargs with more characters of JSON are left out of a sample."""

_KEPT = (
    *("schema_version", "id", "task_id", "task_name", "source_queue", "dead_letter_queue"),
    *("dead_lettered_at", "first_delivered_at", "deliveries", "retries", "redrives"),
    *("max_deliveries", "max_retries", "args_json", "kwargs_json"),
    *("root_id", "parent_id", "group_id", "origin", "worker_hostname", "worker_pid", "release"),
)


def observer(parts: WorkerParts) -> Observer | None:
    """The observer of a worker that samples."""
    return Sampler(parts) if parts.settings.of("sample_successes") else None


class Sampler(Observer):
    """Samples a share of the guarded messages that succeeded.

    A message that is not chosen costs one random number. Samples are sent with a tick.
    """

    def __init__(self, parts: WorkerParts, chance: Callable[[], float] = random.random) -> None:
        self._samples = parts.backend.part(Samples)
        self._share = parts.settings.of("sample_successes")
        self._make = parts.make
        self._chance = chance

    @property
    def tasks(self) -> Sequence[Task]:
        """Send new samples, and the last ones."""
        return [
            Task(name="samples", work=self._samples.send_samples, close=self._samples.send_samples)
        ]

    def after_end(self, request: GuardedRequest, in_flight: InFlight, ended: Ended) -> None:
        """Sample a message whose task returned, if it is chosen."""
        if ended.succeeded and self._chance() < self._share:
            self._samples.add_sample(
                in_flight.key.dead_letter_queue, self._sample_fields(request, in_flight)
            )

    def _sample_fields(self, request: GuardedRequest, in_flight: InFlight) -> dict[str, bytes]:
        message = Message.of(request.message, request.request_dict)
        args = {name: _shortened(message.values[name]) for name in ("args_json", "kwargs_json")}
        letter = self._make(
            replace(message, values={**message.values, **args}),
            in_flight.resolved,
            Die(Reason.FAILED, ""),  # success is not a `Reason`
            history=(in_flight.delivery,),
            deliveries=in_flight.delivery.number,
            pid=request.worker_pid,
        )
        fields = replace(letter, history=()).to_fields()
        kept = {name: fields[name] for name in _KEPT if name in fields}
        return {**kept, "reason": SUCCEEDED.encode(), "headers": self._headers(request)}

    def _headers(self, request: GuardedRequest) -> bytes:
        """What the sample stands for, and of a redriven message the cause that it died of."""
        headers: dict[str, Any] = {SAMPLE_HEADER: self._share}
        lives = lives_of(request.request_dict)
        if lives and "fingerprint" in lives[-1]:
            cause = {"fingerprint": lives[-1]["fingerprint"]}
            headers[EARLIER_HEADER] = json.dumps([cause])
        return json.dumps(headers).encode()


def _shortened(text: str | None) -> str | None:
    return None if text is None or len(text) > LONGEST_ARGUMENTS else text
