"""The pages as an ASGI app, for uvicorn or to mount in another app under any path."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING

import anyio
import anyio.from_thread
import anyio.to_thread
from starlette.concurrency import iterate_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.requests import Request as StarletteRequest
from starlette.responses import Response as StarletteResponse
from starlette.responses import StreamingResponse

from celery_dlq.errors import SettingsError
from celery_dlq.web.http import (
    MAX_FORM_BYTES,
    Fields,
    Request,
    RequestError,
    Response,
    User,
    fields_of,
)
from celery_dlq.web.web import MAX_CALLS

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from celery_dlq.web.web import Web

FORM_SECONDS = 30.0
"""Longest wait for the rest of a form."""

AppAccess = Callable[[StarletteRequest], "User | Awaitable[User | None] | None"]
"""An app's own rule: gets Starlette's request; ``None`` for who has to log in there first."""


class Proxies:
    """The proxies whose headers are believed."""

    def __init__(self, addresses: Iterable[str] = ()) -> None:
        try:
            self._networks = [ip_network(text, strict=False) for text in addresses]
        except ValueError as exc:
            raise SettingsError(
                f"expected addresses of proxies such as 10.0.0.7 or 10.0.0.0/8, got: {exc}"
            ) from exc

    def trusts(self, address: str) -> bool:
        """True if the address is one of them."""
        try:
            found = ip_address(address)
        except ValueError:
            return False
        return any(found in network for network in self._networks)

    def seen(self, peer: str, scheme: str, headers: Mapping[str, str]) -> tuple[str, str, bool]:
        """The browser's address and scheme, and whether a trusted proxy says so."""
        if not self.trusts(peer):
            return peer, scheme, False
        chain = [text.strip() for text in headers.get("x-forwarded-for", "").split(",")]
        # From the right: what is left of an unknown address was written by that one.
        client = next((text for text in reversed(chain) if text and not self.trusts(text)), peer)
        told = headers.get("x-forwarded-proto", "").split(",")[-1].strip().lower()
        return client, told if told in ("http", "https") else scheme, True


class DeadLettersApp:
    """An ASGI app of the pages."""

    def __init__(
        self, web: Web, proxies: Proxies | None = None, *, root_path: str = "", scheme: str = ""
    ) -> None:
        self.web = web
        self._scheme = scheme
        self._proxies = proxies or Proxies()
        self._root_path = root_path.rstrip("/")
        # Of our own: the app that we are mounted in may need all of the usual ones.
        self._limiter: anyio.CapacityLimiter | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        else:
            await self._answer(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                self.web.close()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = StarletteRequest(scope, receive)
        refused = None
        form: Fields = {}
        query: Fields = {}
        try:
            query = fields_of(scope["query_string"].decode("latin-1"))
            if raw.method == "POST":
                form = await _form_of(raw)
        except ClientDisconnect:
            return
        except RequestError as exc:
            refused = exc
        request = self._request(raw, query, form)
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(2 * MAX_CALLS)
        response = await anyio.to_thread.run_sync(
            self.web.handle, request, refused, limiter=self._limiter
        )
        await _made(response, raw.method)(scope, receive, send)

    def _request(self, raw: StarletteRequest, query: Fields, form: Fields) -> Request:
        scope = raw.scope
        headers = dict(raw.headers.items())
        peer = raw.client.host if raw.client else ""
        client, scheme, proxied = self._proxies.seen(peer, scope.get("scheme", "http"), headers)
        root = str(scope.get("root_path", "")).rstrip("/") or self._root_path
        return Request(
            method=raw.method,
            path=self._below(root, scope["path"]),
            root=root,
            query=query,
            form=form,
            headers=headers,
            scheme=self._scheme or scheme,
            client=client,
            proxied=proxied,
            raw=raw,
        )

    def _below(self, root: str, path: str) -> str:
        """The path below the mount, whether the server or a proxy removed the mount or not."""
        below = _without(root, path)
        route, _, methods = self.web.routes.find("GET", below)
        if route is None and not methods:  # the server added it, and the proxy had kept it
            below = _without(self._root_path or root, below)
        return below


def asked(access: AppAccess) -> Callable[[Request], User | None]:
    """An app's own rule for the pages; it may be a coroutine function."""

    def ask(request: Request) -> User | None:
        found = access(request.raw)
        if inspect.isawaitable(found):
            found = anyio.from_thread.run(_awaited, found)
        if found is not None and not isinstance(found, User):
            raise TypeError(
                f"expected access to return a celery_dlq.web.User or None, got {found!r}"
            )
        return found

    return ask


async def _awaited(answer: Awaitable[User | None]) -> User | None:
    return await answer


async def _form_of(raw: StarletteRequest) -> Fields:
    """Read an urlencoded form."""
    kind = raw.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("", "application/x-www-form-urlencoded"):
        raise RequestError(415, "expected a form of application/x-www-form-urlencoded")
    body = bytearray()
    try:
        with anyio.fail_after(FORM_SECONDS):
            async for part in raw.stream():
                body += part
                if len(body) > MAX_FORM_BYTES:
                    raise RequestError(
                        413, f"expected a form of at most {MAX_FORM_BYTES:,} bytes, got more"
                    )
    except TimeoutError as exc:
        raise RequestError(
            400, f"expected the whole form within {FORM_SECONDS:.0f} seconds"
        ) from exc
    return fields_of(body.decode("utf-8", "replace"))


def _without(root: str, path: str) -> str:
    if root and (path == root or path.startswith(root + "/")):
        path = path[len(root) :]
    return path or "/"


def _made(response: Response, method: str) -> StarletteResponse:
    made: StarletteResponse
    if isinstance(response.body, bytes):
        made = StarletteResponse(response.body, response.status)
    else:
        parts = () if method == "HEAD" else response.body
        made = StreamingResponse(iterate_in_threadpool(parts), response.status)
    length = [pair for pair in made.raw_headers if pair[0] == b"content-length"]
    if method == "HEAD" and isinstance(response.body, bytes):
        made.body = b""
    made.raw_headers = [*_raw_headers(response), *length]
    return made


def _raw_headers(response: Response) -> list[tuple[bytes, bytes]]:
    pairs = [("content-type", response.content_type), *response.headers]
    return [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in pairs]
