"""Messages that Celery drops without running them are letters too."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

import redis
from raw import BODY, JSON, headers, publish
from waiting import poll
from workers import Place, Worker, diagonals

from celery_dlq import DeadLetter, Reason

Letters = Callable[..., list[DeadLetter]]
Ran = Callable[[str], int]
Start = Callable[..., Worker]


class Bomb:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@diagonals("prefork", "threads", "solo", "gevent", "eventlet")
def test_each_message_that_celery_drops_becomes_one_letter_with_its_bytes(
    poison: ModuleType,
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    tmp_path: Path,
    place: Place,
    pool: str,
    redis_url: str,
) -> None:
    """Unknown, invalid, undecodable, disallowed, foreign and expired; the worker lives on."""
    exploded = tmp_path / "exploded"
    bomb = pickle.dumps(((), {}, {"x": Bomb(exploded)}))
    past = (datetime.now(timezone.utc) - timedelta(seconds=5)).isoformat()
    broker = place.env.get("POISON_BROKER", redis_url)
    healthy = "poison_app.healthy"
    start_worker(pool=pool, env=place.env)

    publish(broker, BODY, headers=headers("no.such.task", "unknown"), **JSON)
    publish(broker, BODY, headers=headers(healthy, "bad-eta", eta="soon"), **JSON)
    publish(broker, b'{"broken', headers=headers(healthy, "broken"), **JSON)
    publish(broker, b"\xff\xfe\x00", headers=headers(healthy, "utf-8"), **JSON)
    publish(
        broker,
        bomb,
        headers=headers(healthy, "bomb"),
        content_type="application/x-python-serialize",
        content_encoding="binary",
    )
    publish(broker, b'{"hello": "world"}', message_id="foreign", **JSON)
    publish(broker, BODY, headers=headers(healthy, "expired", expires=past), **JSON)
    publish(broker, BODY, headers=headers(healthy, "after"), **JSON)

    found = {letter.task_id: letter for letter in letters(count=7)}

    assert {task_id: letter.reason for task_id, letter in found.items()} == {
        "unknown": Reason.UNKNOWN_TASK,
        "bad-eta": Reason.INVALID_MESSAGE,
        "broken": Reason.UNDECODABLE_MESSAGE,
        "utf-8": Reason.UNDECODABLE_MESSAGE,
        "bomb": Reason.UNDECODABLE_MESSAGE,
        "foreign": Reason.INVALID_MESSAGE,
        "expired": Reason.EXPIRED,
    }
    assert found["broken"].body == b'{"broken'
    assert found["utf-8"].body == b"\xff\xfe\x00"
    assert found["bomb"].body == bomb
    assert found["bad-eta"].body == BODY
    assert not exploded.exists()
    assert "no.such.task" in found["unknown"].description
    assert found["broken"].task_name == healthy
    assert found["bad-eta"].decoded("headers")["eta"] == "soon"
    poll(lambda: ran("x") == 1)  # "after", and none of the others


def test_nothing_is_kept_of_what_no_policy_guards(
    poison: ModuleType, start_worker: Start, redis_url: str
) -> None:
    """Without a policy the plugin leaves everything to Celery."""
    start_worker({"dlq_queues": {}})
    poison.app.send_task("no.such.task")
    publish(redis_url, b'{"broken', headers=headers("poison_app.healthy", "broken"), **JSON)
    assert poison.healthy.delay("after").get(timeout=10) == "after"
    assert poison.dlq.queues() == []


def test_a_revoked_task_is_no_death(
    poison: ModuleType, start_worker: Start, ran: Ran, tmp_path: Path
) -> None:
    """Somebody meant it."""
    worker = start_worker()
    waiting = poison.healthy.apply_async(("revoked",), countdown=1)
    poll(lambda: f"Task poison_app.healthy[{waiting.id}] received" in worker.output)
    waiting.revoke()
    poll(lambda: "Discarding revoked task" in worker.output)
    assert poison.healthy.delay("after").get(timeout=10) == "after"
    assert poison.dlq.queues() == []
    assert ran("revoked") == 0


def test_bad_input_is_kept_and_does_not_crash_the_worker(
    poison: ModuleType, start_worker: Start, letters: Letters
) -> None:
    """A large body, an unspeakable exception, ten thousand frames, an odd name, odd headers."""
    start_worker()
    large = "x" * 20_000_000
    sent = {
        "large": poison.fails.delay(large),
        "unspeakable": poison.unspeakable.delay("unspeakable"),
        "deep": poison.deep.delay("deep"),
        "unicorn": poison.unicorn.delay("unicorn"),
        "headers": poison.fails.apply_async(("h",), headers={"odd": [1, {"a": None}], "ü": "☃"}),
    }

    found = {letter.task_id: letter for letter in letters(count=5, timeout_seconds=60)}

    by = {name: found[result.id] for name, result in sent.items()}
    assert len(by["large"].body) > 20_000_000
    assert json.loads(by["large"].body)[0] == [large]
    assert "RuntimeError" in (by["unspeakable"].exception_message or "")
    assert "ten thousand frames down" in by["deep"].description
    assert len(by["deep"].traceback or "") < 70_000
    assert by["unicorn"].task_name == "with spaces and 🦄"
    assert by["headers"].decoded("headers")["odd"] == [1, {"a": None}]
    assert poison.healthy.delay("after").get(timeout=10) == "after"


def test_every_form_of_message_can_die_and_come_back(
    poison: ModuleType, start_worker: Start, letters: Letters, ran: Ran, redis_url: str
) -> None:
    """Protocol 1, other serializers, compressed bodies and priorities redrive as they were."""
    forms: list[dict[str, Any]] = [{"serializer": "yaml"}, {"compression": "gzip"}, {"priority": 5}]
    sent = {}
    for protocol in (1, 2):
        poison.app.conf.task_protocol = protocol
        poison.app.amqp.__dict__.pop("create_task_message", None)  # made from the setting
        try:
            for how in forms:
                form = f"protocol {protocol}, {how}"
                sent[form] = poison.fails.apply_async((form,), **how).id
        finally:
            poison.app.conf.task_protocol = 2
            poison.app.amqp.__dict__.pop("create_task_message", None)
    start_worker()
    found = letters(count=len(sent))
    assert sorted(letter.task_id for letter in found) == sorted(sent.values())
    assert {letter.task_name for letter in found} == {"poison_app.fails"}
    with redis.Redis.from_url(f"{redis_url.rpartition('/')[0]}/2") as client:
        client.set("fixed", "yes")

    poison.dlq.redrive("orders-DLQ")

    for form, task_id in sent.items():
        poll(
            lambda i=task_id: poison.app.backend.get_state(i) == "SUCCESS",  # type: ignore[misc]
            timeout_seconds=20,
        )
        assert (form, ran(form)) == (form, 2)
