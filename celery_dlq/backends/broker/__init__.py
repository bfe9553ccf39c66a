"""Letters in real queues of the user's broker; Redis keeps counts, claims and positions only."""

from celery_dlq.backends.broker.store import BrokerStore

__all__ = ["BrokerStore"]
