"""What pool processes learn from the main process while they live."""

from __future__ import annotations

import os
from collections.abc import Callable

from builders import an_app

from celery_dlq.policies.policy import Policy
from celery_dlq.policies.table import PolicyTable
from celery_dlq.worker.leaflet import Leaflet
from celery_dlq.worker.policy_cache import PolicyCache


class Child:
    """A forked process that answers a question whenever it is asked."""

    def __init__(self, answer: Callable[[], str]) -> None:
        self._ask, asked = os.pipe()[::-1]
        self._answers, told = os.pipe()
        self._pid = os.fork()
        if not self._pid:  # pragma: no cover - another process
            while os.read(asked, 1) == b"?":
                os.write(told, answer().encode())
            os._exit(0)
        os.close(asked)
        os.close(told)

    def __call__(self) -> str:
        """Ask."""
        os.write(self._ask, b"?")
        return os.read(self._answers, 100).decode()

    def end(self) -> None:
        """Let it go."""
        os.write(self._ask, b".")
        os.waitpid(self._pid, 0)
        os.close(self._ask)
        os.close(self._answers)


def test_an_override_reaches_a_process_that_was_forked_before() -> None:
    """And its end does; the process need not ask anybody."""
    plans = PolicyCache(PolicyTable({"orders": Policy(max_deliveries=3)}), an_app().amqp.queues)
    plans.share()

    def limit() -> str:
        plans.catch_up()
        policy = plans.of({"exchange": "", "routing_key": "orders"}).policy
        return str(policy.max_deliveries if policy else None)

    child = Child(limit)
    try:
        assert child() == "3"
        plans.obey({"orders": (Policy(max_deliveries=1), "ann")})
        assert (child(), child(), limit()) == ("1", "1", "1")
        plans.obey({})
        assert child() == "3"
    finally:
        child.end()


def test_what_is_too_long_changes_nothing() -> None:
    """The main process obeys it all the same."""
    leaflet = Leaflet()
    leaflet.write(b"x" * 70_000)
    assert leaflet.news() is None
