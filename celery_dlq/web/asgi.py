"""The pages as an ASGI app, for uvicorn or to mount in another app under any path."""

from __future__ import annotations

import inspect
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlencode, urlsplit

import anyio
import anyio.from_thread
import anyio.to_thread
from starlette.concurrency import iterate_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route as StarletteRoute
from starlette.routing import Router

from celery_dlq.web.access import (
    COOKIE,
    FIELD,
    MAX_AGE_SECONDS,
    TOKEN_COOKIE,
    Forms,
    Token,
    check_host,
    check_secret,
    check_url,
)
from celery_dlq.web.http import (
    MAX_CALLS,
    Call,
    Fields,
    Page,
    RequestError,
    Route,
    Site,
    User,
    fields_of,
)
from celery_dlq.web.site import all_routes, handle

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from celery_dlq import DeadLetters

MAX_FORM_BYTES = 1024 * 1024
"""Largest form that is read: an edited message's arguments are the largest part of one."""

FORM_SECONDS = 30.0
"""Longest wait for the rest of a form."""

Access = Callable[[Request], "User | Awaitable[User | None] | None"]
"""Gets Starlette's request; returns who asks, or ``None`` for somebody unknown."""


class DeadLettersApp:
    """An ASGI app of the pages."""

    def __init__(
        self,
        dlq: DeadLetters,
        *,
        access: Access | None = None,
        secret: str | None = None,
        url: str | None = None,
        hosts: Iterable[str] | None = (),
        root_path: str = "",
        routes: Iterable[Route] | None = None,
        **options: Any,
    ) -> None:
        address = check_url("url", url)
        self.url = urlsplit(address)
        self.access = access or (lambda _: User())
        self.forms = Forms(check_secret("secret", secret), address)
        self.hosts: frozenset[str] | None = None  # The names under which browsers may ask
        if hosts is not None:
            names = [hosts] if isinstance(hosts, str) else hosts
            known = ("localhost", self.url.hostname or "localhost", *names)
            self.hosts = frozenset(name.lower() for name in known)
        routes = all_routes() if routes is None else routes
        self.site = Site(dlq, routes, takes_token=isinstance(access, Token), **options)
        self._root_path = root_path.rstrip("/")
        self._router = Router(
            [StarletteRoute(path, _Path(self, of)) for path, of in self.site.paths.items()],
            redirect_slashes=False,
            default=self._elsewhere,
            lifespan=self._lifespan,
        )
        # Of our own: the app that we are mounted in may need all of the usual ones.
        self.limiter: anyio.CapacityLimiter | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whether the server or a proxy removed the mount path or not."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] == "http":
            root = str(scope.get("root_path", "")).rstrip("/") or self._root_path
            path = f"{root}/" if scope["path"] == root else scope["path"]
            scope = {**scope, "root_path": root, "path": path}
        await self._router(scope, receive, send)

    @asynccontextmanager
    async def _lifespan(self, _app: object) -> AsyncIterator[None]:
        yield
        self.site.close()

    async def _elsewhere(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer where no route is, unless the mount path is there twice."""
        root, path = scope["root_path"], scope["path"]
        if root and path.startswith(f"{root}{root}/"):  # a server added it, the proxy had kept it
            await self._router({**scope, "path": path[len(root) :]}, receive, send)
        else:
            await _Path(self, {})(scope, receive, send)


class _Path:
    """The app of one path; a function would get a request instead."""

    def __init__(self, app: DeadLettersApp, methods: Mapping[str, Route]) -> None:
        self._app, self._methods = app, methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if app.limiter is None:
            app.limiter = anyio.CapacityLimiter(2 * MAX_CALLS)
        with suppress(ClientDisconnect):
            visit = _Visit(app, Request(scope, receive))
            await visit.read()
            page = await anyio.to_thread.run_sync(
                handle, visit.call, self._methods, visit.check, limiter=app.limiter
            )
            await visit.response(page)(scope, receive, send)


class _Visit:
    """A browser's request on its way to a page, and the answer on its way back."""

    def __init__(self, app: DeadLettersApp, request: Request) -> None:
        self._app, self._request, scope = app, request, request.scope
        self._scheme = app.url.scheme or scope.get("scheme", "http")
        self._session = request.cookies.get(COOKIE, "")
        self._cookies: list[tuple[str, str, int | None]] = []
        self._refused: RequestError | None = None
        self.call = Call(
            site=app.site,
            method=request.method,
            path=scope["path"].removeprefix(scope["root_path"]),
            root=scope["root_path"],
            origin=f"{self._scheme}://{app.url.netloc or request.headers.get('host', '')}",
            parts={
                name: unquote(text)
                for name, text in request.path_params.items()
                if isinstance(text, str)  # an app's own part before the mount may be a number
            },
            client=request.client.host if request.client else "",
            home=app.site.home,
            token_field=FIELD,
            token=self._form_token,
        )

    async def read(self) -> None:
        """Read the fields of the URL and of the form."""
        try:
            self.call.query = fields_of(self._request.scope["query_string"].decode("latin-1"))
            if self.call.method == "POST":
                self.call.form = await _form_of(self._request)
        except RequestError as exc:
            self._refused = exc

    def check(self) -> Page | None:
        """Check the host, who asks, and where a form comes from."""
        call, route, headers = self.call, self.call.route, self._request.headers
        if self._refused is not None:
            raise self._refused
        if self._app.hosts is not None and (route is None or route.name != "health"):
            check_host(headers.get("host", ""), self._app.hosts)  # probes ask by address
        if route is None:
            return None
        if route.permission is not None:
            access = self._app.access
            if isinstance(access, Token) and "token" in call.query and call.method == "GET":
                cookie = access.cookie(call.query["token"][-1])
                if cookie is not None:
                    return self._entered(cookie)
            call.user = self._find_user()
        if route.method == "POST" and (call.user or not route.permission):
            self._app.forms.check(self._request, call.value(FIELD), self._scheme)
        return None

    def _find_user(self) -> User | None:
        user = self._app.access(self._request)
        if inspect.isawaitable(user):
            user = anyio.from_thread.run(_awaited, user)
        if user is not None and not isinstance(user, User):
            raise TypeError(
                f"expected access to return a celery_dlq.web.User or None, got {user!r}"
            )
        return user

    def _entered(self, cookie: str) -> Page:
        """Send who gave the token on: no address with it stays in the browser's history."""
        self._cookies.append((TOKEN_COOKIE, cookie, MAX_AGE_SECONDS))
        query = {name: values for name, values in self.call.query.items() if name != "token"}
        location = quote(self.call.root + self.call.path)
        location += f"?{urlencode(query, doseq=True, errors='replace')}" if query else ""
        return Page(status=303, headers={"location": location})

    def _form_token(self) -> str:
        """The token of a form for this browser; gives it a cookie if it has none."""
        if not self._session:
            self._session = secrets.token_urlsafe(24)
            self._cookies.append((COOKIE, self._session, None))
        return self._app.forms.token(self._session)

    def response(self, page: Page) -> Response:
        """Starlette's response of a page."""
        head = self.call.method == "HEAD"
        made: Response
        if isinstance(page.body, bytes):
            length = {"content-length": str(len(page.body))}
            made = Response(b"" if head else page.body, page.status, {**page.headers, **length})
        else:
            parts = iterate_in_threadpool(() if head else page.body)
            made = StreamingResponse(parts, page.status, page.headers)
        for name, value, seconds in self._cookies:
            # Lax: with Strict, a link in a chat opens the page as if nobody had been there.
            made.set_cookie(
                name,
                value,
                max_age=seconds,
                path=quote(self.call.root) or "/",
                secure=self._scheme == "https",
                httponly=True,
                samesite="lax",
            )
        return made


async def _awaited(answer: Awaitable[User | None]) -> User | None:
    return await answer


async def _form_of(request: Request) -> Fields:
    """Read an urlencoded form; of nothing else, because a parser can be attacked."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("", "application/x-www-form-urlencoded"):
        raise RequestError(415, "expected a form of application/x-www-form-urlencoded")
    body = bytearray()
    try:
        with anyio.fail_after(FORM_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MAX_FORM_BYTES:
                    most = f"{MAX_FORM_BYTES:,} bytes"
                    raise RequestError(413, f"expected a form of at most {most}, got more")
    except TimeoutError as exc:
        raise RequestError(400, f"expected the form within {FORM_SECONDS:.0f} seconds") from exc
    return fields_of(body.decode("utf-8", "replace"))
