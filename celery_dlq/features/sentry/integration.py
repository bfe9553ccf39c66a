"""What is added to Sentry's own client: no event twice, and nothing that ``dlq_redact`` names."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from celery import current_task
from celery import signals as celery_signals
from celery.utils.collections import LimitedSet

from celery_dlq.features.sentry.observer import sentry_client
from celery_dlq.letters.printable import get_logger
from celery_dlq.writing.failure import SENTRY_EVENT_ID, SENTRY_TRACE

if TYPE_CHECKING:
    from celery_dlq.letters.redaction import Redaction
    from celery_dlq.worker.observer import Keeps

logger = get_logger("celery_dlq.sentry")

_MAX_TEMPLATES, _SECONDS_PER_LINE = 200, 60
_MASKED = ("exception", "threads", "logentry", "message", "extra", "contexts", "breadcrumbs")


class SentryDeduplicator:
    """Drops events of Sentry's integrations that would duplicate a report.

    Made in the worker's main process before the pool starts, so that pool processes inherit it.
    """

    def __init__(self, keeps: Keeps, handling: Callable[[], bool]) -> None:
        self._keeps = keeps
        self._handling = handling
        self._logged = LimitedSet(maxlen=_MAX_TEMPLATES, expires=_SECONDS_PER_LINE)

    def install(self) -> None:
        """Process every event of this process and of the pool processes that it starts.

        Replaces the one of an earlier worker in this process.
        """
        if not _installed:
            scope = sys.modules["sentry_sdk"].get_global_scope()
            scope.add_event_processor(_processed_by_newest)
        _installed[:] = [self]
        celery_signals.task_failure.connect(
            _carry_event_id, weak=False, dispatch_uid="celery_dlq.sentry"
        )

    def processed(self, event: Any, hint: Mapping[str, Any]) -> Any:
        """Sentry's event, or ``None`` to drop it because a letter reports it."""
        if "log_record" in hint:
            return event if self._may_log(hint["log_record"]) else None
        if _mechanism(event) != "celery" or not current_task:
            return event
        request = current_task.request
        try:
            if self._keeps(current_task, request.delivery_info or {}, hint.get("exc_info")):
                return None
        except Exception:
            logger.exception("Could not check an event of Sentry's integration; it is sent")
        setattr(request, SENTRY_EVENT_ID, event.get("event_id"))
        return event

    def _may_log(self, record: logging.LogRecord) -> bool:
        if record.name.startswith("celery.worker"):
            return not self._handling()
        # One line per lost process, and one of ours per letter while the store is down: each kind
        # passes once a minute.
        if record.name != "multiprocessing" and not record.name.startswith("celery_dlq"):
            return True
        kind = record.name, str(record.msg)
        self._logged.purge()
        if kind in self._logged:
            return False
        self._logged.add(kind)
        return True


_installed: list[SentryDeduplicator] = []  # the newest; Sentry can forget none


def _processed_by_newest(event: Any, hint: Mapping[str, Any]) -> Any:
    return _installed[-1].processed(event, hint)


def install_masking(redaction: Redaction | None) -> None:
    """Mask every event of this process, and of the pool processes that it starts.

    As Sentry's ``before_send``, after that of the app: only there an event has all that
    integrations add to it, as JSON. Local variables are left out: they may hold any part of an
    argument.

    Source: https://docs.sentry.io/platforms/python/configuration/filtering/
    """
    found = sentry_client()
    if found is None or not redaction:
        return
    found.options["include_local_variables"] = False
    for name in ("before_send", "before_send_transaction"):
        theirs = found.options.get(name)
        if isinstance(theirs, _Masking):  # of an earlier worker in this process
            theirs = theirs.theirs
        found.options[name] = _Masking(theirs, redaction)


class _Masking:
    """Masks what the app's ``before_send`` returns."""

    def __init__(self, theirs: Callable[[Any, Any], Any] | None, redaction: Redaction) -> None:
        self.theirs = theirs
        self._redaction = redaction

    def __call__(self, event: Any, hint: Any) -> Any:
        if self.theirs is not None:
            event = self.theirs(event, hint)
        if event is None:
            return None
        texts = {name: event.pop(name) for name in _MASKED if name in event}
        try:
            request = current_task.request if current_task else None
            args, kwargs = getattr(request, "args", None), getattr(request, "kwargs", None)
            event.update(self._redaction.value(texts, args or (), kwargs))
        except Exception as exc:  # noqa: BLE001 - the event must not leak, nor be lost
            logger.warning("An event for Sentry is sent without texts: %s", type(exc).__name__)
        return event


def _carry_event_id(sender: Any = None, einfo: Any = None, **_: Any) -> None:
    """In the pool process: attach event id and trace to the failure for the main process."""
    event_id = getattr(getattr(sender, "request", None), SENTRY_EVENT_ID, None)
    found = sentry_client()
    if found is None or einfo is None:
        return
    sdk = sys.modules["sentry_sdk"]
    # The ids differ if Sentry sampled the event out, or the app's before_send dropped it.
    if event_id and sdk.last_event_id() == event_id:
        setattr(einfo, SENTRY_EVENT_ID, event_id)
    if found.get_integration("celery") is not None:  # else the trace is that of the process
        setattr(einfo, SENTRY_TRACE, sdk.get_traceparent())


def _mechanism(event: Mapping[str, Any]) -> str | None:
    values = (event.get("exception") or {}).get("values") or ()
    return (values[-1].get("mechanism") or {}).get("type") if values else None
