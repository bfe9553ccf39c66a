"""Write what this version keeps in Redis into a file: ``python tests/wire/record_store.py FILE``.

Recorded once per format of the store, by the last version that wrote it; never edited afterwards.
It needs redis-server, and ``tests`` and ``tests/acceptance`` on ``PYTHONPATH``.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import redis
from servers import RedisServer
from waiting import poll

BREAKER = {"max_deliveries": 3, "circuit_breaker": {"deaths": 20}}
CONF = {"dlq_queues": {"orders": BREAKER}, "dlq_sample_successes": 1.0}


def dumped(client: Any, prefix: str = "") -> dict[str, Any]:
    """All keys, by name: their type and their value; bytes as Latin-1."""
    found = {}
    for name in sorted(client.scan_iter(match=f"{prefix}*")):
        kind = client.type(name).decode()
        found[name.decode("latin-1")] = [kind, _plain(_READ[kind](client, name))]
    return found


def restored(client: Any, keys: dict[str, Any]) -> None:
    """Write what was dumped."""
    for name, (kind, value) in keys.items():
        _WRITE[kind](client, name.encode("latin-1"), value)


def main(path: Path) -> None:
    """Let a worker and an operator do all that leaves something behind; write it down."""
    from workers import Worker  # beside the app

    with tempfile.TemporaryDirectory() as folder, RedisServer() as server:
        os.environ["POISON_REDIS"] = server.url.rpartition("/")[0]
        os.environ["POISON_CONF"] = json.dumps(CONF)
        poison = importlib.import_module("poison_app")
        with (
            Worker(server.url, Path(folder) / "log", CONF) as worker,
            redis.Redis.from_url(server.url) as client,
        ):
            _leave_something(poison, Path(folder), lambda: worker.output)
            found = dumped(client, "dlq:")
        poison.dlq.close()
        poison.app.close()
    text = re.sub(r'(\\"until\\":)\d+', r"\g<1>4102444800000000", json.dumps(found, indent=1))
    path.write_text(text + "\n", "utf-8")  # overrides that are in force until 2100


def _leave_something(poison: Any, folder: Path, log: Callable[[], str]) -> None:
    dlq, queue = poison.dlq, "orders-DLQ"
    for key in ("stays", "discarded", "redriven", "again"):
        poison.fails.delay(key)
    poison.requeues.delay("poison")
    poison.healthy.delay("well")
    poll(lambda: any(q.letters == 5 for q in dlq.queues()), timeout_seconds=60)
    found = {json.loads(letter.args_json)[0]: letter for letter in dlq.letters(queue)}
    dlq.export(folder / "letters")
    dlq.discard(queue, ids=frozenset([found["discarded"].id]))
    dlq.redrive(queue, ids=frozenset([found["redriven"].id]))
    poll(lambda: any(q.letters == 4 for q in dlq.queues()), timeout_seconds=60)
    first, second = (group.fingerprint for group in dlq.groups(queue)[:2])
    dlq.note(queue, first, "the partner is down")
    dlq.resolve(queue, first, release="1.0")
    dlq.mute(queue, second)
    dlq.override_policy("orders", timedelta(days=30), max_deliveries=9)
    dlq.plan("redrive", queue)
    held = dlq.hold("poison_app.healthy", reason="a deploy")
    dlq.open_breaker("poison_app.fails", "orders", reason="an outage")
    poll(lambda: "hold" in log(), timeout_seconds=30)
    for key in ("held-1", "held-2"):
        poison.healthy.delay(key)
    poison.fails.delay("held by the breaker")
    poll(lambda: sum(h.held for h in dlq.holds()) == 3, timeout_seconds=30)
    assert dlq.holds()[0].hold.id == held.id
    waiting = poison.healthy.apply_async(("later",), countdown=3600, queue="orders")
    poll(lambda: waiting.id in log(), timeout_seconds=30)


_READ: dict[str, Callable[[Any, bytes], Any]] = {
    "string": lambda client, name: client.get(name),
    "hash": lambda client, name: client.hgetall(name),
    "set": lambda client, name: sorted(client.smembers(name)),
    "zset": lambda client, name: client.zrange(name, 0, -1, withscores=True),
    "stream": lambda client, name: client.xrange(name),
}


def _bytes(value: dict[str, str]) -> dict[bytes, bytes]:
    return {key.encode("latin-1"): text.encode("latin-1") for key, text in value.items()}


_WRITE: dict[str, Callable[[Any, bytes, Any], Any]] = {
    "string": lambda client, name, value: client.set(name, value.encode("latin-1")),
    "hash": lambda client, name, value: client.hset(name, mapping=_bytes(value)),
    "set": lambda client, name, value: client.sadd(name, *(v.encode("latin-1") for v in value)),
    "zset": lambda client, name, value: client.zadd(
        name, {member.encode("latin-1"): score for member, score in value}
    ),
    "stream": lambda client, name, value: [
        client.xadd(name, _bytes(fields), id=position) for position, fields in value
    ],
}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, dict):
        return {_plain(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


if __name__ == "__main__":
    main(Path(sys.argv[1]))
