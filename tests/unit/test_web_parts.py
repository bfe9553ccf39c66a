"""Pages whose reading is bounded: they say that they show a part, and lead to the rest."""

from __future__ import annotations

import json
import re
from html import unescape
from typing import Any
from urllib.parse import urlencode

import intervals
import pytest
from builders import DLQ, a_letter, key_of
from web_pages import Pages, get, pages

from celery_dlq.errors import NotFound
from celery_dlq.letters.record import DeadLetter

QUEUE = f"/queues/{DLQ}"
GROUP = "0123456789abcdef"


def stored(web: Pages, **changes: Any) -> DeadLetter:
    """A letter that is in the store."""
    letter = a_letter(**changes)
    web.dlq.store.dead_letter(letter, key_of(letter))
    return letter


def shown(web: Pages, path: str, **query: str) -> str:
    """The HTML of a page."""
    response = web.handle(get(path, query=urlencode(query)))
    assert response.status == 200, response.body
    return response.body.decode()


def test_a_search_that_was_cut_off_leads_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link says how many letters were looked at, for the script that follows it."""
    intervals.change(monkeypatch, page=0.0)
    web = pages()
    wanted = stored(web, task_name="shop.refund")
    for _ in range(75):
        stored(web)
    text, seen = shown(web, f"{QUEUE}/letters", task_name="shop.refund"), 1
    while wanted.id not in text:
        assert "None found among 25 letters yet." in text
        link = re.search(r'<a data-searched="25" href="[^"?]*\?([^"]*)">Search on from here', text)
        assert link, text
        answer = web.handle(get(f"{QUEUE}/letters", query=unescape(link[1])))
        text, seen = answer.body.decode(), seen + 1
    assert seen == 4
    assert "data-searched" not in shown(web, f"{QUEUE}/letters")  # nothing is searched for


def test_a_count_that_was_cut_off_is_no_small_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A canary is offered: there may be a million."""
    intervals.change(monkeypatch, page=0.0)
    web = pages()
    for _ in range(3):
        stored(web)
    text = shown(web, f"{QUEUE}/redrive", reason="failed")
    assert "<strong>1 or more</strong> letters" in text
    assert re.search(r'id="canary" [^>]*value="10"', text)


def test_a_job_looks_for_those_that_died_again_in_some_letters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its page says so, and where all of them are."""
    monkeypatch.setattr("celery_dlq.web.pages.changes.MOST_SEARCHED", 2)
    web = pages()
    stored(web)
    job_id = web.dlq.redrive(DLQ, force=True).redrive_id
    assert web.dlq.job(job_id).counts["died_again"] == 0
    assert "looked at" not in shown(web, f"/jobs/{job_id}")
    headers = json.dumps({"dlq_redrive": job_id})
    for changes in ({}, {"headers": headers}, {"headers": headers}):
        stored(web, **changes)
    assert web.dlq.job(job_id).counts["died_again"] == 2
    counts = web.dlq.job(job_id, most_searched=2).counts
    assert (counts["died_again"], counts["searched"]) == (1, 2)
    text = shown(web, f"/jobs/{job_id}")
    link = re.search(r'looked at .*<a href="[^"?]*\?([^"]*)">Find all', text)
    assert link, text
    found = web.handle(get(f"{QUEUE}/letters", query=unescape(link[1]))).body.decode()
    assert found.count('name="ids"') == 2


def test_the_differences_of_some_letters_lead_to_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The page says how many of the group's letters were compared, and what compares more."""
    monkeypatch.setattr("celery_dlq.features.differences.pages.SECONDS", 10.0)
    web = pages()
    for number in range(350):
        stored(web, fingerprint=GROUP, kwargs_json=f'{{"plan": "trial", "n": {number}}}')
    text = shown(web, f"{QUEUE}/groups/{GROUP}/differences")
    assert "of its newest letters, of 350 in all" in text
    assert "The command dlq differences compares more." in re.sub(r"</?code>", "", text)
    # With nothing to compare with, nothing is said to differ, or not to.
    assert re.search(
        r"All \d+ letters that were looked at, .*have args\[0\] = 1, kwargs.plan", text
    )
    assert "There is nothing to compare" in text
    assert "Nothing stands out" not in text


def test_the_beginning_of_an_id_finds_no_letter_on_a_page() -> None:
    """All ids of the queue would be read; the command does that."""
    web = pages()
    letter = stored(web)
    assert web.dlq.entry(letter.id[:8], DLQ)[1].key == letter.id
    with pytest.raises(NotFound):
        web.dlq.entry(letter.id[:8], DLQ, whole=True)
    assert web.handle(get(f"{QUEUE}/letters/{letter.id[:8]}")).status == 410
    assert web.handle(get(f"{QUEUE}/letters/{letter.id}")).status == 200


@pytest.mark.parametrize("by", ["letters", "newest"])
@pytest.mark.parametrize("state", ["open", "resolved", "muted"])
def test_only_the_groups_that_are_shown_are_read(
    monkeypatch: pytest.MonkeyPatch, by: Any, state: str
) -> None:
    """With a hundred thousand groups the page takes as long as with a hundred."""
    web = pages()
    names = [f"{number:016x}" for number in range(12)]
    for number, name in enumerate(names):
        for _ in range(1 + number % 3):
            stored(web, fingerprint=name)
    for number, name in enumerate(names):
        if number % 3:
            (web.dlq.resolve if number % 3 == 1 else web.dlq.mute)(DLQ, name)
    read: list[str] = []
    overviews = web.dlq.store.overviews
    groups = overviews.groups

    def reading(queue: str, some: Any) -> Any:
        read.extend(some)
        return groups(queue, some)

    monkeypatch.setattr(overviews, "groups", reading)
    found = web.dlq.groups(DLQ, state=state, by=by, limit=2)
    assert [(one.fingerprint in names, one.status.state.value) for one in found] == [
        (True, state)
    ] * 2
    assert sorted(read) == sorted(one.fingerprint for one in found)


def test_a_fact_that_is_zero_is_shown() -> None:
    """A count of nothing is known; only what is not known is left out."""
    web = pages()
    letter = stored(web, redrives=0, parent_id=None)
    text = shown(web, f"{QUEUE}/letters/{letter.id}")
    assert "<dt>redrives</dt><dd>0</dd>" in text
    assert "parent id" not in text
