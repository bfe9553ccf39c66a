"""Addresses: the same connections as kombu makes for the same URL and options."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any

import kombu
import pytest
import redis
from celery import Celery
from kombu.transport.redis import Channel, SentinelChannel

from celery_dlq.config import Settings
from celery_dlq.errors import SettingsError
from celery_dlq.store.address import AddressKind, address_of

if TYPE_CHECKING:
    from collections.abc import Mapping

SECRET = "s3cret"
COMPARED = ("host", "path", "username", "password", "db", "credential_provider")
COMPARED_TLS = (
    "ssl_cert_reqs",
    "ssl_ca_certs",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_check_hostname",
)
REQUIREMENTS = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}


class Tokens(redis.CredentialProvider):
    """A provider of passwords that expire."""

    def get_credentials(self) -> tuple[str, str]:
        """The present user and password."""
        return "worker", SECRET

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokens)

    __hash__ = None  # type: ignore[assignment]


def kombus(app: Celery, kind: type[Channel]) -> dict[str, Any]:
    """The arguments of the connections that kombu would make; nothing is sent."""
    channel = object.__new__(kind)
    channel.connection = app.connection_for_write().transport
    for name, value in (app.conf.broker_transport_options or {}).items():
        setattr(channel, name, value)
    found: dict[str, Any] = channel._connparams()
    return found


def seen(connection: Mapping[str, Any]) -> dict[str, Any]:
    """What both must agree on, in one form."""
    found = {name: connection.get(name) for name in COMPARED}
    tls = connection.get("ssl") or "SSL" in getattr(
        connection.get("connection_class"), "__name__", ""
    )
    if "path" not in connection:
        found["port"] = connection.get("port") or 6379
        found["host"] = {"127.0.0.1": "localhost"}.get(connection["host"], connection["host"])
    if tls:
        found |= {name: connection.get(name) for name in COMPARED_TLS}
        wanted = found["ssl_cert_reqs"]
        found["ssl_cert_reqs"] = REQUIREMENTS.get(wanted, wanted)
    for name in ("socket_keepalive", "socket_keepalive_options"):
        found[name] = None if "path" in connection else connection.get(name)
    return {**found, "tls": bool(tls)}


@pytest.mark.parametrize(
    "url",
    [
        "redis://",
        "redis://host",
        "redis://HOST:6380/3",
        "redis://:pw@host:6380/0",
        "redis://user:p%40s%2Fs%3B@host/1",
        "redis://user@host",
        "redis://[::1]:6380/2",
        "redis+socket:///run/redis.sock",
        "redis+socket:///run/redis.sock?virtual_host=4",
        "redis+socket://user:pw@/run/redis.sock",
        "rediss://host",
        "rediss://host/5?ssl_cert_reqs=CERT_NONE",
        "rediss://host?ssl_cert_reqs=required&ssl_ca_certs=%2Fetc%2Fca.pem",
        "rediss://host?ssl_cert_reqs=CERT_OPTIONAL&ssl_check_hostname=false",
        "redis://host?ssl_cert_reqs=CERT_REQUIRED",
        "redis://user:pw@host?credential_provider=unit.test_address.Tokens",
    ],
)
@pytest.mark.parametrize(
    "use_ssl",
    [
        None,
        True,
        {"ssl_cert_reqs": ssl.CERT_NONE},
        {
            "ssl_ca_certs": "/etc/ca.pem",
            "ssl_certfile": "/etc/me.pem",
            "ssl_keyfile": "/etc/me.key",
        },
    ],
    ids=["plain", "true", "unverified", "verified"],
)
def test_the_brokers_redis_is_reached_as_kombu_reaches_it(url: str, use_ssl: object) -> None:
    """Host, database, user, password, token, TLS and socket options, all from the same settings."""
    if use_ssl is True and url.startswith("rediss:") and "ssl_" not in url:
        pytest.skip("kombu fails with a TypeError")
    if kombu.VERSION < (5, 6) and ("credential_provider" in url or "check_hostname" in url):
        pytest.skip("new in kombu 5.6")
    app = Celery(broker=url, set_as_current=False)
    app.conf.update(
        broker_use_ssl=use_ssl,
        broker_transport_options={"socket_keepalive": True, "socket_keepalive_options": {1: 2}},
    )
    (ours,) = Settings().store_at(app.conf)[0].connections()
    assert seen(ours) == seen(kombus(app, Channel))


def test_sentinels_are_reached_as_kombu_reaches_them() -> None:
    """The password and the database of the first URL are those of the server that they name."""
    app = Celery(broker="sentinel://:pw@a:1/2;sentinel://b:3", set_as_current=False)
    app.conf.broker_transport_options = {"master_name": "shop"}
    address, _prefix = Settings().store_at(app.conf)
    first, second = address.connections()
    assert seen(first) == seen(kombus(app, SentinelChannel))
    assert (address.kind, second["host"], second["port"]) == (AddressKind.SENTINELS, "b", 3)


def test_each_server_has_its_own_port() -> None:
    """The next one must not be looked for at the port of the one before."""
    ports = [one["port"] for one in address_of("redis://a:7000;redis://b").connections()]
    assert ports == [7000, 6379]


def test_an_own_url_with_tls_verifies_the_certificate() -> None:
    """Only the broker's URL is read as kombu reads it, which verifies nothing by default."""
    (found,) = address_of("rediss://host").connections()
    assert found["ssl_cert_reqs"] == "required"


@pytest.mark.parametrize(
    "url",
    [
        f"redis://user:{SECRET}@host:port/0",
        f"redis://user:12/{SECRET}@host/0",
        f"redis://user:{SECRET}@host/letters",
        f"redis://user:{SECRET}@host?credential_provider=no.such.thing",
        f"redis://user:{SECRET}@host?credential_provider=os.path",
        f"redis://user:{SECRET}@a;amqp://user:{SECRET}@b",
        f"redis://user:{SECRET}@a;sentinel://b",
        f"unix:///a.sock;redis://user:{SECRET}@b",
        f"redis+cluster://user:{SECRET}@a/1",
        f"redis://user:{SECRET}@host?socket_timeout=3",
        "",
    ],
)
def test_a_url_that_cannot_be_used_is_refused_in_one_line(url: str) -> None:
    """A typing mistake in a URL must not publish a password."""
    with pytest.raises(SettingsError, match=r"^expected dlq_url to be") as raised:
        address_of(url)
    assert SECRET not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_shown_address_has_neither_user_nor_password() -> None:
    """It is part of messages and of the name of a folder."""
    address = address_of(
        f"sentinel://u:{SECRET}@a:1;sentinel://u:{SECRET}@b", options={"master_name": "m"}
    )
    assert str(address) == repr(address) == "sentinel://a:1;sentinel://b"
