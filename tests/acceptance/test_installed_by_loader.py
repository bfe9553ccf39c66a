"""An app whose code is somebody else's is guarded by two environment variables."""

from __future__ import annotations

import json
from collections.abc import Callable

import redis
from waiting import poll
from workers import Worker, run_python

INSTALLED = {
    "CELERY_LOADER": "celery_dlq.Loader",
    "CELERY_DLQ_SETTINGS": json.dumps(
        {"dlq_queues": {"orders": {"max_deliveries": 2, "default_delay": 1}}}
    ),
}


def test_worker_publisher_and_commands_of_such_an_app(
    start_worker: Callable[..., Worker], redis_url: str
) -> None:
    """Its messages wait, are executed so often and no more, and are redriven."""
    worker = start_worker(app="their_app", env=INSTALLED)

    def dlq(*arguments: str) -> str:
        command = ("-m", "celery", "-A", "their_app", "dlq", *arguments)
        done = run_python(redis_url, *command, **INSTALLED)
        assert done.returncode == 0, done.stderr
        return done.stdout

    code = "import their_app; print(their_app.killed.delay().id)"
    done = run_python(redis_url, "-c", code, **INSTALLED)
    assert done.returncode == 0, done.stderr
    with redis.Redis.from_url(redis_url) as client:
        poll(lambda: client.exists("dlq:{orders-DLQ}:letters") == 1, timeout_seconds=30)
    [letter] = map(json.loads, dlq("list", "orders-DLQ", "--json").splitlines())
    assert letter["task_id"] == done.stdout.strip()
    assert letter["reason"] == "max_deliveries_exceeded", worker.output
    with redis.Redis.from_url(f"{redis_url.rpartition('/')[0]}/2") as client:
        starts = client.lrange("theirs", 0, -1)
    assert len(starts) == 2
    assert not any(start.endswith(b"None") for start in starts)  # the publisher set the delay
    assert "1 letter" in dlq("redrive", "orders-DLQ", "--yes", "--all")


def test_an_app_that_guards_nothing_says_so(
    start_worker: Callable[..., Worker], redis_url: str
) -> None:
    """Else its log and its commands would look like those of an app where all is well."""
    installed = {**INSTALLED, "CELERY_DLQ_SETTINGS": "{}"}
    said = "No queue and no task of this app has a policy, so failed tasks leave no letters"
    assert said in start_worker(app="their_app", env=installed).output
    command = ("-m", "celery", "-A", "their_app", "dlq", "queues")
    assert said in " ".join(run_python(redis_url, *command, **installed).stdout.split())
    guarded = run_python(redis_url, *command, **INSTALLED).stdout
    assert guarded == "There are no dead letters yet.\n"


def test_a_mistake_in_the_settings_is_one_line_also_from_a_command_of_their_own(
    redis_url: str,
) -> None:
    """Airflow starts its workers with ``worker_main``, where click raises what it would print."""
    done = run_python(
        redis_url,
        "-c",
        "import their_app; their_app.app.worker_main(['worker', '--pool', 'solo'])",
        **{**INSTALLED, "CELERY_DLQ_SETTINGS": '{"dlq_queue": {}}'},
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("Error: expected only known dlq_ settings")
    assert "Traceback" not in done.stderr
