"""What a page gets and gives: requests, responses, users and their permissions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from urllib.parse import parse_qsl, quote

from celery_dlq.errors import DLQError, SettingsError

MAX_FIELDS = 200
MAX_FORM_BYTES = 1024 * 1024
"""Largest form that is read: an edited message's arguments are the largest part of one."""


class Permission(str, Enum):
    """What a user may do. Django's permissions have the same names."""

    VIEW = "view"
    REDRIVE = "redrive"  # also edit, restore, hold, release, note, and states of groups
    DISCARD = "discard"
    EDIT_POLICIES = "edit_policies"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """Who asks."""

    name: str = ""  # For the audit; empty for somebody who did not log in
    # What they may do, as `Permission` or its text; by default, to look
    permissions: Iterable[Permission | str] = frozenset({Permission.VIEW})
    # Sentence for a page that offers what they may not do
    why_not: str = "You may look, but not change anything."

    def __post_init__(self) -> None:
        try:
            found = frozenset(map(Permission, self.permissions))
        except ValueError as exc:
            known = ", ".join(Permission)
            raise SettingsError(f"expected permissions of {known}, got {exc}") from exc
        object.__setattr__(self, "permissions", found)

    def may(self, permission: Permission) -> bool:
        """True if they may do it."""
        return permission in frozenset(self.permissions)


class RequestError(DLQError):
    """A request that cannot be answered."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


Fields = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request."""

    method: str  # `GET`, `HEAD` or `POST`
    path: str  # The path below the mount path, percent-decoded once, as servers give it
    root: str = ""  # The mount path, without a slash at its end
    query: Fields = field(default_factory=dict)  # Values by name from the URL
    form: Fields = field(default_factory=dict)  # Values by name from the body
    headers: Mapping[str, str] = field(default_factory=dict)  # By lower-case name
    scheme: str = "http"  # `http` or `https`, as the browser sees it
    client: str = ""  # Address of the browser, or of the last proxy that is not trusted
    proxied: bool = False  # True if a trusted proxy passed the request on
    home: str = ""  # Link back to the application, where it differs from request to request
    raw: Any = None  # The adapter's own request

    @property
    def host(self) -> str:
        """Host and port that the browser asked for."""
        return self.headers.get("host", "")

    @property
    def origin(self) -> str:
        """Scheme, host and port that the browser asked for."""
        return f"{self.scheme}://{self.host}"

    def cookie(self, name: str) -> str:
        """A cookie; empty if there is none."""
        # Not by http.cookies: it reads none that stand behind a malformed one, and other
        # applications of the host write theirs into the same header.
        pairs = (pair.partition("=") for pair in self.headers.get("cookie", "").split(";"))
        return next((value.strip() for key, _, value in pairs if key.strip() == name), "")

    def set_cookie(self, name: str, value: str, seconds: int | None = None) -> tuple[str, str]:
        """A header that sets a cookie for these pages, until the browser ends or for a time."""
        # Lax: with Strict, a link in a chat opens the page as if nobody had been there.
        text = f"{name}={value}; Path={quote(self.root) or '/'}; HttpOnly; SameSite=Lax"
        text += "" if seconds is None else f"; Max-Age={seconds}"
        return "set-cookie", text + ("; Secure" if self.scheme == "https" else "")

    def value(self, name: str, default: str = "") -> str:
        """The last value of a field of the form, or else of the URL."""
        found = self.form.get(name) or self.query.get(name)
        # Browsers send the lines of a text so.
        return found[-1].replace("\r\n", "\n") if found else default


Access = Callable[[Request], User | None]
"""Returns who asks; ``None`` if they must log in."""


@dataclass(slots=True, kw_only=True)
class Response:
    """One answer."""

    status: int = 200  # HTTP status
    content_type: str = "text/html; charset=utf-8"  # Type of the body
    body: bytes | Iterable[bytes] = b""  # The body; or parts of it, made while they are sent
    headers: list[tuple[str, str]] = field(default_factory=list)  # Further headers


def fields_of(text: str) -> dict[str, list[str]]:
    """Read a query string or an urlencoded form."""
    found: dict[str, list[str]] = {}
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError as exc:
        raise RequestError(400, f"expected at most {MAX_FIELDS} fields, got more") from exc
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    return found
