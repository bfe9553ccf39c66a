"""A worker's main process, as far as one request goes: real requests, a pool that does nothing."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from billiard.einfo import ExceptionInfo
from builders import a_message, a_request, an_app
from celery.worker.request import create_request_cls
from fresh import fresh_conf, fresh_store, shared

from celery_dlq import DeadLetters
from celery_dlq.errors import StoreUnavailable
from celery_dlq.worker.guard import Guard
from celery_dlq.worker.request import (
    ChildProcessRequest,
    DeadLetterRequest,
    guarded_request_class,
)
from celery_dlq.worker.wiring import guard_of
from celery_dlq.writing.lifecycle import DeliveryState


def an_error(exc: BaseException) -> ExceptionInfo:
    """As the pool reports it."""
    try:
        raise exc
    except type(exc):
        return ExceptionInfo()


class Pool:
    """Takes tasks, and never runs one."""

    is_green = False

    def apply_async(self, *_: Any, **__: Any) -> None:
        """Not even this one."""


class Worker:
    """A worker's main process, as far as one request goes."""

    def __init__(
        self,
        tmp_path: Any,
        pool: Any = None,
        *,
        gives_back: bool = False,
        kind: type[DeadLetterRequest] = ChildProcessRequest,
        **policy: Any,
    ) -> None:
        orders = policy or {"max_deliveries": 1}
        conf: dict[str, Any] = {**fresh_conf(), "dlq_queues": {"orders": orders}}
        self.app = app = an_app(**conf, dlq_spool_dir=str(tmp_path), task_default_queue="orders")
        self.dlq: DeadLetters = shared(DeadLetters(app))
        self.guard: Guard = guard_of(
            self.dlq.assembly, hostname="w", pid=1, flags_redelivery=True, gives_back=gives_back
        )
        self.id = str(uuid4())  # Celery remembers what is revoked
        self.said: list[str] = []
        self.later = self.guard.later

        @app.task(name="shop.charge", acks_late=True, shared=False)
        def charge() -> None:
            """Do nothing."""

        self.task = charge
        base = guarded_request_class(charge, self.guard, kind)
        self._kind = create_request_cls(base, charge, pool or Pool(), "w", None, app=app)
        self._store, self.down = self.dlq.assembly.backend.new_letters.dead_letter, False
        self.dlq.assembly.backend.new_letters.dead_letter = self._dead_letter  # type: ignore[method-assign]

    def _dead_letter(self, *args: Any) -> Any:
        if self.down:
            raise StoreUnavailable("away")
        self.said.append("letter")
        return self._store(*args)

    def receive(self, *, redelivered: bool = False, **headers: Any) -> Any:
        """A request for a message."""
        info = {"exchange": "", "routing_key": "orders", "redelivered": redelivered}
        message = a_message(delivery_info=info, headers=a_request(id=self.id, **headers))
        return self._kind(
            message,
            app=self.app,
            task=self.task,
            on_ack=lambda *_: self.said.append("ack"),
            on_reject=lambda _log, _errors, requeue: self.said.append(f"reject {requeue}"),
        )

    def start(self, *, redelivered: bool = False, **headers: Any) -> Any:
        """A request that a process, or this one, has accepted."""
        request = self.receive(redelivered=redelivered, **headers)
        request.execute_using_pool(Pool())
        given = DeliveryState.NEW if request.dlq_starts_here else DeliveryState.DISPATCHED
        assert request.dlq_state is given
        request.on_accepted(4711, 0.0)
        assert request.dlq_state is DeliveryState.RUNNING
        return request

    def counted(self, metric: Any) -> dict[tuple[str, ...], int]:
        """A metric's values, by its labels."""
        store = fresh_store().metrics
        self.guard.counts.flush(store.add_counts)
        counts = store.read_all().counts
        return {key[1:]: n for key, n in counts.items() if key[0] == metric.name}

    def observer(self, feature: str) -> Any:
        """What a feature does in the worker."""
        (found,) = (one for one in self.guard.observers if one.name == feature)
        return found
