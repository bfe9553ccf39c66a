"""Tasks that a worker gets to know after its start, with a task class of their own."""

from __future__ import annotations

import os
import signal

from celery import Task
from poison_app import app, trace


class Late(Task):
    """A task of Celery's own base class, with Celery's own Request."""


@app.task(base=Late, name="late.killed")
def killed(key: str) -> None:
    trace("ran", key)
    os.kill(os.getpid(), signal.SIGKILL)
