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
_NO_REPLY: Command = ("CLIENT", "REPLY", "SKIP")  # to the command that follows
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
    """One connection on which commands are written, most of them without an answer.

    Waiting for Redis would cost a healthy task most of what this plugin costs. So `tell` writes
    commands to which Redis does not reply, and `call` waits for a reply; because Redis takes
    commands in order, it sees the effect of everything that was told before, and confirms it.

    No reply means also that what was told arrives when this process is killed right afterwards:
    Redis lets go of a client to which it cannot write, with all that it has not read yet of what
    the client wrote.

    Safe to use from several threads.

    Args:
        client: Gives the connection's settings.
        url: For messages; its password is never shown.
        breaker: Shared memory of failures.
        failing: What to say when Redis does not take what is written.
    """

    _MOST_TOLD = 64  # that may have to be told again; the next one waits for a reply
    _LOG_SECONDS = 10.0

    def __init__(
        self,
        client: Any,
        url: str,
        breaker: Breaker | None = None,
        failing: str = "Deliveries are not counted now",
    ) -> None:
        self._failing = failing
        self._client = client
        self._url = url
        self._breaker = breaker or Breaker()
        self._lock = threading.RLock()
        self._connection: Any = None
        self._unconfirmed: deque[Lost] = deque()
        self._logged_at = -self._LOG_SECONDS
        self.errors = 0

    def tell(self, commands: Sequence[Command], lost: Lost | None = None) -> bool:
        """Write commands to which Redis does not reply; never raises.

        An error of the server is not seen: a script is sent as its text, and something else
        must ask now and then whether Redis takes writes; see `probe`.

        Args:
            commands: Each a command with its arguments.
            lost: Called if they may not have reached Redis: they could not be written, or the
                connection broke before a later command was answered.

        Returns:
            Whether they were written.

        Source: https://redis.io/docs/latest/commands/client-reply/
        """
        with self._lock:
            try:
                self._write([part for command in commands for part in (_NO_REPLY, command)], lost)
                if lost is not None:
                    self._unconfirmed.append(lost)
                    if len(self._unconfirmed) >= self._MOST_TOLD:
                        self.probe("PING")
            except StoreUnavailable as exc:
                self._log(exc)
                return False
            except Exception:
                raise
            except BaseException:  # as in `_uninterrupted`, which costs each task more
                self._drop()
                raise
            return True

    def probe(self, *command: Any) -> bool:
        """Wait for the reply to a command, and log if Redis does not take it; never raises."""
        try:
            self.call(*command)
        except (StoreUnavailable, NoScriptError) as exc:
            self._log(exc)
            return False
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
            self._write([command] if before is None else [before, command])
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

    def close(self) -> None:
        """Disconnect when what was told has arrived; never raises."""
        with self._lock:
            if self._unconfirmed:
                self.probe("PING")
            if self._connection is not None:
                with suppress(Exception):
                    self._connection.disconnect()
                self._connection = None

    def _write(self, commands: Sequence[Command], lost: Lost | None = None) -> None:
        if self._breaker.is_open:
            _tell(lost)
            raise unavailable(self._breaker.reason, self._url) from self._breaker.reason
        try:
            if self._connection is None:
                self._connection = self._client.connection_pool.make_connection()
                self._connection.connect()
            self._connection.send_packed_command(self._packed(commands), check_health=False)
        except (RedisError, OSError) as exc:
            _tell(lost)
            self._lost(exc)
            raise unavailable(exc, self._url) from exc

    def _packed(self, commands: Sequence[Command]) -> list[bytes]:
        """As redis-py packs them, without its looks at each argument: these are all our own."""
        if pack_command is None:
            return list(self._connection.pack_commands(commands))
        packed = [pack_command(command) for command in commands]
        return packed if len(packed) == 1 else [b"".join(packed)]

    def _one(self) -> Any:
        """Read a reply: all that was written before its command has arrived."""
        try:
            return self._connection.read_response()
        except ResponseError:
            raise
        except (RedisError, OSError) as exc:
            self._lost(exc)
            raise
        finally:
            if self._connection is not None:
                self._unconfirmed.clear()
                self._breaker.worked()

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
        unconfirmed, self._unconfirmed = self._unconfirmed, deque()
        for lost in unconfirmed:
            _tell(lost)
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


def _tell(lost: Lost | None) -> None:
    if lost is not None:
        lost()
