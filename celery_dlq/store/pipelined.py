"""A connection on which most commands are written without waiting for a reply."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import redis
from hiredis import pack_command
from redis.exceptions import (
    AskError,
    ClusterDownError,
    NoPermissionError,
    NoScriptError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.sentinel import SentinelConnectionPool

from celery_dlq import timing
from celery_dlq.errors import StoreUnavailable
from celery_dlq.letters.printable import error_without_secrets, get_logger, url_without_secrets
from celery_dlq.store.connect import is_cluster, new_connection, translated, unavailable
from celery_dlq.store.scripts import Script

logger = get_logger("celery_dlq.store")

Command = tuple[Any, ...]
Repetition = Command | Callable[[], Command]
"""A command that is seldom sent: made when it is, where making it costs a task something."""

ELSEWHERE = (AskError, ClusterDownError, TryAgainError)  # a node refused; MOVED is an AskError
_NO_REPLY: Command = ("CLIENT", "REPLY", "SKIP")  # to the command that follows
_NO_REPLY_PACKED = pack_command(_NO_REPLY)


class OutageBackoff:
    """Circuit breaker for Redis, so that not every task waits for a timeout."""

    def __init__(
        self,
        pause_seconds: float = 0.5,
        most_pause_seconds: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backoff = timing.Backoff(pause_seconds, most_pause_seconds)
        self._clock = clock
        self._closed_at = 0.0
        self._reason: Exception | None = None

    @property
    def is_open(self) -> bool:
        """True while nothing is sent because Redis has just failed."""
        return self._reason is not None and self._clock() < self._closed_at

    @property
    def has_failed(self) -> bool:
        """True from a failure to the next reply."""
        return self._reason is not None

    @property
    def reason(self) -> Exception:
        """The last failure."""
        return self._reason or ConnectionError("not connected")

    def failed(self, exc: Exception) -> None:
        """Record a failure."""
        self._reason = exc
        self._closed_at = self._clock() + self._backoff.failed()

    def worked(self) -> None:
        """Record a reply."""
        if self._reason is not None:
            self._reason = None
            self._backoff.worked()


def commands_of(repetitions: Sequence[Repetition]) -> list[Command]:
    """Make the commands that are made when they are sent."""
    return [one() if callable(one) else one for one in repetitions]


class PipelinedConnection:
    """One connection on which commands are written, most of them without a reply.

    Waiting for Redis would be most of what this plugin costs a healthy task. So
    `send_unanswered` writes commands to which Redis does not reply, and `send_and_wait` waits for a
    reply. Redis runs commands in order, so a write that it accepts confirms everything sent before;
    a refusal (it is read-only, say) leaves all of it in doubt, and all of it is sent again. What
    must not be missed even if Redis refused writes for a moment is sent again until Redis has
    accepted that very command.

    Commands without a reply also survive if this process is killed right after the write: Redis
    drops a client to which it cannot write a reply, with all that it has not read from it yet.

    To a user who may not run ``CLIENT REPLY``, Redis replies all the same; each reply is awaited.

    Thread-safe.
    """

    _MAX_UNCONFIRMED = 1024  # then wait for a reply; usually a second's worth
    _LOG_SECONDS = 10.0
    _question: Command = ("PING",)  # asked for the reply alone
    writev: Callable[..., int] = staticmethod(os.writev)  # pools of threads have one of their own

    def __init__(
        self,
        client: Any,
        url: str,
        breaker: OutageBackoff | None = None,
        failing: str = "Deliveries are not counted now, and metrics wait in memory",
    ) -> None:
        self._failing = failing
        self._client = client
        self._url = url
        self.breaker = breaker or OutageBackoff()
        self._lock = threading.RLock()
        self._connection: Any = None
        self.skips_replies: bool | None = None  # True if CLIENT REPLY is allowed
        self.unconfirmed: deque[Repetition] = deque(maxlen=4 * self._MAX_UNCONFIRMED)
        self.kept: deque[Repetition] = deque(maxlen=4 * self._MAX_UNCONFIRMED)
        self._in_doubt = False  # what is unconfirmed may have been refused
        self._gathers, self._gathered = False, list[Command]()  # these wait for the next write
        self._logged_at = -self._LOG_SECONDS
        self.is_replicated = isinstance(client.connection_pool, SentinelConnectionPool)
        self._alone_until = self._replicated_until = 0.0
        self.errors = 0

    def send_unanswered(
        self, commands: Sequence[Command], again: Sequence[Repetition] = (), *, keep: bool = False
    ) -> bool:
        """Write commands to which Redis does not reply. Never raises.

        Errors of the server are not seen. So scripts must be sent as text, and `probe_writes` must
        be called now and then to see if Redis accepts writes.

        Source: https://redis.io/docs/latest/commands/client-reply/
        """
        with self._lock:
            pending = self.kept if keep else self.unconfirmed
            gathers = self._gathers and self.skips_replies and self.is_open
            if again and gathers and len(pending) < self._MAX_UNCONFIRMED:
                self._gathered += commands
                pending.extend(again)
                return True
            try:
                self._write_commands(commands, reply=False)
                if not self.skips_replies:
                    return self._awaited(commands, again, pending)
            except StoreUnavailable as exc:
                if keep:
                    pending.extend(again)
                self._log_failure(exc)
                return False
            except Exception:
                raise
            except BaseException:  # Ctrl-C: it is unknown how much was written
                self.disconnect()
                raise
            if again:
                pending.extend(again)
                if len(pending) >= self._MAX_UNCONFIRMED and not self._in_doubt:
                    self.probe_writes(again[-1:])
            return True

    def gather(self) -> None:
        """Let unanswered commands wait for the next that is awaited, or for `send_gathered`.

        Each read of its socket costs Redis as much as a small script. If the connection is lost
        until then, they are repeated like all that is not confirmed.
        """
        self._gathers = True

    def send_gathered(self) -> None:
        """Send what has waited, with one write, and what comes from now on at once."""
        self._gathers = False
        if self._gathered:
            self.send_unanswered(())

    def probe_writes(self, commands: Sequence[Repetition]) -> bool:
        """Write commands and wait; log a failure and return False. Never raises.

        What Redis may have refused before is written first.
        """
        with self._lock:
            try:
                self._settle_unanswered()
                self._write_and_wait(commands)
            except StoreUnavailable as exc:
                self._log_failure(exc)
                return False
            self.unconfirmed.clear()
            return True

    @property
    def is_open(self) -> bool:
        """True if connected and the circuit breaker lets commands through."""
        return self._connection is not None and not self.breaker.is_open

    def send_and_wait(
        self, *command: Any, before: Command | None = None, again: Command | None = None
    ) -> Any:
        """Send one command and wait for its reply; try once more if the connection was closed."""
        commands = [command] if before is None else [before, command]
        with self._lock:
            self._settle_unanswered()
            replies = self._replies_to(commands, [*commands[:-1], again or command])
        for reply in replies:
            if isinstance(reply, NoScriptError):
                raise reply
            if isinstance(reply, ResponseError):
                raise unavailable(reply, self._url) from reply
        return replies[-1]

    def call_script(
        self,
        script: Script,
        keys: Sequence[str],
        *args: Any,
        before: Command | None = None,
        again: Sequence[Any] | None = None,
    ) -> Any:
        """`send_and_wait` a script by its digest, or by its text if Redis does not know it."""
        call = (len(keys), *keys)
        second = None if again is None else ("EVAL", script.text, *call, *again)
        try:
            return self.send_and_wait(
                "EVALSHA", script.digest, *call, *args, before=before, again=second
            )
        except NoScriptError:
            return self.send_and_wait(
                "EVAL", script.text, *call, *args, before=before, again=second
            )

    def wait_for_replica(self, key: str) -> None:
        """Wait until a replica has what was written, where one takes over when the master dies.

        A master that loses its replicas may be losing its role: for ten seconds, or while a
        Sentinel says so, what was written does not count, and the next attempt asks anew who the
        master is. After that, and without replicas from the beginning, the master's word is
        enough, for half a minute at a time. The first question is asked for a second: a replica
        that was slow once would leave half a minute of letters to the master alone.

        Source: https://redis.io/docs/latest/commands/wait/
        """
        if not self.is_replicated or time.monotonic() < self._alone_until:
            return
        try:
            wait = timing.current.replica_wait
            is_first = not (self._replicated_until or self._alone_until)
            tries = math.ceil(timing.current.replica_first / wait) if is_first else 1
            reached = any(
                self.send_and_wait("WAIT", 1, math.ceil(1000 * wait)) for _ in range(tries)
            )
        except StoreUnavailable as exc:
            if not isinstance(exc.__cause__, NoPermissionError):
                raise
            reached = False
        now = time.monotonic()
        if reached:
            self._replicated_until = now + timing.current.replica_doubt
        elif now < self._replicated_until or self._master_changes():
            self.disconnect()
            away = redis.ConnectionError(f"no replica has what was written for {key}")
            raise unavailable(away, self._url) from away
        else:
            self._alone_until = now + timing.current.replica_look

    def _master_changes(self) -> bool:
        """True if a Sentinel names another master, or is about to."""
        pool = self._client.connection_pool
        if not isinstance(pool, SentinelConnectionPool):
            return False
        for sentinel in pool.sentinel_manager.sentinels:
            with suppress(RedisError, OSError, KeyError):
                state = sentinel.sentinel_masters()[pool.service_name]
                here = self._connection.host, int(self._connection.port)
                return (state["ip"], state["port"]) != here or "failover" in str(state["flags"])
        return False

    def confirm(self) -> bool:
        """Wait until Redis has executed everything; False if it does not. Never raises."""
        with self._lock:
            # All in order: the last start alone would come after what took it back.
            self._in_doubt = self._in_doubt or bool(self.unconfirmed)
            return self.probe_writes([])

    def close(self) -> None:
        """Wait until Redis has executed everything, and disconnect. Never raises."""
        with self._lock:
            self.confirm()
            self.disconnect()

    def _awaited(
        self, commands: Sequence[Command], again: Sequence[Repetition], pending: deque[Repetition]
    ) -> bool:
        """Read the replies to commands that should have none; True if Redis did not refuse."""
        try:
            replies = self.replies(len(commands))
        except (RedisError, OSError):  # it is unknown if they were executed
            self.disconnect()
            pending.extend(again)
            self.probe_writes(again[-1:])  # over a new connection, after all that is unconfirmed
            return True
        for reply in replies:
            if isinstance(reply, ResponseError):
                raise unavailable(reply, self._url) from reply
        return True

    def _settle_unanswered(self) -> None:
        """Write again what Redis may have refused, and wait; raise if it refuses."""
        pending = [*self.unconfirmed, *self.kept] if self._in_doubt else [*self.kept]
        if self._in_doubt:  # one first: a Redis that takes no writes does not get all each time
            self._write_and_wait(pending[-1:])
        self._write_and_wait(pending)
        if pending:
            self.unconfirmed.clear()
        self.kept.clear()
        self._in_doubt = False

    def _write_and_wait(self, repetitions: Sequence[Repetition]) -> None:
        """Write commands and wait; raise if Redis refuses one."""
        commands = commands_of(repetitions)
        for reply in self._replies_to(commands, commands) if commands else ():
            # Refused for ever: another program made a key of that name.
            if isinstance(reply, ResponseError) and "WRONGTYPE" not in str(reply):
                self._in_doubt = True
                raise unavailable(reply, self._url) from reply

    def _replies_to(self, commands: Sequence[Command], second: Sequence[Command]) -> list[Any]:
        """Write commands, the second ones if the connection was closed; read all replies."""
        attempts = [commands] if self._connection is None else [commands, second]
        lost: Exception = ConnectionError("not connected")
        with translated(self._url):
            for some in attempts:
                try:
                    self._write_commands(some)
                    return self.replies(len(some))
                except (redis.ConnectionError, OSError) as exc:
                    lost = exc
                    self.disconnect()  # Redis closed an idle connection; it need not be down
                except Exception:
                    raise
                except BaseException:  # Ctrl-C: it is unknown how much of the reply was read
                    self.disconnect()
                    raise
            self.breaker.failed(lost)
            raise lost

    def raise_if_away(self) -> None:
        """Raise `StoreUnavailable` if Redis failed and does not answer yet."""
        if self.breaker.has_failed:
            self.send_and_wait(*self._question)

    def _write_commands(self, commands: Sequence[Command], *, reply: bool = True) -> None:
        if self.breaker.is_open:
            raise unavailable(self.breaker.reason, self._url) from self.breaker.reason
        try:
            if self._connection is not None:
                try:
                    return self._send_commands(commands, reply=reply)
                except (redis.ConnectionError, OSError):
                    self.disconnect()  # Redis closed an idle connection; it need not be down
            self._connection = self._new_connection()
            self._connection.connect()
            self.skips_replies = None
            if self.unconfirmed or self.kept:
                again = commands_of([*self.unconfirmed, *self.kept])
                self._in_doubt = True  # until Redis, which may be read-only or loading, takes them
                self._send_commands(again, reply=False)
                if not self.skips_replies:
                    self.replies(len(again))
            self._send_commands(commands, reply=reply)
        except (RedisError, OSError) as exc:
            self._record_loss(exc)
            raise unavailable(exc, self._url) from exc

    def _new_connection(self) -> Any:
        return new_connection(self._client.connection_pool)

    def _send_commands(self, commands: Sequence[Command], *, reply: bool) -> None:
        if not reply and self.skips_replies is None:
            self.skips_replies = self._may_skip_replies()
        # Like redis-py, without its checks of each argument: these are all our own.
        before = b"" if reply or not self.skips_replies else _NO_REPLY_PACKED
        gathered = [_NO_REPLY_PACKED + pack_command(one) for one in self._gathered]
        self._gathered.clear()
        packed: bytes | memoryview = b"".join(
            gathered + [before + pack_command(one) for one in commands]
        )
        sock = self._connection._sock  # noqa: SLF001 - redis-py has no public name for it
        if type(sock) is socket.socket:  # TLS has a class of its own
            # A socket with a timeout asks first if it can be written to: one more call of the
            # operating system, and in gevent several. It does not block, so just write. Not with
            # os.write: eventlet's own waits for ever if the other side has closed the connection.
            with suppress(BlockingIOError):
                sent = self.writev(sock.fileno(), [packed])
                if sent == len(packed):
                    return
                packed = memoryview(packed)[sent:]
        self._connection.send_packed_command([packed], check_health=False)

    def _may_skip_replies(self) -> bool:
        """True if ``CLIENT REPLY`` is allowed; in Redis 6 it is not to users without @admin."""
        self._send_commands([_NO_REPLY, ("PING",), ("PING",)], reply=True)
        try:
            self._connection.read_response()
        except ResponseError as exc:
            if "client" not in str(exc).lower():
                raise
            refusal = exc
        else:
            return True
        for _ in range(2):
            self._connection.read_response()
        logger.warning(
            "Each write to %s waits for its reply, because CLIENT REPLY is refused: %s; allow it "
            "with +client|reply",
            url_without_secrets(self._url),
            error_without_secrets(refusal),
        )
        return False

    def replies(self, number: int) -> list[Any]:
        """Read replies or refusals."""
        replies = []
        for _ in range(number):
            try:
                replies.append(self._connection.read_response())
            except ResponseError as exc:
                replies.append(exc)
            except RedisError as exc:
                if not isinstance(exc, redis.ConnectionError):  # it hangs, or is not Redis
                    self._record_loss(exc)
                raise
        self.breaker.worked()
        return replies

    def _record_loss(self, exc: Exception) -> None:
        self.breaker.failed(exc)
        self.disconnect()

    def disconnect(self) -> None:
        """Disconnect, so that a late reply is not taken for the reply to another command."""
        self._gathered.clear()  # they are not confirmed, so they are sent again
        if self._connection is not None:
            with suppress(Exception):
                self._connection.disconnect()
            self._connection = None

    def _log_failure(self, exc: Exception) -> None:
        """Log a failure, at most every ten seconds."""
        self.errors += 1
        now = time.monotonic()
        if now - self._logged_at >= self._LOG_SECONDS:
            self._logged_at = now
            logger.error("%s: %s (error %d)", self._failing, exc, self.errors)


def pipelined(client: Any, url: str) -> PipelinedConnection:
    """Return the connection for writes that do not wait for replies."""
    if not is_cluster(client):
        return PipelinedConnection(client, url)
    from celery_dlq.store.slots import ClusterConnection  # noqa: PLC0415 - few have a cluster

    return ClusterConnection(client, url)
