"""What is next after each verdict on a redrive: a command that is printed, and a button."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from builders import DLQ
from test_web_groups import GROUP, stored
from web_pages import Pages, get, pages

from celery_dlq import LetterFilter

SEEN = {"letters": 10, "succeeded": 8, "died": 2, "open": 0, "held": 0, "holds": []}
SEEN |= {"waited_seconds": 3.0, "wait_seconds": 60.0, "died_ids": []}


def ended(web: Pages, state: str, letters: int = 2, **changes: Any) -> str:
    """A redrive of a cause that ended so; its id."""
    for _ in range(letters):
        stored(web)
    plan = web.dlq.plan("redrive", DLQ, LetterFilter(fingerprint=GROUP), canary=10)
    now = web.dlq.job_store.now()
    values: dict[str, Any] = {"state": state, "run": 1, "expires_at": None, "ended_at": now}
    job = replace(plan, started_at=now - timedelta(seconds=5), **{**values, **changes})
    web.dlq.job_store.write(job.id, job.to_stored())
    return job.id


def commands(web: Pages, job_id: str) -> list[str]:
    """The commands that are next, with the job's id named so."""
    return [one.command.replace(job_id, "JOB") for one in web.dlq.next_steps(job_id)]


def buttons(web: Pages, job_id: str) -> list[str]:
    """The texts of the buttons that do the same on the job's page."""
    page = web.handle(get(f"/jobs/{job_id}")).body.decode()
    section = page.partition("data-next>")[2].partition("</section>")[0]
    found = re.findall(r"<(?:a|button)\b[^>]*>([^<]+)</(?:a|button)>", section)
    for name in re.findall(r'href="#(\w+)"', section):
        assert f'id="{name}"' in page, "the place is on this page"
    return [" ".join(text.split()).removesuffix(" …") for text in found]


LOOK = f"list {DLQ} --where headers.dlq_redrive=JOB"
HOLD = "hold --task shop.charge --reason 'cause 01234567'"


@pytest.mark.parametrize(
    ("verdict", "expected", "shown"),
    [
        (
            "died again",
            [LOOK, HOLD, "note 01234567 TEXT", "jobs resume JOB"],
            ["Look at those that died again", "Hold shop.charge", "Note it", "Try again, once it"],
        ),
        (
            "held",
            ["release hold-1", "jobs resume JOB"],
            ["Release what holds them", "Go on with it"],
        ),
        ("not finished", ["jobs status JOB", "jobs resume JOB"], ["Try again, once it is mended"]),
        ("nothing tried", ["jobs resume JOB"], ["Try again, once it is mended"]),
    ],
)
def test_each_verdict_of_a_canary_has_its_next_step(
    verdict: str, expected: list[str], shown: list[str]
) -> None:
    """Died: look, hold, note. Held: release. Open: watch."""
    web = pages()
    holds = ["hold-1"] if verdict == "held" else []
    job_id = ended(web, "stopped", canary={**SEEN, "verdict": verdict, "holds": holds})
    assert [re.sub(r" --where '.*'(?= --reason)", "", c) for c in commands(web, job_id)] == expected
    found = buttons(web, job_id)
    assert [one.startswith(words) for one, words in zip(found, shown, strict=True)], found


def test_after_a_success_the_rest_goes_and_the_cause_is_resolved() -> None:
    """Where messages still run, they are watched first; without letters there is no rest."""
    web = pages()
    job_id = ended(web, "done", counts={"published": 10})
    watch, rest, resolve = commands(web, job_id)
    assert (watch, rest) == ("jobs status JOB", f"redrive {DLQ} --fingerprint 01234567")
    assert resolve == "resolve 01234567"
    assert buttons(web, job_id) == [
        "Redrive the other 2",
        "Resolve, when none of them dies again",
    ]
    web.dlq.discard(DLQ, fingerprint=GROUP)
    assert commands(web, job_id) == ["jobs status JOB", "resolve 01234567"]


@pytest.mark.parametrize("state", ["cancelled", "failed", "interrupted"])
def test_a_job_that_ended_early_is_resumed(state: str) -> None:
    """Whatever ended it."""
    web = pages()
    job_id = ended(web, state)
    assert commands(web, job_id) == ["jobs resume JOB"]
    assert buttons(web, job_id) == ["Go on with it"]


def test_a_job_that_runs_is_waited_for() -> None:
    """There is nothing to press; a discard has no such steps."""
    web = pages()
    job_id = ended(web, "running", ended_at=None)
    assert commands(web, job_id) == ["jobs status JOB"]
    (letter,) = [stored(web, fingerprint="fedcba9876543210")]
    web.dlq.discard(DLQ, ids={letter.id})
    assert web.dlq.next_steps(web.dlq.jobs()[0].id) == []
