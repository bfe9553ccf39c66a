"""Letters for measurements: many, all different, as compressible as those of a shop are."""

from __future__ import annotations

import json
import random
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from builders import DLQ, NOW, a_letter, an_ended_delivery

from celery_dlq.backends.redis.keys import Keys
from celery_dlq.backends.redis.packing import packed

if TYPE_CHECKING:
    from collections.abc import Iterator

BODY_BYTES = 1024

_WORDS = ("lamp", "table", "chair", "green", "large", "oak", "steel", "blue", "shelf", "kids",
          "garden", "outdoor", "soft", "carpet", "mirror", "desk", "bed", "pine")  # fmt: skip
_TRACEBACK = "Traceback (most recent call last):\n" + "".join(
    f'  File "/srv/shop/{name}.py", line {line}, in {name}\n    return {name}_next(order)\n'
    for line, name in enumerate(("tasks", "payment", "gateway", "http"), 40)
)
_BATCH = 1000
_MOST_REPR = 1024  # Celery cuts a representation there
_REPLY_TO = UUID(int=20260304)


def fill(client: Any, letters: int, dead_letter_queue: str = DLQ) -> None:
    """Put letters into Redis as a worker does, without the index that only operators need."""
    pipe = client.pipeline(transaction=False)
    for number, fields in enumerate(entries(letters), 1):
        flat = [part for pair in packed(fields).items() for part in pair]
        pipe.execute_command("XADD", Keys().letters(dead_letter_queue), "*", *flat)
        if number % _BATCH == 0:
            pipe.execute()
    pipe.execute()
    client.sadd(Keys().queues(), dead_letter_queue)


def entries(letters: int) -> Iterator[dict[str, bytes]]:
    """The stored form of letters, each with a body of 1 KB; the same in every run."""
    chance = random.Random(20260304)  # noqa: S311 - data, not secrets
    base = a_letter(
        published_at=NOW, first_delivered_at=NOW, deliveries=3, max_deliveries=3,
        history=[an_ended_delivery(number=number) for number in (1, 2, 3)],
        worker_hostname="celery@web-1",
        worker_pid=4711, origin="gen1@web-1", argsrepr="[]",
    ).to_fields()  # fmt: skip
    micros = int(base["dead_lettered_at"])
    step = int(timedelta(milliseconds=40) / timedelta(microseconds=1))
    for number in range(letters):
        task_id = str(UUID(int=chance.getrandbits(128), version=4))
        order = _order(number, chance)
        kwargs, kwargsrepr = json.dumps(order), repr(order)[:_MOST_REPR]
        body = f'[[], {kwargs}, {{"callbacks": null, "errbacks": null, "chain": null}}]'
        yield {
            **base,
            "id": str(UUID(int=chance.getrandbits(128), version=4)).encode(),
            "task_id": task_id.encode(),
            "root_id": task_id.encode(),
            "dead_lettered_at": b"%d" % (micros + number * step),
            "fingerprint": b"%016x" % chance.randrange(200),
            "description": b"gateway said 502 for order %d" % number,
            "exception_message": b"gateway said 502 for order %d" % number,
            "traceback": (_TRACEBACK + f"shop.Down: gateway said 502 for order {number}").encode(),
            "args_json": b"[]",
            "kwargs_json": kwargs.encode(),
            "kwargsrepr": kwargsrepr.encode(),
            "headers": _headers(task_id, kwargsrepr),
            "properties": _properties(task_id),
            "body": body.encode(),
        }


def _headers(task_id: str, kwargsrepr: str) -> bytes:
    """As Celery's protocol 2 has them."""
    headers = {
        "lang": "py", "task": "shop.charge", "id": task_id, "shadow": None, "eta": None,
        "expires": None, "group": None, "group_index": None, "retries": 0,
        "timelimit": [None, None], "root_id": task_id, "parent_id": None, "argsrepr": "[]",
        "kwargsrepr": kwargsrepr, "origin": "gen1@web-1", "ignore_result": False,
        "replaced_task_nesting": 0, "stamped_headers": None, "stamps": {},
    }  # fmt: skip
    return json.dumps(headers, separators=(",", ":")).encode()


def _properties(task_id: str) -> bytes:
    """As kombu's Redis transport has them."""
    properties = {
        "correlation_id": task_id, "reply_to": str(_REPLY_TO), "delivery_mode": 2,
        "delivery_info": {"exchange": "", "routing_key": "orders"}, "priority": 0,
        "body_encoding": "base64", "delivery_tag": str(UUID(task_id[::-1].replace("-", ""))),
    }  # fmt: skip
    return json.dumps(properties, separators=(",", ":")).encode()


def _order(number: int, chance: random.Random) -> dict[str, Any]:
    order: dict[str, Any] = {
        "order_id": number,
        "customer": f"{chance.getrandbits(64):016x}",
        "card": f"{chance.randrange(10**16):016d}",
        "lines": [],
    }
    size = 0
    while size < BODY_BYTES - 230:
        line = {
            "sku": f"{chance.randrange(10**6):06d}",
            "title": " ".join(chance.choices(_WORDS, k=4)),
            "quantity": chance.randrange(1, 9),
            "cents": chance.randrange(100, 99999),
        }
        order["lines"].append(line)
        size += len(json.dumps(line)) + 2
    return order
