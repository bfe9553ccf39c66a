"""The public names for authors of tasks: ``@dead_letter_policy`` and ``RejectToDLQ``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from celery import current_app
from celery.exceptions import Reject
from celery.local import PromiseProxy, Proxy

from celery_dlq.errors import SettingsError
from celery_dlq.policies.checks import shown
from celery_dlq.policies.policy import POLICY_ATTRIBUTE, SHARED_POLICIES, Policy

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from celery_dlq.policies.keys import PolicyKeys

T = TypeVar("T")


class RejectToDLQ(Reject):  # type: ignore[misc]
    """Raise it in a task to send its message straight to the dead-letter queue.

    The letter gets reason ``rejected`` and your description. It works for every
    task of an app that has `DeadLetters`, guarded or not, with early and with
    late acknowledgement.

    Example:
        ``raise RejectToDLQ("no such order")``

    Args:
        description: Why, for the operator; stored on the letter.
        requeue: Ignored: the message is never requeued. Celery unpickles a `Reject` with two
            arguments.
    """

    def __init__(self, description: str = "", requeue: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - pickling calls it so
        super().__init__(str(description), requeue=False)

    @property
    def description(self) -> str:
        """The reason that the task gave."""
        return str(self.reason)

    def __str__(self) -> str:
        return self.description


def dead_letter_policy(*given: NoReturn, **keys: Unpack[PolicyKeys]) -> Callable[[T], T]:
    """Guard one task. Its fields beat those of the queue's policy.

    Works above or below ``@app.task`` and ``@shared_task``, and on a task class.

    Args:
        *given: Nothing: keys are written with their names, and brackets are always needed.
        **keys: The fields of `celery_dlq.policies.policy.Policy`, e.g. ``max_deliveries=3``.

    Returns:
        A decorator that returns the task or function unchanged.

    Raises:
        SettingsError: A key is unknown or a value is not usable; raised when the module is
            imported, not at the first message.
    """
    if given:
        raise SettingsError(
            f"expected keys of a policy with their names, got {shown(given[0])}; "
            f"write @dead_letter_policy(max_deliveries=3)"
        )
    policy = Policy.parse(keys, "dead_letter_policy")

    def decorate(target: T) -> T:
        # Tasks that Celery has not made yet (both of its lazy forms) get it once they are made;
        # making them here would configure the app in the middle of an import. That is what
        # isinstance() would do: it asks the task for its class.
        if issubclass(type(target), PromiseProxy):
            target.__then__(setattr, target, POLICY_ATTRIBUTE, policy)  # type: ignore[attr-defined]
        elif issubclass(type(target), Proxy):
            SHARED_POLICIES.append(partial(_mark_shared, target, policy))
        else:
            setattr(target, POLICY_ATTRIBUTE, policy)
        return target

    return decorate


def _mark_shared(proxy: Proxy, policy: Policy, app: Any) -> None:
    """Give the policy to a shared task of an app that has made its tasks.

    The task's proxy has no other way to be asked about one app: it looks into the current one,
    which may be another app, or one that was closed and does not know the task.
    """
    restore = current_app.set_current  # of the app that is current now
    app.set_current()
    try:
        with suppress(KeyError):  # NotRegistered: an app without this task
            setattr(proxy, POLICY_ATTRIBUTE, policy)
    finally:
        restore()
