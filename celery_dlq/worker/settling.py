"""How a message leaves this worker: first its letter is stored, then the message is settled.

The lower half of the guard's mix-in for Celery's requests; `celery_dlq.worker.request` has the
hooks that call it. A message that died goes this way, and no other:

1. The guard decides and writes the letter (`decide`). An error of ours lets the message wait.
2. `STORED`: the message is settled, that is, acknowledged; its task fails, if it has no result yet.
3. `WAITING_FOR_STORE`: nothing is settled. Once the store answers, the writer calls
   `dlq_wait_is_over`, and 2 follows.
4. `DONE`: it is no death. Celery, or who asked, settles the message.

A message that does not die goes back to its broker: it is put off (it waits here for another
start), given back (it goes to the head of its queue), or disowned (another worker has it).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from billiard.einfo import ExceptionInfo
from celery import signals
from celery.app.task import Context
from celery.exceptions import MaxRetriesExceededError, TaskRevokedError
from celery.worker.state import task_ready

from celery_dlq.errors import MaxDeliveriesExceeded
from celery_dlq.letters.printable import get_logger
from celery_dlq.letters.record import Outcome, Reason
from celery_dlq.policies.decisions import Die, End
from celery_dlq.worker.dispatched import drop_failed
from celery_dlq.worker.guard import Guard
from celery_dlq.writing.failure import Failure, dropped_failure
from celery_dlq.writing.lifecycle import NEXT, DeliveryState, InFlight, is_held, leases_of

if TYPE_CHECKING:
    from celery.worker.request import Request as _Base  # has no types
else:
    _Base = object

logger = get_logger("celery_dlq.worker")

_S = DeliveryState


class SettlingRequest(_Base):
    """The part of a guarded request that settles its message; it overrides nothing of Celery."""

    dlq_guard: Guard  # The worker's guard
    dlq_state = DeliveryState.NEW
    dlq_in_flight: InFlight | None = None  # The guarded message, from its start on

    _dlq_settle_later: Callable[[], Any] | None = None  # called once the wait for the store is over

    def dlq_move(self, state: DeliveryState) -> None:
        """Change the state; an illegal transition is logged and counted, and changes nothing.

        See `celery_dlq.writing.lifecycle`.
        """
        before = self.dlq_state
        if state in NEXT[before]:
            self.dlq_state = state
            return
        self.dlq_guard.count_internal_error("transition")
        logger.error(
            "Task %s stays %s, it cannot become %s: a bug in celery_dlq, please report it",
            self.id,
            before.value,
            state.value,
            stack_info=True,
        )

    # -- a death --------------------------------------------------------------------

    def _dlq_store_then_settle(
        self,
        decide: Callable[[], DeliveryState],
        settle: Callable[[], Any],
        leave: Callable[[], Any] | None = None,
    ) -> bool:
        """Let the guard decide and store the letter; then settle the message, now or later.

        False if this is no death: the caller settles the message, as Celery does. An error of ours
        lets it wait; if it is found to be no death later, ``leave`` settles it, or it goes back.
        """
        try:
            state = decide()
        except Exception as exc:  # noqa: BLE001 - an error of ours
            again = partial(self._dlq_decide_again, decide, leave)
            state = self.dlq_guard.undecided(self, again, exc)
        if state is _S.DONE:
            self.dlq_move(state)
            return False
        if state is _S.STORED:
            self.dlq_move(state)
            settle()
            return True
        self._dlq_settle_later = settle
        # In a thread pool, the store may have answered in the meantime.
        if self.dlq_state in (_S.STORED, _S.DONE):
            self._dlq_settle_after_wait()
        else:
            self.dlq_move(state)
        return True

    def _dlq_decide_again(
        self, decide: Callable[[], DeliveryState], leave: Callable[[], Any] | None
    ) -> None:
        """Decide a message that waits because of an error of ours."""
        state = decide()
        if state is _S.DONE and leave is not None:
            self.dlq_move(state)
            self.__dict__.pop("_dlq_settle_later", None)
            leave()
        elif state is not _S.WAITING_FOR_STORE:
            self.dlq_wait_is_over(state)

    def dlq_wait_is_over(self, state: DeliveryState) -> None:
        """Settle the message: its letter is stored, or cannot be stored."""
        self.dlq_move(state)
        self._dlq_settle_after_wait()

    def _dlq_settle_after_wait(self) -> None:
        settle = self.__dict__.pop("_dlq_settle_later", None)  # once, whichever thread comes first
        if settle is None:
            return
        if self.dlq_state is _S.STORED:
            settle()
        else:  # there is no letter: an error of ours acknowledges nothing
            task_ready(self)
            if is_held(self.message):
                super().reject(requeue=True)

    def _dlq_settle(self, error: Exception | None = None) -> None:
        """Acknowledge a message that ends here; its task fails, if there is an error.

        An error of the broker lets it come again.
        """
        task_ready(self)
        try:
            if error is not None:
                self._dlq_mark_as_failed(error)
        except Exception:
            logger.exception("Task %s was dead-lettered, but its result is not stored", self.id)
        try:
            super().acknowledge()
        except Exception:
            logger.exception("Task %s is not executed again, but could not be ended", self.id)

    def _dlq_mark_as_failed(self, exc: Exception) -> None:
        """End the task's result, so that callers stop waiting for it.

        Errbacks run, and a chord or chain fails as usual in Celery.
        """
        self.task.backend.mark_as_failure(
            self.id,
            exc,
            request=self._dlq_context(),
            store_result=self.store_errors,
        )
        try:
            raise exc
        except type(exc):
            info = ExceptionInfo()
        signals.task_failure.send(
            sender=self.task,
            task_id=self.id,
            exception=exc,
            args=self.args,
            kwargs=self.kwargs,
            traceback=None,
            einfo=info,
        )
        self.send_event("task-failed", exception=repr(exc), traceback=info.traceback)

    def _dlq_context(self) -> Context:
        """What the result backend reads: errbacks, chord and chain stand in the body."""
        body = self.body if self.content_type is None else self.message.payload  # decoded already
        return Context({**self.request_dict, **(body[2] or {})})

    def _dlq_dead_letter(self, verdict: Die, failure: Failure | None = None) -> None:
        """Dead-letter a message that does not run, or was terminated; its task fails."""
        decide = partial(self.dlq_guard.dead_letter, self, verdict, failure)
        self._dlq_store_then_settle(decide, lambda: self._dlq_settle(self._dlq_refusal(verdict)))

    def _dlq_refusal(self, verdict: Die) -> Exception:
        """The result of a message that is kept from running."""
        where = self.dlq_guard.dead_letter_queue_of(self)
        return refusal_error(f"{self.name}[{self.id}]", verdict, where)

    def _dlq_refuse(self, exc: Exception, leave: Callable[[], Any] | None = None) -> bool:
        """Dead-letter a message that Celery cannot read and that would stop the worker."""
        failure = dropped_failure(exc, "not a Celery task message")

        def decide() -> DeliveryState:
            return self.dlq_guard.decide_dropped(
                self.message, self.request_dict, Reason.INVALID_MESSAGE, failure, self
            )

        return self._dlq_store_then_settle(decide, self._dlq_settle, leave)

    def _dlq_pool_refused(self, pool: Any, exc: Exception) -> bool:
        """End a delivery that the pool could not take; the message may be tried again."""
        drop_failed(pool, self.id)
        in_flight = self.dlq_in_flight
        if in_flight is None or in_flight.resolved.policy is None:
            return False
        logger.error("Task %s cannot be given to the pool: %r", self.id, exc)
        text = f"could not be given to the pool: {exc}"
        end = End(outcome=Outcome.FAILED, exception_names=(type(exc).__name__,), text=text)
        failure = replace(dropped_failure(exc, text), end=end)
        again = in_flight.resolved.policy.max_deliveries is not None
        decide = partial(self.dlq_guard.decide_end, self, failure, requeued=again)
        leave = partial(super().reject, requeue=again)
        self.dlq_move(_S.ENDING)
        if not self._dlq_store_then_settle(decide, partial(self._dlq_settle, exc), leave):
            task_ready(self)
            leave()
        return True

    # -- whose the message is, and how it goes back ------------------------------------

    def _dlq_is_ours(self) -> bool:
        """False if another worker owns the message: this one stood still for too long."""
        leases, tag = leases_of(self.message), self.message.delivery_tag
        if is_held(self.message):
            if leases is not None and not leases.is_known(tag):
                self.delivery_info["redelivered"] = True  # so that its count is awaited
            return True
        logger.info("Task %s does not start here: its message went back to its queue", self.id)
        if leases is not None:
            self.dlq_move(_S.DONE)
            self._dlq_settle()  # frees its place in the prefetch window, and nothing else
        else:
            self._dlq_disown()
        return False

    def _dlq_take_to_work(self) -> bool:
        """Take the message to work; False if a lost connection gives it back at this moment."""
        leases = leases_of(self.message)
        if leases is not None and not leases.begin(self.message.delivery_tag):
            self._dlq_disown()
            return False
        self.dlq_guard.at_work.add(self)
        return True

    def _dlq_has_another_owner(self) -> bool:
        """True if the message went to another worker while its task ran here."""
        leased = leases_of(self.message) is not None and not self.acknowledged
        return leased and not is_held(self.message)

    def dlq_put_off(self) -> bool:
        """Let the message wait for another start; False if its lost connection gives it back."""
        self.dlq_guard.at_work.over(self)
        leases = leases_of(self.message)
        if leases is None or leases.put_off(self.message.delivery_tag):
            return True
        self._dlq_disown()
        return False

    def dlq_give_back(self) -> None:
        """Return a message to the head of its queue, if the broker can; it waited, or cannot."""
        put_first = getattr(getattr(self.message.channel, "qos", None), "put_first", None)
        if put_first is not None and put_first(self.message.delivery_tag):
            self.acknowledged = True
        else:
            super().reject(requeue=True)
        self.dlq_move(_S.DONE)  # last: what fails is tried again
        task_ready(self)

    def _dlq_disown(self) -> None:
        """Do nothing more with a message that goes back to its queue; it is not this worker's."""
        self.dlq_move(_S.DONE)
        task_ready(self)
        self.acknowledged = True

    def _dlq_give_back_or_lapse(self, *, at_once: bool) -> None:
        """Give back a message that nobody settles any more: at once, or when its lease ends."""
        task_ready(self)
        if is_held(self.message):
            leases = leases_of(self.message)
            if at_once or leases is None:
                super().reject(requeue=True)
            else:
                leases.let_lapse(self.message.delivery_tag)
                super().acknowledge()  # frees its place in the prefetch window, and nothing else
        self.acknowledged = True


_RESULTS: dict[Reason, type[Exception]] = {
    Reason.MAX_RETRIES_EXCEEDED: MaxRetriesExceededError,
    Reason.OPERATOR: TaskRevokedError,
}


def refusal_error(task: str, verdict: Die, dead_letter_queue: str) -> Exception:
    """Make the result of a message that a limit or an operator keeps from running."""
    kind = _RESULTS.get(verdict.reason, MaxDeliveriesExceeded)
    where = f"is in {dead_letter_queue}" if verdict.kept else "ended"
    return kind(f"{task} {where}: {verdict.description}")
