"""Dead-letter queues on RabbitMQ, through kombu."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from celery_dlq.backends.broker.driver import CONNECT, MOST_LETTERS, Connect, translated
from celery_dlq.backends.broker.held import HEARTBEAT_SECONDS, AmqpHeldQueue
from celery_dlq.backends.broker.message import LetterMessage, publish
from celery_dlq.backends.broker.snapshot import Snapshot
from celery_dlq.errors import StoreError, StoreUnavailable
from celery_dlq.logs import get_logger

logger = get_logger("celery_dlq.store")

_FIRST_WITH_LIMIT = 4  # RabbitMQ 4 has a delivery limit unless told otherwise
_NOT_FOUND, _OTHER = 404, 406


class AmqpQueueDriver:
    """Dead-letter queues of one broker.

    Args:
        connect: Makes a connection; takes ``transport_options`` and ``heartbeat``.
        timeout_seconds: Longest wait for one answer.
        most_letters: See `MOST_LETTERS`; only tests give another number.
    """

    def __init__(
        self, connect: Connect, timeout_seconds: float, most_letters: int = MOST_LETTERS
    ) -> None:
        self._connect = connect
        self._options = {
            "confirm_publish": True,
            "read_timeout": timeout_seconds,
            "write_timeout": timeout_seconds,
        }
        self.most_letters = most_letters
        self._connection = connect(transport_options=self._options)
        self._channel: Any = None
        self._kinds: dict[str, str | None] = {}
        self._lock = threading.RLock()

    def check(self) -> None:
        """Connect."""
        self._tried(self._open)

    def put(self, queue: str, letter: LetterMessage) -> None:
        """Publish a letter; comes back when the broker has confirmed it.

        Raises:
            StoreUnavailable: It was not confirmed.
        """
        self._tried(lambda: self._put(queue, letter), queue)

    def length(self, queue: str) -> int:
        """How many messages wait in a queue; 0 if there is none."""
        found = self._tried(lambda: self._passive(queue))
        return 0 if found is None else int(found.message_count)

    def read(self, queue: str) -> tuple[Snapshot, AmqpHeldQueue | None]:
        """Write down what is in a queue, and give it all back; see `hold`.

        Returns:
            What was read, and the queue still held if there is more than can be read:
            given back, those letters would come last, and the next reading would find others.
        """
        held = self.hold(queue)
        if not held.snapshot.complete:
            return held.snapshot, held
        held.give_back()
        return held.snapshot, None

    def hold(self, queue: str) -> AmqpHeldQueue:
        """Read a queue and keep its messages from everybody else until they are given back.

        Raises:
            StoreUnavailable: Another process reads it, or the broker does not answer.
            StoreError: The queue is declared in a way that would lose letters by reading.
        """
        present, kind = self._tried(lambda: self._kind_of(queue))
        if present and kind is None:
            raise StoreError(
                f"expected the queue {queue!r} on {self._connection.as_uri()} to be a durable "
                f"quorum queue without a delivery limit, or a durable classic queue, and "
                f"without other arguments; got one declared otherwise, which might lose "
                f"letters by being read. Move its messages to a queue that a worker made"
            )
        held = AmqpHeldQueue(
            self._connect(transport_options=self._options, heartbeat=HEARTBEAT_SECONDS),
            queue,
            kind or "",
            self.most_letters,
            present=present,
        )
        held.open()
        return held

    def close(self) -> None:
        """Disconnect; never raises."""
        with self._lock:
            self._channel = None
            self._kinds.clear()
            with suppress(Exception):
                self._connection.close()

    def _tried(self, what: Callable[[], Any], queue: str | None = None) -> Any:
        """Do something; once more if the connection turns out to be a stale one."""
        with self._lock:
            used = self._channel is not None
            try:
                with self._errors(queue):
                    return what()
            except StoreUnavailable:
                if not used:
                    raise
            with self._errors(queue):
                return what()

    def _put(self, queue: str, letter: LetterMessage) -> None:
        self._open()
        if queue not in self._kinds:
            self._kinds[queue] = self._made(queue)
        # Mandatory: a queue that somebody deleted takes nothing, and py-amqp raises that.
        producer = self._connection.Producer(channel=self._open(), auto_declare=False)
        publish(producer, queue, letter, delivery_mode=2, mandatory=True)

    def _kind_of(self, queue: str) -> tuple[bool, str | None]:
        """Whether there is a queue, and how it was made."""
        present = self._passive(queue) is not None
        if present and self._kinds.get(queue) is None:
            self._kinds[queue] = self._made(queue)
        return present, self._kinds.get(queue)

    def _open(self) -> Any:
        if self._channel is None or not self._channel.is_open:
            self._connection.ensure_connection(**CONNECT)
            self._channel = self._connection.channel()
        return self._channel

    def _passive(self, queue: str) -> Any:
        try:
            return self._open().queue_declare(queue, passive=True)
        except self._connection.channel_errors as exc:
            if getattr(exc, "code", None) == _NOT_FOUND:
                return None
            raise

    def _made(self, queue: str) -> str | None:
        """Make a queue, or find out how it was made: ``quorum``, ``classic``, or something else."""
        version = str(self._connection.connection.server_properties.get("version", "0"))
        quorum: dict[str, Any] = {"x-queue-type": "quorum"}
        if int(version.partition(".")[0] or 0) >= _FIRST_WITH_LIMIT:
            quorum["x-delivery-limit"] = -1
        shapes: tuple[tuple[str, dict[str, Any]], ...] = (
            ("quorum", quorum),
            ("classic", {}),
            ("classic", {"x-queue-type": "classic"}),
        )
        for kind, arguments in shapes:
            try:
                self._open().queue_declare(
                    queue, durable=True, auto_delete=False, arguments=arguments
                )
            except self._connection.channel_errors as exc:
                if getattr(exc, "code", None) != _OTHER:
                    raise
            else:
                return kind
        logger.warning(
            "The queue %r is neither a plain durable quorum queue nor a plain durable classic "
            "one. It gets letters, but `celery dlq` will not read it: "
            "see docs/how-to/broker-store.md",
            queue,
        )
        return None

    @contextmanager
    def _errors(self, queue: str | None = None) -> Iterator[None]:
        try:
            with translated(self._connection):
                yield
        except StoreUnavailable:
            self._kinds.pop(queue or "", None)
            self._channel = None
            with suppress(Exception):
                self._connection.close()
            raise
