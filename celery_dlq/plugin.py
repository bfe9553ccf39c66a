"""``DeadLetters(app)``: installs the plugin; `celery_dlq.operating` has what operators call.

Each of their methods stands here by its name. The first look-up loads it, also of the class, as
`help()` does.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from celery import Celery

from celery_dlq.assembly import Assembly
from celery_dlq.config import Settings
from celery_dlq.policies.checks import expected
from celery_dlq.registry import features
from celery_dlq.store.worker_records import Clock

if TYPE_CHECKING:
    from celery_dlq.letters.redaction import Redaction
    from celery_dlq.operating import OperatorMethods as _Typed
else:
    _Typed = object

ATTRIBUTE = "_celery_dlq"
"""Attribute of an app that holds its first `DeadLetters`."""


def utc_now() -> datetime:
    """The present, aware UTC."""
    return datetime.now(timezone.utc)


def app_itself(app: Any) -> Any:
    """The app behind a proxy such as ``celery.current_app``: what its methods are bound to."""
    return getattr(getattr(app, "set_current", None), "__self__", app)


class _Later:
    """Stands for a method of operators until it is first looked up: no worker loads them."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: DeadLetters | None, owner: type) -> Any:
        from celery_dlq.operating import OperatorMethods

        found = getattr(OperatorMethods, self._name)
        setattr(DeadLetters, self._name, found)
        return found.__get__(instance, owner)


class DeadLetters(_Typed):
    """Installs the plugin on a Celery app; also the operator's API.

    Making it reads neither the configuration nor Redis, so call it before or after you
    configure the app. Settings are checked when a worker starts, when a message is
    published, and at the first operation.

    Arguments that several methods share:

    - ``dead_letter_queue``: the queue's name, e.g. ``"orders-DLQ"``.
    - ``where``: the letters to work on, as a `LetterFilter`; or pass its fields as keywords,
      e.g. ``fingerprint="…"``. Without either, all letters.
    - ``limit``: at most this many letters; ``None`` for all.
    - ``progress``: called with the number of letters in every finished batch.
    - ``scanned``: called with the number of entries in every page read.

    Args:
        app: The Celery app. A second `DeadLetters` for one app shares the first one's
            installation, with its clock, its events and its connections.
        clock: Returns the present, aware UTC; only tests pass one.

    Raises:
        SettingsError: ``app`` is no Celery app.

    Example:
        ``dlq = DeadLetters(app)``
    """

    def __init__(self, app: Any, *, clock: Clock = utc_now) -> None:
        # The app itself: `celery.current_app` may be another app in another thread.
        self.app = app = app_itself(app)
        if not isinstance(app, Celery):
            raise expected("the argument of DeadLetters(app)", "a Celery app", app)
        first: DeadLetters | None = getattr(app, ATTRIBUTE, None)
        self.assembly = Assembly(app, clock) if first is None else first.assembly
        self.events = self.assembly.events
        if first is None:
            setattr(app, ATTRIBUTE, self)
            self.assembly.install()

    @classmethod
    def of(cls, app: Any) -> DeadLetters:
        """Return the `DeadLetters` of an app; make it if the app has none."""
        found = getattr(app, ATTRIBUTE, None)
        return found if isinstance(found, cls) else cls(app)

    @property
    def settings(self) -> Settings:
        """The checked ``dlq_*`` settings.

        Raises:
            SettingsError: A setting is unknown or has an unusable value.
        """
        return self.assembly.settings

    @property
    def redaction(self) -> Redaction:
        """Masks what ``dlq_redact`` names; for whatever shows letters to people.

        Raises:
            SettingsError: A setting is unknown or has an unusable value.
        """
        return self.assembly.redaction

    def validate(self) -> None:
        """Check all settings and the policies of all registered tasks; for your CI.

        Raises:
            SettingsError: A setting or policy is wrong; the message names it.
        """
        self.assembly.validate()

    def close(self) -> None:
        """Close all connections; the next operation opens new ones."""
        self.assembly.close()


_OPERATIONS = """
store registry job_store queues letters entries page count tail get entry groups emptied group
arguments incidents redrive edit dry_run discard purge restore restore_all plan_restore discarded
trim plan start edited_arguments jobs job cancel resume resume_in_background changes policies
overrides policies_after policy_effect check_override override_policy lift_policy export
forget_export files memory warnings asgi runner
"""  # of the core; a test compares them
for _name in (*_OPERATIONS.split(), *(name for one in features() for name in one.operations)):
    setattr(DeadLetters, _name, _Later(_name))
