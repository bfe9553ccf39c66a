"""Two operators at once, a double click, stale pages: each letter once, and a page that says so."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import redis
from builders import DLQ, a_letter, a_request, key_of
from looking import Watched, expect, press
from served import Pages
from waiting import poll

from celery_dlq import DeadLetter, DeadLetters, LetterFilter

LETTERS = 12
IDS = [f"task-{number}" for number in range(LETTERS)]


@pytest.fixture
def letters(dlq: DeadLetters, watched: Watched) -> list[DeadLetter]:
    """Some letters; nobody consumes what is redriven."""
    watched.allowed.append(
        "Failed to load resource"
    )  # statuses of 400 and above are what is tested
    found = [
        a_letter(task_id=task_id, headers=json.dumps(a_request(id=task_id))) for task_id in IDS
    ]
    for letter in found:
        dlq.store.dead_letter(letter, key_of(letter))
    return found


def planned(dlq: DeadLetters, *ids: str) -> str:
    """Plan a redrive; returns the path of its page."""
    where = LetterFilter(ids=frozenset(ids)) if ids else None
    return f"/jobs/{dlq.plan('redrive', DLQ, where, force=True).id}"


def published(client: redis.Redis) -> Counter[str]:
    """How often each task's message is in its queue."""
    found = (json.loads(raw) for raw in client.lrange("orders", 0, -1))
    return Counter(message["headers"]["id"] for message in found)


def check_each_once(client: redis.Redis, letters: list[DeadLetter]) -> None:
    """Each message was published once."""
    poll(lambda: client.llen("orders") >= len(letters))
    assert published(client) == {letter.task_id: 1 for letter in letters}


def test_two_operators_start_one_plan(
    letters: list[DeadLetter],
    dlq: DeadLetters,
    client: redis.Redis,
    context: Callable[..., Any],
    pages: Pages,
) -> None:
    """Both see the same job."""
    path = planned(dlq)
    both = [context().new_page() for _ in range(2)]
    for page in both:
        page.goto(pages.url + path)
    for page in both:
        page.get_by_role("button", name="Redrive").click()
    for page in both:
        expect(page.locator("main [data-job-state]")).to_have_text("done")
        assert page.url.endswith(path)
    check_each_once(client, letters)


def test_two_plans_of_the_same_letters(
    letters: list[DeadLetter],
    dlq: DeadLetters,
    client: redis.Redis,
    context: Callable[..., Any],
    pages: Pages,
) -> None:
    """The second job says that the letters had gone."""
    both = [(context().new_page(), planned(dlq)) for _ in range(2)]
    for page, path in both:
        page.goto(pages.url + path)
    for page, _ in both:
        page.get_by_role("button", name="Redrive").click(no_wait_after=True)
    for page, _ in both:
        expect(page.locator("main [data-job-state]")).to_have_text("done")
    check_each_once(client, letters)


def test_a_double_click_and_the_back_button(
    letters: list[DeadLetter], dlq: DeadLetters, client: redis.Redis, page: Any, pages: Pages
) -> None:
    """The plan is started once; going back shows no form that could start it again."""
    page.goto(f"{pages.url}/queues/{DLQ}/redrive")
    page.get_by_role("button", name="Show what would happen").dblclick()
    page.wait_for_url("**/jobs/*")
    page.get_by_role("button", name="Redrive").dblclick()
    expect(page.locator("main [data-job-state]")).to_have_text("done")
    page.go_back()
    page.go_back()
    page.go_forward()
    page.go_forward()
    page.reload()
    expect(page.locator("main [data-job-state]")).to_have_text("done")
    check_each_once(client, letters)
    assert len([job for job in dlq.jobs() if job.state != "planned"]) == 1


def test_a_plan_that_is_too_old(
    letters: list[DeadLetter], dlq: DeadLetters, client: redis.Redis, page: Any, pages: Pages
) -> None:
    """409, and nothing is sent; the page offers no button."""
    path = planned(dlq)
    page.goto(pages.url + path)
    job_id = path.rpartition("/")[2]
    stored = dlq.job_store.read(job_id)
    dlq.job_store.write(job_id, {**stored, "expires_at": stored["expires_at"] - 3_600_000_000})
    with page.expect_response("**/start") as answer:
        press(page, "button", "Redrive")
    assert answer.value.status == 409
    assert "has expired" in page.locator("main").inner_text()
    assert page.locator("main form").count() == 0
    assert client.llen("orders") == 0


def test_a_letter_that_somebody_redrove_meanwhile(
    letters: list[DeadLetter], dlq: DeadLetters, client: redis.Redis, page: Any, pages: Pages
) -> None:
    """A plan finds it gone, its own page is 410 and says who did it, an edit too."""
    letter, others = letters[0], letters[1:]
    path = planned(dlq, letter.id)
    page.goto(pages.url + path)
    dlq.redrive(DLQ, ids=[letter.id], force=True)
    press(page, "button", "Redrive")
    expect(page.locator("main [data-job-state]")).to_have_text("done")
    assert "1 of the 1 planned letters had gone" in page.locator("main").inner_text()
    own = f"{pages.url}/queues/{DLQ}/letters/{letter.id}"
    answer = page.goto(own)
    assert answer.status == 410
    assert "1 redriven by" in page.locator("main").inner_text()
    assert page.goto(f"{own}/edit").status == 410
    page.goto(f"{pages.url}/queues/{DLQ}/redrive?ids={letter.id}")
    assert "There is nothing to do" in page.locator("main").inner_text()
    assert published(client) == {letter.task_id: 1}
    assert len(list(dlq.letters(DLQ))) == len(others)


def test_a_letter_is_restored_once(
    letters: list[DeadLetter], dlq: DeadLetters, context: Callable[..., Any], pages: Pages
) -> None:
    """Who comes second sees the letter that is back."""
    dlq.discard(DLQ, ids=[letters[0].id])
    both = [context().new_page() for _ in range(2)]
    for page in both:
        page.goto(f"{pages.url}/queues/{DLQ}/discarded")
    for page in both:
        press(page, "button", "Restore")
    for page in both:
        press(page, "button", "Restore 1 letter")
        assert page.url.endswith(f"/letters/{letters[0].id}")
    assert len(list(dlq.letters(DLQ))) == LETTERS


def test_ended_jobs_are_neither_cancelled_nor_resumed(
    letters: list[DeadLetter],
    dlq: DeadLetters,
    client: redis.Redis,
    context: Callable[..., Any],
    pages: Pages,
) -> None:
    """A page that is older than the end of its job: 409 and the job as it is."""
    dlq.redrive(DLQ, force=True, limit=1)
    job = dlq.jobs()[0]
    page = context().new_page()
    page.goto(f"{pages.url}/jobs")
    for action in ("cancel", "resume"):
        page.goto(f"{pages.url}/policies")
        with page.expect_response(f"**/{action}") as answer:
            page.evaluate(
                "(path) => { const form = document.querySelector('main form');"
                " form.action = path; form.submit(); }",
                f"/jobs/{job.id}/{action}",
            )
        assert answer.value.status == 409
        expect(page.locator("main [data-job-state]")).to_have_text("done")
        assert page.get_by_role("alert").inner_text()
