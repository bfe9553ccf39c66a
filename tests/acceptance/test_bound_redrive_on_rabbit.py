"""A redrive of `--at-most` on RabbitMQ: its worker is killed, and then the command itself."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
from builders import DLQ, a_letter, a_request, key_of
from waiting import poll
from workers import HERE, Place, Worker, environment

BOUND, LETTERS, SECONDS = 3, 14, 0.3


def put(poison: ModuleType) -> list[str]:
    """Store letters of tasks that run for a moment; the ids of their tasks."""
    ids = []
    for number in range(LETTERS):
        key, name = f"parcel-{number}", "poison_app.sleeps"
        headers = json.dumps(a_request(task=name, id=key, root_id=key))
        body = json.dumps([[key, SECONDS], {}, {}]).encode()
        known = {"task_id": key, "task_name": name, "headers": headers, "body": body}
        letter = a_letter(source_queue="orders", **known)
        poison.dlq.store.dead_letter(letter, key_of(letter))
        ids.append(key)
    return ids


@contextmanager
def open_ones(poison: ModuleType, ids: list[str]) -> Iterator[list[int]]:
    """How many messages had left the letters and not succeeded, each time somebody looks.

    Those that left are counted first: a message that ends meanwhile makes it one less, never more.
    """
    found, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            left = sum(queue.letters for queue in poison.dlq.queues() if queue.name == DLQ)
            done = sum(poison.app.backend.get_state(one) == "SUCCESS" for one in ids)
            found.append(LETTERS - left - done)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("place", ["classic"], indirect=True)
def test_a_bound_redrive_goes_on_after_its_worker_and_itself_were_killed(
    poison: ModuleType,
    start_worker: Callable[..., Worker],
    ran: Callable[[str], int],
    redis_url: str,
    here: Place,
) -> None:
    """Messages of the killed worker keep their places; all run, and never more are open."""
    ids = put(poison)
    env = environment(redis_url, None, **here.env)

    def command(*arguments: str) -> subprocess.Popen[bytes]:
        whole = [sys.executable, "-m", "celery", "-A", "poison_app", "dlq", *arguments]
        return subprocess.Popen(whole, cwd=HERE, env=env)

    first = start_worker(env=here.env)
    with open_ones(poison, ids) as found:
        redrive = command("redrive", DLQ, "--all", "--at-most", str(BOUND), "--yes")
        poll(lambda: sum(map(ran, ids)) >= BOUND, timeout_seconds=60)
        first.kill()
        poll(lambda: found[-1] == BOUND)  # the places of those that were killed are taken
        redrive.kill()
        redrive.wait(10)
        (job,) = poison.dlq.jobs()
        assert job.state == "interrupted"
        start_worker(env=here.env)
        resumed = command("jobs", "resume", job.id)
        assert resumed.wait(120) == 0
        poll(lambda: all(poison.app.backend.get_state(one) == "SUCCESS" for one in ids))
    assert max(found) == BOUND
    assert all(map(ran, ids))
    assert list(poison.dlq.letters(DLQ)) == []
    (job,) = poison.dlq.jobs()
    assert (job.state, job.counts["published"]) == ("done", LETTERS)
