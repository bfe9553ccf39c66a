"""The options of ``spark.read``, ``readStream`` and ``write`` with the format ``celery_dlq``.

Spark lower-cases the names and passes every value as text. All options are checked
when the DataFrame is made, not by the first task.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from typing import Any, TypeVar

from celery_dlq.errors import DLQError, SettingsError
from celery_dlq.letters import conditions, json_codec
from celery_dlq.letters.printable import url_without_secrets
from celery_dlq.letters.record import field_kinds
from celery_dlq.policies.checks import suggestion
from celery_dlq.store.address import Address, address_of

T = TypeVar("T", "ReadOptions", "WriteOptions")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """The options of ``spark.read.format("celery_dlq")`` and ``readStream``.

    Attributes:
        url: The Redis that keeps the letters, as the setting ``dlq_url``. Required. Plans,
            logs and errors never show it.
        usessl: The setting ``dlq_use_ssl`` as JSON; defaults to none.
        transportoptions: The setting ``dlq_transport_options`` as JSON; defaults to none.
        queue: Only this dead-letter queue; ``None``: all of them.
        keyprefix: The setting ``dlq_key_prefix``. Defaults to ``dlq``.
        columns: Only these columns, in this order, separated by commas; by default all.
            Spark does not pass the columns it needs to a Python source: without this
            option, bodies and tracebacks are read, too.
        since: Only letters dead-lettered at or after this ISO 8601 time (UTC if it has no
            offset).
        until: Only letters dead-lettered before it.
        where: Only letters for which these conditions on arguments and headers hold, e.g.
            ``kwargs.tenant=42``, as with ``dlq list --where``; several on a line each.
        partitions: Number of tasks that read one queue, 64 at most; 0: one per 20,000
            letters. Defaults to 0.
        clockskewseconds: Largest difference of clocks, in seconds: reading begins this long
            before ``since`` in the stream. Defaults to 3600.
        timeoutseconds: Longest wait for a reply of Redis, in seconds; 0: no limit. Defaults
            to 10.
        startingoffset: Streams only: the start of a stream without a checkpoint,
            ``earliest`` or ``latest``. Defaults to ``earliest``.
        maxletterspertrigger: Streams only: most letters in a micro-batch; 0: no limit.
            Defaults to 0.
    """

    url: str
    usessl: Mapping[str, Any] | bool | None = None
    transportoptions: Mapping[str, Any] = field(default_factory=dict)
    queue: str | None = None
    keyprefix: str = "dlq"
    columns: tuple[str, ...] = tuple(field_kinds())
    since: datetime | None = None
    until: datetime | None = None
    where: tuple[str, ...] | None = None
    partitions: int = 0
    clockskewseconds: float = 3600.0
    timeoutseconds: float = 10.0
    startingoffset: str = "earliest"
    maxletterspertrigger: int = 0

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> ReadOptions:
        """Check the options of a reader.

        Raises:
            SettingsError: One is missing, unknown or has an unusable value.
        """
        parsed = _parsed(cls, options, _READ)
        _ = parsed.address
        return parsed

    @property
    def address(self) -> Address:
        """Where the letters are.

        Raises:
            SettingsError: The URL, or what goes with it, cannot be used.
        """
        return address_of(
            self.url,
            "the option 'url'",
            use_ssl=self.usessl,
            options=self.transportoptions,
            options_where="the option 'transportOptions'",
        )

    @property
    def place(self) -> str:
        """The URL without user, password and options."""
        return url_without_secrets(self.url)

    def __repr__(self) -> str:
        """Leave out the password."""
        return f"ReadOptions(url={self.place!r}, queue={self.queue!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """The options of ``df.write.format("celery_dlq")``.

    Attributes:
        app: The Celery app as for ``celery -A``, e.g. ``proj`` or ``proj.app:app``; the
            driver must be able to import it. Required.
        queue: The dead-letter queue of all rows; ``None``: the column
            ``dead_letter_queue`` names it.
        maxdecisions: Most rows in one write: the driver holds all of them in memory.
            Defaults to 1,000,000.
    """

    app: str
    queue: str | None = None
    maxdecisions: int = 1_000_000

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> WriteOptions:
        """Check the options of a writer.

        Raises:
            SettingsError: One is missing, unknown or has an unusable value.
        """
        return _parsed(cls, options, _WRITE)


def _parsed(kind: type[T], options: Mapping[str, str], known: Mapping[str, _Parse]) -> T:
    values: dict[str, Any] = {}
    for name, value in options.items():
        parse = known.get(name.lower())
        if parse is None:
            raise SettingsError(
                f"expected an option of the format celery_dlq, got {name!r}; "
                f"{suggestion(name.lower(), known)}"
            )
        values[name.lower()] = parse(name.lower(), value)
    required = fields(kind)[0].name
    if not values.get(required):
        raise SettingsError(
            f"expected the option {required!r} to be set, got none; {_HINTS[required]}"
        )
    return kind(**values)


def _json(name: str, value: str) -> Any:
    try:
        found = json.loads(value)
    except ValueError:
        found = None
    if not isinstance(found, dict) and not (name == "usessl" and isinstance(found, bool)):
        raise SettingsError(f"expected the option {name!r} to be a JSON object, got something else")
    return found


def _text(name: str, value: str) -> str:
    if not value:
        raise SettingsError(f"expected the option {name!r} to be a name, got an empty text")
    return value


def _conditions(name: str, value: str) -> tuple[str, ...]:
    lines = [line for line in value.split("\n") if line.strip()]
    if not lines:
        raise SettingsError(
            f"expected the option {name!r} to be conditions such as kwargs.tenant=42, got none"
        )
    try:
        return conditions.checked(lines)
    except DLQError as exc:
        raise SettingsError(f"in the option {name!r}: {exc}") from None


def _columns(name: str, value: str) -> tuple[str, ...]:
    columns = tuple(part.strip() for part in value.split(","))
    known = field_kinds()
    for column in columns:
        if column not in known:
            raise SettingsError(
                f"expected the option {name!r} to name columns of a letter, got {column!r}; "
                f"{suggestion(column, known)}"
            )
    if len(set(columns)) != len(columns):
        raise SettingsError(f"expected the option {name!r} to name each column once, got {value!r}")
    return columns


def _moment(name: str, value: str) -> datetime:
    try:
        moment = json_codec.moment(value.strip())
    except ValueError:
        raise SettingsError(
            f"expected the option {name!r} to be an ISO 8601 time, got {value!r}"
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)


def _count(name: str, value: str) -> int:
    if not (value.strip().isascii() and value.strip().isdigit()):
        raise SettingsError(
            f"expected the option {name!r} to be a whole number of 0 or more, got {value!r}"
        )
    return int(value)


def _seconds(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise SettingsError(
            f"expected the option {name!r} to be a number of seconds, got {value!r}"
        )
    return number


def _offset(name: str, value: str) -> str:
    if value.lower() not in {"earliest", "latest"}:
        raise SettingsError(f"expected the option {name!r} to be earliest or latest, got {value!r}")
    return value.lower()


_Parse = Callable[[str, str], Any]
_READ: Mapping[str, _Parse] = {
    "url": _text,
    "usessl": _json,
    "transportoptions": _json,
    "queue": _text,
    "keyprefix": _text,
    "columns": _columns,
    "since": _moment,
    "until": _moment,
    "where": _conditions,
    "partitions": _count,
    "clockskewseconds": _seconds,
    "timeoutseconds": _seconds,
    "startingoffset": _offset,
    "maxletterspertrigger": _count,
}
_WRITE: Mapping[str, _Parse] = {"app": _text, "queue": _text, "maxdecisions": _count}
_HINTS = {
    "url": "set it to the Redis that keeps the letters, e.g. redis://host:6379/0",
    "app": "set it to the argument of celery -A, e.g. proj.app:app",
}
