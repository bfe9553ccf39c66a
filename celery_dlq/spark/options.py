"""The options of ``spark.read`` with the format ``celery_dlq``.

Spark lower-cases the names and passes every value as text. All options are checked
when the DataFrame is made, not by the first task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from celery_dlq.errors import DLQError, SettingsError
from celery_dlq.letters import conditions
from celery_dlq.letters.json_codec import instant
from celery_dlq.letters.printable import url_without_secrets
from celery_dlq.letters.record import field_kinds
from celery_dlq.policies.checks import Check, check_names, expected, name_text
from celery_dlq.store.address import Address, address_of

_IN_URL = ("key_prefix", "master_name", "sentinel_username", "sentinel_password")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """The options of ``spark.read.format("celery_dlq")``.

    Attributes:
        url: The Redis that keeps the letters, as the setting ``dlq_url``. Required. What else
            reaches it follows a question mark: ``ssl_…`` for TLS; ``master_name``,
            ``sentinel_username`` and ``sentinel_password`` with Sentinels; and ``key_prefix``
            where ``dlq_key_prefix`` is set, e.g.
            ``rediss://host:6379/0?ssl_ca_certs=ca.pem&key_prefix=shop``. Plans, logs and errors
            never show it.
        queue: Only this dead-letter queue; ``None``: all of them.
        columns: Only these columns, in this order, separated by commas; by default all.
            Spark does not pass the columns it needs to a Python source: without this
            option, Redis sends bodies and tracebacks, too.
        since: Only letters dead-lettered at or after this ISO 8601 time (UTC if it has no
            offset).
        until: Only letters dead-lettered before it.
        id: Only the letters of these ids, separated by commas.
        fingerprint: Only the letters of these causes, separated by commas; the first digits do.
        where: Only letters for which these conditions on arguments and headers hold, e.g.
            ``kwargs.tenant=42``, as with ``dlq list --where``; several on a line each.
    """

    url: str
    queue: str | None = None
    columns: tuple[str, ...] = tuple(field_kinds())
    since: datetime | None = None
    until: datetime | None = None
    id: tuple[str, ...] | None = None
    fingerprint: tuple[str, ...] | None = None
    where: tuple[str, ...] | None = None

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> ReadOptions:
        """Check the options of a reader."""
        given = {name.lower(): value for name, value in options.items()}
        check_names("options of the format celery_dlq", given, _READ, SettingsError)
        values = {name: _READ[name](f"the option {name!r}", value) for name, value in given.items()}
        if "url" not in values:
            raise SettingsError(
                "expected the option 'url' to be set, got none; set it to the Redis that keeps "
                "the letters, e.g. redis://host:6379/0"
            )
        parsed = cls(**values)
        _ = parsed.address
        return parsed

    @property
    def address(self) -> Address:
        """Where the letters are."""
        urls, ours = self._reached
        secrets = {
            name.removeprefix("sentinel_"): ours[name]
            for name in ours
            if name.startswith("sentinel_")
        }
        options = {"master_name": ours.get("master_name"), "sentinel_kwargs": secrets}
        return address_of(urls, "the option 'url'", options=options, options_where="its query")

    @property
    def key_prefix(self) -> str:
        """The first part of the names of all keys."""
        return self._reached[1].get("key_prefix", "dlq")

    @property
    def _reached(self) -> tuple[list[str], dict[str, str]]:
        """The URLs without the parts of their queries that are ours, and these parts."""
        urls: list[str] = []
        ours: dict[str, str] = {}
        for url in self.url.split(";"):
            parts = urlsplit(url)
            query = dict(parse_qsl(parts.query))
            found = {name: query.pop(name) for name in _IN_URL if name in query}
            ours |= found
            urls.append(urlunsplit(parts._replace(query=urlencode(query))) if found else url)
        return urls, ours

    @property
    def place(self) -> str:
        """The URL without user, password and options."""
        return url_without_secrets(self.url)

    def __repr__(self) -> str:
        """Leave out the password."""
        return f"ReadOptions(url={self.place!r}, queue={self.queue!r})"


def _conditions(where: str, value: object) -> tuple[str, ...]:
    lines = [line for line in str(value).split("\n") if line.strip()]
    if not lines:
        raise expected(where, "conditions such as kwargs.tenant=42", value)
    try:
        return conditions.checked(lines)
    except DLQError as exc:
        raise SettingsError(f"in {where}: {exc}") from None


def _several(where: str, value: object) -> tuple[str, ...]:
    found = tuple(part.strip() for part in str(value).split(","))
    if not all(found):
        raise expected(where, "names separated by commas", value)
    return found


def _columns(where: str, value: object) -> tuple[str, ...]:
    columns = _several(where, value)
    check_names(f"columns of a letter in {where}", columns, field_kinds(), SettingsError)
    if len(set(columns)) != len(columns):
        raise expected(where, "a list that names each column once", value)
    return columns


def _checked_time(where: str, value: object) -> datetime:
    try:
        return instant(str(value).strip())
    except ValueError:
        raise expected(where, "an ISO 8601 time", value) from None


_READ: Mapping[str, Check[Any]] = {
    "url": name_text,
    "queue": name_text,
    "columns": _columns,
    "since": _checked_time,
    "until": _checked_time,
    "id": _several,
    "fingerprint": _several,
    "where": _conditions,
}
