"""Limits of RabbitMQ and Amazon SQS that would end an app's messages before its policies do.

Loaded where the broker is one of the two, and by operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from celery_dlq.config import RABBITMQ
from celery_dlq.errors import SettingsError
from celery_dlq.letters.printable import get_logger
from celery_dlq.policies import delivery_limits
from celery_dlq.policies.delivery_limits import LowLimit
from celery_dlq.policies.table import PolicyTable
from celery_dlq.transport import default_delay
from celery_dlq.transport.sqs.aws import redrive_policies

if TYPE_CHECKING:
    from celery_dlq.assembly import Assembly

logger = get_logger("celery_dlq")


def refuse_what_vanishes(assembly: Assembly, table: PolicyTable) -> None:
    """Refuse declared queues of RabbitMQ that drop messages before they are dead letters."""
    # Not `amqp.queues`: it would keep what the configuration says now.
    declared = assembly.app.amqp.Queues(assembly.app.conf.task_queues)
    adopts = bool(assembly.settings.of("adopt"))
    for low in delivery_limits.low_limits(table, declared, {}, adopts=adopts, default=lambda: None):
        if low.vanishes:
            raise SettingsError(low.text)


def low_limits(
    assembly: Assembly, table: PolicyTable, task_queues: Mapping[str, str]
) -> Iterable[LowLimit]:
    """The limits of RabbitMQ that are too low, with the one that it has by default if it says."""

    def default() -> int | None:
        if assembly.server is None:
            with suppress(Exception), assembly.app.connection_for_read(connect_timeout=2) as found:
                assembly.server = found.connection.server_properties
        return delivery_limits.default_limit(assembly.server or {})

    if assembly.app.connection_for_read().transport_cls not in RABBITMQ:
        return ()
    queues, adopts = assembly.app.amqp.queues, bool(assembly.settings.of("adopt"))
    return delivery_limits.low_limits(table, queues, task_queues, adopts=adopts, default=default)


def low_receive_counts(
    assembly: Assembly, channel: Any, queues: Iterable[str], tasks: Mapping[str, str]
) -> Iterator[LowLimit]:
    """What is wrong with the redrive policies of Amazon SQS's queues, as it tells them."""
    table, adopts = assembly.policy_table(), assembly.settings.of("adopt") or {}
    guarded = [name for name in queues if table.tasks or table.resolve(name) is not None]
    policies = redrive_policies(channel, guarded)
    adopted = [channel.entity_name(name) for name in adopts]
    return delivery_limits.low_receive_counts(table, policies, tasks, adopted=adopted)


def warn_of_low_limits(assembly: Assembly, connection: Any) -> None:
    """Warn of them, when a worker has connected."""
    assembly.server = getattr(connection.connection, "server_properties", {})
    tasks: Mapping[str, str] = {}
    with suppress(Exception):  # a route of the user's may take no call without arguments
        tasks = default_delay.task_queues(assembly.app)
    for low in low_limits(assembly, assembly.policy_table(), tasks):
        logger.warning("A message may vanish: %s", low.text)
    if assembly.app.connection_for_read().transport_cls == "sqs":
        queues = assembly.app.amqp.queues
        for low in low_receive_counts(assembly, connection.default_channel, queues, tasks):
            logger.warning("A message may make no letter: %s", low.text)
