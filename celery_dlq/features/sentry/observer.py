"""Report to Sentry: one event per group of letters when it is new, returns, or grows tenfold.

Sentry's CeleryIntegration sends an event for every exception of every task, from the pool
process. For a failure that becomes a letter this would be a duplicate, and in a flood one
event per letter. So this module drops the integration's event of such a failure; events of
retries, unguarded tasks and everything else stay.

A flood of letters must not become a flood of events. So the processes of an app decide
together, in the store, once per letter. Reported are the first letter of a group, the first
after it came back (a redriven message died again, or the group had been emptied), and then
numbers 10, 100, 1,000 and so on. The letter that ends the resolution of its group is reported too;
those of a muted group are not. Against floods of groups each dead-letter queue also has an
allowance; a report that exceeds it is made with the group's next letter.

``sentry_sdk`` is used only if the app has imported it. Without it, or without a DSN, this
module does nothing.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from celery_dlq.letters.record import DeadLetter
from celery_dlq.worker.observer import Keeps, Observer, WorkerParts
from celery_dlq.writing.failure import SENTRY_TRACE
from celery_dlq.writing.lifecycle import HANDLING

if TYPE_CHECKING:
    from celery_dlq.features.sentry.reporter import Reporter


def sentry_client() -> Any:
    """Sentry's client, if the app has imported ``sentry_sdk`` and set a DSN; else ``None``."""
    sdk = sys.modules.get("sentry_sdk")
    if sdk is None or not hasattr(sdk, "get_client"):  # sentry_sdk 1 has no get_client
        return None
    found = sdk.get_client()
    return found if found.is_active() and found.transport is not None else None


def observer(parts: WorkerParts) -> Observer | None:
    """The observer of a worker."""
    if parts.redaction is not None and sentry_client() is not None:
        from celery_dlq.features.sentry.integration import install_masking  # noqa: PLC0415

        install_masking(parts.redaction)
    return SentryObserver(parts) if parts.settings.of("sentry") else None


class SentryObserver(Observer):
    """Lets letters be reported, and loads what that needs once the app uses Sentry."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts

    @cached_property
    def reporter(self) -> Reporter:
        """Reports letters."""
        from celery_dlq.features.sentry.reporter import Reporter  # noqa: PLC0415 - few use Sentry

        return Reporter(self._parts)

    def on_guard_made(self, keeps: Keeps) -> None:
        """Drop events that a report repeats; before the pool starts: its processes inherit that."""
        if sentry_client() is not None:
            from celery_dlq.features.sentry.integration import SentryDeduplicator  # noqa: PLC0415

            SentryDeduplicator(keeps, HANDLING.get).install()
            self.reporter  # noqa: B018 - loaded before the first letter

    def before_store(self, letter: DeadLetter) -> DeadLetter:
        """The letter with the id of its event, if it will be reported."""
        trace = letter.extra.get(SENTRY_TRACE, b"").decode()
        if trace:
            others = {name: value for name, value in letter.extra.items() if name != SENTRY_TRACE}
            letter = replace(letter, extra=others)
        if sentry_client() is None:  # the app may initialise Sentry after the guard is made
            return letter
        return self.reporter.marked(letter, trace)
