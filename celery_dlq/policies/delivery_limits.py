"""The limits of RabbitMQ's quorum queues, and of queues of Amazon SQS, beside ``max_deliveries``.

A quorum queue counts each return of a message, also of one that was only prefetched by a worker
that lost its connection or was stopped. Above its limit RabbitMQ drops the message, or sends it
to the queue's dead-letter exchange: no worker sees it again, so no worker can make its letter.
Twice ``max_deliveries`` leaves as many returns without a start as there are starts.

Only the arguments that the app declares are known here. AMQP tells neither the arguments of a
queue that somebody else declared nor a ``delivery-limit`` that a policy of RabbitMQ sets.

Amazon SQS counts receipts in the same way, where a queue has a redrive policy.

Source: https://www.rabbitmq.com/docs/quorum-queues#poison-message-handling and
https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-dead-letter-queues.html
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from celery_dlq.policies.table import PolicyTable

FIRST_MAJOR = 4
"""RabbitMQ 4 and later have a limit where nobody sets one."""

_DEFAULT_LIMIT = 20


@dataclass(frozen=True, slots=True)
class LowLimit:
    """A queue whose own limit may end a message before ``max_deliveries`` does."""

    queue: str
    text: str  # What is wrong, and the mend
    # True if poison certainly vanishes: the limit is declared, is not above `max_deliveries`, and
    # nothing is known to take what RabbitMQ ends
    vanishes: bool = False


def default_limit(server: Mapping[str, Any]) -> int | None:
    """The limit of a quorum queue that declares none, by the server's properties."""
    major = str(server.get("version", "")).partition(".")[0]
    new = server.get("product") == "RabbitMQ" and major.isdecimal() and int(major) >= FIRST_MAJOR
    return _DEFAULT_LIMIT if new else None


def low_limits(
    table: PolicyTable,
    queues: Mapping[str, Any],
    task_queues: Mapping[str, str],
    *,
    adopts: bool,
    default: Callable[[], int | None],
) -> Iterator[LowLimit]:
    """Compare the quorum queues that an app declares with its policies."""
    for name, queue in queues.items():
        arguments = queue.queue_arguments or {}
        if arguments.get("x-queue-type") != "quorum":
            continue
        most = _most_deliveries(table, name, task_queues)
        needed = 2 * (most.value or 0)
        limit = arguments.get("x-delivery-limit")
        if limit is None and needed > _DEFAULT_LIMIT:
            limit = default()
        exchange = arguments.get("x-dead-letter-exchange")
        adopted = adopts and exchange is not None
        if not isinstance(limit, int) or not 0 <= limit < needed or adopted:
            continue
        declared = "x-delivery-limit" in arguments
        yield LowLimit(
            name,
            f"expected the quorum queue {name!r} to have a delivery limit of at least {needed}, "
            f"twice max_deliveries ({most.source}), got {limit}"
            f"{'' if declared else ', the default of RabbitMQ 4'}: RabbitMQ counts each return of "
            f"a message, also of one that was only prefetched, and {_end(exchange)}. Declare the "
            f"queue anew with x-delivery-limit {needed} or more, or lower max_deliveries, "
            f"or let what RabbitMQ ends become letters: x-dead-letter-exchange and dlq_adopt",
            vanishes=declared and limit <= (most.value or 0) and exchange is None and not adopts,
        )


def low_receive_counts(
    table: PolicyTable,
    policies: Mapping[str, tuple[int, str]],
    task_queues: Mapping[str, str],
    *,
    adopted: Container[str],
) -> Iterator[LowLimit]:
    """Compare the redrive policies of SQS's queues with an app's: what is wrong, and the mend."""
    for name, (limit, target) in policies.items():
        most = _most_deliveries(table, name, task_queues)
        needed = 2 * (most.value or 0)
        if limit < needed and target not in adopted:
            yield LowLimit(
                name,
                f"expected the redrive policy of queue {name!r} to have a maxReceiveCount of at "
                f"least {needed}, twice max_deliveries ({most.source}), got {limit}: SQS counts "
                "each receipt, also of a message that was only prefetched, and then moves it to "
                f"{target!r}, where nothing makes a letter of it. Raise maxReceiveCount, or lower "
                f"max_deliveries; dlq import {target} makes letters of what is there",
            )


def _most_deliveries(table: PolicyTable, queue: str, task_queues: Mapping[str, str]) -> Any:
    """The highest limit of a queue and its tasks, with its source."""
    here = [None, *(task for task, place in task_queues.items() if place == queue)]
    limits = [table.explain(queue, task)["max_deliveries"] for task in here]
    return max(limits, key=lambda sourced: sourced.value or 0)


def _end(exchange: str | None) -> str:
    if exchange is None:
        return "then drops it: no letter, no log line"
    return f"then sends it to the exchange {exchange!r}, where nothing makes a letter of it"
