"""The dead-letter record: one definition that Redis, Parquet, JSON and Spark follow.

The rules of the schema: a field is never renamed and never re-used; new fields are
optional; a reader keeps the fields it does not know (``extra``) and writes them
back. ``tests/wire`` holds golden records of every version.

Storage form ("fields"): a flat mapping of name to bytes, one entry per field,
``None`` left out. Times are microseconds since 1970 in UTC as decimal digits,
so that the exporter can move whole columns without decoding a value.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from enum import Enum, Flag, auto
from functools import cache, partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints
from uuid import UUID, uuid5

from celery_dlq.errors import CorruptLetter
from celery_dlq.letters import json_codec

__all__ = [
    "SCHEMA_VERSION",
    "DeadLetter",
    "Delivery",
    "Outcome",
    "Reason",
    "from_micros",
]

SCHEMA_VERSION = 1

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)
FIRST_MICROS = (datetime.min.replace(tzinfo=timezone.utc) - EPOCH) // _MICROSECOND
LAST_MICROS = (datetime.max.replace(tzinfo=timezone.utc) - EPOCH) // _MICROSECOND

# Letter ids are derived, not random: storing a letter twice finds the first.
_LETTER_NAMESPACE = UUID("6f1f8f4e-2a0e-5f53-9d0c-6b1f6a2f5d11")


class TextEnum(str, Enum):
    """Members are their values, as text too: `enum.StrEnum`, which Python 3.10 has not."""

    __str__ = str.__str__


class About(Flag):
    """What is true of all deaths of a reason."""

    REGISTERED = auto()  # The task's name is one of the app's own
    ANY_NAME = auto()  # Whoever can publish chooses the task's name: it is no label of a metric
    LETHAL = auto()  # It cost a worker process, or its time


REGISTERED, ANY_NAME, LETHAL = About
_NOT_SAID = About(0)


class Reason(TextEnum):
    """Why a message died: a closed list, the same in Redis, Parquet, metrics, CLI and pages.

    A member is its text, what is true of all its deaths, and its colour on the pages.
    """

    about: About
    colour: str

    def __new__(cls, value: str, about: About = _NOT_SAID, colour: str = "") -> Reason:  # noqa: PYI034 - Python 3.10
        """Make a member. The defaults are for type checkers, which read ``Reason(value)`` so."""
        made = str.__new__(cls, value)
        made._value_, made.about, made.colour = value, about, colour
        return made

    MAX_DELIVERIES_EXCEEDED = "max_deliveries_exceeded", REGISTERED | LETHAL, "#c8553d"
    MAX_RETRIES_EXCEEDED = "max_retries_exceeded", REGISTERED, "#6797bf"
    FAILED = "failed", REGISTERED, "#4478b0"
    REJECTED = "rejected", REGISTERED, "#6064c8"
    TIME_LIMIT_EXCEEDED = "time_limit_exceeded", REGISTERED | LETHAL, "#b9752a"
    WORKER_LOST = "worker_lost", REGISTERED | LETHAL, "#b5476b"
    EXPIRED = "expired", REGISTERED, "#4f8f62"
    UNKNOWN_TASK = "unknown_task", ANY_NAME, "#7f66a8"
    INVALID_MESSAGE = "invalid_message", ANY_NAME, "#9a78b8"
    UNDECODABLE_MESSAGE = "undecodable_message", ANY_NAME, "#a8659f"
    RETRY_NOT_PUBLISHED = "retry_not_published", REGISTERED, "#3f7d74"
    ADOPTED = "adopted", ANY_NAME, "#93774f"
    OPERATOR = "operator", REGISTERED, "#6f8a2f"
    # Not a death: only of messages that wait in the queue of a hold
    HELD = "held", REGISTERED, "#7f7a70"


class Outcome(TextEnum):
    """How one delivery ended."""

    FAILED = "failed"
    RETRIED = "retried"
    REJECTED = "rejected"
    REQUEUED = "requeued"
    TIME_LIMIT = "time_limit"
    WORKER_LOST = "worker_lost"
    SHUTDOWN = "shutdown"
    VANISHED = "vanished"


def check_aware(name: str, value: datetime | None) -> None:
    """Refuse a datetime without a time zone: it would be read as some other hour.

    Raises:
        ValueError: ``value`` is naive.
    """
    if value is not None and value.tzinfo is None:
        raise ValueError(
            f"expected {name} to be an aware datetime, got the naive {value.isoformat()}"
        )


def to_micros(value: datetime) -> int:
    """Microseconds since 1970, exact (no float on the way); negative before 1970.

    What a time zone puts before year 1 or after 9999 in UTC is the nearest time that there is.
    """
    return max(FIRST_MICROS, min((value - EPOCH) // _MICROSECOND, LAST_MICROS))


def from_micros(micros: int) -> datetime:
    """The aware UTC datetime of `to_micros`."""
    return EPOCH + micros * _MICROSECOND


def iso(value: datetime | None) -> str | None:
    """ISO 8601 in UTC with microseconds, or ``None``."""
    if value is None:
        return None
    if value.tzinfo is not timezone.utc:
        value = from_micros(to_micros(value))
    return value.isoformat("T", "microseconds")


_R = TypeVar("_R", bound="Recorded")


class Recorded:
    """A record that Redis keeps as JSON, with times in microseconds; people read ISO 8601."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping with the attribute names."""
        return _mapping(self, iso)

    def to_stored(self) -> dict[str, Any]:
        """As `to_json`, with times in microseconds since 1970."""
        return _mapping(self, to_micros)

    @classmethod
    def from_stored(cls: type[_R], value: Mapping[str, Any]) -> _R:  # noqa: PYI019 - Python 3.10
        """Read what `to_stored` wrote; keys of later versions are skipped."""
        return _read(cls, value, lambda micros: from_micros(int(micros)))  # type: ignore[no-any-return]


def _read(cls: Any, value: Mapping[str, Any], time: Callable[[Any], datetime]) -> Any:
    known: dict[str, Any] = {}
    for name, kind in _readers(cls).items():
        if name in value:
            read = time if kind is datetime else kind
            known[name] = None if value[name] is None else read(value[name])
    return cls(**known)


def _mapping(record: Any, time: Callable[[datetime], Any]) -> dict[str, Any]:
    return {name: _plain_value(value, time) for name, value in dataclasses.asdict(record).items()}


def _plain_value(value: Any, time: Callable[[datetime], Any]) -> Any:
    if value is None or type(value) in (str, int):  # nearly always
        return value
    if isinstance(value, datetime):
        return time(value)
    return list(value) if isinstance(value, tuple) else _unchanged(value)


@cache
def _readers(cls: Any) -> dict[str, Any]:
    """What makes the value of each field of JSON, which has no times, tuples and enumerations."""
    hints = get_type_hints(cls)
    return {field.name: _reader_of(hints[field.name]) for field in dataclasses.fields(cls)}


def _reader_of(hint: Any) -> Any:
    optional = type(None) in get_args(hint)
    for one in get_args(hint) if optional else (hint,):
        if one in (datetime, int) or (isinstance(one, type) and issubclass(one, Enum)):
            return one
    return tuple if get_origin(hint) is tuple else lambda value: value


_UNREADABLE = (KeyError, TypeError, ValueError, OverflowError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One start of execution of a message, and how it ended.

    Attributes:
        number: Which delivery of its message this was, from 1.
        retries: The message's ``retries`` header: 0 for the first message of the task.
        started_at: When it was dispatched, aware UTC.
        ended_at: When its outcome was seen; ``None`` if nobody was left to see it.
        worker_hostname: Node name of the worker, e.g. ``celery@web-1``.
        worker_pid: Process that ran it: the pool child when it was known, else the worker itself.
        outcome: How it ended; ``None`` while it runs.
        exception_type: Qualified name of what was raised, if anything was.
        exception_message: Its text, capped.
        release: Version of the code that ran it: the setting ``dlq_release``.
    """

    number: int
    retries: int = 0
    started_at: datetime
    ended_at: datetime | None = None
    worker_hostname: str
    worker_pid: int | None = None
    outcome: Outcome | None = None
    exception_type: str | None = None
    exception_message: str | None = None
    release: str | None = None

    def __post_init__(self) -> None:
        if self.started_at.tzinfo is None or self.ended_at is not None:  # every task pays for this
            check_aware("started_at", self.started_at)
            check_aware("ended_at", self.ended_at)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping; times as ISO 8601 in UTC."""
        shown = {name: _plain_value(getattr(self, name), iso) for name in self.__slots__}
        if self.release is None:  # as before there was a release
            del shown["release"]
        return shown

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Delivery:
        """Read what `to_json` wrote; keys of later versions are skipped."""
        return _read(cls, {"worker_hostname": "", **value}, json_codec.moment)  # type: ignore[no-any-return]


_HISTORY = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)


def _encode(text: str) -> bytes:
    # Text of odd origin may hold lone surrogates. They must neither stop a letter
    # nor become bytes that Parquet readers refuse, so they are spelled out.
    return str(text).encode("utf-8", "backslashreplace")


def _decode(value: bytes) -> str:
    return value.decode("utf-8", "replace")


def _unchanged(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _json_from(value: bytes) -> str:
    text = _decode(value)
    json.loads(text)  # unreadable JSON is found here, not by who asks for its value
    return text


def _history_json(history: tuple[Delivery, ...]) -> list[dict[str, Any]]:
    return [delivery.to_json() for delivery in history]


class _Form(NamedTuple):
    """How the values of one kind are written and read."""

    stored: Callable[[Any], bytes]  # The form in Redis
    read: Callable[[bytes], Any]  # The value of a form in Redis
    shown: Callable[[Any], Any]  # The form in JSON
    column: str  # The type in Parquet and SQL: a field of `celery_dlq.letters.dialects.Dialect`
    in_redis: str  # What the reference says of the form in Redis, and of that in JSON
    in_json: str


class Kind(_Form, Enum):
    """What a field holds; its forms in Redis, JSON, Parquet, Spark and SQL follow."""

    TEXT = _Form(
        lambda value: _encode(value if type(value) is str else _unchanged(value)),
        *(_decode, _unchanged, "text", "UTF-8", "string"),
    )
    INTEGER = _Form(b"%d".__mod__, int, _unchanged, "integer", "decimal digits", "number")
    BOOLEAN = _Form(
        {True: b"true", False: b"false"}.__getitem__,
        {b"true": True, b"false": False}.__getitem__,
        *(_unchanged, "boolean", "`true` or `false`", "`true` or `false`"),
    )
    TIME = _Form(
        lambda value: b"%d" % to_micros(value),
        lambda value: from_micros(int(value)),
        *(iso, "time", "microseconds since 1970, UTC", "ISO 8601 text, UTC, microseconds"),
    )
    BYTES = _Form(
        *(bytes, bytes, lambda value: base64.b64encode(value).decode("ascii")),
        *("bytes", "the bytes", "base64 text"),
    )
    JSON = _Form(_encode, _json_from, json.loads, "text", "JSON text", "nested value")
    HISTORY = _Form(
        lambda value: _encode(_HISTORY.encode(_history_json(value))),
        lambda value: tuple(Delivery.from_json(item) for item in json.loads(value)),
        *(_history_json, "text", "JSON text", "list of objects, see below"),
    )


class Use(Flag):
    """How a field of the record is kept; a stream entry has it inline, or compressed if it is long.

    See `celery_dlq.letters.packing`.
    """

    PLAIN = auto()  # A field of the stream entry, for scripts and people
    MESSAGE = auto()  # A redrive needs it: inline, unless the whole message is small
    COMPRESSED = auto()  # Compressed in the entry, for people only
    REPEATS = auto()  # Parquet has a dictionary of its values
    FILTERED = auto()  # Parquet has statistics of it, by which readers skip row groups
    SENT = auto()  # A redrive reads it, too: of a file only such, and what every letter has


PLAIN, MESSAGE, COMPRESSED, REPEATS, FILTERED, SENT = Use
_NO_USE, _REQUIRED = Use(0), dataclasses.MISSING


class Field(NamedTuple):
    """What packing, Parquet, Spark and JSON know of one field of the record."""

    kind: Kind
    doc: str
    use: Use
    within: str | None  # The field that its value is usually a part of
    same_as: str | None  # The field that usually has the same value


def _field(
    kind: Kind,
    doc: str,
    use: Use = _NO_USE,
    *,
    within: str | None = None,
    same_as: str | None = None,
    default: Any = None,
) -> Any:
    return field(default=default, metadata={"field": Field(kind, doc, use, within, same_as)})


_text = partial(_field, Kind.TEXT)
_time = partial(_field, Kind.TIME)
_integer = partial(_field, Kind.INTEGER)
_boolean = partial(_field, Kind.BOOLEAN)
_json = partial(_field, Kind.JSON)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A message that will not be tried again, with the reason, the time and its history.

    ``headers``, ``properties`` and ``native_death`` hold JSON text (see
    `celery_dlq.letters.json_codec`); `decoded` gives their values. ``body`` is the message
    body as it was received, never unpickled by anything but a worker. What each field
    says is in its ``doc``.
    """

    schema_version: int = _integer("Version of this record.", default=SCHEMA_VERSION)
    id: str = _text(
        "The letter's own id, made from its queue and message: stored twice, it is one letter.",
        PLAIN | FILTERED,
        default=_REQUIRED,
    )
    task_id: str = _text(
        "Id of the task, as Celery gave it. Empty if the message has none.",
        FILTERED,
        within="headers",
        default=_REQUIRED,
    )
    task_name: str = _text(
        "Registered name of the task. Empty if the message has none.",
        REPEATS | FILTERED,
        default=_REQUIRED,
    )
    source_queue: str = _text(
        "Queue that the message came from. Empty if it is not known.",
        REPEATS | FILTERED,
        default=_REQUIRED,
    )
    dead_letter_queue: str = _text("Queue that it is in.", REPEATS | FILTERED, default=_REQUIRED)
    reason: Reason = _text("Why the message died.", PLAIN | REPEATS | FILTERED, default=_REQUIRED)
    description: str = _text(
        "What the rejecter said, or the exception's message.", REPEATS, default=""
    )
    dead_lettered_at: datetime = _time("When it died.", PLAIN | FILTERED, default=_REQUIRED)
    published_at: datetime | None = _time(
        "When its task was first published, by the publisher's clock; retries and redrives keep "
        "it. Empty if the publisher has no celery_dlq.",
        FILTERED,
    )
    first_delivered_at: datetime | None = _time("When its first delivery began.", FILTERED)
    deliveries: int = _integer("How often it was delivered.", FILTERED, default=0)
    retries: int = _integer(
        "Its retry number: 0 for the first message of a task.", FILTERED, default=0
    )
    redrives: int = _integer("How often it was redriven before.", FILTERED | SENT, default=0)
    max_deliveries: int | None = _integer("The limit that held when it died.")
    max_retries: int | None = _integer("The limit that held when it died.")
    exception_type: str | None = _text("Full name of what was raised.", REPEATS | FILTERED | SENT)
    exception_message: str | None = _text("Its text; capped.", REPEATS, same_as="description")
    traceback: str | None = _text("Where it was raised; capped.", COMPRESSED | REPEATS)
    fingerprint: str = _text(
        "Hash of the cause: the letters of one group share it.",
        PLAIN | REPEATS | FILTERED,
        default=_REQUIRED,
    )
    history: tuple[Delivery, ...] = _field(
        Kind.HISTORY, "Its deliveries, oldest first; capped.", COMPRESSED, default=()
    )
    exchange: str = _text("Exchange that it was published to.", REPEATS, default="")
    routing_key: str = _text("Its routing key.", REPEATS, same_as="source_queue", default="")
    content_type: str = _text("The body's type: ``application/json``.", REPEATS | SENT, default="")
    content_encoding: str = _text("The body's encoding: ``utf-8``.", REPEATS | SENT, default="")
    headers: str = _json("All headers of the message.", MESSAGE, default="{}")
    properties: str = _json("All properties of the message.", MESSAGE | REPEATS, default="{}")
    body: bytes = _field(Kind.BYTES, "The body as received; may be pickle.", PLAIN, default=b"")
    args_json: str | None = _text(
        "Positional arguments, if the body is JSON, compressed or not.", REPEATS, within="body"
    )
    kwargs_json: str | None = _text(
        "Keyword arguments, if the body is JSON, compressed or not.", within="body"
    )
    argsrepr: str | None = _text(
        "Celery's description of the positional arguments; cut by Celery.",
        REPEATS,
        within="headers",
    )
    kwargsrepr: str | None = _text(
        "Celery's description of the keyword arguments; cut by Celery.", within="headers"
    )
    root_id: str | None = _text("Id of the first task of the workflow.", same_as="task_id")
    parent_id: str | None = _text("Id of the task that sent it.")
    group_id: str | None = _text("Id of the group it belongs to.")
    origin: str | None = _text("Process that published it, e.g. ``gen4711@web-1``.", REPEATS)
    worker_hostname: str | None = _text(
        "Node name of the worker that saw it die.", REPEATS | FILTERED
    )
    worker_pid: int | None = _integer("Process that ran its last delivery.")
    eta: datetime | None = _time("When it was to run.")
    expires: datetime | None = _time("When it was to expire.", SENT)
    release: str | None = _text(
        "Version of the code that ran its last delivery: the setting ``dlq_release``.",
        REPEATS | FILTERED,
    )
    sentry_event_id: str | None = _text("Event that Sentry got of it.")
    native_death: str | None = _json(
        "What the broker said of it, when the letter was adopted.", COMPRESSED
    )
    extra: Mapping[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _TIMES:
            if (value := getattr(self, name)) is not None:  # every letter has two of six
                check_aware(name, value)

    def decoded(self, name: str) -> Any:
        """The value of a JSON field (``headers``, ``properties``, ``native_death``)."""
        text = getattr(self, name)
        return None if text is None else json_codec.loads(text)

    def to_fields(self) -> dict[str, bytes]:
        """The storage form: every field that is set, by name."""
        fields = {
            name: stored(value)
            for (name, stored), value in zip(_STORED, _VALUES(self), strict=True)
            if value is not None
        }
        return {**self.extra, **fields} if self.extra else fields

    @classmethod
    def from_fields(cls, fields: Mapping[str, bytes]) -> DeadLetter:
        """Read the storage form of this or another schema version.

        Raises:
            CorruptLetter: A required field is missing or one cannot be read.
        """
        try:
            known, extra = {}, {}
            for name, value in fields.items():
                if name in _KINDS:
                    known[name] = _KINDS[name].read(value)
                else:
                    extra[name] = value
            known["reason"] = Reason(known["reason"])
            return cls(**known, extra=extra)
        except _UNREADABLE as exc:
            raise CorruptLetter(
                f"expected a dead letter, got an entry that cannot be read ({exc!r})"
            ) from exc

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping with the record's field names.

        Times are ISO 8601 in UTC, ``headers``, ``properties``, ``history`` and
        ``native_death`` are nested, and ``body`` is base64, because a body may be
        any bytes.
        """
        return {
            name: None if (value := getattr(self, name)) is None else kind.shown(value)
            for name, kind in _KINDS.items()
        }


@cache
def record_fields() -> dict[str, Field]:
    """Every field of the record by name, in the order of the schema."""
    all_fields = dataclasses.fields(DeadLetter)
    return {f.name: f.metadata["field"] for f in all_fields if f.metadata}


@cache
def field_kinds() -> dict[str, Kind]:
    """Name and kind of every field of the record, in the order of the schema."""
    return {name: facts.kind for name, facts in record_fields().items()}


def letter_id(
    dead_letter_queue: str,
    task_id: str,
    retries: int,
    redrives: int,
    nesting: int = 0,
    publication: str = "",
) -> str:
    """The id of the letter of one message: the same message always gets the same id.

    A worker that dies between storing a letter and acknowledging the message
    stores it a second time; the equal id makes that one letter. Another message
    with the same task id is another publication, and gets a letter of its own.
    """
    further = [nesting, publication] if publication else [nesting] if nesting else []
    key = json.dumps([dead_letter_queue, task_id, retries, redrives, *further])
    return str(uuid5(_LETTER_NAMESPACE, key))


def end_of(letter: DeadLetter) -> datetime | None:
    """The time at which a letter ends because its message would have expired.

    ``None`` if the message had no expiry, or was past it when it died: such a letter
    would end before anybody could see it.
    """
    if letter.expires is None or letter.expires <= letter.dead_lettered_at:
        return None
    return letter.expires


_KINDS = field_kinds()
_STORED = tuple((name, kind.stored) for name, kind in _KINDS.items())
_VALUES = attrgetter(*_KINDS)
TEXTLESS = frozenset(name for name, kind in _KINDS.items() if kind.column not in {"text", "bytes"})
"""Fields whose values can hide no text, whatever a publisher wrote."""
_TIMES = tuple(name for name, kind in _KINDS.items() if kind is Kind.TIME)
REQUIRED_FIELDS = frozenset(
    f.name.encode() for f in dataclasses.fields(DeadLetter) if f.metadata and f.default is _REQUIRED
)
"""Fields that every letter has, in all versions of the record."""
REDRIVEN_FIELDS = {name.decode() for name in REQUIRED_FIELDS} | {
    name for name, facts in record_fields().items() if facts.use & (PLAIN | MESSAGE | SENT)
}
