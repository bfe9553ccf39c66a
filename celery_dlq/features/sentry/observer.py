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

import logging
import re
import sys
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4, uuid5

from celery import current_task
from celery import signals as celery_signals
from celery.utils.collections import LimitedSet
from kombu.utils.functional import LRUCache

from celery_dlq.errors import StoreUnavailable
from celery_dlq.events import Action, Change, DeadLettered, Event
from celery_dlq.letters.fingerprint import Raised, raised_exceptions
from celery_dlq.letters.printable import get_logger
from celery_dlq.letters.record import DeadLetter, TextEnum, iso
from celery_dlq.policies.checks import true_or_false
from celery_dlq.store.new_letters import release_text
from celery_dlq.store.part import Part
from celery_dlq.worker.observer import Observer, WorkerParts
from celery_dlq.writing.failure import SENTRY_EVENT_ID, SENTRY_TRACE
from celery_dlq.writing.lifecycle import HANDLING

if TYPE_CHECKING:
    from celery_dlq.letters.redaction import Redaction

QUIET_SECONDS = 24 * 3600.0
"""A group without letters for this long is new again when it comes back."""

GAP_SECONDS = 300.0
"""Minimum time between two reports that a group came back."""

BURST = 20
"""Maximum number of reports of one dead-letter queue in a burst."""

REFILL_SECONDS = 180.0
"""Time until one more report is allowed."""

MOST_IDS = 10
"""Maximum number of letter ids in a report."""


class ReportCause(TextEnum):
    """Reason for reporting a letter; ``USED_UP`` if what redrove it gives it up."""

    NEW = "new"
    CAME_BACK = "came_back"
    GREW = "grew"
    USED_UP = "used_up"
    REGRESSED = "regressed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Decision to report a letter."""

    why: ReportCause  # The reason
    number: int  # The letter's number in its group, counted since the group was new or came back
    letter_ids: tuple[str, ...]  # Ids of the group's newest letters, this one first


_WHY = (
    None,
    ReportCause.NEW,
    ReportCause.CAME_BACK,
    ReportCause.GREW,
    ReportCause.REGRESSED,
)  # as `report.lua` replies


class Reports(Part):
    """Decides which letters are reported."""

    lua = "celery_dlq.features.sentry"

    gap_seconds = GAP_SECONDS

    def report_of(self, letter: DeadLetter) -> Report | None:
        """Decide about a letter that is about to be stored; repeated calls give the same result."""
        self._connection.raise_if_away()
        queue, fingerprint = letter.dead_letter_queue, letter.fingerprint
        number_of, number, ids = self._run_script(
            "report",
            letter.id,
            fingerprint,
            *(int(seconds * 1000) for seconds in (QUIET_SECONDS, self.gap_seconds)),
            BURST,
            int(REFILL_SECONDS * 1000),
            MOST_IDS,
            letter.redrives,
            release_text(letter.release),
            queue=queue,
            report=self._keys.report(queue, fingerprint),
        )
        why = _WHY[number_of]
        if why is None:
            return None
        return Report(why=why, number=number, letter_ids=tuple(ids.decode().split()))


logger = get_logger("celery_dlq.sentry")

setting = true_or_false
"""The check of ``dlq_sentry``."""

_TRACE_HEADER = re.compile(r"([0-9a-f]{32})-([0-9a-f]{16})(-[01])?")
_EVENT_NAMESPACE = UUID("f0a4f0a6-0a33-5d0e-8a35-9f6f8c1d8d57")
_MAX_DUE_REPORTS = 1_000
_MAX_BODY_BYTES = 8_192
_MAX_TEMPLATES, _SECONDS_PER_LINE = 200, 60
_MASKED = ("exception", "threads", "logentry", "message", "extra", "contexts", "breadcrumbs")

Keeps = Callable[[Any, "dict[str, Any]", Any], bool]


def sentry_client() -> Any:
    """Sentry's client, if the app has imported ``sentry_sdk`` and set a DSN; else ``None``."""
    sdk = sys.modules.get("sentry_sdk")
    if sdk is None or not hasattr(sdk, "get_client"):  # sentry_sdk 1 has no get_client
        return None
    found = sdk.get_client()
    return found if found.is_active() and found.transport is not None else None


def event_id_of(letter: DeadLetter) -> str:
    """The id of a letter's event, derived from the letter's: a second report is the same event."""
    return uuid5(_EVENT_NAMESPACE, letter.id).hex


def observer(parts: WorkerParts) -> Observer | None:
    """The observer of a worker."""
    install_masking(parts.redaction)
    return SentryObserver(parts) if parts.settings.of("sentry") else None


class SentryObserver(Observer):
    """Marks letters that will be reported, and reports them once they are stored.

    Drops the events of Sentry's integrations that would be the same.
    """

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self.due: MutableMapping[str, tuple[Report, str]] = LRUCache(_MAX_DUE_REPORTS)  # type: ignore[no-untyped-call]

    def on_guard_made(self, keeps: Keeps) -> None:
        """Drop events before the pool starts, so that its processes inherit that."""
        if sentry_client() is not None:
            SentryDeduplicator(keeps, HANDLING.get).install()

    def before_store(self, letter: DeadLetter) -> DeadLetter:
        """The letter with the id of its event, if it will be reported."""
        trace = letter.extra.get(SENTRY_TRACE, b"").decode()
        if trace:
            others = {name: value for name, value in letter.extra.items() if name != SENTRY_TRACE}
            letter = replace(letter, extra=others)
        if sentry_client() is None:
            return letter
        # Here, because the app may initialise Sentry after the guard is made.
        self._parts.events.subscribe(self.report, lambda kind: kind is DeadLettered)
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
                sent["contexts"].update(_trace_of(event.letter, due[1]))
                send_event(sent)


def send_event(event: dict[str, Any]) -> None:
    """Send an event without breadcrumbs: those of the main process belong to all tasks."""
    sdk = sys.modules["sentry_sdk"]
    with sdk.isolation_scope() as scope:
        scope.clear_breadcrumbs()
        sdk.capture_event(event)


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


def event_of(letter: DeadLetter, report: Report, *, with_values: bool) -> dict[str, Any]:
    """The Sentry event of a letter and its group."""
    tags = {
        "task": letter.task_name,
        "queue": letter.source_queue,
        "dead_letter_queue": letter.dead_letter_queue,
        "reason": letter.reason,
        "deliveries": letter.deliveries,
        "redrives": letter.redrives,
        "group": report.why,
        "celery_task_id": letter.task_id,
        "release": letter.release,
        "worker": letter.worker_hostname,
    }
    context = {
        "letter_id": letter.id,
        "letter_ids": list(report.letter_ids),
        "letters_in_group": report.number,
        "description": letter.description,
        "retries": letter.retries,
        "dead_lettered_at": iso(letter.dead_lettered_at),
        "first_delivered_at": iso(letter.first_delivered_at),
        "show": f"celery dlq show {letter.id}",
        "redrive": f"celery dlq redrive {letter.dead_letter_queue} "
        f"--fingerprint {letter.fingerprint}",
    }
    event = _event_of(letter.dead_lettered_at, letter.task_name, tags, {"dead_letter": context})
    event |= {"event_id": letter.sentry_event_id, "fingerprint": [letter.fingerprint]}
    if letter.release is not None:
        event["release"] = letter.release
    if letter.exception_type is not None:
        event["exception"] = {"values": _exceptions(letter)}
    else:
        text = f"{letter.task_name} dead-lettered: {letter.reason}: {letter.description}"
        event["logentry"] = {"message": text, "formatted": text}
    if with_values:  # as far as they are readable without unpickling
        event["extra"] = {
            "args": letter.args_json or letter.argsrepr,
            "kwargs": letter.kwargs_json or letter.kwargsrepr,
            "body": letter.body[:_MAX_BODY_BYTES].decode("utf-8", "backslashreplace"),
        }
    return event


def event_of_opening(change: Change) -> dict[str, Any]:
    """The Sentry event of a circuit breaker that opened."""
    detail = change.detail
    task, queue = str(detail.get("task")), str(detail.get("queue"))
    text = f"Circuit breaker of {task} opened: {detail.get('reason')}"
    tags = {"task": task, "queue": queue, "hold": change.target}
    return {
        **_event_of(change.at, task, tags, {"circuit_breaker": dict(detail.get("circuit") or {})}),
        "fingerprint": ["celery_dlq.circuit_opened", task, queue],
        "logentry": {"message": text, "formatted": text},
    }


def _event_of(
    at: datetime, task: str, tags: Mapping[str, object], contexts: dict[str, Any]
) -> dict[str, Any]:
    return {
        "timestamp": at,
        "level": "error",
        "platform": "python",
        "logger": "celery_dlq",
        "transaction": task,
        "tags": {name: str(value) for name, value in tags.items() if value is not None},
        "contexts": contexts,
    }


def _trace_of(letter: DeadLetter, trace: str) -> dict[str, dict[str, str]]:
    """The context ``trace``: that of the task, or a new span in that of its message."""
    if found := _TRACE_HEADER.match(trace):
        return {"trace": {"trace_id": found[1], "span_id": found[2]}}
    headers = letter.decoded("headers")
    inner = headers.get("headers")  # where Sentry's integration reads it
    header = (inner if isinstance(inner, Mapping) else headers).get("sentry-trace")
    if found := _TRACE_HEADER.match(str(header)):
        span = {"span_id": uuid4().hex[:16], "parent_span_id": found[2]}
        return {"trace": {"trace_id": found[1], **span}}
    return {}


def _exceptions(letter: DeadLetter) -> list[dict[str, Any]]:
    """The chain of exceptions; the last one has type and text from the letter."""
    chain = raised_exceptions(letter.traceback or "") or [Raised(name="", message="", frames=())]
    last = replace(
        chain[-1], name=letter.exception_type or "", message=letter.exception_message or ""
    )
    return [_exception(one) for one in (*chain[:-1], last)]


def _exception(one: Raised) -> dict[str, Any]:
    module, _, name = one.name.rpartition(".")
    value: dict[str, Any] = {
        "type": name or "Exception",
        "module": module or None,
        "value": one.message,
        "mechanism": {"type": "celery_dlq", "handled": False},
    }
    if one.frames:
        value["stacktrace"] = {
            "frames": [
                {
                    "filename": frame.file,
                    "abs_path": frame.file,
                    "function": frame.function,
                    "lineno": frame.line,
                    "context_line": frame.code,
                    "in_app": frame.own,
                }
                for frame in one.frames
            ]
        }
    return value


def sends_values(options: Mapping[str, Any]) -> bool:
    """True if the app's ``sentry_sdk.init`` allows personal data."""
    collection = options.get("data_collection") or {}
    newer = collection.get("provided_by_user")
    return bool(collection.get("queues") if newer else options.get("send_default_pii"))


def _mechanism(event: Mapping[str, Any]) -> str | None:
    values = (event.get("exception") or {}).get("values") or ()
    return (values[-1].get("mechanism") or {}).get("type") if values else None
