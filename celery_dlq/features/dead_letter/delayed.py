"""Messages that wait for their delay or ETA, as far as a broker and its workers show them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from heapq import nsmallest
from typing import Any

from celery_dlq.errors import DLQError, NotFound
from celery_dlq.features.adopt.letter import request_fields
from celery_dlq.features.dead_letter.observer import DELAYED_COMMAND
from celery_dlq.letters import json_codec
from celery_dlq.letters.record import iso
from celery_dlq.logs import get_logger
from celery_dlq.policies.queue_names import did_you_mean
from celery_dlq.transport.amqp.delay_queues import QUEUES, DelayQueues
from celery_dlq.transport.redis.waiting import MOST_ENTRIES, WaitingMessages
from celery_dlq.writing.capture import parsed_time

logger = get_logger("celery_dlq")

MOST_DELAYED = 10_000
_ASKED_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayedMessage:
    """A message that is not to be executed yet."""

    task_id: str  # Its task
    task_name: str  # The name of the task
    eta: datetime  # When it may be executed, aware UTC
    place: str  # `queue`: no worker has it yet. `worker`: a worker holds it
    worker: str | None = None  # That worker, if it said so

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping with the attribute names."""
        return {**asdict(self), "eta": iso(self.eta)}


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayedMessages:
    """The messages of one queue that wait for their time."""

    messages: tuple[DelayedMessage, ...]  # Those that are due first
    total: int  # Number of messages that were seen
    # Number of messages by delay queue of RabbitMQ, of all queues together
    levels: Mapping[str, int]
    unseen: tuple[str, ...]  # What could not be seen, and why

    def to_json(self) -> Iterator[dict[str, Any]]:
        """One JSON-ready mapping for each message, each delay queue, and each thing unseen."""
        yield from (message.to_json() for message in self.messages)
        for name, messages in self.levels.items():
            yield {"delay_queue": name, "messages": messages}
        yield from ({"unseen": text} for text in self.unseen)


class DelayedRun:
    """Lists delayed messages; see `DeadLetters.delayed`."""

    def __init__(
        self, app: Any, queues: Callable[[], frozenset[str]], now: Callable[[], datetime]
    ) -> None:
        self._app = app
        self._queues = queues
        self._now = now

    def delayed(self, queue: str, *, limit: int) -> DelayedMessages:
        """List the messages; nothing is changed, and no body is read."""
        if not 1 <= limit <= MOST_DELAYED:
            raise DLQError(f"expected limit to be from 1 to {MOST_DELAYED:,}, got {limit}")
        known = self._queues()
        if queue not in known:
            raise NotFound(
                f"expected a queue that the app, a live worker or a letter knows, got {queue!r}"
                f"{did_you_mean(queue, known)}"
            )
        unseen: list[str] = []
        found, total = self._in_workers(queue, limit, unseen)
        levels: dict[str, int] = {}
        waiting = WaitingMessages(self._app)
        try:
            if waiting.supported:
                found, total = self._on_redis(waiting, queue, found, unseen)
            else:
                added, levels = self._on_rabbitmq(queue, found, unseen)
                total += added
        finally:
            waiting.close()
        messages = tuple(nsmallest(limit, found.values(), key=lambda one: (one.eta, one.task_id)))
        return DelayedMessages(
            messages=messages, total=max(total, len(found)), levels=levels, unseen=tuple(unseen)
        )

    def _in_workers(
        self, queue: str, limit: int, unseen: list[str]
    ) -> tuple[dict[str, DelayedMessage], int]:
        """What live workers say that they hold, by task id; and how many they have in all."""
        replies: list[Mapping[str, Any]] = []
        try:
            replies = self._app.control.broadcast(
                DELAYED_COMMAND,
                arguments={"queue": queue, "limit": limit},
                reply=True,
                timeout=_ASKED_SECONDS,
            )
        except Exception as exc:  # noqa: BLE001 - remote control is optional, and broker-dependent
            logger.debug("Workers cannot be asked for delayed messages: %r", exc)
        found, total = {}, 0
        answers = {host: said for reply in replies or () for host, said in reply.items()}
        for host, said in sorted(answers.items()):
            if not isinstance(said, Mapping) or "messages" not in said:  # of an earlier version
                unseen.append(f"what {host} holds: it does not know the question")
                continue
            total += int(said["total"])
            for task_id, task_name, eta in said["messages"]:
                found[task_id] = DelayedMessage(
                    task_id=task_id,
                    task_name=task_name,
                    eta=json_codec.moment(eta),
                    place="worker",
                    worker=host,
                )
        if not answers:
            unseen.append("which worker holds what: none has answered")
        return found, total

    def _on_redis(
        self,
        waiting: WaitingMessages,
        queue: str,
        in_workers: Mapping[str, DelayedMessage],
        unseen: list[str],
    ) -> tuple[dict[str, DelayedMessage], int]:
        """All messages with an ETA in the lists of a queue, and of those that workers hold."""
        found: dict[str, DelayedMessage] = {}
        now, total = self._now(), 0
        held = (one for one in waiting.held(_has_eta) if one.queue == queue)
        for entries in (waiting.in_lists(queue, _has_eta), held):
            for entry in entries:
                message = _delayed(waiting.message(entry), "worker" if entry.tag else "queue")
                if message is None or message.eta <= now:
                    continue
                total += 1
                if len(found) < MOST_ENTRIES:
                    found[message.task_id] = in_workers.get(message.task_id, message)
        if waiting.length(queue) > MOST_ENTRIES:
            unseen.append(f"the oldest messages of {queue}: only {MOST_ENTRIES:,} are looked at")
        return found, total

    def _on_rabbitmq(
        self, queue: str, found: dict[str, DelayedMessage], unseen: list[str]
    ) -> tuple[int, dict[str, int]]:
        """Add the heads of RabbitMQ's delay queues; how many, and the lengths of all."""
        delays, added = DelayQueues(self._app), 0
        try:
            if not delays.supported:
                unseen.append(
                    "what waits at the broker: only Redis and RabbitMQ can be looked into"
                )
                return 0, {}
            levels = delays.lengths()
            messages, why_not = delays.messages() if levels else ([], "")
        finally:
            delays.close()
        if why_not:
            unseen.append(f"single messages in RabbitMQ: {why_not}")
            return 0, levels
        keys = self._routing_keys(queue)
        for message in messages:
            if str(message.delivery_info.get("routing_key")).split(".", len(QUEUES))[-1] in keys:
                one = _delayed(message, "queue")
                if one is not None:
                    added += one.task_id not in found
                    found.setdefault(one.task_id, one)
        if len(messages) < sum(levels.values()):
            unseen.append(
                f"{sum(levels.values()) - len(messages):,} messages of RabbitMQ's delay queues, of "
                f"all queues: the first {len(messages):,} were looked at"
            )
        return added, levels

    def _routing_keys(self, queue: str) -> set[str]:
        """What a delayed message for a queue has at the end of its routing key."""
        known = self._app.amqp.queues.get(queue)
        if known is None:
            return {queue}
        bound = (binding.routing_key for binding in known.bindings or ())
        return {queue, *(key for key in (known.routing_key, *bound) if key)}


def _has_eta(entry: bytes) -> bool:
    return b'"eta"' in entry and b'"eta": null' not in entry


def _delayed(message: Any, place: str) -> DelayedMessage | None:
    """A message with an ETA; ``None`` if it is none."""
    try:
        fields = request_fields(message, message.headers)
        eta = parsed_time(fields.get("eta"))
    except (AttributeError, TypeError, ValueError):  # no task message
        return None
    if eta is None:
        return None
    return DelayedMessage(
        task_id=str(fields.get("id", "")),
        task_name=str(fields.get("task", "")),
        eta=eta,
        place=place,
    )
