"""What watches a worker: its metrics and, if the app uses Sentry, its reporter."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from celery_dlq.config import Settings
from celery_dlq.contrib import sentry
from celery_dlq.events import Events
from celery_dlq.logs import get_logger
from celery_dlq.metrics import Measuring, WorkerGauges
from celery_dlq.parts import make_reports
from celery_dlq.record import DeadLetter
from celery_dlq.worker.failure import failure_of_exc_info
from celery_dlq.worker.lifecycle import HANDLING

if TYPE_CHECKING:
    from celery_dlq.worker.guard import Guard
    from celery_dlq.worker.letter_writer import LetterWriter

logger = get_logger("celery_dlq.worker")


class WorkerObservers:
    """The observers of one worker. None of them can fail a task or stop a letter.

    Args:
        settings: The checked settings.
        broker_url: The app's ``broker_url``.
        events: Where the worker's events come from.
        measuring: The process's part in the metrics.
    """

    def __init__(
        self, settings: Settings, broker_url: object, events: Events, measuring: Measuring
    ) -> None:
        self._settings = settings
        self._broker_url = broker_url
        self._events = events
        self._measuring = measuring
        self._reporter: sentry.SentryReporter | None = None
        self._gauges: Any = None

    def watch(self, guard: Guard, letter_writer: LetterWriter, hostname: str) -> None:
        """Begin; before the pool starts, so that its processes take part."""
        self._gauges = partial(_gauges, letter_writer, hostname)
        if self._settings.sentry != sentry.OFF and sentry.client() is not None:
            keeps = partial(_keeps, guard)
            instead = self._settings.sentry == sentry.GROUPS
            sentry.SentryDeduplicator(keeps, HANDLING.get, instead=instead).install()

    def marked(self, letter: DeadLetter) -> DeadLetter:
        """The letter with the id of the Sentry event that will tell of it, if one will."""
        if self._settings.sentry == sentry.OFF or sentry.client() is None:
            return letter
        if self._reporter is None:
            self._reporter = sentry.SentryReporter(make_reports(self._settings, self._broker_url))
            self._events.subscribe(self._reporter)
        return self._reporter.mark(letter)

    def tick(self) -> None:
        """Take the worker's counts to the store, every few seconds."""
        self._measuring.tick(self._gauges)

    def close(self) -> None:
        """Take the last counts to the store; never raises."""
        try:
            self._measuring.flush(self._gauges)
            self._measuring.close()
        except Exception:
            logger.exception("The last metrics of this worker are not written")


def _gauges(letter_writer: LetterWriter, hostname: str) -> WorkerGauges:
    return WorkerGauges(worker=hostname, spool=letter_writer.spooled, waiting=len(letter_writer))


def _keeps(guard: Guard, task: Any, delivery_info: dict[str, Any], exc_info: Any) -> bool:
    return guard.keeps(task, delivery_info, failure_of_exc_info(exc_info, task.throws))
