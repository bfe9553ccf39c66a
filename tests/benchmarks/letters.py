"""Letters as a real worker stores them, in any number."""

from __future__ import annotations

import json
import random
import string
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from builders import DLQ, a_letter, an_ended_delivery

from celery_dlq.backends.redis.packing import packed
from celery_dlq.record import DeadLetter, to_micros

if TYPE_CHECKING:
    from celery_dlq.backends.redis.keys import Keys

BODY_BYTES = 1024
GROUPS = 20

_TRACEBACK = """Traceback (most recent call last):
  File "/app/.venv/lib/python3.11/site-packages/celery/app/trace.py", line 479, in trace_task
    R = retval = fun(*args, **kwargs)
  File "/app/.venv/lib/python3.11/site-packages/celery/app/trace.py", line 779, in __protected__
    return self.run(*args, **kwargs)
  File "/app/shop/tasks.py", line {line}, in charge
    price = prices[order["sku"]]
            ~~~~~~^^^^^^^^^^^^^^
KeyError: 'sku-{number}'
"""


def big_letter(number: int, *, group: str, body_bytes: int = BODY_BYTES) -> DeadLetter:
    """A letter whose message has a body of about so many random bytes."""
    task_id = str(uuid4())
    rest = body_bytes - 144
    args = [{"order": number, "note": "".join(random.choices(string.ascii_letters, k=rest))}]  # noqa: S311
    links = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
    argsrepr = repr(tuple(args))[:1024]
    headers = {
        "lang": "py", "task": "shop.charge", "id": task_id, "shadow": None, "eta": None,
        "expires": None, "group": None, "group_index": None, "retries": 0,
        "timelimit": [None, None], "root_id": task_id, "parent_id": None, "argsrepr": argsrepr,
        "kwargsrepr": "{}", "origin": "gen4711@web-1", "ignore_result": False,
        "replaced_task_nesting": 0, "stamped_headers": None, "stamps": {},
    }  # fmt: skip
    properties = {
        "correlation_id": task_id, "reply_to": str(uuid4()), "delivery_mode": 2,
        "delivery_info": {"exchange": "", "routing_key": "orders"}, "priority": 0,
        "body_encoding": "base64", "delivery_tag": str(uuid4()),
    }  # fmt: skip
    text = f"'sku-{number}'"
    return a_letter(
        task_id=task_id,
        fingerprint=group,
        description=text,
        exception_type="KeyError",
        exception_message=text,
        traceback=_TRACEBACK.format(line=number % 90, number=number),
        history=(an_ended_delivery(exception_type="KeyError", exception_message=text),),
        headers=json.dumps(headers, separators=(",", ":")),
        properties=json.dumps(properties, separators=(",", ":")),
        body=json.dumps([args, {}, links]).encode(),
        args_json=json.dumps(args),
        argsrepr=argsrepr,
        kwargsrepr="{}",
        root_id=task_id,
        origin="gen4711@web-1",
        worker_hostname="celery@web-1",
        worker_pid=4711,
        dead_lettered_at=datetime.now(timezone.utc) - timedelta(seconds=1),
    )


def raw_bytes(letter: DeadLetter) -> int:
    """The size of the message that a letter keeps: body, headers and properties."""
    return len(letter.body) + len(letter.headers) + len(letter.properties)


def fill(client: Any, keys: Keys, letters: int, *, groups: int = GROUPS) -> int:
    """Store letters as ``dead_letter.lua`` does, but pipelined; returns their raw bytes.

    A hundred letters are written again and again under new ids: to make a million is not
    what is measured.
    """
    samples = [big_letter(n, group=f"{n % groups:016x}") for n in range(100)]
    entries = [{**packed(letter.to_fields())} for letter in samples]
    facts = json.dumps(
        {"task_name": "shop.charge", "reason": "failed", "exception_type": "KeyError"}
    )
    raw = 0
    client.sadd(keys.queues(), DLQ)
    for start in range(0, letters, 500):
        pipe = client.pipeline(transaction=False)
        made = []
        for number in range(start, min(start + 500, letters)):
            letter_id, fingerprint = str(uuid4()), f"{number % groups:016x}"
            sample = number % len(samples)
            raw += raw_bytes(samples[sample])
            made.append((letter_id, fingerprint))
            pipe.xadd(
                keys.letters(DLQ), {**entries[sample], "id": letter_id, "fingerprint": fingerprint}
            )
        places = pipe.execute()
        pipe = client.pipeline(transaction=False)
        pipe.hset(keys.ids(DLQ), mapping={i: p for (i, _), p in zip(made, places, strict=True)})
        pipe.hincrby(keys.tally(DLQ), "reason:failed", len(made))
        for letter_id, fingerprint in made:
            pipe.zincrby(keys.groups(DLQ), 1, fingerprint)
            at = to_micros(samples[0].dead_lettered_at)
            pipe.hset(keys.tally(DLQ), f"group:{fingerprint}", f"{at}|{at}|{letter_id}|{facts}")
        pipe.execute()
    return raw
