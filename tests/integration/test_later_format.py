"""A store of a later format, in every way to reach it: refused, and left as it is."""

from __future__ import annotations

import pytest
from builders import a_letter, key_of
from cluster import ClusterServers
from servers import RedisServer

from celery_dlq.errors import StoreUnavailable
from celery_dlq.store.keys import FORMAT, Keys
from celery_dlq.store.store import Store

LATER = "got '2', which a later celery_dlq wrote; install that version here"


def refuses_everything(backend: Store) -> None:
    """Reads, writes and counts, over the client and over the worker's connection."""
    for call in (
        backend.letters.overviews.queues,
        backend.instructions.all,
        backend.workers.workers,
        lambda: backend.letters.dead_letter(a_letter(), key_of(a_letter())),
        backend.check,
    ):
        with pytest.raises(StoreUnavailable, match=LATER):
            call()
    assert not backend.connection.send_unanswered([("SET", Keys().queues(), "x")])
    backend.close()


def test_one_server(redis_server: RedisServer, redis_url: str) -> None:
    """Also one that was of this format when a client connected, once it connects again."""
    client = redis_server.client()
    backend = Store(redis_url, timeout_seconds=2.0)
    assert backend.letters.overviews.queues() == []
    client.set(Keys().format(), FORMAT + 1)
    backend.client.connection_pool.disconnect()
    backend.connection.disconnect()
    refuses_everything(backend)
    assert client.keys() == [Keys().format().encode()]


def test_a_cluster(cluster_servers: ClusterServers, cluster_url: str) -> None:
    """Its nodes are asked through the client that knows the slots."""
    cluster_servers.holder(Keys().format()).client().set(Keys().format(), FORMAT + 1)
    refuses_everything(Store(cluster_url, timeout_seconds=2.0))
    assert sum(server.client().dbsize() for server in cluster_servers.masters) == 1


def test_the_format_of_now_and_none_are_taken(redis_server: RedisServer, redis_url: str) -> None:
    """None is what the first versions left."""
    backend = Store(redis_url, timeout_seconds=2.0)
    backend.check()
    assert redis_server.client().get(Keys().format()) == b"%d" % FORMAT
    backend.client.connection_pool.disconnect()
    assert backend.letters.overviews.queues() == []
    backend.close()


def test_a_master_that_is_gone_stops_no_other(
    cluster_servers: ClusterServers, cluster_url: str
) -> None:
    """A client that connects then can use the others, though nobody tells it the format."""
    backend = Store(cluster_url, timeout_seconds=2.0)
    names = [f"queue-{n}-DLQ" for n in range(9)]
    lost = cluster_servers.holder(Keys().format())
    name = next(n for n in names if cluster_servers.holder(Keys().letters(n)) is not lost)
    lost.kill()
    try:
        assert backend.letters.length(name) == 0
        assert backend.connection.send_unanswered([("SET", Keys().format(), "x")]) in (True, False)
    finally:
        lost.start()
        backend.close()
