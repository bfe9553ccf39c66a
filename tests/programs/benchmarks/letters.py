"""Letters for measurements: many, all different, as compressible as those of a shop are."""

from __future__ import annotations

import json
import random
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

from builders import DLQ, NOW, a_letter, an_ended_delivery

from celery_dlq.letters.packing import packed
from celery_dlq.letters.record import Reason
from celery_dlq.store.keys import Keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BODY_BYTES = 1024
GROUPS = 200

_WORDS = (
    "lamp",
    "table",
    "chair",
    "green",
    "large",
    "oak",
    "steel",
    "blue",
    "shelf",
    "kids",
    "garden",
    "outdoor",
    "soft",
    "carpet",
    "mirror",
    "desk",
    "bed",
    "pine",
)
_TRACEBACK = "Traceback (most recent call last):\n" + "".join(
    f'  File "/srv/shop/{name}.py", line {line}, in {name}\n    return {name}_next(order)\n'
    for line, name in enumerate(("tasks", "payment", "gateway", "http"), 40)
)
_BATCH = 500
_LINKS = '{"callbacks": null, "errbacks": null, "chain": null, "chord": null}'
_DISTINCT = 20_000
"""More letters repeat these under new ids, so far apart that no file gains by it."""

_MOST_REPR = 1024  # Celery cuts a representation there
_REPLY_TO = UUID(int=20260304)


def fill(
    client: Any,
    letters: int,
    *,
    groups: int = GROUPS,
    tell: Callable[[int], None] = lambda _: None,
) -> int:
    """Store letters as ``dead_letter.lua`` does, but many in one write.

    Args:
        client: Of an empty Redis.
        letters: How many.
        groups: Number of their groups.
        tell: Called with the number there are after each batch.

    Returns:
        The bytes of their messages: bodies, headers and properties.
    """
    keys, samples = Keys(), _packed(min(letters, _DISTINCT))
    reason = Reason.FAILED.value
    facts = json.dumps(
        {"task_name": "shop.charge", "reason": reason, "exception_type": "shop.Down"}
    )
    client.sadd(keys.queues(), DLQ)
    raw = 0
    for start in range(0, letters, _BATCH):
        pipe = client.pipeline(transaction=False)
        made = []
        for number in range(start, min(start + _BATCH, letters)):
            letter_id, fingerprint = str(uuid4()), f"{number % groups:016x}"
            entry, message_bytes, at = samples[number % len(samples)]
            raw += message_bytes
            made.append((letter_id, fingerprint, at))
            entry = {**entry, b"id": letter_id, b"fingerprint": fingerprint}
            flat = [part for pair in entry.items() for part in pair]
            pipe.execute_command("XADD", keys.letters(DLQ), "*", *flat)
        places = pipe.execute()
        pipe = client.pipeline(transaction=False)
        ids = [letter_id for letter_id, _, _ in made]
        pipe.hset(keys.ids(DLQ), mapping=dict(zip(ids, places, strict=True)))
        pipe.hincrby(keys.tally(DLQ), f"reason:{reason}", len(made))
        for letter_id, fingerprint, at in made:
            pipe.zincrby(keys.groups(DLQ), 1, fingerprint)
            pipe.hset(
                keys.tally(DLQ), f"group:{fingerprint}", f"{at}|{at}|{letter_id}||0:0||{facts}"
            )
            pipe.zadd(keys.newest_groups(DLQ), {fingerprint: at})
        pipe.execute()
        tell(start + len(made))
    return raw


@lru_cache(maxsize=1)
def _packed(letters: int) -> list[tuple[dict[bytes, bytes], int, str]]:
    """Entries as Redis keeps them, the bytes of their messages, and when they died."""
    found = []
    for fields in entries(letters):
        message_bytes = sum(len(fields[name]) for name in ("body", "headers", "properties"))
        entry = {name.encode(): value for name, value in packed(fields).items()}
        found.append((entry, message_bytes, fields["dead_lettered_at"].decode()))
    return found


def messages(letters: int) -> Iterator[tuple[bytes, dict[str, Any], dict[str, Any]]]:
    """Body, headers and properties of the same letters, ready to be published."""
    for fields in entries(letters):
        yield fields["body"], json.loads(fields["headers"]), json.loads(fields["properties"])


def entries(letters: int) -> Iterator[dict[str, bytes]]:
    """The stored form of letters, with bodies of about 1 KB; the same in every run."""
    chance = random.Random(20260304)  # noqa: S311 - data, not secrets
    base = a_letter(
        published_at=NOW,
        first_delivered_at=NOW,
        deliveries=1,
        max_deliveries=3,
        exception_type="shop.Down",
        history=[an_ended_delivery(exception_type="shop.Down")],
        worker_hostname="celery@web-1",
        worker_pid=4711,
        origin="gen1@web-1",
        argsrepr="[]",
    ).to_fields()
    micros = int(base["dead_lettered_at"])
    step = int(timedelta(milliseconds=40) / timedelta(microseconds=1))
    for number in range(letters):
        task_id = str(UUID(int=chance.getrandbits(128), version=4))
        order = _order(number, chance)
        kwargs, kwargsrepr = json.dumps(order), repr(order)[:_MOST_REPR]
        body = f"[[], {kwargs}, {_LINKS}]"
        yield {
            **base,
            "id": str(UUID(int=chance.getrandbits(128), version=4)).encode(),
            "task_id": task_id.encode(),
            "root_id": task_id.encode(),
            "dead_lettered_at": b"%d" % (micros + number * step),
            "fingerprint": b"%016x" % (number % GROUPS),
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
        "lang": "py",
        "task": "shop.charge",
        "id": task_id,
        "shadow": None,
        "eta": None,
        "expires": None,
        "group": None,
        "group_index": None,
        "retries": 0,
        "timelimit": [None, None],
        "root_id": task_id,
        "parent_id": None,
        "argsrepr": "[]",
        "kwargsrepr": kwargsrepr,
        "origin": "gen1@web-1",
        "ignore_result": False,
        "replaced_task_nesting": 0,
        "stamped_headers": None,
        "stamps": {},
    }
    return json.dumps(headers, separators=(",", ":")).encode()


def _properties(task_id: str) -> bytes:
    """As kombu's Redis transport has them."""
    properties = {
        "correlation_id": task_id,
        "reply_to": str(_REPLY_TO),
        "delivery_mode": 2,
        "delivery_info": {"exchange": "", "routing_key": "orders"},
        "priority": 0,
        "body_encoding": "base64",
        "delivery_tag": str(UUID(task_id[::-1].replace("-", ""))),
    }
    return json.dumps(properties, separators=(",", ":")).encode()


def _order(number: int, chance: random.Random) -> dict[str, Any]:
    order: dict[str, Any] = {
        "order_id": number,
        "customer": f"{chance.getrandbits(64):016x}",
        "card": f"{chance.randrange(10**16):016d}",
        "lines": [],
    }
    # Not all of one length: Redis gives memory in steps, and all would lie just beside one.
    size, wanted = 0, chance.randrange(BODY_BYTES * 3 // 4, BODY_BYTES * 5 // 4) - 200
    while size < wanted:
        line = {
            "sku": f"{chance.randrange(10**6):06d}",
            "title": " ".join(chance.choices(_WORDS, k=4)),
            "quantity": chance.randrange(1, 9),
            "cents": chance.randrange(100, 99999),
        }
        order["lines"].append(line)
        size += len(json.dumps(line)) + 2
    return order
