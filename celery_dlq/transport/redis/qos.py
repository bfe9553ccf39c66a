"""Acknowledging and restoring what was fetched by script.

Source: ``QoS`` in https://github.com/celery/kombu/blob/main/kombu/transport/redis.py
"""

from __future__ import annotations

from typing import Any

from kombu.transport import redis as kombu_redis
from kombu.transport import virtual
from kombu.utils.encoding import bytes_to_str

from celery_dlq.logs import get_logger
from celery_dlq.transport.redis.leases import Leases

logger = get_logger("celery_dlq.transport")


class ReliableQoS(kombu_redis.QoS):
    """Acknowledges and restores what this worker fetched by script; the rest as kombu does."""

    @property
    def _leases(self) -> Leases:
        leases: Leases = self.channel.dlq_leases
        return leases

    def append(self, message: Any, delivery_tag: Any) -> None:
        """Add a delivered message."""
        if self._leases.is_own(delivery_tag):  # the fetch has recorded it
            virtual.QoS.append(self, message, delivery_tag)
        else:
            super().append(message, delivery_tag)

    def ack(self, delivery_tag: Any) -> None:
        """Acknowledge a message."""
        if self._leases.is_own(delivery_tag):
            self._leases.acknowledge(delivery_tag)
            virtual.QoS.ack(self, delivery_tag)
        else:
            super().ack(delivery_tag)

    def reject(self, delivery_tag: Any, requeue: bool = False) -> None:  # noqa: FBT001, FBT002
        """Remove a message, or return it as the last of its queue."""
        if not self._leases.is_own(delivery_tag):
            super().reject(delivery_tag, requeue=requeue)
        elif requeue:
            self._leases.restore(delivery_tag, first=False)
            virtual.QoS.ack(self, delivery_tag)
        else:
            self.ack(delivery_tag)

    def put_first(self, delivery_tag: Any) -> bool:
        """Return a message as the next of its queue; false if it was not fetched by script."""
        if not self._leases.is_own(delivery_tag):
            return False
        self._leases.restore(delivery_tag, first=True)
        virtual.QoS.ack(self, delivery_tag)
        return True

    def restore_unacked(self, client: Any = None) -> None:
        """Restore what the channel delivered, but for tasks at work: they go on."""
        own = [tag for tag in self._delivered if self._leases.is_own(tag)]
        for tag in own:
            del self._delivered[tag]
        self._leases.connection_closes(own)
        super().restore_unacked(client)

    def restore_by_tag(self, tag: Any, client: Any = None, leftmost: bool = False) -> None:  # noqa: FBT001, FBT002
        """Restore what a dead worker fetched without a lease; a bad record ends no worker.

        After an outage, the index alone does not tell who is dead: leases are renewed then.
        """
        if self._leases.has_lease(tag):
            return
        if self._leases.restore_of_another(bytes_to_str(tag)) is not None:
            return
        try:
            super().restore_by_tag(tag, client=client, leftmost=leftmost)
        except (ValueError, TypeError, RecursionError) as exc:
            logger.error("Message %r cannot be restored: its record is unreadable: %r", tag, exc)  # noqa: TRY400
