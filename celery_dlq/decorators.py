"""What the author of a task writes: ``@dead_letter_policy`` and ``RejectToDLQ``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from celery import _state
from celery.exceptions import Reject
from celery.local import PromiseProxy, Proxy

from celery_dlq.policies.policy import Policy

T = TypeVar("T")

_ATTRIBUTE = "__dead_letter_policy__"

# Tasks that Celery has not made yet (both of its lazy forms), with their policies.
# They are looked up by task name when a worker or a publisher needs them; making
# them here would configure the app in the middle of an import.
_LAZY: list[tuple[Proxy, Policy]] = []

SAYS_DELAY: set[Policy] = set()
"""Policies of decorators that publishers have to ask; mostly none."""


class RejectToDLQ(Reject):  # type: ignore[misc]
    """Raise it in a task to send its message straight to the dead-letter queue.

    The letter gets reason ``rejected`` and your description. It works for every
    task of an app that has `DeadLetters`, guarded or not, with early and with
    late acknowledgement.

    Example:
        ``raise RejectToDLQ("no such order")``

    Args:
        description: Why, for the operator. Kept on the letter.
        requeue: Only there because Celery unpickles a `Reject` with two arguments; the
            message is never requeued.
    """

    def __init__(self, description: str = "", requeue: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - pickling calls it so
        super().__init__(str(description), requeue=False)

    @property
    def description(self) -> str:
        """Why the message was rejected."""
        return str(self.reason)

    def __str__(self) -> str:
        return self.description


def dead_letter_policy(**keys: Any) -> Callable[[T], T]:
    """Guard one task. Beats the policies of its queue, field by field.

    Works above or below ``@app.task`` and ``@shared_task``, and on a task class.

    Args:
        **keys: The fields of `celery_dlq.policy.Policy`, e.g. ``max_deliveries=3``.

    Returns:
        A decorator that gives back what it got.

    Raises:
        SettingsError: A key is unknown or a value is not usable; raised right here, when
            the module is imported, not at the first message.
    """
    policy = Policy.parse(keys, "dead_letter_policy")
    if policy.says_delay:
        SAYS_DELAY.add(policy)

    def decorate(target: T) -> T:
        if isinstance(target, Proxy):
            _LAZY.append((target, policy))
        else:
            setattr(target, _ATTRIBUTE, policy)
        return target

    return decorate


def policy_of(task: Any) -> Policy | None:
    """The policy that a task's decorator set, if any.

    Args:
        task: A registered Celery task.
    """
    for place in (task, getattr(task, "run", None), getattr(task, "__wrapped__", None)):
        found = getattr(place, _ATTRIBUTE, None)
        if isinstance(found, Policy):
            return found
    for proxy, policy in _LAZY:
        if _is_of(proxy, task):
            setattr(task, _ATTRIBUTE, policy)
            return policy
    return None


def _is_of(proxy: Proxy, task: Any) -> bool:
    """Whether a lazy task is this task; a shared one is that of every app."""
    try:
        # Not isinstance(): that would already look the task up, in the current app.
        if issubclass(type(proxy), PromiseProxy):
            return proxy._get_current_object() is task  # noqa: SLF001 - the only way to look
        with _current(task.app):
            return bool(proxy.name == task.name)
    except KeyError:  # Celery's NotRegistered: a shared task that this app has not got
        return False


@contextmanager
def _current(app: Any) -> Iterator[None]:
    """Let a shared task's proxy look into this app, whichever the current one is.

    The current one may not know the task at all, e.g. because it was closed.
    """
    before = _state._tls.current_app  # noqa: SLF001 - `set_current` could not be taken back
    _state._tls.current_app = app  # noqa: SLF001
    try:
        yield
    finally:
        _state._tls.current_app = before  # noqa: SLF001
