"""The checkpoint of an export, written to a Redis that is full."""

from __future__ import annotations

import json

from servers import RedisServer

from celery_dlq.store.keys import Keys
from celery_dlq.store.store import Store


def test_a_full_redis_takes_the_note_that_lets_letters_go() -> None:
    """Otherwise what keeps letters until they are exported would keep Redis full."""
    with RedisServer("--maxmemory-policy", "noeviction") as server:
        client = server.client()
        store = Store(server.url, timeout_seconds=2.0).letters
        client.xadd(Keys().letters("orders-DLQ"), {"id": "a"}, id="5-5")
        lease = store.lease("orders-DLQ", "lake", "an export", 0)
        client.config_set("maxmemory", 1)
        assert lease.acquire().acquired
        for position in ("5-4", "5-5"):
            lease.save_state(json.dumps({"name": "lake", "of": None, "position": position}))
        (folder,) = store.export_folders("orders-DLQ")
        assert folder.position == "5-5"
        store.close()
