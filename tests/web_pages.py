"""The pages of an app without a server, and requests as browsers send them."""

from __future__ import annotations

import asyncio
import re
import secrets
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote, urlencode

from celery import Celery
from fresh import fresh_conf

from celery_dlq import DeadLetters
from celery_dlq.web.access import COOKIE, FIELD, Forms
from celery_dlq.web.asgi import DeadLettersApp
from celery_dlq.web.http import Page, Permission, Route, User
from celery_dlq.web.site import all_routes

SECRET = "a secret of these tests"
HOST = "127.0.0.1:9809"
PARTS = {"queue": "orders-DLQ", "fingerprint": "c6a56e9b25a57fc5", "letter": "1f0c9a40"}
ROUTES = all_routes()
POSTS = [route.name for route in ROUTES if route.method == "POST"]
ALL = frozenset(Permission)
SAME_SITE = {"sec-fetch-site": "same-origin"}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request; its path is decoded once, as servers give it."""

    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict)
    query: str = ""
    body: str = ""
    client: str = "10.0.0.7"
    scheme: str = "http"
    peer: str = ""  # Where the connection comes from, if a proxy's header said the client


@dataclass(kw_only=True)
class Answer:
    """What came back."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


class Pages:
    """The pages of an app, asked without a server."""

    def __init__(self, dlq: DeadLetters, **options: Any) -> None:
        self.dlq = dlq
        self.app = DeadLettersApp(dlq, **options)

    def handle(self, asked: Asked) -> Answer:
        """Answer a request."""
        scope = {
            "type": "http",
            "method": asked.method,
            "path": asked.path,
            "root_path": "",
            "query_string": asked.query.encode(),
            "headers": [
                (k.encode("latin-1"), v.encode("latin-1")) for k, v in asked.headers.items()
            ],
            "client": (asked.client, 1),
            "scheme": asked.scheme,
            **({"celery_dlq.peer": asked.peer} if asked.peer else {}),
        }
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": asked.body.encode(), "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        asyncio.run(self.app(scope, receive, send))
        return Answer(
            status=sent[0]["status"],
            headers=[(k.decode("latin-1"), v.decode("latin-1")) for k, v in sent[0]["headers"]],
            body=b"".join(message.get("body", b"") for message in sent[1:]),
        )

    def close(self) -> None:
        """End its threads."""
        self.app.site.close()


def pages(**options: Any) -> Pages:
    """The pages of an app of its own; everybody may do everything."""
    app = Celery("pages", broker="memory://")
    app.conf.update(fresh_conf())
    user = User(name="olga", permissions=ALL)
    return Pages(DeadLetters(app), **{"access": lambda _: user, "secret": SECRET, **options})


def recorded(web: Pages) -> list[str]:
    """Let every route that needs a permission only note its name; returns the notes."""
    reached: list[str] = []

    def watched(route: Route) -> Route:
        def page(_: object) -> Page:
            reached.append(route.name)
            return Page(body=b"reached")

        return route if route.permission is None else replace(route, page=page)

    for of_path in web.app.site.paths.values():
        of_path.update({method: watched(route) for method, route in of_path.items()})
    return reached


def path_of(route: Route) -> str:
    """A path of a route; its parts are those of no real letter."""
    return re.sub(r"\{(\w+)\}", lambda part: quote(PARTS.get(part[1], "x")), route.pattern)


def get(path: str = "/", **changes: Any) -> Asked:
    """A request for a page."""
    headers = {"host": HOST, **changes.pop("headers", {})}
    return Asked(method="GET", path=path, headers=headers, **changes)


def cookie_of(answer: Answer, name: str = COOKIE) -> str:
    """The cookie that an answer sets, as the browser sends it back."""
    set_ = [value for key, value in answer.headers if key == "set-cookie"]
    (found,) = [value.partition(";")[0] for value in set_ if value.startswith(f"{name}=")]
    return found


def form_of(secret: str = SECRET) -> tuple[str, str]:
    """A browser's cookie and the token of the form that it was given."""
    session = secrets.token_urlsafe(24)
    return f"{COOKIE}={session}", Forms(secret).token(session)


def post(path: str, cookie: str = "", token: str = "", **changes: Any) -> Asked:
    """A form that is sent; by default without a header that says where from."""
    kind = "application/x-www-form-urlencoded"
    headers = {"host": HOST, "cookie": cookie, "content-type": kind, **changes.pop("headers", {})}
    body = f"{urlencode({FIELD: token})}&{changes.pop('fields', '')}"
    return Asked(method="POST", path=path, headers=headers, body=body, **changes)
