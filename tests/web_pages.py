"""The pages of an app without a server, and requests as browsers send them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from celery import Celery
from fresh import fresh_conf

from celery_dlq import DeadLetters
from celery_dlq.web.forms import COOKIE, FIELD, SignedForms
from celery_dlq.web.http import Permission, Request, Response, User, fields_of
from celery_dlq.web.routes import Route, Routes
from celery_dlq.web.site import ROUTES
from celery_dlq.web.web import Web

SECRET = "a secret of these tests"
HOST = "127.0.0.1:9809"
PARTS = {"queue": "orders-DLQ", "fingerprint": "c6a56e9b25a57fc5", "letter": "1f0c9a40"}
POSTS = [route.name for route in ROUTES.all if route.method == "POST"]
ALL = frozenset(Permission)
SAME_SITE = {"sec-fetch-site": "same-origin"}


def pages(**options: Any) -> Web:
    """The pages of an app whose letters are in memory; everybody may do everything."""
    app = Celery("pages", broker="memory://")
    app.conf.update(fresh_conf())
    user = User(name="olga", permissions=ALL)
    given = {"access": lambda _: user, "forms": SignedForms(SECRET), **options}
    return DeadLetters(app).web(**given)


def recorded(web: Web) -> list[str]:
    """Let every route that needs a permission only note its name; returns the notes."""
    reached: list[str] = []

    def watched(route: Route) -> Route:
        def page(_: object) -> Response:
            reached.append(route.name)
            return Response(body=b"reached")

        return route if route.permission is None else replace(route, page=page)

    web.routes = Routes([watched(route) for route in ROUTES.all])
    return reached


def path_of(route: Route) -> str:
    """A path of a route; its parts are those of no real letter."""
    return re.sub(r"\{(\w+)\}", lambda part: quote(PARTS.get(part[1], "x")), route.pattern)


def get(path: str = "/", **changes: Any) -> Request:
    """A request for a page."""
    headers = {"host": HOST, **changes.pop("headers", {})}
    return Request(method="GET", path=path, headers=headers, **changes)


def cookie_of(response: Response, name: str = COOKIE) -> str:
    """The cookie that a response sets, as the browser sends it back."""
    set_ = [value for key, value in response.headers if key == "set-cookie"]
    (found,) = [value.partition(";")[0] for value in set_ if value.startswith(f"{name}=")]
    return found


def form_of(web: Web, **changes: Any) -> tuple[str, str]:
    """A browser's cookie and the token of the form that it was given."""
    assert web.options.forms is not None
    response = Response()
    token = web.options.forms.token(get(**changes), response)
    return cookie_of(response), token


def post(path: str, cookie: str = "", token: str = "", **changes: Any) -> Request:
    """A form that is sent; by default without a header that says where from."""
    headers = {"host": HOST, "cookie": cookie, **changes.pop("headers", {})}
    fields = {FIELD: [token], **fields_of(changes.pop("fields", ""))}
    return Request(method="POST", path=path, headers=headers, form=fields, **changes)
