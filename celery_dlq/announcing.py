"""Wires the dead-letter exchanges of an app: made when a policy names one, else nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from celery_dlq.config import Settings
from celery_dlq.errors import BrokerUnavailable, DLQError
from celery_dlq.logs import get_logger
from celery_dlq.parts import make_outbox
from celery_dlq.ports import DeadLetterStore, Keeper

if TYPE_CHECKING:
    from celery_dlq.courier import Courier

logger = get_logger("celery_dlq.courier")


class PostOffice:
    """The courier of an app and what it needs.

    Args:
        app: The Celery app.
        settings: Gives its checked settings.
        make_store: Makes a store for the courier alone: it works in a thread of its own.
    """

    def __init__(
        self, app: Any, settings: Callable[[], Settings], make_store: Callable[[], DeadLetterStore]
    ) -> None:
        self._app = app
        self._settings = settings
        self._make_store = make_store
        self._courier: Courier | None = None
        self._lock = threading.Lock()

    def courier(self) -> Courier | None:
        """What publishes the letters; ``None`` if no policy names an exchange.

        Raises:
            SettingsError: Two policies name one exchange with two types.
        """
        from celery_dlq.courier import Courier, Targets  # noqa: PLC0415 - needs kombu

        with self._lock:
            targets = Targets(self._app, self._settings().policies)
            if self._courier is None and targets.exchanges():
                outbox = make_outbox(self._settings(), self._app.conf.broker_url)
                self._courier = Courier(self._app, self._make_store(), outbox, targets)
            return self._courier

    def before(self, store: DeadLetterStore) -> Keeper:
        """The store, with a notice of each letter kept before the letter is stored."""
        courier = self.courier()
        return store if courier is None else courier.before(store)

    def check(self) -> None:
        """Refuse exchanges and queues that are not as the policies say.

        Raises:
            SettingsError: The message says which, and what the broker has.
        """
        courier = self.courier()
        try:
            if courier is not None:
                courier.check()
        except BrokerUnavailable as exc:  # Celery waits for the broker; they are declared later
            logger.warning("The dead-letter exchanges are not checked: %s", exc)

    def deliver(self, dead_letter_queues: Iterable[str]) -> None:
        """Publish now what a command stored; if that fails, a worker does it later."""
        courier = self.courier()
        if courier is not None:
            try:
                courier.deliver(dead_letter_queues)
            except DLQError as exc:
                logger.warning("A worker publishes the letters later: %s", exc)
            courier.close()

    def close(self) -> None:
        """Disconnect; never raises."""
        if self._courier is not None:
            self._courier.close()
