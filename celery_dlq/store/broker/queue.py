"""Dead-letter queues on RabbitMQ, through kombu: putting, reading and removing letters.

Reading: one consumer takes all messages without acknowledging them, and requeues them in their
order. Nobody else may read at the same time, or each would see a part; a lock that ends with
its connection ensures that. Letters that arrive meanwhile wait in the queue.

Measured on RabbitMQ 3.10: messages of a quorum queue that are requeued more than 32 at a time,
or whose connection ends, come back in any order, each with its delivery count one higher. So
they are requeued 32 at a time, and letters are always sorted by their positions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from typing import Any

from kombu.exceptions import KombuError

from celery_dlq.errors import SettingsError, StoreError, StoreUnavailable
from celery_dlq.events import process_user
from celery_dlq.logs import get_logger
from celery_dlq.store.broker.message import LetterMessage, publish
from celery_dlq.store.broker.snapshot import Entry, Snapshot

logger = get_logger("celery_dlq.store")

MAX_LETTERS = 50_000
"""Maximum number of letters read of one queue; RabbitMQ too has a limit per consumer."""

MAX_BYTES = 8 * 1024**3
"""Maximum number of bytes read of one queue; they go to a temporary file."""

WAIT_SECONDS = 10.0
"""Maximum wait of a reader for another one to finish, or for the next message."""

REQUEUED_PER_BATCH = 32
"""Messages of a quorum queue that are requeued together; more would lose their order."""

Connect = Callable[..., Any]
"""Opens a connection; takes ``transport_options`` and ``heartbeat``."""

_HEARTBEAT_SECONDS = 60
_QUIET_SECONDS = 0.1  # without a message; then the queue may be empty
_LATE_SECONDS = 1.0  # maximum time for reading letters that arrived after the start
_SETTLING_SECONDS = 2.0  # maximum wait until the number of ready messages is stable
_COMMANDS_PER_BATCH = 16  # acknowledgements of a quorum queue; after 32 they are kept back
_MAX_PREFETCH = 65_535  # AMQP's limit
_CONNECT: dict[str, Any] = {"max_retries": 1, "interval_start": 0.2, "interval_step": 0.2}
_LOCK_SUFFIX = ".reader"

_FIRST_MAJOR_WITH_LIMIT = 4  # RabbitMQ 4 has a delivery limit by default
_NOT_FOUND, _LOCKED, _DECLARED_OTHERWISE = 404, 405, 406  # AMQP's reply codes
_REFUSED, _NOT_ALLOWED = 403, 530


class QueueDriver:
    """Dead-letter queues of one broker."""

    def __init__(
        self, connect: Connect, timeout_seconds: float, most_letters: int = MAX_LETTERS
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
        try:
            self._tried(self._open)
        except StoreUnavailable as exc:
            if getattr(exc.__cause__, "code", None) in (_REFUSED, _NOT_ALLOWED):
                raise SettingsError(
                    f"expected broker_url to name a user, its password and a virtual host of "
                    f"RabbitMQ, got: {exc}; correct them"
                ) from exc
            raise

    def put(self, queue: str, letter: LetterMessage) -> None:
        """Publish a letter and wait until the broker has confirmed it."""
        self._tried(lambda: self._put(queue, letter), queue)

    def length(self, queue: str) -> int:
        """Return the number of ready messages; 0 if there is no such queue."""
        found = self._tried(lambda: self._passive(queue))
        return 0 if found is None else int(found.message_count)

    def read(self, queue: str) -> tuple[Snapshot, HeldQueue | None]:
        """Copy all messages of a queue and requeue them; see `hold`."""
        held = self.hold(queue)
        if not held.snapshot.complete:
            return held.snapshot, held
        held.give_back()
        return held.snapshot, None

    def hold(self, queue: str) -> HeldQueue:
        """Read a queue and keep its messages from other readers until they are requeued."""
        present, kind = self._tried(lambda: self._kind_of(queue))
        if present and kind is None:
            raise StoreError(
                f"expected the queue {queue!r} on {self._connection.as_uri()} to be a durable "
                f"quorum queue without a delivery limit or a durable classic queue, without "
                f"other arguments; got one declared otherwise, and reading it might lose "
                f"letters. Move its messages to a queue that a worker declared"
            )
        held = HeldQueue(
            self._connect(transport_options=self._options, heartbeat=_HEARTBEAT_SECONDS),
            queue,
            kind or "",
            self.most_letters,
            present=present,
        )
        held.open()
        return held

    def close(self) -> None:
        """Disconnect. Never raises."""
        with self._lock:
            self._channel = None
            self._kinds.clear()
            with suppress(Exception):
                self._connection.close()

    def _tried(self, what: Callable[[], Any], queue: str | None = None) -> Any:
        """Call a function, and once more over a new connection if the old one was stale."""
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
        # Mandatory: if the queue was deleted, the letter is returned and py-amqp raises.
        producer = self._connection.Producer(channel=self._open(), auto_declare=False)
        publish(producer, queue, letter, delivery_mode=2, mandatory=True)

    def _kind_of(self, queue: str) -> tuple[bool, str | None]:
        """Return True if the queue exists, and its kind."""
        present = self._passive(queue) is not None
        if present and self._kinds.get(queue) is None:
            self._kinds[queue] = self._made(queue)
        return present, self._kinds.get(queue)

    def _open(self) -> Any:
        if self._channel is None or not self._channel.is_open:
            self._connection.ensure_connection(**_CONNECT)
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
        """Declare a queue; return ``quorum``, ``classic``, or ``None`` if it exists as another."""
        version = str(self._connection.connection.server_properties.get("version", "0"))
        quorum: dict[str, Any] = {"x-queue-type": "quorum"}
        if int(version.partition(".")[0] or 0) >= _FIRST_MAJOR_WITH_LIMIT:
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
                if getattr(exc, "code", None) != _DECLARED_OTHERWISE:
                    raise
            else:
                return kind
        logger.warning(
            "The queue %r is neither a plain durable quorum queue nor a plain durable classic "
            "queue. Letters are put into it, but `celery dlq` will not read it; "
            "see docs/how-to/broker-store.md",
            queue,
        )
        return None

    @contextmanager
    def _errors(self, queue: str | None = None) -> Iterator[None]:
        try:
            with _translated(self._connection):
                yield
        except StoreUnavailable:
            self._kinds.pop(queue or "", None)
            self._channel = None
            with suppress(Exception):
                self._connection.close()
            raise


class HeldQueue:
    """The unacknowledged messages of one queue."""

    def __init__(
        self, connection: Any, queue: str, kind: str, most_letters: int, *, present: bool
    ) -> None:
        self.snapshot = Snapshot()
        self._connection = connection
        self._queue = queue
        self._kind = kind
        self._most = most_letters
        self.present = present
        self._channel: Any = None
        self._taken = 0
        self._failure: Exception | None = None
        self._lock = threading.RLock()
        self._over = threading.Event()

    def open(self) -> None:
        """Take all messages; see `QueueDriver.hold`."""
        if not self.present:
            return
        try:
            with _translated(self._connection):
                self._connection.ensure_connection(**_CONNECT)
                self._alone()
                self._fill()
        except BaseException:
            self.drop()
            raise
        threading.Thread(target=self._beat, name="dlq-heartbeat", daemon=True).start()

    def refresh(self) -> None:
        """Take the messages that arrived meanwhile."""
        if self.present:
            with self._lock, _translated(self._connection):
                self._fill()

    def __len__(self) -> int:
        return sum(len(entry.tags) for entry in self.snapshot.ordered())

    def remove(self, entries: Sequence[Entry]) -> None:
        """Acknowledge messages and wait until the broker has processed that."""
        if not entries:
            return
        gone = {tag for entry in entries for tag in entry.tags}
        with self._lock, _translated(self._connection):
            together, single = _acknowledgements(gone, self.snapshot)
            for entry in entries:  # first: a copy that arrives now is a letter of its own
                self.snapshot.drop(entry)
            if together is not None:
                self._channel.basic_ack(together, multiple=True)
                self._wait_for_commands()
            for start in range(0, len(single), _COMMANDS_PER_BATCH):
                for tag in single[start : start + _COMMANDS_PER_BATCH]:
                    self._channel.basic_ack(tag)
                self._wait_for_commands()

    def give_back(self) -> None:
        """Requeue the rest in order, and unlock the queue. Never raises."""
        self._over.set()
        with self._lock, suppress(Exception):
            tags = sorted(tag for entry in self.snapshot.ordered() for tag in entry.tags)
            if self._channel is not None and self._channel.is_open and tags:
                self._return(tags)
        self.drop()

    def drop(self) -> None:
        """Disconnect. Never raises."""
        self._over.set()
        with self._lock, suppress(Exception):
            self._connection.close()

    def _wait_for_commands(self) -> None:
        """Wait until the broker has processed what was sent.

        A channel keeps back acknowledgements for a quorum queue after 32 that the queue has not
        confirmed, and forgets them when it is closed (``rabbit_fifo_client.erl``). basic.get
        goes through the queue's log, so it is answered after what was sent before it.
        """
        if self._kind != "quorum":
            self._ready()
        elif (message := self._channel.basic_get(self._queue)) is not None:
            self._take(message)
            self._raise_failure()

    def _return(self, tags: Sequence[int]) -> None:
        ready = self._ready()
        step = REQUEUED_PER_BATCH if self._kind == "quorum" else len(tags)
        for start in range(0, len(tags), step):
            some = tags[start : start + step]
            requeue_up_to(self._channel, some[-1])
            # Wait before the next batch, or both would be one, in any order.
            deadline = time.monotonic() + WAIT_SECONDS
            while self._ready() < ready + start + len(some) and time.monotonic() < deadline:
                time.sleep(0.001)

    def _ready(self) -> int:
        return int(self._channel.queue_declare(self._queue, passive=True).message_count)

    def _alone(self) -> None:
        """Lock the queue for this process, or raise after a wait."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            channel = self._connection.channel()
            try:
                # The lock ends with the connection, so also if the process or machine dies.
                channel.queue_declare(
                    f"{self._queue}{_LOCK_SUFFIX}", durable=False, exclusive=True, auto_delete=True
                )
            except self._connection.channel_errors as exc:
                if getattr(exc, "code", None) != _LOCKED:
                    raise
                if time.monotonic() >= deadline:
                    raise _busy(self._queue) from exc
                time.sleep(0.2)
            else:
                self._channel = channel
                return

    def _fill(self) -> None:
        """Take messages until none is ready."""
        channel, expected, before = self._channel, self._settled(), self._taken
        if not expected or self._taken >= self._most:
            self.snapshot.complete = self.snapshot.complete and not expected
            return
        channel.basic_qos(0, min(self._most, _MAX_PREFETCH), False)  # noqa: FBT003 - AMQP's order
        tag = f"{process_user()} {time.monotonic_ns()}"
        channel.basic_consume(self._queue, callback=self._take, consumer_tag=tag)
        last, enough_at = time.monotonic(), 0.0
        while not self._full():
            seen, quiet = self._taken, False
            try:
                self._connection.drain_events(timeout=_QUIET_SECONDS)
            except TimeoutError:
                quiet = True
            self._raise_failure()
            if self._taken - before >= expected:
                enough_at = enough_at or time.monotonic()
                # A flood never ends; the rest is for the next reading.
                late = time.monotonic() - enough_at > _LATE_SECONDS
                if late or (quiet and not self._ready()):
                    break
            if self._taken > seen:
                last = time.monotonic()
            elif time.monotonic() - last > WAIT_SECONDS:
                raise StoreUnavailable(
                    f"the broker sent {self._taken - before} of {expected} messages of "
                    f"{self._queue!r} and then nothing for {WAIT_SECONDS:.0f} s; try again"
                )
        channel.basic_cancel(tag)
        channel.callbacks[tag] = self._take  # take late messages too: none is to be rejected
        if self._full():
            self.snapshot.complete = not self._ready()

    def _full(self) -> bool:
        return self._taken >= self._most or self.snapshot.bytes >= MAX_BYTES

    def _settled(self) -> int:
        """Return the number of ready messages once it is stable.

        Another reader may just have requeued messages, or died.
        """
        count, deadline = self._ready(), time.monotonic() + _SETTLING_SECONDS
        while True:
            time.sleep(0.02)
            previous, count = count, self._ready()
            if count == previous or time.monotonic() > deadline:  # in a flood it never is
                return count

    def _take(self, message: Any) -> None:
        try:
            body = message.body.encode() if isinstance(message.body, str) else bytes(message.body)
            about = dict(message.headers or {})
            self.snapshot.add(about, message.delivery_tag, body)
            self._taken += 1
        except Exception as exc:  # noqa: BLE001 - raised by `_raise_failure`
            self._failure = exc

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise StoreError(
                f"the messages of {self._queue!r} could not be written to a temporary file: "
                f"{type(self._failure).__name__}: {self._failure}; make room in its folder"
            ) from self._failure

    def _beat(self) -> None:
        """Send heartbeats while an operation does other work."""
        while not self._over.wait(_HEARTBEAT_SECONDS / 4):
            with self._lock, suppress(Exception):
                self._connection.connection.send_heartbeat()


def requeue_up_to(channel: Any, tag: int) -> None:
    """Put all unacknowledged messages of an AMQP channel back, up to a delivery tag."""
    from amqp import spec  # type: ignore[import-untyped]  # noqa: PLC0415 - AMQP only

    # py-amqp has no method for RabbitMQ's basic.nack.
    channel.send_method(spec.Basic.Nack, "Lbb", (tag, True, True))


def _acknowledgements(gone: AbstractSet[int], snapshot: Snapshot) -> tuple[int | None, list[int]]:
    """Return the tag up to which all held messages are in ``gone``, and its tags above."""
    held = [tag for entry in snapshot.ordered() for tag in entry.tags]
    kept = min((tag for tag in held if tag not in gone), default=None)
    if kept is None:
        return max(gone), []
    return max((tag for tag in gone if tag < kept), default=None), sorted(
        tag for tag in gone if tag > kept
    )


def _busy(queue: str) -> StoreUnavailable:
    """Return the error for the second of two readers."""
    return StoreUnavailable(
        f"the dead-letter queue {queue!r} is locked: another process has been reading or changing "
        f"it for {WAIT_SECONDS:.0f} s, and with letters on the broker only one can. `dlq jobs` "
        f"lists running jobs; try again when it is done"
    )


@contextmanager
def _translated(connection: Any) -> Iterator[None]:
    """Translate the errors of a broker's client to `StoreUnavailable`; shows no password."""
    try:
        yield
    except StoreError:
        raise
    except (
        *connection.transport.channel_errors,
        *connection.transport.connection_errors,
        *connection.transport.recoverable_connection_errors,  # what it refuses is among these alone
        KombuError,
        OSError,
    ) as exc:
        raise StoreUnavailable(
            f"the broker {connection.as_uri()} failed to store or read dead letters with "
            f"{type(exc).__name__}: {exc}"
        ) from exc
