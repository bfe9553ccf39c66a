"""Policy keys that are off, in running workers: as if no policy had ever set them."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any

import intervals
import pytest
from builders import a_letter, a_request, key_of
from command_line import Dlq
from waiting import poll
from workers import Worker, run_python

from celery_dlq import DeadLetter

Start = Callable[..., Worker]
Ran = Callable[[str], int]
Letters = Callable[..., list[DeadLetter]]
BREAKER = {"deaths": 2, "window": 60}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of a policy begins now, and breakers probe every second."""
    intervals.change(monkeypatch, grace=timedelta(0), probe=1)


def end(dlq: Dlq, worker: Worker, conf: dict[str, Any], *keys: str) -> None:
    """Override keys of ``orders`` with ``none``, and wait until the worker knows."""
    values = [f"{key}=none" for key in keys]
    done = dlq("policies", "set", "orders", *values, "--for", "5m", conf=conf)
    assert done.exit_code == 0, done.stderr
    poll(lambda: "overridden by" in worker.output, timeout_seconds=30)


def put(poison: ModuleType, queue: str) -> None:
    """Store a letter of a task that would succeed now."""
    headers = json.dumps(a_request(task="poison_app.healthy"))
    letter = a_letter(
        task_name="poison_app.healthy",
        headers=headers,
        body=b'[["x"], {}, {}]',
        source_queue=queue,
        dead_letter_queue=f"{queue}-DLQ",
    )
    poison.dlq.store.dead_letter(letter, key_of(letter))


def length(poison: ModuleType, queue: str) -> int:
    """The number of its letters."""
    found: int = poison.dlq.store.length(f"{queue}-DLQ")
    return found


def test_the_limit_of_deliveries(
    dlq: Dlq, poison: ModuleType, start_worker: Start, ran: Ran
) -> None:
    """A message that comes back for ever does so, until the limit counts again."""
    conf: dict[str, Any] = {"dlq_queues": {"orders": {"max_deliveries": 2}}}
    worker = start_worker(conf)
    end(dlq, worker, conf, "max_deliveries")
    poison.requeues.delay("x")
    poll(lambda: ran("x") > 5)
    assert length(poison, "orders") == 0
    assert "max_deliveries  off  override by " in dlq("policies", conf=conf).stdout
    assert dlq("policies", "unset", "orders", conf=conf).exit_code == 0
    poll(lambda: length(poison, "orders") == 1, timeout_seconds=30)


def test_a_circuit_breaker_that_is_open_closes(
    dlq: Dlq, poison: ModuleType, start_worker: Start, letters: Letters, ran: Ran
) -> None:
    """What it held runs, and no more deaths open it."""
    conf: dict[str, Any] = {"dlq_queues": {"orders": {"circuit_breaker": BREAKER}}}
    worker = start_worker(conf)
    for number in range(3):
        poison.fails.delay(f"early {number}")
    poll(lambda: [one.state for one in poison.dlq.breakers()] == ["open"], timeout_seconds=30)
    end(dlq, worker, conf, "circuit_breaker")
    poll(lambda: "has ended" in worker.output, timeout_seconds=30)
    assert poison.dlq.breakers() == []
    for number in range(9):
        poison.fails.delay(f"late {number}")
    letters(count=12)
    assert poison.dlq.breakers() == []
    assert ran("late 8") == 1


def test_what_takes_letters_out(
    dlq: Dlq,
    poison: ModuleType,
    start_worker: Start,
) -> None:
    """They stay while those of another queue go."""
    ttl = {"dead_letter_ttl": 1}
    conf: dict[str, Any] = {"dlq_queues": {"orders": ttl, "slow": ttl}}
    worker = start_worker(conf)
    end(dlq, worker, conf, *ttl)
    for queue in ("orders", "slow"):
        put(poison, queue)
    poll(lambda: length(poison, "slow") == 0, timeout_seconds=30)
    put(poison, "slow")
    poll(lambda: length(poison, "slow") == 0, timeout_seconds=30)
    assert length(poison, "orders") == 1


def test_exceptions_and_delays_end_by_settings(
    dlq: Dlq, redis_url: str, start_worker: Start, letters: Letters, ran: Ran
) -> None:
    """They act where no override reaches, and the command says so."""
    weak = {"exceptions": {"Exception": {"action": "ignore"}}, "default_delay": 800}
    conf: dict[str, Any] = {
        "dlq_queues": {"*": weak, "orders": {"exceptions": "off", "default_delay": "none"}}
    }
    start_worker(conf)
    for key in ("exceptions", "default_delay"):
        done = dlq("policies", "set", "orders", f"{key}=none", "--for", "5m", conf=conf)
        assert done.exit_code == 1
        assert f"expected a policy key that can be overridden, got '{key}': it acts" in done.stderr
    assert "default_delay  off  dlq_queues['orders']" in dlq("policies", conf=conf).stdout
    code = "import poison_app; poison_app.fails.delay('x')"
    assert run_python(redis_url, "-c", code, conf=conf).returncode == 0
    (letter,) = letters()
    assert (letter.reason, ran("x")) == ("failed", 1)
