"""Rebuild the original message from a letter."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict
from uuid import uuid4

from celery_dlq.errors import CorruptLetter, DLQError, RedriveError
from celery_dlq.letters import json_codec
from celery_dlq.letters.headers import (
    BROKER_PREFIXES,
    EARLIER_HEADER,
    HOLD_HEADER,
    LETTER_HEADER,
    PUBLICATION_HEADER,
    REDELIVERED,
    REDRIVE_HEADER,
    REDRIVEN_AT_HEADER,
    REDRIVES_HEADER,
    is_of_broker,
    is_publication,
    named_after,
)
from celery_dlq.letters.packing import INLINE
from celery_dlq.letters.record import from_micros, iso
from celery_dlq.letters.redriven import MAX_LIVES, OF_ONE_PUBLICATION, REDRIVE_HEADERS, lives_of
from celery_dlq.operations.job import JobOptions
from celery_dlq.operations.redrive.select import RawEntry
from celery_dlq.store.records import Seed

if TYPE_CHECKING:
    from celery_dlq.operations.files import ExportedFiles

_STALE = (REDELIVERED, *OF_ONE_PUBLICATION)
_CHANGED = frozenset({*_STALE, *REDRIVE_HEADERS})  # a text of headers with one cannot be kept
# kombu sets these for each publish; an expiration would begin anew, and end what is no letter.
_TRANSPORT_PROPERTIES = {
    *("delivery_info", "delivery_tag", "body_encoding", "content_type", "content_encoding"),
    *("application_headers", "expiration"),
}

_MAX_CANARY = 1000
_MAX_LIFE_CHARS = 200
# The properties as kombu's Redis transport has them: all but the ids are the same in many messages
_PROPERTIES = re.compile(
    r'\{"correlation_id":"([^"\\]*)"(,.{0,800}),"delivery_tag":"[^"\\]*"\}', re.DOTALL
).fullmatch

_decode, _encode = json.JSONDecoder().raw_decode, json.JSONEncoder().encode


class RedriveKeys(TypedDict, total=False):
    """The options of a redrive as users give them; `DeadLetters.redrive` says what they mean."""

    rate: float | None
    at_most: int | None
    limit: int | None
    to_queue: str | None
    delay: float | timedelta
    new_id: bool
    keep_count: bool
    force: bool
    canary: int | None
    max_failures: int
    canary_wait: float | timedelta
    note: str
    files: str | ExportedFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """The options of a canary."""

    letters: int  # Number of letters to redrive first
    max_failures: int = 0  # Continue if at most this many of them die again or do not end in time
    wait_seconds: float = 60.0  # Seconds to watch them
    passed: bool = False  # True in a job whose canary passed: resumed, it needs no other

    def __post_init__(self) -> None:
        if not 1 <= self.letters <= _MAX_CANARY:
            raise DLQError(f"expected canary to be 1 to {_MAX_CANARY} letters, got {self.letters}")
        if self.max_failures < 0:
            raise DLQError(f"expected max_failures to be 0 or more, got {self.max_failures}")
        if not 0 < self.wait_seconds < float("inf"):
            raise DLQError(
                f"expected canary_wait to be more than 0 seconds, got {self.wait_seconds}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RedriveOptions(JobOptions):
    """The options of a redrive."""

    rate: float | None = None  # At most this many letters per second; `None` for no limit
    to_queue: str | None = None  # Publish to this queue; `None` for each message's own
    delay_seconds: float = 0.0  # Seconds before the messages may run
    new_id: bool = False  # Give each task a new id
    # Count earlier deliveries: a message is executed as often as its `max_deliveries` has left;
    # if none is left, its letter stays
    keep_count: bool = False
    force: bool = False  # Publish also what would be lost; with `keep_count`, for one more delivery
    # Publish while less than so many of its messages wait or run; `None` for no such bound
    at_most: int | None = None
    # Publish one letter in the first second, about twice as many in each later one
    growing: bool = False
    canary: Canary | None = None  # Redrive a few letters first; `None` for no canary
    due: Mapping[str, Any] | None = None  # Of the letters that are due by a policy, only these
    marker: str = ""  # Names a release in the headers of its messages; by default the hold
    changed: Sequence[str] = ()  # The paths that an edit changed
    files: str = ""  # The folder of an export whose letters are redriven; empty: those in Redis
    files_end: str = ""  # Its newest file when the job was made; later ones are left out

    def __post_init__(self) -> None:
        JobOptions.__post_init__(self)  # `super()` fails in a class with slots
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise DLQError(f"expected rate to be more than 0 letters a second, got {self.rate}")
        if self.at_most is not None and not 1 <= self.at_most <= _MAX_CANARY:
            raise DLQError(
                f"expected at_most to be 1 to {_MAX_CANARY} messages, got {self.at_most}"
            )
        if not 0 <= self.delay_seconds < float("inf"):
            raise DLQError(f"expected delay to be 0 seconds or more, got {self.delay_seconds}")
        if self.to_queue is not None and not self.to_queue.strip():
            raise DLQError(f"expected to_queue to be the name of a queue, got {self.to_queue!r}")

    @classmethod
    def of(
        cls,
        *,
        delay: float | timedelta = 0,
        canary: int | None = None,
        max_failures: int = 0,
        canary_wait: float | timedelta = 60,
        **options: Any,
    ) -> RedriveOptions:
        """The checked options that users gave."""
        watched = None
        if canary is not None:
            wait_seconds = _seconds(canary_wait)
            watched = Canary(letters=canary, max_failures=max_failures, wait_seconds=wait_seconds)
        return cls(delay_seconds=_seconds(delay), canary=watched, **options)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RedriveOptions:
        """Read what `to_json` wrote; ignores options of later versions."""
        kept = value.get("canary")
        known = {f.name: value[f.name] for f in fields(cls) if f.name in value}
        return cls(**{**known, "canary": Canary(**kept) if kept else None})


def _seconds(value: float | timedelta) -> float:
    return value.total_seconds() if isinstance(value, timedelta) else float(value)


class Prepared(NamedTuple):
    """A letter that is ready to be redriven."""

    found: RawEntry
    message: Outgoing
    seed: Seed | None  # of its count of deliveries


@dataclass(kw_only=True)
class Outgoing:
    """A message that is about to be published."""

    letter_id: str  # Id of its letter
    task_id: str  # Task id under which it will run
    redrives: int  # Number of its redrives, this one included
    queue: str  # The queue to publish to
    body: bytes  # The original bytes
    content_type: str  # Content type of the body
    content_encoding: str  # Content encoding of the body
    # The original properties, without those that kombu sets
    properties: dict[str, Any] = field(default_factory=dict)
    # The headers as JSON text if the letter's text could be kept, which is faster than making it;
    # empty if not, or once the headers are changed
    headers_text: str = ""
    own_headers: dict[str, Any] = field(default_factory=dict)  # The headers if there is no text

    @cached_property
    def headers(self) -> dict[str, Any]:
        """The original headers with our markers, without those of the broker."""
        return _json(self.headers_text)[0] if self.headers_text else self.own_headers


def outgoing(
    found: RawEntry,
    options: RedriveOptions,
    *,
    redrive_id: str,
    now: datetime,
    redriven_at: datetime | None = None,
) -> Outgoing:
    """The message of a letter.

    Body bytes, id, callbacks, chain, chord and group are the original's. Deliveries and
    retries are counted from 0 again; marker headers name the redrive and the letter. That is
    ``redriven_at`` by the clock of Redis, ``now`` by this machine's.
    """
    raw, letter_id = found.fields, found.key
    if not found.is_letter:
        raise CorruptLetter(f"the entry at {found.position} is not a dead letter")
    try:
        text = _text(raw, b"headers", "{}")
        headers, kept = _clean(text)
        unchanged = _unchanged(raw)
        task_id, queue = _text(raw, b"task_id"), options.to_queue or _text(raw, b"source_queue")
        redrives, earlier = int(raw.get(b"redrives", b"0")) + 1, _lives(headers, raw, letter_id)
        if "expires" in headers and _is_over(raw.get(b"expires"), now):
            headers["expires"], kept = None, False  # else the worker would discard it as expired
    except (LookupError, ValueError, TypeError, AttributeError, OverflowError) as exc:
        raise CorruptLetter(f"the dead letter at {found.position} cannot be read: {exc!r}") from exc
    if not queue:
        raise RedriveError(
            f"letter {letter_id} does not name its source queue, because the message it was "
            f"adopted from did not; choose a queue to redrive to"
        )
    if options.delay_seconds:
        _delay(headers, letter_id, now + timedelta(seconds=options.delay_seconds))
        kept = False
    if options.new_id:
        task_id, kept = _rename(headers, unchanged["properties"], letter_id), False
    of_all, of_all_text = _markers(redrive_id, redriven_at or now)
    markers = {LETTER_HEADER: letter_id, EARLIER_HEADER: earlier}
    if PUBLICATION_HEADER not in headers:  # what a crash makes another run publish is a copy
        markers[PUBLICATION_HEADER] = named_after(letter_id.encode("utf-8", "backslashreplace"))
    added = f'{of_all_text}, "{REDRIVES_HEADER}": {redrives}{_members(markers)}}}' if kept else ""
    return Outgoing(
        letter_id=letter_id,
        task_id=task_id,
        redrives=redrives,
        queue=queue,
        own_headers={} if kept else {**headers, **of_all, REDRIVES_HEADER: redrives, **markers},
        headers_text=text.rstrip()[:-1] + added if kept else "",
        **unchanged,
    )


def _lives(headers: Mapping[str, Any], raw: Mapping[bytes, bytes], letter_id: str) -> str:
    """What a message died of so far, as JSON, without what may quote its arguments."""
    seconds, micros = divmod(int(raw.get(b"dead_lettered_at", b"0")), 1_000_000)
    at = f"{_second(seconds)}.{micros:06d}+00:00"
    earlier = lives_of(headers)[1 - MAX_LIVES :] if EARLIER_HEADER in headers else ()
    before = ", ".join([*map(_encode, earlier), ""]) if earlier else ""
    facts = _facts_text(raw.get(b"reason"), raw.get(b"exception_type"), raw.get(b"fingerprint"))
    return f'[{before}{{"at": "{at}", "letter": {_encode(letter_id)}{facts}}}]'


@lru_cache(maxsize=64)
def _second(seconds: int) -> str:
    """A second since 1970 in ISO 8601; the letters of a storm share it."""
    return from_micros(seconds * 1_000_000).replace(tzinfo=None).isoformat()


@lru_cache(maxsize=1024)
def _facts_text(reason: bytes | None, exception: bytes | None, fingerprint: bytes | None) -> str:
    """What the letters of one cause died of, as the end of a JSON object."""
    named = {"reason": reason, "exception": exception, "fingerprint": fingerprint}
    texts = {name: value.decode("utf-8", "replace") for name, value in named.items() if value}
    return _members({name: text[:_MAX_LIFE_CHARS] for name, text in texts.items()})


def _is_over(expires: bytes | None, now: datetime) -> bool:
    return expires is not None and from_micros(int(expires)) <= now


def released(found: RawEntry, marker: str = "") -> Outgoing:
    """The message of a held entry, as it came; markers name the hold and the entry."""
    raw = found.fields
    if not found.is_letter:
        raise CorruptLetter(f"the entry at {found.position} is not a held message")
    try:
        headers, _tagged = _json(_text(raw, b"headers", "{}"))
        for name in list(filter(is_of_broker, headers)):
            del headers[name]
        headers[HOLD_HEADER] = marker or _text(raw, b"dead_letter_queue")
        headers[LETTER_HEADER] = found.key
        return Outgoing(
            letter_id=found.key,
            task_id=_text(raw, b"task_id"),
            redrives=int(raw.get(b"redrives", b"0")),
            queue=_text(raw, b"source_queue"),
            own_headers=headers,
            **_unchanged(raw),
        )
    except (LookupError, ValueError, TypeError, AttributeError) as exc:
        raise CorruptLetter(f"the message at {found.position} cannot be read: {exc!r}") from exc


def _unchanged(raw: Mapping[bytes, bytes]) -> dict[str, Any]:
    """What a message keeps: body, types, and properties but those of the transport."""
    text = _text(raw, b"properties", "{}")
    if found := _PROPERTIES(text):
        properties = {"correlation_id": found[1], **_shared_properties(f"{{{found[2][1:]}}}")}
    else:
        properties = _kept_properties(text)
    return {
        "body": raw.get(b"body", b""),
        "content_type": _text(raw, b"content_type") or "application/octet-stream",
        "content_encoding": _text(raw, b"content_encoding") or "binary",
        "properties": properties,
    }


def _kept_properties(text: str) -> dict[str, Any]:
    """The properties of a text, but those of the transport."""
    given = _json(text)[0].items()
    return {n: v for n, v in given if v is not None and n not in _TRANSPORT_PROPERTIES}


_shared_properties = lru_cache(maxsize=256)(_kept_properties)


def _text(raw: Mapping[bytes, bytes], name: bytes, default: str = "") -> str:
    """A field as text, or the default if there is none; ``KeyError`` if it cannot be read."""
    value = raw.get(name)
    if value is None:
        if name in raw or INLINE in raw:  # there, but unreadable; or the whole entry is
            raise KeyError(name)
        return default
    return value.decode("utf-8", "replace")


def _json(text: str) -> tuple[dict[str, Any], bool]:
    """An object of JSON text; True if it has values with type tags, which differ from kombu's."""
    tagged = "__type__" in text
    if tagged:
        value = json_codec.loads(text)
    else:
        try:  # two thirds of the time of `json.loads`
            value, end = _decode(text)
        except ValueError:
            end = -1
        if end != len(text):  # malformed, or spaces around it
            value = json.loads(text)
    if value is None:
        return {}, tagged
    if not isinstance(value, dict):
        raise TypeError(type(value))
    return value, tagged


def _clean(text: str) -> tuple[dict[str, Any], bool]:
    """The headers without what is wrong in another delivery; True if that is their text, too."""
    cleaned, tagged = _json(text)
    kept = not tagged and cleaned != {} and text.isascii()
    if not _CHANGED.isdisjoint(cleaned):
        kept = False
        for name in _STALE:
            cleaned.pop(name, None)
    if "x-" in "\n".join(cleaned):
        for name in [name for name in cleaned if name.startswith(BROKER_PREFIXES)]:
            del cleaned[name]
            kept = False
    if PUBLICATION_HEADER in cleaned and not is_publication(cleaned[PUBLICATION_HEADER]):
        del cleaned[PUBLICATION_HEADER]
        kept = False
    retries = cleaned.get("retries", 0)
    if retries or type(retries) is not int:
        cleaned["retries"], kept = 0, False
    if cleaned.get("eta") is not None:
        cleaned["eta"], kept = None, False
    return cleaned, kept


@lru_cache(maxsize=8)
def _markers(redrive_id: str, at: datetime) -> tuple[dict[str, Any], str]:
    """The markers that the messages of a batch share; and their text, to follow other members."""
    shared = {REDRIVE_HEADER: redrive_id, REDRIVEN_AT_HEADER: iso(at)}
    return shared, _members(shared)


def _members(values: Mapping[str, Any]) -> str:
    return "".join([f', "{name}": {_encode(value)}' for name, value in values.items()])


def _delay(headers: dict[str, Any], letter_id: str, eta: datetime) -> None:
    if "task" not in headers:
        raise RedriveError(
            f"letter {letter_id} cannot be delayed, because its message has no task header "
            f"(protocol 2); redrive it without the delay"
        )
    headers["eta"] = eta.isoformat()


def _rename(headers: dict[str, Any], properties: dict[str, Any], letter_id: str) -> str:
    old, new = headers.get("id"), str(uuid4())
    if old is None:
        raise RedriveError(
            f"letter {letter_id} cannot get a new id, because its message has no id header "
            f"(protocol 2); redrive it with its old id"
        )
    headers["id"] = new
    if headers.get("root_id") == old:
        headers["root_id"] = new
    if "correlation_id" in properties:
        properties["correlation_id"] = new
    return new
