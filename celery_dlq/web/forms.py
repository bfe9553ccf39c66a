"""Protection of forms against other sites (CSRF).

A request that changes something must come from our own pages. Three things are checked, because
none is there always: browsers send ``Sec-Fetch-Site`` only over https and to localhost, ``Origin``
not from every old one, and the token proves that the form was ours.
"""

from __future__ import annotations

import secrets
from typing import Protocol
from urllib.parse import urlsplit

from itsdangerous import BadSignature, SignatureExpired, URLSafeTimedSerializer

from celery_dlq.web.http import Request, RequestError, Response

COOKIE = "dlq_session"
FIELD = "dlq_token"
MAX_AGE_SECONDS = 12 * 3600


class Forms(Protocol):
    """Makes and checks the hidden field of a form."""

    field: str

    def token(self, request: Request, response: Response) -> str:
        """Return the value for the field; may set a cookie."""

    def check(self, request: Request) -> None:
        """Raise `RequestError` if the form was not ours."""


class SignedForms:
    """Tokens signed with a secret, bound to a cookie of the browser."""

    field = FIELD

    def __init__(self, secret: str, origin: str | None = None) -> None:
        self._signer = URLSafeTimedSerializer(secret, salt="celery_dlq.web.forms")
        self._origin = origin

    def token(self, request: Request, response: Response) -> str:
        """Return a token for this browser; gives it a cookie if it has none."""
        session = request.cookie(COOKIE)
        if not session:
            session = secrets.token_urlsafe(24)
            response.headers.append(request.set_cookie(COOKIE, session))
        return str(self._signer.dumps(session))

    def check(self, request: Request) -> None:
        """Check where the form came from."""
        site = request.headers.get("sec-fetch-site")
        origin = request.headers.get("origin")
        expected = self._origin or request.origin
        if site is not None:
            if site != "same-origin":
                raise RequestError(403, f"expected a form of this site, got one from a {site} page")
        elif origin is not None:
            if _normal(origin) != _normal(expected):
                raise RequestError(
                    403,
                    f"expected a form from {expected}, got one from {origin}; behind a proxy, set "
                    f"dlq_web_url to the address that browsers use",
                )
        else:
            raise RequestError(403, "expected the header Origin or Sec-Fetch-Site, got neither")
        token = request.value(FIELD)
        cookie = request.cookie(COOKIE)
        if not token or not cookie:
            raise RequestError(403, "expected a form with its token and cookie; open it again")
        try:
            session = self._signer.loads(token, max_age=MAX_AGE_SECONDS)
        except SignatureExpired as exc:
            raise RequestError(403, "the form is older than 12 hours; send it again") from exc
        except BadSignature as exc:
            raise RequestError(403, "the form's token is not one of this server's") from exc
        if not secrets.compare_digest(str(session).encode(), cookie.encode()):
            raise RequestError(403, "the form was made for another browser; open it again")


def _normal(origin: str) -> str:
    """An origin as browsers write it: lower case, and without the port that its scheme has."""
    try:
        parts = urlsplit(origin.lower())
        port = {"http": 80, "https": 443}.get(parts.scheme) if parts.port is None else parts.port
    except ValueError:
        return ""
    return f"{parts.scheme}://{parts.hostname}:{port}" if parts.hostname else origin
