"""Dead-letter queues on a Redis that is the broker: plain lists, as kombu fills them.

A list can be read without taking anything. Only who removes letters must be alone: else one
would claim a letter that the other has just redriven and removed.
"""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from uuid import uuid4

from celery_dlq.backends.broker.driver import (
    CONNECT,
    LOCK_SUFFIX,
    MOST_BYTES,
    MOST_LETTERS,
    WAIT_SECONDS,
    Connect,
    busy,
    translated,
)
from celery_dlq.backends.broker.message import LetterMessage, publish
from celery_dlq.backends.broker.snapshot import Entry, Snapshot
from celery_dlq.backends.redis.scripts import source
from celery_dlq.errors import StoreUnavailable

_PAGE = 50
_TRIES = 20
_LOCK_SECONDS = 9  # less than the next one waits: he may come right after a crash


class RedisListDriver:
    """Dead-letter queues of one broker.

    Args:
        connect: Makes a connection.
        timeout_seconds: Longest wait for one answer.
        most_letters: See `MOST_LETTERS`; only tests give another number.
    """

    def __init__(
        self, connect: Connect, timeout_seconds: float, most_letters: int = MOST_LETTERS
    ) -> None:
        options = {
            "socket_timeout": timeout_seconds,
            "socket_connect_timeout": timeout_seconds,
        }
        self.most_letters = most_letters
        self._connection = connect(transport_options=options)
        self._channel: Any = None
        self._lock = threading.RLock()

    def check(self) -> None:
        """Connect."""
        with self._client() as client:
            client.ping()

    def put(self, queue: str, letter: LetterMessage) -> None:
        """Push a letter; comes back when Redis has it."""
        with self._lock:
            used = self._channel is not None
            try:
                self._put(queue, letter)
            except StoreUnavailable:
                if not used:
                    raise
                self._put(queue, letter)  # it may have been a stale connection

    def length(self, queue: str) -> int:
        """How many messages are in a queue."""
        with self._client() as client:
            return int(client.execute_command("LLEN", self._name(queue)))

    def read(self, queue: str) -> tuple[Snapshot, None]:
        """Write down all messages of a queue, oldest first.

        Raises:
            StoreUnavailable: Messages were removed all the time while it was read.
        """
        for _ in range(_TRIES):
            with self._client() as client:
                snapshot = self._read(client, self._key(queue))
            if snapshot is not None:
                return snapshot, None
        raise StoreUnavailable(
            f"expected {queue!r} to rest for a moment, got one that changes all the time"
        )

    def hold(self, queue: str) -> RedisHeldList:
        """Read a queue, and keep everybody else from removing anything.

        Raises:
            StoreUnavailable: Another process does, or Redis does not answer.
        """
        owner, deadline = uuid4().hex, time.monotonic() + WAIT_SECONDS
        while not self._lock_free(queue, owner):
            if time.monotonic() >= deadline:
                raise busy(queue)
            time.sleep(0.2)
        return RedisHeldList(self, queue, owner)

    def keep(self, queue: str, owner: str) -> bool:
        """Keep the lock of a queue for some seconds more; whether it is still ours."""
        return self._locked(queue, owner, _LOCK_SECONDS)

    def unlock(self, queue: str, owner: str) -> None:
        """Give the lock back, if it is still ours."""
        self._locked(queue, owner, 0)

    def _lock_free(self, queue: str, owner: str) -> bool:
        with self._client() as client:
            name = f"{self._name(queue)}{LOCK_SUFFIX}"  # kombu prefixes SET, unlike EVAL
            return bool(client.execute_command("SET", name, owner, "NX", "EX", _LOCK_SECONDS))

    def _locked(self, queue: str, owner: str, seconds: int) -> bool:
        with self._client() as client:
            key = f"{self._key(queue)}{LOCK_SUFFIX}"
            return bool(
                client.execute_command("EVAL", source("lock"), 1, key, owner, seconds * 1000)
            )

    def remove(self, queue: str, messages: Sequence[bytes]) -> None:
        """Remove messages that are the very same, searched from the oldest end."""
        with self._client() as client:
            for message in messages:
                client.execute_command("LREM", self._key(queue), -1, message)

    def close(self) -> None:
        """Disconnect; never raises."""
        with self._lock:
            self._channel = None
            with suppress(Exception):
                self._connection.close()

    def _put(self, queue: str, letter: LetterMessage) -> None:
        with self._client():
            producer = self._connection.Producer(channel=self._channel, auto_declare=False)
            publish(producer, queue, letter)

    def _read(self, client: Any, key: str) -> Snapshot | None:
        """Read from the oldest end; ``None`` if something was removed on the way meanwhile."""
        snapshot, taken, last = Snapshot(_unwrapped), 0, None
        while True:
            # With the last one again: if it is not at its place, all have moved.
            end = -1 if last is None else -taken
            page = client.execute_command("LRANGE", key, -taken - _PAGE, end)
            entries = [_bytes(entry) for entry in reversed(page)]
            if last is not None:
                if not entries or entries[0] != last:
                    return None
                del entries[0]
            if not entries:
                return snapshot
            left = self.most_letters - taken
            snapshot.complete = len(entries) <= left
            for entry in entries[:left]:
                _add(snapshot, entry)
            taken, last = taken + len(entries), entries[-1]
            if not snapshot.complete:
                return snapshot
            if snapshot.bytes >= MOST_BYTES:
                snapshot.complete = False
                return snapshot

    def _name(self, queue: str) -> str:
        return str(self._channel._q_for_pri(queue, 0))  # noqa: SLF001 - no other way to its name

    def _key(self, queue: str) -> str:
        # Kombu prefixes only the commands that it uses itself.
        return f"{self._channel.global_keyprefix}{self._name(queue)}"

    @contextmanager
    def _client(self) -> Iterator[Any]:
        with self._lock, translated(self._connection):
            try:
                if self._channel is None:
                    self._connection.ensure_connection(**CONNECT)
                    self._channel = self._connection.channel()
                with self._channel.conn_or_acquire() as client:
                    yield client
            except Exception:
                self._channel = None
                raise


class RedisHeldList:
    """The messages of one list, from which nobody else removes any.

    Args:
        driver: Where it is.
        queue: The queue.
        owner: Holds its lock.
    """

    present = True

    def __init__(self, driver: RedisListDriver, queue: str, owner: str) -> None:
        self._driver = driver
        self._queue = queue
        self._owner = owner
        self._over = threading.Event()
        threading.Thread(target=self._beat, name="dlq-lock", daemon=True).start()
        self.refresh()

    def refresh(self) -> None:
        """Read again.

        Raises:
            StoreUnavailable: Redis does not answer, or the queue is not ours any more.
        """
        self._check()
        self.snapshot, _ = self._driver.read(self._queue)

    def __len__(self) -> int:
        return 0  # all are in the queue

    def remove(self, entries: Sequence[Entry]) -> None:
        """Remove messages."""
        self._check()
        for entry in entries:
            copies = [tag for tag in entry.tags if tag is not None]
            self._driver.remove(self._queue, [self.snapshot.message(entry), *copies])
            self.snapshot.drop(entry)

    def give_back(self) -> None:
        """Let others remove; never raises."""
        self._over.set()
        with suppress(Exception):
            self._driver.unlock(self._queue, self._owner)

    def _check(self) -> None:
        if not self._driver.keep(self._queue, self._owner):
            message = f"expected {self._queue!r} to be ours alone, got one that somebody took over"
            raise StoreUnavailable(f"{message}: this process stood still for too long")

    def _beat(self) -> None:
        """Keep the lock while an operation has other things to do."""
        while not self._over.wait(_LOCK_SECONDS / 3):
            with suppress(Exception):
                self._driver.keep(self._queue, self._owner)


def _add(snapshot: Snapshot, entry: bytes) -> None:
    try:
        envelope = json.loads(entry)
        about, body = envelope.get("headers"), _body(envelope)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        about, body = {}, entry
    twin = snapshot.add(entry, about if isinstance(about, dict) else {}, None, body)
    if twin is not None:
        twin.tags[-1] = entry  # not written down a second time, and it may differ


def _unwrapped(entry: bytes) -> bytes:
    try:
        return _body(json.loads(entry))
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return entry


def _body(envelope: Any) -> bytes:
    body = envelope["body"]
    if envelope["properties"].get("body_encoding") == "base64":
        return base64.b64decode(body)
    return body.encode() if isinstance(body, str) else json.dumps(body).encode()


def _bytes(entry: bytes | str) -> bytes:
    return entry.encode("utf-8", "surrogateescape") if isinstance(entry, str) else entry
