"""Letters in real queues of the user's broker; Redis has only counts, claims and positions."""

from celery_dlq.store.broker.store import BrokerStore

__all__ = ["BrokerStore"]
