"""Imported by every Python of a run with the plugin: `DeadLetters` on every Celery app.

In the process of pytest, and in each worker that a test starts as a command. Does nothing
unless the environment has the URL of the Redis where the letters go.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

STORE = os.environ.get("CELERY_DLQ_EVERYWHERE")
SETTINGS = {
    "dlq_queues": {"*": {"max_deliveries": 20}},
    "dlq_url": STORE,
}
"""Not set on the apps, because Celery's tests look at their settings."""
made: list[str] = []
"""The names of the apps that got theirs in this process."""


class AppsFound(MetaPathFinder):
    """Waits for ``celery.app.base``: it must not be imported before a worker's gevent."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """The module's own loader, with our part after it."""
        if fullname != "celery.app.base":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def executing(module: ModuleType) -> None:
            execute(module)
            everywhere(module)

        spec.loader.exec_module = executing  # type: ignore[method-assign]
        return spec


def everywhere(base: Any) -> None:
    """Give every app its `DeadLetters` where Celery registers it, the last thing it does."""
    register = base._register_app

    def registering(app: Any) -> None:
        register(app)
        made.append(dead_letters()(app).app.main)

    base._register_app = registering


@cache
def dead_letters() -> Any:
    """`DeadLetters`, whose settings are those of this run."""
    from celery_dlq import DeadLetters
    from celery_dlq.config import Settings

    read = Settings.from_conf

    def from_conf(conf: Any) -> Settings:
        read(conf)  # it does something to the app's configuration, or finds a fault
        return read(SETTINGS)

    Settings.from_conf = from_conf  # type: ignore[method-assign]
    return DeadLetters


if STORE:
    sys.meta_path.insert(0, AppsFound())
