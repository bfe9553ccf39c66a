"""Where a Redis is and how to reach it: a server, failover URLs, Sentinels or a cluster.

URLs and options are spelled as for the broker, so that the broker's own can be used.

Source: https://github.com/celery/kombu/blob/main/kombu/transport/redis.py (``_connparams``), and
``parse_url`` in https://github.com/celery/kombu/blob/main/kombu/utils/url.py. A unit test compares
the arguments made here with kombu's.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from celery_dlq.errors import SettingsError
from celery_dlq.letters.printable import url_without_secrets


class AddressKind(Enum):
    """What the URLs of an `Address` are."""

    SERVERS = "servers, of which the first that answers is used"
    SENTINELS = "Sentinels that know the server"
    CLUSTER = "nodes of a cluster"


SCHEMES = {
    "redis": AddressKind.SERVERS,
    "rediss": AddressKind.SERVERS,
    "valkey": AddressKind.SERVERS,
    "valkeys": AddressKind.SERVERS,
    "unix": AddressKind.SERVERS,
    "redis+socket": AddressKind.SERVERS,
    "sentinel": AddressKind.SENTINELS,
    "redis+cluster": AddressKind.CLUSTER,
    "rediss+cluster": AddressKind.CLUSTER,
}
_PORTS = {AddressKind.SERVERS: 6379, AddressKind.SENTINELS: 26379, AddressKind.CLUSTER: 6379}
_WITH_TLS = ("rediss", "valkeys", "rediss+cluster")
SOCKETS = ("unix", "redis+socket")
_VERIFIED = {"ssl_cert_reqs": "required"}

_IN_URLS = ("db", "virtual_host", "credential_provider")
_CONNECTION_OPTIONS = ("socket_keepalive", "socket_keepalive_options", "health_check_interval")
OPTIONS = (
    *_CONNECTION_OPTIONS,
    "credential_provider",
    "master_name",
    "min_other_sentinels",
    "sentinel_kwargs",
)
"""The transport options that are used; names and meanings are kombu's."""


@dataclass(frozen=True, slots=True, repr=False)
class Address:
    """The URLs of one store, with what they do not say. Make it with `address_of`."""

    urls: tuple[str, ...]  # The URLs
    # Arguments of redis-py's TLS connections, for URLs without their own; `None`: no TLS unless a
    # URL asks for it
    tls: Mapping[str, Any] | None = None
    # Transport options; others than `OPTIONS` are ignored
    options: Mapping[str, Any] = field(default_factory=dict)
    # Read the URLs as kombu does, which does not verify the certificate of a `rediss://` that has
    # no TLS arguments
    of_broker: bool = False

    def __str__(self) -> str:
        """The URLs without users, passwords and options."""
        return ";".join(map(url_without_secrets, self.urls))

    __repr__ = __str__

    @property
    def kind(self) -> AddressKind:
        """What the URLs are."""
        return SCHEMES[urlsplit(self.urls[0]).scheme]

    def connections(self) -> list[dict[str, Any]]:
        """The arguments of redis-py's connections to each URL.

        One with TLS has ``ssl``, one over a unix socket has ``path``.
        """
        return [self._connection(url) for url in self.urls]

    def _connection(self, url: str) -> dict[str, Any]:
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query))
        found: dict[str, Any] = {}
        if parts.scheme in SOCKETS:
            found["path"] = unquote(parts.path)
            database = query.get("virtual_host") or query.get("db", "")
        else:
            found["host"] = unquote(parts.hostname or "localhost")
            found["port"] = parts.port or _PORTS[SCHEMES[parts.scheme]]
            database = query.get("db", parts.path)
        found["db"] = _database(database)
        if found["db"] and SCHEMES[parts.scheme] is AddressKind.CLUSTER:
            raise _UnusableError("expected no database after the host: a cluster has one only")
        others = [name for name in query if name not in _IN_URLS and name[:4] != "ssl_"]
        if others and not self.of_broker:  # not shown: a password may have a question mark
            raise _UnusableError(
                "expected no options after the host but db, virtual_host, credential_provider and "
                "ssl_…; others are in dlq_transport_options"
            )
        given = query.get("credential_provider") or self.options.get("credential_provider")
        if provider := _provider(given):
            found["credential_provider"] = provider
        else:
            found["username"] = unquote(parts.username or "") or None
            found["password"] = unquote(parts.password or "") or None
        if "path" in found:
            return found
        for name in _CONNECTION_OPTIONS:
            if self.options.get(name) is not None:
                found[name] = self.options[name]
        return {**found, **self._tls(parts.scheme, query)}

    def _tls(self, scheme: str, query: Mapping[str, str]) -> dict[str, Any]:
        tls: dict[str, Any] = {n: value for n, value in query.items() if n.startswith("ssl_")}
        tls = tls or dict(self.tls or {})
        if scheme in _WITH_TLS and not tls:
            tls = {"ssl_cert_reqs": "none"} if self.of_broker else dict(_VERIFIED)
        if not tls:
            return {}
        if isinstance(wanted := tls.get("ssl_cert_reqs"), str):
            tls["ssl_cert_reqs"] = wanted.removeprefix("CERT_").lower()
        if isinstance(checked := tls.get("ssl_check_hostname"), str):
            tls["ssl_check_hostname"] = checked.lower() != "false"
        return {**tls, "ssl": True}


def address_of(
    urls: str | Sequence[str],
    where: str = "dlq_url",
    *,
    options_where: str = "dlq_transport_options",
    use_ssl: Mapping[str, Any] | bool | None = None,
    options: Mapping[str, Any] | None = None,
    of_broker: bool = False,
) -> Address:
    """Check URLs and options."""
    listed = urls.split(";") if isinstance(urls, str) else list(urls)
    names = {urlsplit(url).scheme if isinstance(url, str) else "" for url in listed}
    if not listed or not names <= SCHEMES.keys():
        shown = ";".join(url_without_secrets(str(url)) for url in listed)
        raise SettingsError(
            f"expected {where} to be a Redis URL such as redis://localhost:6379/0, got {shown!r}; "
            f"its scheme is one of {', '.join(SCHEMES)}"
        )
    if len(listed) > 1 and (len({SCHEMES[name] for name in names}) > 1 or names & {*SOCKETS}):
        raise SettingsError(
            f"expected {where} to be one Redis URL, or several of one kind that name a host, "
            f"got several with {' and '.join(sorted(names))}"
        )
    tls = dict(_VERIFIED) if use_ssl is True else use_ssl or None
    address = Address(tuple(listed), tls, dict(options or {}), of_broker)
    try:
        address.connections()
    except Exception as exc:  # noqa: BLE001 - an own credential provider may raise anything
        why = f": {exc}" if type(exc) is _UnusableError else ""
        raise SettingsError(
            f"expected {where} to be a usable Redis URL, got {address}{why}; special characters "
            f"in a password must be percent-encoded"
        ) from None
    if address.kind is AddressKind.SENTINELS and not address.options.get("master_name"):
        raise SettingsError(
            f"expected {options_where}['master_name'] to be the name of the server that the "
            f"Sentinels at {address} watch, got none"
        )
    return address


class _UnusableError(ValueError):
    """A part that cannot be used; the text holds nothing of the rest, such as a password."""


def _database(text: str) -> int:
    number = text.strip("/")
    if number and not (number.isascii() and number.isdigit()):
        # Not shown: what follows the slash of a password that is not percent-encoded ends up here.
        raise _UnusableError("expected the number of a database after the host, got something else")
    return int(number or 0)


def _provider(given: Any) -> Any:
    """A credential provider, or the one whose class has this dotted name."""
    if not given:
        return None
    if isinstance(given, str):
        try:
            given = pkgutil.resolve_name(given)()
        except (ImportError, AttributeError, ValueError) as exc:
            raise _UnusableError(f"expected the name of a credential provider: {exc}") from None
    if not callable(getattr(given, "get_credentials", None)):
        kind = type(given).__name__
        raise _UnusableError(f"expected credential_provider to be a redis one, got {kind}")
    return given
