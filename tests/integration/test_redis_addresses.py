"""Ways to a Redis in production: Sentinel, TLS, failover URLs, tokens that expire."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import intervals
import pytest
import redis
from builders import a_letter, an_app, key_of
from letter_writers import more, writing
from servers import RedisServer
from tls import TlsServer
from waiting import poll
from watched import WatchedServers

from celery_dlq import DeadLetters
from celery_dlq.errors import StoreUnavailable
from celery_dlq.store.address import address_of
from celery_dlq.store.store import Store
from celery_dlq.store.worker_records import Stored

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery_dlq.letters.record import DeadLetter

NOBODY = "redis://127.0.0.1:1/0"


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    """Give a server with a certificate of its own."""
    with TlsServer(tmp_path_factory.mktemp("tls")) as server:
        yield server


def is_ok(server: RedisServer) -> bool:
    """True if the node of a cluster takes writes."""
    said = server.client().execute_command("CLUSTER INFO")  # which redis-py may take apart
    return "ok" in (said["cluster_state"] if isinstance(said, dict) else said.decode())[:40]


def keeps(**conf: Any) -> None:
    """Store a letter with the settings of an app, and read it."""
    dlq = DeadLetters(an_app(**conf))
    try:
        letter = a_letter()
        dlq.store.dead_letter(letter, key_of(letter))
        assert dlq.store.get(letter.dead_letter_queue, letter.id) == letter
    finally:
        dlq.close()


# -- Sentinel ----------------------------------------------------------------------------


def test_letters_that_were_confirmed_survive_a_failover() -> None:
    """The replica has them before they are confirmed, and the Sentinel names it."""
    with WatchedServers() as servers:
        address = address_of(servers.url, options=servers.options)
        with writing(lambda: Store(address, timeout_seconds=1.0)) as writers:
            servers.master.kill()
            servers.wait_for_takeover()
            more(writers)
            assert sum(writer.refused for writer in writers) > 0


def test_letters_that_were_confirmed_survive_a_change_of_roles() -> None:
    """The old master goes on for a moment; what it confirms then without its replica is lost."""
    with WatchedServers() as servers:
        address = address_of(servers.url, options=servers.options)
        with writing(lambda: Store(address, timeout_seconds=1.0)) as writers:
            servers.fail_over()
            more(writers)


def test_a_replica_that_is_slow_at_first_is_waited_for() -> None:
    """Otherwise a worker that has just started would trust the master alone for half a minute."""
    with WatchedServers() as servers:
        backend = Store(address_of(servers.url, options=servers.options))
        letters = [a_letter(), a_letter()]
        backend.letters.length(letters[0].dead_letter_queue)  # is connected
        servers.replica.pause()
        back = threading.Timer(0.3, servers.replica.resume)
        back.start()
        backend.letters.dead_letter(letters[0], key_of(letters[0]))
        back.join()
        servers.replica.pause()
        try:
            with pytest.raises(StoreUnavailable, match="no replica has what was written"):
                backend.letters.dead_letter(letters[1], key_of(letters[1]))
        finally:
            servers.replica.resume()
        backend.close()


def test_a_replica_that_hangs_delays_letters_for_seconds_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then the master's word is enough, and the replica is not asked each time."""
    intervals.change(monkeypatch, replica_doubt=1.0)
    with WatchedServers() as servers:
        backend = Store(address_of(servers.url, options=servers.options))
        letters = [a_letter() for _ in range(5)]
        backend.letters.dead_letter(letters[0], key_of(letters[0]))
        servers.replica.pause()
        try:
            with pytest.raises(StoreUnavailable, match="no replica has what was written"):
                backend.letters.dead_letter(letters[1], key_of(letters[1]))
            stored = poll(lambda: _stored(backend, letters[1]))
            assert stored is Stored.NEW  # nobody was told of it yet
            took = []
            for letter in letters[2:]:
                began = time.monotonic()
                backend.letters.dead_letter(letter, key_of(letter))
                took.append(time.monotonic() - began)
        finally:
            servers.replica.resume()
        assert min(took) < 0.1
        assert backend.letters.length(letters[0].dead_letter_queue) == len(letters)
        backend.close()


def _keeps_now(servers: WatchedServers) -> bool:
    try:
        keeps(broker_url=servers.url, broker_transport_options=servers.options)
    except StoreUnavailable:
        return False
    return True


def _stored(backend: Store, letter: DeadLetter) -> Stored | None:
    try:
        return backend.letters.dead_letter(letter, key_of(letter))
    except StoreUnavailable:
        return None


def test_the_brokers_sentinel_leads_to_the_store() -> None:
    """Nothing else is set."""
    with WatchedServers() as servers:
        keeps(broker_url=servers.url, broker_transport_options=servers.options)
        servers.fail_over()
        # As long as the Sentinel names the old master, nothing is confirmed.
        poll(lambda: _keeps_now(servers), timeout_seconds=30)


def test_a_sentinel_that_does_not_know_the_server_is_an_outage_in_one_line() -> None:
    """It may be about to learn it."""
    with WatchedServers() as servers:
        url, options = servers.url, {"master_name": "other"}
        with pytest.raises(StoreUnavailable, match=r"No master found for 'other'") as raised:
            keeps(broker_url=url, broker_transport_options=options)
        assert "\n" not in str(raised.value)


# -- Plain servers -----------------------------------------------------------------------


def test_every_way_to_write_a_server(redis_url: str, tls_server: TlsServer) -> None:
    """As redis-py, kombu and valkey-py spell it."""
    other = {"broker_url": "amqp://nobody"}
    keeps(**other, dlq_url=redis_url)
    keeps(**other, dlq_url=redis_url.replace("redis://", "valkey://"))
    tls = {"ssl_ca_certs": str(tls_server.certificate)}
    for scheme in ("rediss", "valkeys"):
        url = tls_server.tls_url.replace("rediss", scheme)
        keeps(**other, dlq_url=url, dlq_use_ssl=tls)
    with tempfile.TemporaryDirectory(prefix="dlq-") as folder:  # its path must be short
        path = Path(folder, "redis.sock")
        with RedisServer("--unixsocket", str(path)):
            keeps(**other, dlq_url=f"unix://{path}")
            keeps(**other, dlq_url=f"redis+socket://{path}")


def test_a_cluster_that_speaks_tls(tmp_path: Path) -> None:
    """Every node is reached as the first."""
    options = ("--cluster-enabled", "yes", "--tls-cluster", "yes")
    with TlsServer(tmp_path, *options) as server:
        server.client().execute_command("CLUSTER ADDSLOTS", *range(16384))
        poll(lambda: is_ok(server), timeout_seconds=30)
        url = f"rediss+cluster://127.0.0.1:{server.tls_port}"
        tls = {"ssl_ca_certs": str(server.certificate)}
        keeps(broker_url="amqp://nobody", dlq_url=url, dlq_use_ssl=tls)
        with pytest.raises(StoreUnavailable, match="CERTIFICATE_VERIFY_FAILED") as raised:
            keeps(broker_url="amqp://nobody", dlq_url=url)
        assert "\n" not in str(raised.value)


# -- TLS ---------------------------------------------------------------------------------


def test_the_brokers_tls_goes_for_the_store(tls_server: TlsServer) -> None:
    """A private certificate is named once, in ``broker_use_ssl``."""
    tls = {"ssl_ca_certs": str(tls_server.certificate)}
    keeps(broker_url=tls_server.tls_url, broker_use_ssl=tls)
    keeps(broker_url=tls_server.tls_url.replace("rediss", "redis"), broker_use_ssl=tls)


def test_an_own_store_has_its_own_tls(tls_server: TlsServer) -> None:
    """The broker's is for the broker."""
    tls = {"ssl_ca_certs": str(tls_server.certificate)}
    keeps(broker_url="amqp://nobody", dlq_url=tls_server.tls_url, dlq_use_ssl=tls)
    theirs = {"broker_url": "amqp://nobody", "broker_use_ssl": tls}
    with pytest.raises(StoreUnavailable, match="CERTIFICATE_VERIFY_FAILED") as raised:
        keeps(**theirs, dlq_url=tls_server.tls_url)
    assert "\n" not in str(raised.value)


def test_a_broker_that_is_not_verified_is_the_store_all_the_same(tls_server: TlsServer) -> None:
    """Kombu verifies nothing of a ``rediss://`` without arguments, and warns."""
    keeps(broker_url=tls_server.tls_url)


def test_a_certificate_for_another_host_is_refused(tls_server: TlsServer) -> None:
    """It is for 127.0.0.1, and localhost is another name."""
    tls = {"ssl_ca_certs": str(tls_server.certificate), "ssl_check_hostname": True}
    url = tls_server.tls_url.replace("127.0.0.1", "localhost")
    with pytest.raises(StoreUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
        keeps(broker_url="amqp://nobody", dlq_url=url, dlq_use_ssl=tls)


# -- failover URLs -----------------------------------------------------------------------


@pytest.mark.parametrize("first", [NOBODY, "redis://no.such.host.invalid:6379/0"])
def test_the_first_server_that_answers_is_the_store(redis_url: str, first: str) -> None:
    """As kombu does with a list of URLs, for every kind of access."""
    keeps(broker_url=f"{first};{redis_url}")
    keeps(broker_url=[first, NOBODY, redis_url])
    keeps(broker_url=f"{redis_url};{first}")


def test_a_server_that_dies_is_followed_by_the_next(redis_url: str) -> None:
    """Connections that are open go on there, with its own password and database."""
    with RedisServer(password="hush") as first:
        backend = Store(f"{first.url};{redis_url[:-1]}3", timeout_seconds=1.0)
        letters = [a_letter(), a_letter()]
        backend.letters.dead_letter(letters[0], key_of(letters[0]))
        first.kill()
        backend.letters.dead_letter(letters[1], key_of(letters[1]))
        assert backend.letters.length(letters[1].dead_letter_queue) == 1
        with redis.Redis.from_url(f"{redis_url[:-1]}3") as client:
            assert client.exists(f"dlq:{{{letters[1].dead_letter_queue}}}:letters")
        backend.close()


def test_no_server_that_answers_is_an_outage() -> None:
    """The message names all of them."""
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1/0;redis://127\.0\.0\.1:2"):
        keeps(broker_url=f"{NOBODY};redis://:hush@127.0.0.1:2/0")


# -- tokens ------------------------------------------------------------------------------


class Tokens(redis.CredentialProvider):
    """A provider of passwords that expire, as of a cloud's access management."""

    asked = 0

    def get_credentials(self) -> tuple[str, str]:
        """The present user and password."""
        type(self).asked += 1
        return "worker", "token"


@pytest.mark.parametrize("place", ["url", "instance", "name"])
def test_a_token_is_asked_for_with_each_connection(redis_url: str, place: str) -> None:
    """As kombu spells it, in the URL of the broker; or in the store's own options."""
    name = f"{__name__}.Tokens"
    with redis.Redis.from_url(redis_url) as client:
        rules = ("reset", "on", ">token", "~*", "&*", "+@all")
        client.execute_command("ACL", "SETUSER", "worker", *rules)
    before = Tokens.asked
    if place == "url":
        keeps(broker_url=f"{redis_url}?credential_provider={name}")
    else:
        given = Tokens() if place == "instance" else name
        keeps(
            broker_url="amqp://nobody",
            dlq_url=redis_url,
            dlq_transport_options={"credential_provider": given},
        )
    assert Tokens.asked > before


def test_a_token_that_has_expired_is_said_in_one_line(redis_url: str) -> None:
    """Without the token."""
    with redis.Redis.from_url(redis_url) as client:
        client.execute_command("ACL", "SETUSER", "worker", "reset", "on", ">other", "~*", "+@all")
    with pytest.raises(StoreUnavailable, match="AuthenticationError") as raised:
        keeps(broker_url=f"{redis_url}?credential_provider={__name__}.Tokens")
    assert "token" not in str(raised.value)
    assert "\n" not in str(raised.value)
