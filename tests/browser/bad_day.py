"""Letters of a shop as they are on a bad day: what tests look at, and what pictures show."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from itertools import islice
from random import Random
from typing import TYPE_CHECKING, Any
from uuid import UUID

from builders import a_letter, a_request, key_of
from celery.canvas import Signature

from celery_dlq.features.differences.sampling import SUCCEEDED, Samples
from celery_dlq.letters.record import DeadLetter, Delivery, Outcome, Reason
from celery_dlq.store.keys import Keys
from celery_dlq.store.store import Store

if TYPE_CHECKING:
    from celery_dlq import DeadLetters

_GATEWAY = """Traceback (most recent call last):
  File "/usr/lib/python3.12/site-packages/celery/app/trace.py", line 453, in trace_task
    R = retval = fun(*args, **kwargs)
  File "/usr/lib/python3.12/site-packages/celery/app/trace.py", line 736, in __protected_call__
    return self.run(*args, **kwargs)
  File "/srv/shop/payments/tasks.py", line 41, in charge
    return gateway.charge(order.total, currency=order.currency)
  File "/srv/shop/payments/gateway.py", line 118, in charge
    raise GatewayTimeout(f"payment gateway did not answer within {self.timeout} s")
shop.payments.GatewayTimeout: payment gateway did not answer within 10 s
"""
_STOCK = """Traceback (most recent call last):
  File "/usr/lib/python3.12/site-packages/celery/app/trace.py", line 453, in trace_task
    R = retval = fun(*args, **kwargs)
  File "/srv/shop/stock/tasks.py", line 27, in reserve_stock
    sku = line["sku"]
KeyError: 'sku'
"""
_MAIL = """Traceback (most recent call last):
  File "/srv/shop/mails/tasks.py", line 19, in send_mail
    smtp.send_message(message)
  File "/usr/lib/python3.12/smtplib.py", line 986, in send_message
    return self.sendmail(from_addr, to_addrs, flatmsg, mail_options, rcpt_options)
smtplib.SMTPRecipientsRefused: 550 5.1.1 user unknown
"""

_CAUSES: tuple[dict[str, Any], ...] = (
    {
        "letters": 1204,
        "within_minutes": 48,
        "task_name": "shop.charge",
        "source_queue": "orders",
        "reason": Reason.MAX_RETRIES_EXCEEDED,
        "exception_type": "shop.payments.GatewayTimeout",
        "text": "payment gateway did not answer within 10 s",
        "traceback": _GATEWAY,
        "release": "2026.47.1",
    },
    {
        "letters": 212,
        "within_minutes": 23 * 60,
        "task_name": "shop.reserve_stock",
        "source_queue": "orders",
        "reason": Reason.FAILED,
        "exception_type": "KeyError",
        "text": "'sku'",
        "traceback": _STOCK,
        "release": "2026.46.3",
    },
    {
        "letters": 37,
        "within_minutes": 20 * 60,
        "task_name": "shop.render_invoice",
        "source_queue": "orders",
        "reason": Reason.MAX_DELIVERIES_EXCEEDED,
        "exception_type": None,
        "text": "5 deliveries, each ended with its worker: signal 9 (SIGKILL)",
        "release": "2026.46.3",
    },
    {
        "letters": 18,
        "within_minutes": 9 * 60,
        "task_name": "shop.charge",
        "source_queue": "orders",
        "reason": Reason.REJECTED,
        "exception_type": "celery_dlq.RejectToDLQ",
        "text": "no such order",
        "release": "2026.47.1",
        "retries": 4,
    },
    {
        "letters": 86,
        "within_minutes": 22 * 60,
        "task_name": "shop.send_mail",
        "source_queue": "mails",
        "reason": Reason.FAILED,
        "exception_type": "smtplib.SMTPRecipientsRefused",
        "text": "550 5.1.1 user unknown",
        "traceback": _MAIL,
        "release": "2026.46.3",
    },
    {
        "letters": 12,
        "within_minutes": 15 * 60,
        "task_name": "shop.send_mail",
        "source_queue": "mails",
        "reason": Reason.EXPIRED,
        "exception_type": None,
        "text": "it expired before it ran",
        "release": "2026.47.1",
    },
    {
        "letters": 4,
        "within_minutes": 11 * 60,
        "task_name": "shop.report",
        "source_queue": "reports",
        "reason": Reason.TIME_LIMIT_EXCEEDED,
        "exception_type": "TimeLimitExceeded",
        "text": "300 seconds",
        "release": "2026.45.0",
    },
)
_TENANTS = ("acme", "borealis", "cirrus", "delta", "nordic", "orion")
_DECLINED = """Traceback (most recent call last):
  File "/usr/lib/python3.12/site-packages/celery/app/trace.py", line 453, in trace_task
    R = retval = fun(*args, **kwargs)
  File "/srv/shop/payments/tasks.py", line 44, in charge
    card = wallet[order.tenant].card_of(order)
  File "/srv/shop/payments/wallet.py", line 71, in card_of
    raise UnknownCard(f"no card for orders of {self.tenant}")
shop.payments.UnknownCard: no card for orders of nordic
"""
NIGHT: tuple[dict[str, Any], ...] = (
    {
        "letters": 80,
        "within_minutes": 24,
        "task_name": "shop.charge",
        "source_queue": "orders",
        "reason": Reason.FAILED,
        "exception_type": "shop.payments.UnknownCard",
        "text": "no card for orders of nordic",
        "traceback": _DECLINED,
        "release": "2026.47.2",
        "tenants": ("nordic",),
    },
    {
        "letters": 41,
        "within_minutes": 19 * 60,
        "task_name": "shop.reserve_stock",
        "source_queue": "orders",
        "reason": Reason.FAILED,
        "exception_type": "shop.stock.OutOfStock",
        "text": "LAMP-12: 0 left",
        "release": "2026.46.3",
    },
    *({"tenants": _TENANTS, **cause, "letters": min(60, cause["letters"])} for cause in _CAUSES),
)
"""Nine causes of three queues, each what is left of it; the first burns: one tenant's cards."""


_SAMPLED = (
    "schema_version",
    "id",
    "task_id",
    "task_name",
    "source_queue",
    "dead_letter_queue",
    "dead_lettered_at",
    "deliveries",
    "retries",
    "args_json",
    "kwargs_json",
    "worker_hostname",
    "release",
    "origin",
)


def stored(
    dlq: DeadLetters,
    client: Any,
    letters: int | None = None,
    causes: Sequence[dict[str, Any]] = _CAUSES,
) -> list[DeadLetter]:
    """Store the letters of a bad day, oldest first.

    Args:
        dlq: Stores them.
        client: Of the same Redis.
        letters: At most this many of each cause.
        causes: What happened.
    """
    dice = Random(7)  # noqa: S311 - the same every time
    found: list[DeadLetter] = []
    for number, cause in enumerate(causes):
        most = min(cause["letters"], letters or cause["letters"])
        found += [_letter(cause, number, dice) for _ in range(most)]
    found.sort(key=lambda letter: letter.dead_lettered_at)
    for letter in found:
        dlq.store.dead_letter(letter, key_of(letter))
    _spread(client, found)
    return found


def sampled(dlq: DeadLetters, successes: int = 400) -> None:
    """Store a sample of messages that succeeded, of the tasks of the two largest causes."""
    dice = Random(11)  # noqa: S311 - the same every time
    (url,) = dlq.settings.url or ()
    store = Store(url)
    kept = store.part(Samples)
    for number in range(successes):
        letter = _letter(_CAUSES[number % 2], number % 2, dice)
        args, kwargs = json.loads(letter.args_json or ""), json.loads(letter.kwargs_json or "")
        kwargs["currency"] = dice.choice(["EUR", "EUR", "USD", "GBP", "CHF"])
        ended = datetime.now(timezone.utc) - timedelta(minutes=dice.uniform(1, 24 * 60))
        release = "2026.47.1" if ended > datetime.now(timezone.utc) - timedelta(hours=1) else None
        good = replace(
            letter,
            args_json=json.dumps(args),
            kwargs_json=json.dumps(kwargs),
            dead_lettered_at=ended,
            release=release or "2026.46.3",
            retries=0,
            fingerprint="",
        )
        fields = {name: good.to_fields()[name] for name in _SAMPLED if name in good.to_fields()}
        marks = {"reason": SUCCEEDED.encode(), "headers": b'{"dlq_sample_share": 0.001}'}
        kept.add_sample(letter.dead_letter_queue, {**fields, **marks})
        kept.send_samples()
    store.connection.send_and_wait("PING")
    store.close()


def _letter(cause: dict[str, Any], number: int, dice: Random) -> DeadLetter:
    task_id = str(UUID(int=dice.getrandbits(128), version=4))
    # More towards the end, as outages are.
    minutes = cause["within_minutes"] * (1 - dice.random() ** 0.6) + 0.05
    died = datetime.now(timezone.utc) - timedelta(minutes=minutes)
    tries = {Reason.MAX_DELIVERIES_EXCEEDED: 5, Reason.EXPIRED: 0}.get(cause["reason"], 1)
    args, kwargs = _arguments(cause, dice)
    host = f"celery@orders-{dice.randint(1, 3)}"
    history = tuple(
        Delivery(
            number=each,
            started_at=died - timedelta(seconds=14.0 * (tries - each) + dice.uniform(9, 11)),
            ended_at=died - timedelta(seconds=14.0 * (tries - each)),
            worker_hostname=host,
            worker_pid=dice.randint(100, 999),
            outcome=Outcome.FAILED if cause["exception_type"] else Outcome.WORKER_LOST,
            exception_type=cause["exception_type"] or "signal 9 (SIGKILL)",
            exception_message=cause["text"] if cause["exception_type"] else None,
        )
        for each in range(1, tries + 1)
    )
    retries = 4 if cause["reason"] is Reason.MAX_RETRIES_EXCEEDED else cause.get("retries", 0)
    queue = cause["source_queue"]
    embed = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
    if cause["task_name"] == "shop.charge":
        follows = Signature("shop.send_mail", ("receipt",), immutable=True)
        embed["chain"] = [dict(follows)]  # type: ignore[assignment]
    headers = a_request(
        task=cause["task_name"],
        id=task_id,
        root_id=task_id,
        retries=retries,
        argsrepr=repr(args),
        kwargsrepr=repr(kwargs),
        origin=f"gen212@web-{dice.randint(1, 4)}",
    )
    return a_letter(
        task_id=task_id,
        root_id=task_id,
        task_name=cause["task_name"],
        source_queue=queue,
        dead_letter_queue=f"{queue}-DLQ",
        reason=cause["reason"],
        description=cause["text"],
        dead_lettered_at=died,
        published_at=died - timedelta(seconds=80 + 40 * retries),
        first_delivered_at=history[0].started_at if history else None,
        deliveries=tries,
        max_deliveries=5 if queue == "orders" else 3,
        retries=retries,
        max_retries=4 if retries else None,
        exception_type=cause["exception_type"],
        exception_message=cause["text"] if cause["exception_type"] else None,
        traceback=cause.get("traceback"),
        fingerprint=f"{number + 0xA1:02x}{hash_of(cause)}",
        history=history,
        routing_key=queue,
        body=json.dumps([args, kwargs, embed]).encode(),
        args_json=json.dumps(args),
        kwargs_json=json.dumps(kwargs),
        headers=json.dumps(headers),
        properties=json.dumps(
            {"correlation_id": task_id, "delivery_mode": 2, "delivery_info": {"routing_key": queue}}
        ),
        worker_hostname=host,
        worker_pid=dice.randint(100, 999),
        origin=headers["origin"],
        release=cause["release"],
    )


def held(dlq: DeadLetters, letters: int = 2) -> str:
    """A hold of orders that has some messages; returns its id."""
    hold = dlq.hold(queue="orders", conditions=["kwargs.currency=USD"], reason="four eyes").id
    for number, letter in enumerate(islice(dlq.letters("orders-DLQ"), letters)):
        one = replace(letter, id=str(UUID(int=number)), dead_letter_queue=hold)
        dlq.assembly.backend.held.dead_letter(one, key_of(one))
    return hold


def hash_of(cause: dict[str, Any]) -> str:
    """Fourteen digits that look like those of a fingerprint."""
    from hashlib import sha256

    return sha256(repr((cause["task_name"], cause["text"])).encode()).hexdigest()[:14]


def _arguments(cause: dict[str, Any], dice: Random) -> tuple[list[Any], dict[str, Any]]:
    order = dice.randint(400_000, 499_999)
    task = cause["task_name"]
    if "tenants" in cause:
        kwargs = {"tenant": dice.choice(cause["tenants"]), "currency": dice.choice(["EUR", "USD"])}
        return [f"customer{order}@example.com" if task == "shop.send_mail" else order], kwargs
    if task == "shop.send_mail":
        return [f"customer{order}@example.com"], {"template": dice.choice(["receipt", "shipped"])}
    if task == "shop.report":
        return [f"2026-{dice.randint(1, 11):02d}"], {"format": "pdf"}
    if task == "shop.charge":
        currency = "CHF" if dice.random() < 0.9 else "EUR"  # what sets these apart
        if cause["reason"] is Reason.REJECTED:
            currency = dice.choice(["EUR", "USD", "GBP", "CHF"])
        amount = f"{dice.randint(5, 480)}.{dice.randint(0, 99):02d}"
        basket = [{"sku": f"LAMP-{dice.randint(10, 99)}", "quantity": dice.randint(1, 4)}]
        return [order], {"amount": amount, "currency": currency, "basket": basket}
    return [order], {"currency": dice.choice(["EUR", "USD", "GBP", "CHF"])}


def _spread(client: Any, letters: list[DeadLetter]) -> None:
    """Count each letter in the minute and hour of its death: Redis counted all of them now."""
    keys = Keys()
    now = datetime.now(timezone.utc).timestamp()
    for queue in {letter.dead_letter_queue for letter in letters}:
        mine = [letter for letter in letters if letter.dead_letter_queue == queue]
        minutes = Counter(
            (int(letter.dead_lettered_at.timestamp() // 60), letter.reason.value)
            for letter in mine
            if now - letter.dead_lettered_at.timestamp() < 3540
        )
        client.delete(keys.arrivals(queue))
        for (minute, reason), count in minutes.items():
            client.hset(keys.arrivals(queue), f"{minute % 60}:{reason}", f"{minute}:{count}")
        for fingerprint in {letter.fingerprint for letter in mine}:
            of_group = [letter for letter in mine if letter.fingerprint == fingerprint]
            _spread_group(client, keys.tally(queue), of_group)


def _spread_group(client: Any, tally: str, letters: list[DeadLetter]) -> None:
    name = f"group:{letters[0].fingerprint}"
    first, last, example, _, _, releases, facts = client.hget(tally, name).decode().split("|", 6)
    now = datetime.now(timezone.utc).timestamp() // 300
    spans = Counter(int(letter.dead_lettered_at.timestamp() // 300) for letter in letters)
    hours = Counter(int(letter.dead_lettered_at.timestamp() // 3600) for letter in letters)
    newest = max(spans)
    hours[newest // 12] -= spans[newest]
    recent = sorted((span for span in spans if span > now - 12), reverse=True) or [newest]
    value = "|".join(
        (
            first,
            last,
            example,
            ",".join(f"{h}:{n}" for h, n in sorted(hours.items(), reverse=True) if n),
            ",".join(f"{span}:{spans[span]}" for span in recent),
            releases,
            facts,
        )
    )
    client.hset(tally, name, value)
