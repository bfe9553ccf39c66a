"""The login of `celery_dlq.web.users`: its form, and the ways in and out."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

from celery_dlq.web.http import RequestError, Response

if TYPE_CHECKING:
    from celery_dlq.web.users import Login
    from celery_dlq.web.web import Call

_LONGEST_PATH = 4000


def form(call: Call, text: str = "") -> Response:
    """Show the form; it leads back to the page that was asked for."""
    _login_of(call)
    request = call.request
    back = own_path(call, request.value("next"))
    asked = quote(request.root + request.path, errors="replace")
    if not back and request.method in ("GET", "HEAD") and asked != call.link("login"):
        query = urlencode(request.query, doseq=True, errors="replace")
        back = own_path(call, f"{asked}?{query}" if query else asked)
    name = request.form.get("name", [""])[-1][:100]
    return call.page("login.html", title="Log in", next=back, text=text, name=name)


def log_in(call: Call) -> Response:
    """Check a name and a password."""
    cookie = _login_of(call).log_in(call.request)
    if cookie is None:
        response = form(call, "The name or the password is not right.")
        response.status = 401
        return response
    back = own_path(call, call.request.value("next")) or call.link("overview")
    return Response(status=303, headers=[("location", back), cookie])


def log_out(call: Call) -> Response:
    """End the session."""
    cookie = _login_of(call).log_out(call.request)
    return Response(status=303, headers=[("location", call.link("login")), cookie])


def own_path(call: Call, text: str) -> str:
    """A path of these pages from a form or URL; empty if it leads elsewhere."""
    root = quote(call.request.root)
    # Browsers read a backslash as a slash, and drop line ends and tabs.
    plain = text.isascii() and text.isprintable() and "\\" not in text and " " not in text
    own = text.startswith(f"{root}/") and not text.startswith("//")
    return text if plain and own and len(text) < _LONGEST_PATH else ""


def _login_of(call: Call) -> Login:
    found = call.web.options.login
    if found is None:
        raise RequestError(404, "these pages have no login")
    return found
