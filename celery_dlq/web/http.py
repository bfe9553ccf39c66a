"""What a page gets and gives: a `Call` and a `Page`; the routes; users and their permissions.

A page is a function of a call and knows no framework. Starlette (`celery_dlq.web.asgi`) and Django
(`celery_dlq.web.django`) make calls of their requests, and their answers of pages.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, urlencode

from celery_dlq.errors import DLQError, SettingsError
from celery_dlq.letters.record import TextEnum
from celery_dlq.registry import features

if TYPE_CHECKING:
    from celery_dlq import DeadLetters
    from celery_dlq.letters.record import DeadLetter
    from celery_dlq.operations.in_force import InForce
    from celery_dlq.operations.jobs import Runner
    from celery_dlq.operations.redrive.select import RawEntry

MAX_CALLS = 16
"""Requests answered at the same time; a store that hangs keeps no more threads than these."""

MAX_TICKED = 200
"""Letters that may be ticked at a time."""

MAX_FIELDS = MAX_TICKED + 50
"""Fields of a form or a query: the ticked letters, a filter and options."""

Fields = Mapping[str, Sequence[str]]
"""Values by name."""

Panel = tuple[str, Mapping[str, Any]]
"""What a feature shows on a page of the core: a template, and its values, there as ``panel``."""


class Permission(TextEnum):
    """What a user may do. Django's permissions have the same names.

    Each route says what it does with one of them: `celery_dlq.web.site.allowed`.
    """

    VIEW = "view"
    REDRIVE = "redrive"
    DISCARD = "discard"
    HOLD = "hold"
    EDIT_POLICIES = "edit_policies"


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """The person who asks, and what they may do."""

    name: str = ""  # For the audit; empty for somebody who did not log in
    # What they may do, as `Permission` or its text; by default, to look
    permissions: Iterable[Permission | str] = frozenset({Permission.VIEW})
    # Sentence for a page that offers what they may not do; by default, what they may
    why_not: str = ""

    def __post_init__(self) -> None:
        try:
            found = frozenset(map(Permission, self.permissions))
        except ValueError as exc:
            known = ", ".join(Permission)
            raise SettingsError(f"expected permissions of {known}, got {exc}") from exc
        object.__setattr__(self, "permissions", found)
        if not self.why_not:
            names = " and ".join(one for one in Permission if one in found - {Permission.VIEW})
            why_not = f"You have the permissions view and {names}; this needs another."
            if self.reads_only:
                why_not = "You may look, but not change anything."
            object.__setattr__(self, "why_not", why_not)

    @property
    def reads_only(self) -> bool:
        """True if they may change nothing."""
        return frozenset(self.permissions) <= {Permission.VIEW}

    def may(self, permission: Permission) -> bool:
        """True if they may do it."""
        return permission in frozenset(self.permissions)


NOBODY = User(permissions=())


class RequestError(DLQError):
    """A request that cannot be answered."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(slots=True, kw_only=True)
class Page:
    """What the browser gets: status, headers and content."""

    status: int = 200
    content_type: str = "text/html; charset=utf-8"
    body: bytes | Iterable[bytes] = b""  # The body; or parts of it, made while they are sent
    headers: dict[str, str] = field(default_factory=dict)  # Further headers


@dataclass(frozen=True, slots=True)
class Route:
    """One kind of request."""

    name: str  # For links
    method: str  # `GET`, which never changes anything, or `POST`
    pattern: str  # The path, with `{name}` for a part, as Starlette's routes have it
    permission: Permission | None  # Needed for it; `None` for what has no data in it
    page: Callable[[Call], Page]  # Answers it
    seconds: float  # Longest wait for the answer; 0 for what asks no store
    tab: str = ""  # Its name on every page, if all pages lead to it
    does: str = ""  # What its permission is given for, in words

    def link(self, root: str, parts: Mapping[str, Any], query: Mapping[str, Any] = {}) -> str:
        """The path; names in it are encoded twice.

        They come from anyone who can publish, and servers decode a path once before a slash of a
        name can be told from others.
        """
        path = self.pattern
        for name, value in parts.items():
            path = path.replace(f"{{{name}}}", _encoded(str(value)), 1)
        given = {key: value for key, value in query.items() if value not in (None, "")}
        fields = urlencode(given, doseq=True, errors="replace")
        return quote(root) + path + (f"?{fields}" if fields else "")


def get(
    pattern: str,
    page: Callable[[Call], Page],
    permission: Permission | None = Permission.VIEW,
    *,
    name: str = "",
    seconds: float = 2.0,
    tab: str = "",
) -> Route:
    """A route that only shows."""
    return Route(name or page.__name__, "GET", pattern, permission, page, seconds, tab)


def post(
    pattern: str, page: Callable[[Call], Page], permission: Permission, does: str = ""
) -> Route:
    """A route that changes something; ``does`` says what, to who gives the permission."""
    return Route(page.__name__, "POST", pattern, permission, page, seconds=30.0, does=does)


class Site:
    """What all calls of an app share."""

    def __init__(
        self,
        dlq: DeadLetters,
        routes: Iterable[Route],
        *,
        title: str = "",
        home: str = "",
        runs_jobs: bool = False,
        takes_token: bool = False,
    ) -> None:
        # `celery_dlq.web.User` can be imported without jinja2.
        from celery_dlq.web.status import Status  # noqa: PLC0415
        from celery_dlq.web.templating import Templates  # noqa: PLC0415

        self.dlq = dlq
        self.title = title  # Name of the environment, e.g. `production`, in the title of each page
        self.home = home  # Link back to the application that the pages are mounted in
        self.runs_jobs = runs_jobs  # True if jobs that wait are run in this process
        self.takes_token = takes_token  # True if who is unknown may give a token
        self.templates = Templates()
        self.status = Status(dlq)
        self.routes: dict[str, Route] = {}
        self.paths: dict[str, dict[str, Route]] = defaultdict(dict)
        """The routes of each path by method."""
        for route in routes:
            self.routes[route.name] = self.paths[route.pattern][route.method] = route
        self.threads = ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="dlq-web")
        self._starting = threading.Lock()
        self._runner: Runner | None = None

    def runner(self) -> Runner:
        """Runs the jobs that wait, in threads of this process."""
        with self._starting:
            if self._runner is None:
                self._runner = self.dlq.runner().start()
            return self._runner

    def prepare(self) -> None:
        """Compile the templates and make the overview: the first request imports nothing more."""
        self.templates.compile()
        route = self.routes["overview"]
        made = self.threads.submit(route.page, Call(site=self, user=User(), route=route))
        with suppress(Exception):  # a store that is away: pages say so
            made.result(timeout=route.seconds)

    def close(self) -> None:
        """End the threads; requests that are being answered are answered.

        A job ends after its current batch, and waits for the next process.
        """
        if self._runner is not None:
            self._runner.close()
        self.threads.shutdown(wait=False, cancel_futures=True)


@dataclass(kw_only=True)
class Call:
    """One request on its way to a page."""

    site: Site
    method: str = "GET"
    path: str = "/"  # Below the mount path, percent-decoded once, as servers give it
    root: str = ""  # The mount path, without a slash at its end
    origin: str = ""  # What browsers write before it: scheme and host
    parts: Mapping[str, str] = field(default_factory=dict)  # The parts of the path
    query: Fields = field(default_factory=dict)  # Values by name from the URL
    form: Fields = field(default_factory=dict)  # Values by name from the body
    client: str = ""  # Address of the browser, for the log
    home: str = ""  # Link back to the application that the pages are in
    token_field: str = ""  # The hidden field of forms; empty where nothing can be changed
    token: Callable[[], str] = str  # Makes its value
    user: User | None = None  # `None` for somebody unknown
    route: Route | None = None  # What is asked for, once that is known
    failed: bool = False  # True for the page of an error, which waits for no store

    @property
    def dlq(self) -> DeadLetters:
        """The letters, and what can be done with them."""
        return self.site.dlq

    def value(self, name: str, default: str = "") -> str:
        """The last value of a field of the form, or else of the URL."""
        found = self.form.get(name) or self.query.get(name)
        # Browsers send the lines of a text so.
        return found[-1].replace("\r\n", "\n") if found else default

    def typed(self, name: str) -> str:
        """What somebody typed into a field of one line, without the spaces around it."""
        return self.value(name).strip()

    def may(self, permission: str) -> bool:
        """True if the user may do it and this server lets anybody do it."""
        return bool(self.token_field) and (self.user or NOBODY).may(Permission(permission))

    def check(self, permission: Permission) -> None:
        """Raise `RequestError` if the user may not do it."""
        if self.user is None:
            raise RequestError(401, "These pages are for known users only.")
        if not self.user.may(permission):
            raise RequestError(403, f"expected the permission {permission}. {self.user.why_not}")

    def masked(self, entry: RawEntry) -> DeadLetter:
        """A letter as people may see it: the only one that pages get."""
        return self.dlq.redaction.letter(entry.letter())

    def link(self, name: str, /, query: Mapping[str, Any] = {}, **parts: Any) -> str:
        """The path of a route."""
        return self.site.routes[name].link(self.root, parts, query)

    def page(self, template: str, *, status: int = 200, **values: Any) -> Page:
        """A page made from a template; it knows the parts of the path, e.g. the queue."""
        known = {"call": self, "user": self.user or NOBODY, "link": self.link, "may": self.may}
        body = self.site.templates.render(template, **{**self.parts, **known, **values})
        return Page(status=status, body=body)

    def panels(self, name: str, subject: Any) -> list[Panel]:
        """What features show in a place of a page about the subject: templates, their values."""
        shown = [(each, each.panels[name]) for each in features() if name in each.panels]
        return [feature.load(place)(self, subject) for feature, place in shown]

    def in_force(self) -> InForce | None:
        """What every page shows: holds, circuit breakers, jobs; ``None`` for who may not look."""
        if not (self.user or NOBODY).may(Permission.VIEW):
            return None
        kept = self.site.status.in_force
        return kept.last if self.failed else kept()

    def to(self, name: str, /, query: Mapping[str, Any] = {}, **parts: Any) -> Page:
        """Send the browser to another page, after a change."""
        return Page(status=303, headers={"location": self.link(name, query, **parts)})


def fields_of(text: str) -> dict[str, list[str]]:
    """Read a query string or an urlencoded form."""
    try:
        return parse_qs(text, keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError as exc:
        raise RequestError(400, f"expected at most {MAX_FIELDS} fields, got more") from exc


@lru_cache(maxsize=1024)
def _encoded(name: str) -> str:
    once = quote(name, safe="", errors="backslashreplace")
    if not once.strip("."):  # browsers take "." and ".." for folders
        once = once.replace(".", "%2E")
    return quote(once, safe="")
