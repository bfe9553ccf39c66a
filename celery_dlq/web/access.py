"""Who may ask, and from where, where Starlette serves the pages.

A request that changes something must come from our own pages (CSRF). Three things are checked,
because none is there always: browsers send ``Sec-Fetch-Site`` only over https and to localhost,
``Origin`` not from every old one, and the token proves that the form was ours.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from itsdangerous import BadSignature, SignatureExpired, URLSafeTimedSerializer

from celery_dlq.errors import SettingsError
from celery_dlq.policies.checks import expected
from celery_dlq.web.http import RequestError, User

if TYPE_CHECKING:
    from starlette.requests import Request

COOKIE = "dlq_session"
FIELD = "dlq_token"
TOKEN_COOKIE = "dlq_access"  # noqa: S105 - its name
MAX_AGE_SECONDS = 12 * 3600
SHORTEST_SECRET = 16
_LONGEST_NAME = 200
_FOREIGN_FORM = (
    "expected a form that was signed with the secret of this process, got another one; give all "
    "processes behind this address the same: `dlq web --secret` (or DLQ_WEB_SECRET), "
    "asgi(secret=...). If this process was restarted, open the form again"
)

PEER = "celery_dlq.peer"
"""Entry of a scope: the address that the connection comes from, before a proxy's headers."""


class Forms:
    """Tokens of forms: signed with a secret, bound to a cookie of the browser."""

    def __init__(self, secret: str, url: str = "") -> None:
        self._signer = URLSafeTimedSerializer(secret, salt="celery_dlq.web.forms")
        self._url = url

    def token(self, session: str) -> str:
        """The token for the browser with this cookie."""
        return str(self._signer.dumps(session))

    def check(self, request: Request, token: str, scheme: str) -> None:
        """Check where a form came from."""
        site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
        ours = self._url or f"{scheme}://{request.headers.get('host', '')}"
        if site is None and origin is None:
            raise RequestError(403, "expected the header Origin or Sec-Fetch-Site, got neither")
        if site not in (None, "same-origin"):
            raise RequestError(403, f"expected a form of this site, got one from a {site} page")
        if site is None and _normal_origin(origin or "") != _normal_origin(ours):
            raise RequestError(
                403,
                f"expected a form from {ours}, got one from {origin}; behind a proxy, give the "
                f"address that browsers use: `dlq web --url`, or asgi(url=...)",
            )
        cookie = request.cookies.get(COOKIE)
        if not token or not cookie:
            raise RequestError(403, "expected a form with its token and cookie; open it again")
        try:
            session = self._signer.loads(token, max_age=MAX_AGE_SECONDS)
        except SignatureExpired as exc:
            raise RequestError(403, "the form is older than 12 hours; send it again") from exc
        except BadSignature as exc:
            raise RequestError(403, _FOREIGN_FORM) from exc
        if not hmac.compare_digest(str(session).encode(), cookie.encode()):
            raise RequestError(403, "the form was made for another browser; open it again")


def check_host(host: str, known: Collection[str]) -> None:
    """Refuse a name that is not ours: another site may point its own at our address."""
    with suppress(ValueError):
        name = urlsplit(f"//{host}").hostname or ""
        # Python reads "[::1].evil.example" as the address in its brackets.
        rest = host.rpartition("]")[2] if host.startswith("[") else ""
        if rest.startswith(":") or not rest:
            if name not in known:
                ip_address(name)  # no other site can point an address at us
            return
    raise RequestError(
        421,
        f"expected an IP address or one of the hosts {', '.join(sorted(known))}, got "
        f"{host[:100]!r}; give the address that browsers use, or add the name: `dlq web --url` "
        f"or `--host-name`, asgi(url=...) or asgi(hosts=...)",
    )


class Token:
    """One secret for all who may look, as Jupyter has it: once in the URL, then in a cookie."""

    def __init__(self, token: str, secret: str, user: User) -> None:
        self._token = token.encode()
        # With another token, cookies of this one end.
        self._signer = URLSafeTimedSerializer(f"{secret}:{token}", salt="celery_dlq.web.token")
        self._user = user

    def __call__(self, request: Request) -> User | None:
        """Who has the cookie is the user."""
        try:
            self._signer.loads(request.cookies.get(TOKEN_COOKIE, ""), max_age=MAX_AGE_SECONDS)
        except BadSignature:
            return None
        return self._user

    def cookie(self, given: str) -> str | None:
        """The value of the cookie for who gives the token."""
        if not hmac.compare_digest(given.encode("utf-8", "replace"), self._token):
            return None
        return str(self._signer.dumps(secrets.token_urlsafe(8)))


class ProxyUser:
    """The user whom a header of a proxy names."""

    def __init__(self, header: str, proxies: Iterable[str], user: User) -> None:
        self._header = header.lower()
        self._proxies = networks(proxies)
        self._user = user

    def __call__(self, request: Request) -> User | None:
        """Refuse who did not come through a proxy that was named: anybody can send a header."""
        peer = str(request.scope.get(PEER, ""))
        try:
            known = any(ip_address(peer) in network for network in self._proxies)
        except ValueError:
            known = False
        if not known:
            raise RequestError(
                403,
                f"expected a request from a trusted proxy, got one from {peer or 'nowhere'}; name "
                f"the proxy's address with --trusted-proxy",
            )
        name = _name_in(request.headers.get(self._header, "")).strip()
        if not name or len(name) > _LONGEST_NAME:
            raise RequestError(401, f"expected the proxy to name a user in {self._header}")
        return replace(self._user, name=name)


def _name_in(header: str) -> str:
    """A header's text: proxies send UTF-8, and Starlette reads every header as Latin-1."""
    try:
        return header.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return header


def networks(addresses: Iterable[str]) -> list[IPv4Network | IPv6Network]:
    """Addresses and networks of proxies."""
    try:
        return [ip_network(text, strict=False) for text in addresses]
    except ValueError as exc:
        raise SettingsError(
            f"expected addresses of proxies such as 10.0.0.7 or 10.0.0.0/8, got: {exc}"
        ) from exc


def check_secret(what: str, value: str | None) -> str:
    """A secret that somebody gave, or a random one."""
    if value is None:
        return secrets.token_urlsafe(32)
    if len(value) < SHORTEST_SECRET:
        raise SettingsError(
            f"expected {what} to be a text of at least {SHORTEST_SECRET} characters, got a shorter "
            f"one; make one with: python -c 'import secrets; print(secrets.token_urlsafe())'"
        )
    return value


def check_url(what: str, value: str | None) -> str:
    """The address of the pages as browsers see it; empty if nobody gave it."""
    url = (value or "").rstrip("/")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and not parts.username
        usable = usable and not (parts.query or parts.fragment) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if value is not None and not usable:
        raise expected(what, "an address such as https://ops.example.com/dlq", value)
    return url


def _normal_origin(origin: str) -> str:
    """An origin as browsers write it: lower case, and without the port that its scheme has."""
    try:
        parts = urlsplit(origin.lower())
        port = {"http": 80, "https": 443}.get(parts.scheme) if parts.port is None else parts.port
    except ValueError:
        return ""
    return f"{parts.scheme}://{parts.hostname}:{port}" if parts.hostname else origin
