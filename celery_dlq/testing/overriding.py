"""Changing an object for a while, so that nothing of the change stays."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from celery.local import Proxy


def override(stack: ExitStack, target: Any, name: str, value: Any) -> None:
    """Set an attribute until the stack is closed; then it is as it was, also if it was not there.

    Args:
        stack: Undoes it.
        target: An object or a class.
        name: The attribute.
        value: Its value for now.
    """
    own = vars(target)
    if name in own:
        stack.callback(setattr, target, name, own[name])
    else:
        stack.callback(delattr, target, name)
    setattr(target, name, value)


def override_setting(stack: ExitStack, conf: Any, name: str, value: Any) -> None:
    """Set a Celery setting until the stack is closed; then it is as it was, also if it was unset.

    Args:
        stack: Undoes it.
        conf: ``app.conf``, configured.
        name: The setting.
        value: Its value for now.
    """
    changes = conf.changes
    if name in changes:
        stack.callback(changes.__setitem__, name, changes[name])
    else:
        stack.callback(changes.pop, name, None)
    changes[name] = value


def itself(target: Any) -> Any:
    """The object behind one of Celery's proxies, such as ``celery.current_app``."""
    return target._get_current_object() if isinstance(target, Proxy) else target  # noqa: SLF001 - its only way
