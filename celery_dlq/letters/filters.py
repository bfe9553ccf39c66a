"""The selection of letters for an operation: one value object for API, command line and web."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, TypedDict

from celery_dlq.errors import DLQError
from celery_dlq.letters import conditions, json_codec
from celery_dlq.letters.printable import shortened
from celery_dlq.letters.record import DeadLetter, Reason, check_aware, from_micros, iso, to_micros

_MAX_SHOWN_CHARS = 40
_GREPPED = (b"body", b"args_json", b"kwargs_json")
_READ = {
    "ids": ("id",),
    "since": ("dead_lettered_at",),
    "until": ("dead_lettered_at",),
    "min_deliveries": ("deliveries",),
    "grep": ("description", "exception_message", "body", "args_json", "kwargs_json"),
    "conditions": ("args_json", "kwargs_json", "headers"),
}
"""Fields of a letter that some fields of a filter are compared with; others have their name."""

MAX_GREP_CHARS = 1000


class FilterFields(TypedDict, total=False):
    """The fields of a `LetterFilter`, as keywords."""

    ids: frozenset[str] | None
    reason: Reason | str | None
    task_name: str | None
    fingerprint: str | None
    exception_type: str | None
    worker_hostname: str | None
    since: datetime | None
    until: datetime | None
    grep: str | None
    release: str | None
    root_id: str | None
    group_id: str | None
    min_deliveries: int | None
    conditions: tuple[str, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterFilter:
    """A filter of letters; every field that is set must match.

    Attributes:
        ids: Letter ids; also positions in the store, for entries that are no letters.
        reason: A `Reason` or its name.
        task_name: Registered task name, exact.
        fingerprint: The fingerprint, or the first digits of it.
        exception_type: Dotted name of the exception, or its last part.
        worker_hostname: Node name of the worker that saw the death.
        since: Dead-lettered at or after this aware time.
        until: Dead-lettered before this aware time.
        grep: Text of at most 1,000 characters to find in the description, the exception's message
            or the body, however JSON spells it there; of a compressed body, in the arguments.
        release: Version of the code that saw the death, exact.
        root_id: Id of the first task of the workflow, exact.
        group_id: Id of the group, exact.
        min_deliveries: Delivered at least this often; 1 or more.
        conditions: Conditions on arguments and headers, e.g. ``("kwargs.tenant=42",)``; all of them
            must hold. See `celery_dlq.letters.conditions`.
    """

    ids: frozenset[str] | None = None
    reason: Reason | str | None = None
    task_name: str | None = None
    fingerprint: str | None = None
    exception_type: str | None = None
    worker_hostname: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    grep: str | None = None
    release: str | None = None
    root_id: str | None = None
    group_id: str | None = None
    min_deliveries: int | None = None
    conditions: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.ids is not None:  # a text alone would find whatever has an id within it
            ids = [self.ids] if isinstance(self.ids, str) else self.ids
            object.__setattr__(self, "ids", frozenset(ids))
        if self.conditions is not None:  # none given is none set: a filter is true if it narrows
            object.__setattr__(self, "conditions", conditions.checked(self.conditions) or None)
        if self.min_deliveries is not None and (
            type(self.min_deliveries) is not int or self.min_deliveries < 1
        ):
            raise DLQError(
                f"expected min_deliveries to be a whole number of 1 or more, got "
                f"{json_codec.safe_repr(self.min_deliveries, _MAX_SHOWN_CHARS)}"
            )
        if self.grep is not None and len(self.grep) > MAX_GREP_CHARS:
            raise DLQError(
                f"expected grep to be a text of at most {MAX_GREP_CHARS} characters, got "
                f"{len(self.grep)}"
            )
        check_aware("since", self.since)
        check_aware("until", self.until)
        if self.reason is not None and str(self.reason) not in {r.value for r in Reason}:
            known = ", ".join(sorted(r.value for r in Reason))
            raise DLQError(f"expected reason to be one of {known}, got {str(self.reason)!r}")
        if self.since is not None and self.until is not None and self.since > self.until:
            raise DLQError(
                f"expected since to be before until, got since {iso(self.since)} and until "
                f"{iso(self.until)}"
            )

    def __bool__(self) -> bool:
        return any(getattr(self, f.name) is not None for f in fields(self))

    def matches(self, letter: DeadLetter) -> bool:
        """True if a letter matches all fields that are set."""
        return self.matches_fields({n.encode(): value for n, value in letter.to_fields().items()})

    def matches_fields(self, entry: Mapping[bytes, bytes]) -> bool:
        """Like `matches`, for a letter's storage form; reads only the fields it needs."""
        return self.judged(entry) is True

    def judged(self, entry: Mapping[bytes, bytes]) -> bool | None:
        """Like `matches_fields`; ``None`` if its arguments, which cannot be read, would decide."""

        def text_of(name: str) -> str:
            return entry.get(name.encode(), b"").decode("utf-8", "replace")

        matches = (
            (self.ids is None or text_of("id") in self.ids)
            and (self.reason is None or text_of("reason") == str(self.reason))
            and (self.task_name is None or text_of("task_name") == self.task_name)
            and (self.fingerprint is None or text_of("fingerprint").startswith(self.fingerprint))
            and (self.worker_hostname is None or text_of("worker_hostname") == self.worker_hostname)
            and (self.release is None or text_of("release") == self.release)
            and (self.root_id is None or text_of("root_id") == self.root_id)
            and (self.group_id is None or text_of("group_id") == self.group_id)
            and _is_within(text_of, "deliveries", self.min_deliveries, None)
            and _is_within(
                text_of, "dead_lettered_at", _micros_of(self.since), _micros_of(self.until)
            )
            and (
                self.exception_type is None
                or self.exception_type
                in {(full := text_of("exception_type")), full.rpartition(".")[2]}
            )
            and (
                self.grep is None
                or self.grep in text_of("description")
                or self.grep in text_of("exception_message")
                # Of a compressed body, only the arguments are known.
                or any(_in_body(self.grep, entry.get(name, b"")) for name in _GREPPED)
            )
        )
        if not matches or self.conditions is None:
            return matches
        return conditions.judge_all(self.conditions, text_of)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping of the fields that are set; times in microseconds since 1970."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: _plain_json(value) for name, value in values if value is not None}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LetterFilter:
        """Read what `to_json` wrote."""
        known = dict(value)
        for name in ("since", "until"):
            if name in known:
                known[name] = from_micros(known[name])
        if "ids" in known:
            known["ids"] = frozenset(known["ids"])
        return cls(**known)

    def to_query(self) -> dict[str, list[str]]:
        """The fields that are set, as texts for a URL: ``urlencode(..., doseq=True)``.

        Raises:
            DLQError: A field is set to nothing (``""``), which a URL cannot say.
        """
        found: dict[str, list[str]] = {}
        for name, value in self.to_json().items():
            texts = value if isinstance(value, list) else [str(value)]
            if name in ("since", "until"):
                texts = [from_micros(value).isoformat(timespec="microseconds")]
            if not all(texts) or not texts:
                raise DLQError(f"expected {name} not to be empty in a URL, got {value!r}")
            found[name] = texts
        return found

    @classmethod
    def from_query(cls, query: Mapping[str, Sequence[str]]) -> LetterFilter:
        """Read what `to_query` wrote, or a form sent.

        Args:
            query: Texts by the name of the field, as ``urllib.parse.parse_qs`` gives them. Empty
                texts are those of fields that nobody filled in. A time without an offset is UTC.

        Raises:
            DLQError: A field is unknown, given twice, or not usable; the message names it.
        """
        known: dict[str, Any] = {}
        for name, given in query.items():
            if name not in cls.__slots__:
                names = ", ".join(cls.__slots__)
                raise DLQError(f"expected the fields of a filter ({names}), got {name!r}")
            texts = [text for text in ([given] if isinstance(given, str) else given) if text]
            if name in _SEVERAL:
                known[name] = _SEVERAL[name](texts) or None
            elif len(texts) > 1:
                raise DLQError(f"expected {name} once, got it {len(texts)} times")
            elif texts:
                read = _FROM_TEXT.get(name)
                known[name] = read(name, texts[0]) if read else texts[0]
        return cls(**known)


def fields_read(where: LetterFilter) -> frozenset[str]:
    """The fields of a letter that a filter reads: others need not be there."""
    given = {f.name for f in fields(where) if getattr(where, f.name) is not None}
    return frozenset(name for one in given for name in _READ.get(one, (one,)))


def filter_of(where: LetterFilter | None, fields: FilterFields) -> LetterFilter:
    """The filter of a call: a filter, or its fields as keywords.

    Raises:
        DLQError: Both are given: one of them would be ignored. Or the filter is something else.
    """
    if where is not None and not isinstance(where, LetterFilter):
        shown = json_codec.safe_repr(where, _MAX_SHOWN_CHARS)
        text = where if isinstance(where, str) else "kwargs.tenant=42"
        raise DLQError(
            f"expected where to be a LetterFilter, got {shown}; pass the fields of one as "
            f"keywords, for example conditions={shortened(repr(text), _MAX_SHOWN_CHARS)}"
        )
    if where and fields:
        names = ", ".join(fields)
        raise DLQError(f"expected a filter or its fields as keywords, got a filter and {names}")
    return where or LetterFilter(**fields)


def _plain_json(value: Any) -> Any:
    if isinstance(value, datetime):
        return to_micros(value)
    if isinstance(value, (frozenset, tuple)):
        return sorted(value)
    return value.value if isinstance(value, Reason) else value


def _parsed_moment(name: str, text: str) -> datetime:
    try:
        return json_codec.instant(text)
    except ValueError:
        raise DLQError(f"expected {name} to be an ISO 8601 time, got {text!r}") from None


def _parsed_number(_name: str, text: str) -> int | str:
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else text  # the filter refuses a text


_SEVERAL: Mapping[str, Callable[[list[str]], Any]] = {"ids": frozenset, "conditions": tuple}
_FROM_TEXT: Mapping[str, Callable[[str, str], Any]] = {
    "since": _parsed_moment,
    "until": _parsed_moment,
    "min_deliveries": _parsed_number,
}


def _micros_of(moment: datetime | None) -> int | None:
    return None if moment is None else to_micros(moment)


def _is_within(
    text_of: Callable[[str], str], name: str, first: int | None, end: int | None
) -> bool:
    """True if a number is at or after the first and before the end."""
    if first is None and end is None:
        return True
    try:
        number = int(text_of(name))
    except ValueError:  # an entry that is no letter
        return False
    return (first is None or number >= first) and (end is None or number < end)


def _in_body(text: str, body: bytes) -> bool:
    r"""True if a body has a text, also as JSON may spell it: ``ü`` is also ``\u00fc``.

    In time that grows with the body alone, whatever both repeat: `bytes.find` and one substitution
    are linear, an alternation of spellings is not.
    """
    wanted = text.encode("utf-8", "surrogatepass")
    return wanted in body or (b"\\" in body and wanted in _ESCAPE.sub(_character, body))


def _character(escape: re.Match[bytes]) -> bytes:
    character: str = json.loads(b'"%b"' % escape[0])
    return character.encode("utf-8", "surrogatepass")


_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}"
    rb'|\\["\\/bfnrt]'
)
