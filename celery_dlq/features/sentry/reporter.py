"""Marks letters that will be reported to Sentry, and sends their events once they are stored."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from dataclasses import replace
from typing import Any

from kombu.utils.functional import LRUCache

from celery_dlq.errors import StoreUnavailable
from celery_dlq.events import Action, Change, DeadLettered, Event
from celery_dlq.features.sentry.events import (
    event_id_of,
    event_of,
    event_of_opening,
    sends_values,
    trace_of,
)
from celery_dlq.features.sentry.observer import sentry_client
from celery_dlq.features.sentry.reports import Report, ReportCause, Reports
from celery_dlq.letters.printable import get_logger
from celery_dlq.letters.record import DeadLetter
from celery_dlq.worker.observer import WorkerParts

logger = get_logger("celery_dlq.sentry")

_MAX_DUE_REPORTS = 1_000


class Reporter:
    """Marks letters that will be reported, and reports them once they are stored."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self.due: MutableMapping[str, tuple[Report, str]] = LRUCache(_MAX_DUE_REPORTS)  # type: ignore[no-untyped-call]
        parts.events.subscribe(self.report, lambda kind: kind is DeadLettered)

    def marked(self, letter: DeadLetter, trace: str) -> DeadLetter:
        """The letter with the id of its event, if it will be reported."""
        if letter.sentry_event_id is not None:
            return letter
        try:
            report = self._last_report(letter) or self._parts.backend.part(Reports).report_of(
                letter
            )
        except StoreUnavailable as exc:
            logger.warning("Letter %s is not reported to Sentry: %s", letter.id, exc)
            return letter
        if report is None:
            return letter
        self.due[letter.id] = report, trace
        return replace(letter, sentry_event_id=event_id_of(letter))

    def _last_report(self, letter: DeadLetter) -> Report | None:
        """The report that a message is redriven no more: one for each group, while it lasts."""
        if not letter.redrives:
            return None
        if not any(one.gives_up(letter) for one in self._parts.made.values()):
            return None
        group = replace(letter, redrives=0, fingerprint=f"{letter.fingerprint}:used_up")
        report = self._parts.backend.part(Reports).report_of(group)
        if report is None or report.why is not ReportCause.NEW:
            return None
        return replace(report, why=ReportCause.USED_UP)

    def report(self, event: Event) -> None:
        """Hand the event of a stored letter, or of a circuit breaker, to Sentry's own thread."""
        found = sentry_client()
        if found is None:
            return
        if isinstance(event, Change) and event.action is Action.CIRCUIT_OPENED:
            send_event(event_of_opening(event))
        elif isinstance(event, DeadLettered):
            due = self.due.pop(event.letter.id, None)
            if due is not None:
                shown, redaction = event.letter, self._parts.redaction
                if redaction is not None:
                    shown = redaction.letter(shown)
                sent = event_of(shown, due[0], with_values=sends_values(found.options))
                sent["contexts"].update(trace_of(event.letter, due[1]))
                send_event(sent)


def send_event(event: dict[str, Any]) -> None:
    """Send an event without breadcrumbs: those of the main process belong to all tasks."""
    sdk = sys.modules["sentry_sdk"]
    with sdk.isolation_scope() as scope:
        scope.clear_breadcrumbs()
        sdk.capture_event(event)
