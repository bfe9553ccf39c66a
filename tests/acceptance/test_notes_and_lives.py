"""Notes on redrives and removals, and what a redriven message died of before."""

from __future__ import annotations

import json
from dataclasses import replace
from types import ModuleType

import pytest
import redis
from builders import a_letter, key_of
from command_line import Dlq
from test_operations import QUEUE, broker, published, put

from celery_dlq import DLQError
from celery_dlq.letters.headers import EARLIER_HEADER
from celery_dlq.letters.redriven import MAX_LIVES

__all__ = ["broker"]  # a fixture


@pytest.mark.parametrize(
    ("command", "more"), [("redrive", ("--force",)), ("discard", ()), ("purge", ())]
)
def test_a_note_is_in_job_and_audit(
    poison: ModuleType, dlq: Dlq, command: str, more: tuple[str, ...]
) -> None:
    """A ticket, in one line; what follows is found by it."""
    put(poison)
    done = dlq(command, QUEUE, "--all", "--yes", "--note", "OPS-17\nsee chat", *more)
    assert done.exit_code == 0, done.stderr
    (job,) = dlq("jobs", "--json").lines
    assert job["options"]["note"] == "OPS-17\\nsee chat"
    assert "OPS-17" in dlq("jobs").stdout
    assert "OPS-17" in dlq("jobs", "status", job["id"]).stdout
    (change,) = dlq("audit", "--json").lines
    assert change["detail"]["note"] == "OPS-17\\nsee chat"
    with pytest.raises(DLQError, match="note to be a text"):
        poison.dlq.purge(QUEUE, note=5)


def test_a_letter_says_what_its_message_died_of_before(
    poison: ModuleType, dlq: Dlq, broker: redis.Redis
) -> None:
    """The last five deaths, with their causes; other headers stay as they were."""
    letter = put(poison, exception_type="shop.Bug", fingerprint="a" * 16)
    for life in range(MAX_LIVES + 2):
        poison.dlq.redrive(QUEUE, force=True)
        headers = max(
            (message["headers"] for message in published(broker)),
            key=lambda one: int(one["dlq_redrives"]),
        )
        assert headers["task"] == letter.task_name
        died = a_letter(
            task_id=letter.task_id,
            redrives=life + 1,
            headers=json.dumps(headers),
            exception_type=f"shop.Other{life}",
            fingerprint="b" * 16,
        )
        died = replace(died, source_queue=letter.source_queue)
        poison.dlq.store.dead_letter(died, key_of(died))
        if not life:
            text = dlq("show", died.id).stdout
            assert "died before" in text
            assert "Bug, cause " + "a" * 16 in text
    lives = json.loads(headers[EARLIER_HEADER])
    assert len(lives) == MAX_LIVES
    assert [one["exception"] for one in lives[-2:]] == ["shop.Other4", "shop.Other5"]
