"""Connections to Redis: the pooled client, and the wire that does not wait for replies."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import redis
from kombu.utils.url import maybe_sanitize_url
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.retry import Retry

from celery_dlq.errors import SettingsError, StoreUnavailable
from celery_dlq.logs import get_logger

try:
    from hiredis import pack_command
except ImportError:  # redis-py works without, so do we
    pack_command = None  # type: ignore[assignment]

logger = get_logger("celery_dlq.store")

Command = tuple[Any, ...]
Again = Callable[[], Sequence[Command]]
Lost = Callable[[], object]


def connect(url: str, timeout_seconds: float, *, retries: int = 1) -> Any:
    """A client for the URL; nothing is sent yet.

    Args:
        url: A Redis URL as Celery or redis-py writes it.
        timeout_seconds: Longest wait for a connection and for an answer.
        retries: How often a command is sent again after a lost connection. 0 where a
            command must not run twice.

    Raises:
        SettingsError: The URL cannot be used.
    """
    try:
        return redis.Redis.from_url(
            _redis_py_url(url),
            socket_timeout=timeout_seconds,
            socket_connect_timeout=timeout_seconds,
            retry=Retry(NoBackoff(), retries),
            client_name="celery_dlq",
            protocol=2,
        )
    except ValueError as exc:
        message = f"expected dlq_url to be a usable Redis URL, got {_safe(url)}: {exc}"
        raise SettingsError(message) from exc


def _safe(url: str) -> str:
    """The URL without its password, also when it is too odd to be taken apart."""
    try:
        return str(maybe_sanitize_url(url))
    except ValueError:
        return f"{url.partition('://')[0]}://…"


def _redis_py_url(url: str) -> str:
    """Celery's spellings of a Redis URL in redis-py's."""
    url = url.replace("redis+socket://", "unix://", 1) if url.startswith("redis+") else url
    for name in ("NONE", "OPTIONAL", "REQUIRED"):
        url = url.replace(f"ssl_cert_reqs=CERT_{name}", f"ssl_cert_reqs={name.lower()}")
    return url


def unavailable(exc: Exception, url: str) -> StoreUnavailable:
    """What to tell an operator when Redis does not do its work; never shows a password."""
    return StoreUnavailable(
        f"expected the store at {maybe_sanitize_url(url)} to answer, got {type(exc).__name__}: "
        f"{exc}; check that Redis runs there, is writable, and that dlq_url is right"
    )


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Turn what redis-py raises into `StoreUnavailable`.

    A refusal (read-only, full, loading, no permission, a key of another type) is as
    bad as silence: what was to be stored is not, and may be tried again once somebody
    mended it.
    """
    try:
        yield
    except NoScriptError:
        raise
    except (RedisError, OSError) as exc:
        raise unavailable(exc, url) from exc


class Breaker:
    """Remembers that Redis is down, so that not every task waits for a time-out.

    Args:
        rest_seconds: How long after a failure nothing is tried; doubles with every
            failure in a row.
        most_rest_seconds: Where the doubling ends.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        rest_seconds: float = 0.5,
        most_rest_seconds: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first_rest = rest_seconds
        self._most_rest = most_rest_seconds
        self._clock = clock
        self._rest = rest_seconds
        self._closed_at = 0.0
        self._reason: Exception | None = None

    @property
    def is_open(self) -> bool:
        """Whether Redis failed just now and is left alone."""
        return self._reason is not None and self._clock() < self._closed_at

    @property
    def reason(self) -> Exception:
        """The last failure."""
        return self._reason or ConnectionError("not connected")

    def failed(self, exc: Exception) -> None:
        """Note a failure."""
        self._reason = exc
        self._closed_at = self._clock() + self._rest
        self._rest = min(2 * self._rest, self._most_rest)

    def worked(self) -> None:
        """Note that Redis answered."""
        if self._reason is not None:
            self._reason = None
            self._rest = self._first_rest


class Wire:
    """One connection on which commands are written and replies are read later.

    Waiting for Redis would cost a healthy task most of what this plugin costs. So a
    command is written and its reply stays in the socket until some have gathered;
    errors are seen then. `call` waits, and because replies come in order, it sees
    the effect of everything that was written before.

    Safe to use from several threads. At most `_MOST_UNREAD` replies are outstanding.

    Args:
        client: Gives the connection's settings.
        url: For messages; its password is never shown.
        scripts: Texts of the scripts that will be called by digest; loaded with every new
            connection, so that a restarted Redis knows them.
        breaker: Shared memory of failures.
        failing: What to say when Redis does not take what is written.
    """

    _MOST_UNREAD = 64
    _LEFT_UNREAD = 8  # the newest may still be on their way: don't wait for them
    _LOG_SECONDS = 10.0

    def __init__(
        self,
        client: Any,
        url: str,
        scripts: Sequence[str] = (),
        breaker: Breaker | None = None,
        failing: str = "Deliveries are not counted now",
    ) -> None:
        self._failing = failing
        self._client = client
        self._loads: list[Command] = [("SCRIPT", "LOAD", text) for text in scripts]
        self._url = url
        self._breaker = breaker or Breaker()
        self._lock = threading.RLock()
        self._connection: Any = None
        self._unread: deque[tuple[Again | None, Lost | None]] = deque()
        self._logged_at = -self._LOG_SECONDS
        self.errors = 0

    def send(
        self, commands: Sequence[Command], again: Again | None = None, lost: Lost | None = None
    ) -> bool:
        """Write commands without waiting; never raises.

        Args:
            commands: Each a command with its arguments.
            again: Gives the commands to send instead when Redis lost its scripts; called for
                each command that was refused.
            lost: Called for each command that may not have reached Redis: it could not be
                written, or the connection broke before its reply came.

        Returns:
            Whether they were written. An error of the server shows later, in the log
            and in ``errors``.
        """
        with self._lock:
            try:
                self._write(commands, again, lost)
                if len(self._unread) >= self._MOST_UNREAD:
                    self._read(self._LEFT_UNREAD, or_all=True)
            except StoreUnavailable as exc:
                self._log(exc)
                return False
            except Exception:
                raise
            except BaseException:  # as in `_uninterrupted`, which costs each task more
                self._drop()
                raise
            return True

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, and no failure to rest from."""
        return self._connection is not None and not self._breaker.is_open

    def call(self, *command: Any, before: Command | None = None) -> Any:
        """Send one command and wait for its reply.

        Args:
            *command: The command.
            before: Another one that goes first, with the same write; if it is refused, so is
                this one.

        Raises:
            StoreUnavailable: Redis does not answer or refuses.
            NoScriptError: The script is not there.
        """
        with self._lock, self._uninterrupted(), translated(self._url):
            self._write([command] if before is None else [before, command], None)
            self._read(1 if before is None else 2)
            refused = None
            if before is not None:
                try:
                    self._one()
                except ResponseError as exc:
                    refused = exc
            reply = self._one()
            if refused is not None:
                raise refused
            return reply

    def _one(self) -> Any:
        """Read the reply of the oldest command."""
        self._unread.popleft()
        try:
            return self._connection.read_response()
        except ResponseError:
            raise
        except (RedisError, OSError) as exc:
            self._lost(exc)
            raise

    def call_script(
        self,
        digest: str,
        script: str,
        keys: Sequence[str],
        *args: Any,
        before: Command | None = None,
    ) -> Any:
        """`call` a script by its digest, and by its text when Redis does not know it."""
        try:
            return self.call("EVALSHA", digest, len(keys), *keys, *args, before=before)
        except NoScriptError:
            return self.call("EVAL", script, len(keys), *keys, *args, before=before)

    def flush(self) -> None:
        """Read all outstanding replies; never raises."""
        with self._lock:
            try:
                self._read(0)
            except StoreUnavailable as exc:
                self._log(exc)

    def close(self) -> None:
        """Read what is outstanding and disconnect; never raises."""
        with self._lock:
            self.flush()
            if self._connection is not None:
                with suppress(Exception):
                    self._connection.disconnect()
                self._connection = None

    def _write(
        self, commands: Sequence[Command], again: Again | None, lost: Lost | None = None
    ) -> None:
        if self._breaker.is_open:
            _tell(lost, len(commands))
            raise unavailable(self._breaker.reason, self._url) from self._breaker.reason
        loads: Sequence[Command] = ()
        try:
            if self._connection is None:
                self._connection = self._client.connection_pool.make_connection()
                self._connection.connect()
                loads = self._loads
            packed = self._packed([*loads, *commands] if loads else commands)
            self._connection.send_packed_command(packed, check_health=False)
        except (RedisError, OSError) as exc:
            _tell(lost, len(commands))
            self._lost(exc)
            raise unavailable(exc, self._url) from exc
        for _ in loads:
            self._unread.append((None, None))
        mine = again, lost
        for _ in commands:
            self._unread.append(mine)

    def _packed(self, commands: Sequence[Command]) -> list[bytes]:
        """As redis-py packs them, without its looks at each argument: these are all our own."""
        if pack_command is None:
            return list(self._connection.pack_commands(commands))
        packed = [pack_command(command) for command in commands]
        return packed if len(packed) == 1 else [b"".join(packed)]

    def _read(self, left: int, *, or_all: bool = False) -> None:
        """Read replies until ``left`` are outstanding.

        Args:
            left: How many may be left.
            or_all: None, if one must be sent again: else an end would overtake its start.
        """
        resend: list[tuple[Again, Lost | None]] = []
        while len(self._unread) > (0 if resend and or_all else left):
            again, lost = self._unread[0]
            try:
                self._connection.read_response()
            except NoScriptError:
                if again is not None:
                    resend.append((again, lost))
            except ResponseError as exc:
                self._log(unavailable(exc, self._url))
            except (RedisError, OSError) as exc:
                self._lost(exc)
                raise unavailable(exc, self._url) from exc
            self._unread.popleft()
        self._breaker.worked()
        for again, lost in resend:
            self._write(again(), None, lost)

    def _lost(self, exc: Exception) -> None:
        self._breaker.failed(exc)
        self._drop()

    @contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        """Ctrl-C or a signal may strike anywhere; nobody knows then how much was read."""
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        """Begin anew: replies of a connection that is gone must not be taken for others."""
        unread, self._unread = self._unread, deque()
        for _again, lost in unread:
            _tell(lost, 1)
        if self._connection is not None:
            with suppress(Exception):
                self._connection.disconnect()
            self._connection = None

    def _log(self, exc: Exception) -> None:
        """Say that Redis failed: at once, then at most every ten seconds."""
        self.errors += 1
        now = time.monotonic()
        if now - self._logged_at >= self._LOG_SECONDS:
            self._logged_at = now
            logger.error("%s: %s (error %d)", self._failing, exc, self.errors)


def _tell(lost: Lost | None, times: int) -> None:
    for _ in range(times if lost is not None else 0):
        lost()  # type: ignore[misc]
