"""What an operator mistypes is answered in one line, with what to do."""

from __future__ import annotations

import signal
import subprocess
import sys
from types import ModuleType

import command_line
import pytest
import redis
from test_operations import put
from waiting import poll
from workers import HERE, environment


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("hold --task poison_app.fails --for 0", "at most 30 days, got 0 s"),
        ("hold --task poison_app.fails --for 31d", "at most 30 days, got 2,678,400 s"),
        ("policies set orders max_deliveries=5 --for 0", "at most 30 days, got 0 s"),
        ("hold --task poison_app.fails --for 999999999999d", "expected seconds, or a text"),
        ("list orders-DLQ --since 999999999999d", "expected a time such as"),
        ("show 0f9f", "give at least 6 characters"),
        ("redrive orders-DLQ --all --at 9999-12-31T23:59:59-12:00", "at most 366 days ahead"),
        ("redrive orders-DLQ --all --at 9999-12-31T23:59:59", "at most 366 days ahead"),
        ("redrive orders-DLQ --all --at +3000000d", "expected a time such as"),
        ("redrive orders-DLQ --all --at +367d", "at most 366 days ahead"),
    ],
)
def test_a_mistake_is_one_line(
    poison: ModuleType, dlq: command_line.Dlq, command: str, said: str
) -> None:
    """Neither a traceback nor a text of Python's."""
    put(poison)
    done = dlq(*command.split())
    assert done.exit_code in (1, 2)
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_ctrl_c_names_the_job_and_how_to_go_on(poison: ModuleType, redis_url: str) -> None:
    """Its letters are safe; what is left of it needs the id, which nothing has printed yet."""
    for _ in range(3):
        put(poison)
    redrive = ["redrive", "orders-DLQ", "--all", "--rate", "1", "--yes"]
    with subprocess.Popen(
        [sys.executable, "-m", "celery", "-A", "poison_app", "dlq", *redrive],
        env=environment(redis_url),
        cwd=HERE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        try:
            with redis.Redis.from_url(redis_url) as broker:
                poll(lambda: broker.llen("orders"), timeout_seconds=20)
            running.send_signal(signal.SIGINT)
            _, said = running.communicate(timeout=20)
        finally:
            running.kill()

    (job,) = poison.dlq.jobs()
    assert f"`dlq jobs resume {job.id}`" in said
    assert running.returncode == 1
    report = poison.dlq.resume(job.id)
    assert report.published + report.finished >= 1
    assert not list(poison.dlq.letters("orders-DLQ"))
