"""Answers requests: finds the route, checks who asks and from where, and calls the page."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from celery_dlq.errors import (
    BrokerUnavailable,
    CorruptLetter,
    DLQError,
    MissingExtra,
    NotFound,
    StoreUnavailable,
)
from celery_dlq.events import acting_as
from celery_dlq.features.redaction.masking import Redaction
from celery_dlq.letters.printable import one_line
from celery_dlq.logs import get_logger
from celery_dlq.web import http
from celery_dlq.web.http import Access, Permission, Request, RequestError, Response, User
from celery_dlq.web.status import Status
from celery_dlq.web.templating import Templates

if TYPE_CHECKING:
    from celery_dlq.assembly import Assembly
    from celery_dlq.operations.jobs import Runner
    from celery_dlq.web.forms import Forms
    from celery_dlq.web.routes import Route, Routes
    from celery_dlq.web.users import Login

logger = get_logger("celery_dlq.web")

MAX_CALLS = 16
"""Requests answered at the same time; a store that hangs keeps no more threads than these."""

SECURITY_HEADERS = (
    (
        "content-security-policy",
        (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
            "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
        ),
    ),
    ("x-content-type-options", "nosniff"),
    # Not "no-referrer": then the Origin of a form is "null".
    ("referrer-policy", "same-origin"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("x-frame-options", "DENY"),
)

_STATUS: tuple[tuple[type[DLQError], int], ...] = (
    (NotFound, 404),
    (StoreUnavailable, 503),
    (BrokerUnavailable, 503),
    (CorruptLetter, 422),
    (MissingExtra, 501),
)
_RETRY_AFTER = {429: "30", 503: "5"}
"""Seconds by status."""
_TITLES = {
    400: "This request cannot be read",
    401: "Please log in",
    403: "Not allowed",
    404: "Not found",
    405: "Not a way to ask for this page",
    409: "Not any more",
    410: "Gone",
    413: "Too large",
    415: "Not a form of these pages",
    421: "Unknown address",
    422: "Not readable",
    429: "Too many tries",
    500: "This page failed",
    501: "Not possible here",
    503: "The store does not answer",
}


@dataclass(frozen=True, kw_only=True)
class WebOptions:
    """How pages are served."""

    # Returns who asks. The default lets everybody look and nobody change anything
    access: Access = field(default=lambda request: User())  # noqa: ARG005
    forms: Forms | None = None  # Protects forms; `None` if nothing can be changed
    # Answers the form for a name and a password; `None` if there is none
    login: Login | None = None
    # Host names under which browsers may ask, beside `localhost`, IP addresses, and the name of
    # `dlq_web_url`; `None` if the framework checks that. Ports are ignored
    hosts: Iterable[str] | None = ()
    title: str = ""  # Name of the environment, e.g. `production`, in the title of each page
    home: str = ""  # Link back to the application that the pages are mounted in
    runs_jobs: bool = False  # True if jobs that wait are run in this process


class Web:
    """The pages of one app."""

    types = http

    def __init__(
        self,
        assembly: Assembly,
        routes: Routes,
        options: WebOptions,
    ) -> None:
        self.assembly = assembly
        self.routes = routes
        self.options = options
        self.templates = Templates()
        self.status = Status(assembly)
        self._threads = ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="dlq-web")
        self._free = threading.BoundedSemaphore(MAX_CALLS)
        self._starting = threading.Lock()
        self._runner: Runner | None = None

    def runner(self) -> Runner:
        """Runs the jobs that wait, in threads of this process."""
        with self._starting:
            if self._runner is None:
                self._runner = self.assembly.runner().start()
            return self._runner

    def close(self) -> None:
        """End the threads; requests that are being answered are answered.

        A job ends after its current batch, and waits for the next process.
        """
        if self._runner is not None:
            self._runner.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def redaction(self) -> Redaction:
        """Masks what ``dlq_redact`` names."""
        return self.assembly.redaction

    def handle(self, request: Request, refused: RequestError | None = None) -> Response:
        """Answer a request. Never raises."""
        try:
            response = self.failed(request, refused) if refused else self._answer(request)
        except Exception as exc:  # noqa: BLE001 - a page of its own
            response = self.failed(request, exc)
        response.headers += SECURITY_HEADERS
        if not any(name == "cache-control" for name, _ in response.headers):
            response.headers.append(("cache-control", "no-store"))
        return response

    def failed(self, request: Request, exc: Exception, user: User | None = None) -> Response:
        """Return the page for an error."""
        if isinstance(exc, RequestError):
            status = exc.status
        elif isinstance(exc, DLQError):
            status = next((code for kind, code in _STATUS if isinstance(exc, kind)), 400)
        else:
            logger.error("A page failed: %s %s", request.method, request.path[:200], exc_info=exc)
            status, exc = 500, RequestError(500, "The log of this process says why.")
        response = Response(status=status)
        if status in _RETRY_AFTER:
            response.headers.append(("retry-after", _RETRY_AFTER[status]))
        call = Call(web=self, request=request, user=user or User(permissions=()))
        response.body = call.html(
            "error.html", response, title=_TITLES.get(status, "Error"), status=status, text=str(exc)
        )
        return response

    def who(self, request: Request) -> User | None:
        """Who asks, if they may look; ``None`` if they may not, or must log in."""
        user = self.options.access(request)
        return user if user is not None and user.may(Permission.VIEW) else None

    def _answer(self, request: Request) -> Response:
        route, parts, methods = self.routes.find(request.method, request.path)
        if route is None or route.name != "health":  # probes ask by address
            self._check_host(request)
        if route is None:
            if methods:
                refused = self.failed(
                    request, RequestError(405, f"expected {' or '.join(methods)} for this path")
                )
                refused.headers.append(("allow", ", ".join(methods)))
                return refused
            raise RequestError(404, f"there is no page {request.path!r}")
        if self.options.runs_jobs:
            self.runner()  # jobs that another process left waiting go on
        user = self.options.access(request) if route.permission is not None else User()
        if user is None:
            _log_refusal(request, "nobody is logged in")
            return self._log_in(request)
        call = Call(web=self, request=request, user=user, parts=parts)
        try:
            if route.method == "POST":
                self._check_form(request)
            _check_permission(route, user)
            return self._within(route, call) if route.seconds else route.page(call)
        except Exception as exc:  # noqa: BLE001 - a page that knows the user
            if isinstance(exc, RequestError) and exc.status == 403:  # noqa: PLR2004
                _log_refusal(request, str(exc), user.name)
            return self.failed(request, exc, user)

    def _within(self, route: Route, call: Call) -> Response:
        """Call the page in a thread of its own, for a limited time."""
        if not self._free.acquire(blocking=False):
            raise StoreUnavailable(
                f"{MAX_CALLS} requests wait for the store already; try again in a few seconds"
            )

        def run() -> Response:
            try:
                with acting_as(call.user.name):
                    answer: Response = route.page(call)
                    return answer
            finally:
                self._free.release()

        running = self._threads.submit(run)
        try:
            return running.result(timeout=route.seconds)
        except LateError:
            raise StoreUnavailable(
                f"the store did not answer within {route.seconds:.0f} s; it is slow, or away"
            ) from None

    def _check_host(self, request: Request) -> None:
        """Refuse names that are not ours: another site may point its own at this address."""
        if self.options.hosts is None:
            return
        url = self.assembly.settings.web_url or ""
        known = {"localhost", urlsplit(url).hostname, *map(str.lower, self.options.hosts)}
        name = _host_name(request.host)
        if name and (name in known or _is_address(name)):
            return
        shown = ", ".join(sorted(filter(None, known)))
        raise RequestError(
            421,
            f"expected an IP address or one of the hosts {shown}, got {request.host[:100]!r}; set "
            f"dlq_web_url to the address that browsers use, or add the name: `dlq web "
            f"--host-name`, or asgi(hosts=...)",
        )

    def _check_form(self, request: Request) -> None:
        if self.options.forms is None:
            raise RequestError(403, "nothing can be changed here. " + User().why_not)
        self.options.forms.check(request)

    def _log_in(self, request: Request) -> Response:
        if self.options.login is None:
            return self.failed(request, RequestError(401, "These pages are for known users only."))
        call = Call(web=self, request=request, user=User(permissions=()))
        form: Response = self.routes["login"].page(call)
        form.status = 401
        return form


@dataclass(kw_only=True)
class Call:
    """One request on its way to a page."""

    web: Web  # The pages
    request: Request  # The request
    user: User  # Who asks
    parts: dict[str, str] | Any = field(default_factory=dict)  # The parts of the path

    @property
    def dlq(self) -> Assembly:
        """Makes the parts that read and change letters."""
        return self.web.assembly

    def may(self, permission: str) -> bool:
        """True if the user may do it and this server lets anybody do it."""
        return self.web.options.forms is not None and self.user.may(Permission(permission))

    def link(self, name: str, /, query: Any = (), **parts: Any) -> str:
        """Return the path of a route."""
        return self.web.routes.link(self.request.root, name, parts, query)

    def page(self, template: str, *, status: int = 200, **values: Any) -> Response:
        """Return a page."""
        response = Response(status=status)
        response.body = self.html(template, response, **values)
        return response

    def html(self, template: str, response: Response, **values: Any) -> bytes:
        """Render a template."""
        forms = self.web.options.forms
        return self.web.templates.render(
            template,
            call=self,
            options=self.web.options,
            user=self.user,
            link=self.link,
            may=self.may,
            token_field=forms.field if forms else "",
            token=forms.token(self.request, response) if forms else "",
            **values,
        )

    def to(self, name: str, /, query: Any = (), **parts: Any) -> Response:
        """Send the browser to another page, after a change."""
        path = self.link(name, query, **parts)
        return Response(status=303, headers=[("location", path)])


def _check_permission(route: Route, user: User) -> None:
    # A refused form shows what it would change: who may not look sends none.
    for needed in () if route.permission is None else (Permission.VIEW, route.permission):
        if not user.may(needed):
            raise RequestError(403, f"expected the permission {needed}. {user.why_not}")


def _log_refusal(request: Request, why: str, user: str = "") -> None:
    """One line for each change that was refused; the form may have secrets, so it is left out."""
    if request.method == "POST":
        logger.warning(
            "Refused POST %s of %s at %s: %s",
            one_line(request.path[:200]),
            one_line(user[:100]) or "nobody",
            one_line(request.client[:60]) or "an unknown address",
            one_line(why[:300]),
        )


def _host_name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def _is_address(host: str) -> bool:
    """True if it is an IP address: no other site can point that at us."""
    with suppress(ValueError):
        return bool(ip_address(host))
    return False
