"""The phases of a job: what each says while it is on, over, or to come."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from builders import DLQ, NOW
from test_web_groups import GROUP, shown, stored
from web_pages import pages

from celery_dlq.features.phases.pages import phases_of
from celery_dlq.operations.job import Job

CANARY = {"letters": 10, "max_failures": 0, "wait_seconds": 60.0}
SEEN = {"letters": 10, "succeeded": 10, "died": 0, "open": 0, "waited_seconds": 30.0}
SEEN |= {"wait_seconds": 60.0, "verdict": "passed"}


def texts(seconds: float = 34, **changes: Any) -> list[str]:
    """What the phases of a job say some seconds after its start: state, name and text."""
    values = {"id": "1", "kind": "redrive", "queue": DLQ, "started_at": NOW, "updated_at": NOW}
    job = Job(**{**values, "total": 563, "options": {"canary": CANARY}, **changes})
    found = phases_of(job, NOW + timedelta(seconds=seconds))
    return [f"{one.state} {one.name} {one.text}".strip() for one in found]


def test_a_plan_has_all_its_phases_before_it() -> None:
    """Those that it will have: without a canary there is none."""
    planned = ["now Planned 563 letters", "next Canary 10 letters first", "next Sending"]
    assert texts(state="planned") == [*planned, "next Watching"]
    found = texts(state="planned", options={})
    assert found == ["now Planned 563 letters", "next Sending", "next Watching"]


def test_a_canary_says_how_it_does_and_what_came_of_it() -> None:
    """While it is watched, and where it stopped the job."""
    on = {**SEEN, "succeeded": 7, "open": 3, "verdict": "running"}
    found = texts(canary=on, counts={"published": 10})
    expected = "now Canary 7 of 10 succeeded, 3 open; watched for 30 s of 60 s"
    assert found[1:3] == [expected, "next Sending"]
    died = {**SEEN, "succeeded": 8, "died": 2, "verdict": "died again"}
    found = texts(canary=died, counts={"published": 10}, state="stopped")
    assert found[1] == "stopped Canary 8 of 10 succeeded, 2 died again. Verdict: died again"


def test_sending_says_its_own_pace_and_the_time_that_is_left() -> None:
    """Of the letters behind the canary: watching it is no sending."""
    passed = {"canary": {**CANARY, "passed": True}}
    found = texts(canary=SEEN, options=passed, counts={"published": 110})
    assert found[1] == "done Canary 10 of 10 succeeded. Verdict: passed"
    assert found[2] == "now Sending 110 of 563 at 25 a second, 18 s left"
    found = texts(options=passed, canary=SEEN, counts={"published": 110}, state="cancelled")
    assert found[2] == "stopped Sending 110 of 563"


def test_a_job_is_watched_until_all_its_messages_have_ended() -> None:
    """Also those that are open: a message that nobody sees the end of stays open."""
    ends = {"published": 110, "succeeded": 96}
    over = {"state": "done", "total": 110, "ended_at": NOW + timedelta(seconds=5), "options": {}}
    found = texts(counts=ends, **over)
    assert found[1:] == [
        "done Sending 110 of 110",
        "now Watching 96 succeeded, 0 died again, 14 open",
    ]
    found = texts(counts={**ends, "died_again": 14}, **over)
    assert found[2] == "done Watching 96 succeeded, 14 died again (still here), 0 open"


def test_the_page_counts_new_letters_of_the_cause_since_the_job_began() -> None:
    """Of this cause, and none that the job itself sent."""
    web = pages()
    stored(web)
    job_id = web.dlq.redrive(DLQ, fingerprint=GROUP, force=True).redrive_id
    stored(web, headers=f'{{"dlq_redrive": "{job_id}"}}')
    for cause in (GROUP, GROUP, "fedcba9876543210"):
        stored(web, fingerprint=cause)
    text = shown(web, f"/jobs/{job_id}")
    watched = "Watching ✓ done 0 succeeded, 1 died again (still here), 0 open"
    assert f"{watched} 2 new letters of this cause since it began." in text
    assert web.dlq.job(job_id).counts["new_letters"] == 2


def test_the_page_of_a_job_says_each_number_once() -> None:
    """What its phases say stands in no second list."""
    web = pages()
    stored(web)
    job_id = web.dlq.redrive(DLQ, fingerprint=GROUP, force=True).redrive_id
    text = shown(web, f"/jobs/{job_id}")
    assert text.count("succeeded") == 1
    assert "1 letters published" in text
    assert "published 1" not in text
