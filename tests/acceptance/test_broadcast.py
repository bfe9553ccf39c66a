"""Messages that every worker gets: kombu's Broadcast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from waiting import poll
from workers import Place, Worker, run_python

PUBLISH = "import broadcast_app as b; print(b.refresh.delay().id)"
QUEUES = "import broadcast_app as b; print(sorted((q.name, q.letters) for q in b.dlq.queues()))"
REDRIVE = "import broadcast_app as b; print(b.dlq.redrive('refresh-DLQ').to_json())"


@pytest.mark.parametrize("place", ["classic"], indirect=True)
def test_a_broadcast_has_one_dead_letter_queue_of_its_name(
    place: Place, redis_url: str, start_worker: Callable[..., Worker]
) -> None:
    """Each worker has a queue of its own, bcast.<uuid>, that nobody finds after its end."""

    def told(code: str) -> str:
        done = run_python(redis_url, "-c", code, **place.env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def start(name: str) -> Worker:
        arguments = ("--queues", "refresh", "--hostname", f"{name}@x")
        more: dict[str, Any] = {"env": place.env, "app": "broadcast_app", "pool": "threads"}
        return start_worker(arguments=arguments, **more)

    workers = [start("one"), start("two")]
    told(PUBLISH)
    for one in workers:
        poll(lambda one=one: "nothing to refresh" in one.output, timeout_seconds=20)
    assert told(QUEUES) == "[('refresh-DLQ', 1)]"

    assert "'published': 0, 'finished': 0" in told(REDRIVE)  # no queue has that name
    assert told(QUEUES) == "[('refresh-DLQ', 1)]"
