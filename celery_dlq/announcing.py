"""Wires the dead-letter exchanges of an app: made when a policy names one, else nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from celery_dlq.backends.base import DeadLetterStore, Keeper
from celery_dlq.config import Settings
from celery_dlq.errors import BrokerUnavailable, DLQError
from celery_dlq.logs import get_logger
from celery_dlq.parts import make_outbox

if TYPE_CHECKING:
    from celery_dlq.dlx.publisher import ExchangePublisher

logger = get_logger("celery_dlq.dlx.publisher")


class DeadLetterExchanges:
    """The publisher of an app and what it needs.

    Args:
        app: The Celery app.
        settings: Gives its checked settings.
        make_store: Makes a store for the publisher alone: it works in a thread of its own.
    """

    def __init__(
        self, app: Any, settings: Callable[[], Settings], make_store: Callable[[], DeadLetterStore]
    ) -> None:
        self._app = app
        self._settings = settings
        self._make_store = make_store
        self._publisher: ExchangePublisher | None = None
        self._lock = threading.Lock()

    def publisher(self) -> ExchangePublisher | None:
        """What publishes the letters; ``None`` if no policy names an exchange.

        Raises:
            SettingsError: Two policies name one exchange with two types.
        """
        from celery_dlq.dlx.publisher import ExchangePublisher, Targets  # noqa: PLC0415 - needs kombu

        with self._lock:
            targets = Targets(self._app, self._settings().policies)
            if self._publisher is None and targets.exchanges():
                outbox = make_outbox(self._settings(), self._app.conf.broker_url)
                self._publisher = ExchangePublisher(self._app, self._make_store(), outbox, targets)
            return self._publisher

    def before(self, store: DeadLetterStore) -> Keeper:
        """The store, with a notice of each letter kept before the letter is stored."""
        publisher = self.publisher()
        return store if publisher is None else publisher.before(store)

    def check(self) -> None:
        """Refuse exchanges and queues that are not as the policies say.

        Raises:
            SettingsError: The message says which, and what the broker has.
        """
        publisher = self.publisher()
        try:
            if publisher is not None:
                publisher.check()
        except BrokerUnavailable as exc:  # Celery waits for the broker; they are declared later
            logger.warning("The dead-letter exchanges are not checked: %s", exc)

    def deliver(self, dead_letter_queues: Iterable[str]) -> None:
        """Publish now what a command stored; if that fails, a worker does it later."""
        publisher = self.publisher()
        if publisher is not None:
            try:
                publisher.deliver(dead_letter_queues)
            except DLQError as exc:
                logger.warning("A worker publishes the letters later: %s", exc)
            publisher.close()

    def close(self) -> None:
        """Disconnect; never raises."""
        if self._publisher is not None:
            self._publisher.close()
