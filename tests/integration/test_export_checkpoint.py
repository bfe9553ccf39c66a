"""The checkpoint of an export, written to a Redis that is full."""

from __future__ import annotations

from servers import RedisServer

from celery_dlq.store.keys import Keys
from celery_dlq.store.store import Store


def test_a_full_redis_takes_the_note_that_lets_letters_go() -> None:
    """Otherwise what keeps letters until they are exported would keep Redis full."""
    with RedisServer("--maxmemory-policy", "noeviction") as server:
        client = server.client()
        store = Store(server.url, timeout_seconds=2.0).letters
        client.xadd(Keys().letters("orders-DLQ"), {"id": "a"}, id="5-5")
        client.config_set("maxmemory", 1)
        for position in ("5-4", "5-5", "5-1"):
            store.note_exported("orders-DLQ", position)
        assert store.exported_until("orders-DLQ") == "5-5"
        store.close()
