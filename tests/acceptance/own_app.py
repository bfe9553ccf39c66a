"""An app whose owner has his own Request, Task class, __call__ and signal handlers.

Configured Django-style, by a namespace of a settings object; the plugin comes first.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

import redis
from celery import Celery, Task, shared_task, signals
from celery.worker.request import Request

from celery_dlq import DeadLetters, dead_letter_policy

URL = os.environ.get("POISON_REDIS", "redis://127.0.0.1:6379")


def trace(name: str) -> None:
    with redis.Redis.from_url(f"{URL}/2") as client:
        client.rpush("own", name)


class OwnRequest(Request):
    def on_failure(self, *args: Any, **kwargs: Any) -> Any:
        trace(f"request.on_failure {self.id}")
        return super().on_failure(*args, **kwargs)


class OwnTask(Task):
    Request = OwnRequest

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trace("task.__call__")
        return super().__call__(*args, **kwargs)

    def on_failure(self, exc: Any, task_id: str, *_: Any) -> None:
        trace(f"task.on_failure {task_id}")


class OwnAppTask(Task):
    def before_start(self, task_id: str, *_: Any) -> None:
        trace(f"task_cls.before_start {task_id}")


class Settings:
    CELERY_BROKER_URL = f"{URL}/0"
    CELERY_RESULT_BACKEND = f"{URL}/1"
    CELERY_TASK_ACKS_LATE = True
    CELERY_TASK_REJECT_ON_WORKER_LOST = True
    CELERY_TASK_DEFAULT_QUEUE = "orders"
    CELERY_DLQ_QUEUES: ClassVar[dict[str, Any]] = {"orders": {"max_deliveries": 2}}
    DLQ_OF_SOMEBODY_ELSE = True


app = Celery("own", task_cls=OwnAppTask, set_as_current=True)
other = Celery("other", broker=f"{URL}/3", set_as_current=False)
dlq = DeadLetters(app)
DeadLetters(other)
app.config_from_object(Settings, namespace="CELERY")


@signals.task_failure.connect
def on_task_failure(task_id: str, **_: Any) -> None:
    trace(f"signal.task_failure {task_id}")


@signals.task_prerun.connect
def on_task_prerun(task_id: str, **_: Any) -> None:
    trace(f"signal.task_prerun {task_id}")


@app.task(base=OwnTask)
def own(key: str) -> None:
    raise LookupError(key)


@app.task
def plain(key: str) -> str:
    return key


@dead_letter_policy(max_deliveries=1)
@shared_task
def shared(key: str) -> None:
    os.kill(os.getpid(), 9)


@signals.celeryd_init.connect
def register_late(**_: Any) -> None:
    @app.task(name="late")
    def late(key: str) -> None:
        raise LookupError(f"late {key}")
