"""Pages say "no letters now" only if they have looked, and lead to what was mended."""

from __future__ import annotations

from urllib.parse import urlencode

from builders import DLQ, a_letter, key_of
from test_web_groups import GROUP, GROUPS, PAGE, shown, stored
from web_pages import SAME_SITE, Pages, form_of, get, pages, post

from celery_dlq.web.http import MAX_TICKED
from celery_dlq.web.pages.letters import PAGE as PAGE_SIZE

LETTERS = f"{GROUPS}/letters"


def test_an_emptied_last_page_does_not_say_that_the_queue_is_empty() -> None:
    """Its letters left; the queue has others."""
    web = pages()
    ids = [stored(web).id for _ in range(PAGE_SIZE + 5)]
    older = web.dlq.page(DLQ, size=PAGE_SIZE).older
    assert older is not None
    web.dlq.assembly.backend.letters.remove(DLQ, ids[:5])
    text = shown(web, LETTERS, cursor=older)
    assert "no letters now" not in text
    assert "Newest letters" in text
    assert "no letters now" not in shown(web, LETTERS, cursor=older, task_name="shop.charge")


def test_entries_without_a_cause_are_no_empty_queue() -> None:
    """What is no letter is in no group."""
    web = pages()
    letter = stored(web)
    store = web.dlq.assembly.backend
    store.client.xadd(store.keys.letters(DLQ), {"mood": "bad"})
    store.letters.remove(DLQ, [letter.id])
    text = shown(web, GROUPS)
    assert "no letters now" not in text
    assert "1 entries" in text or "1 entry" in text


def test_a_mended_cause_stays_in_the_list_and_its_job_leads_to_it() -> None:
    """For a day; a cause that has letters again is in the table only."""
    web = pages()
    stored(web)
    web.dlq.discard(DLQ, fingerprint=GROUP)
    body = linked(web, GROUPS)
    assert f"/groups/{GROUP}" in body
    (job,) = web.dlq.jobs()
    assert f"/groups/{GROUP}" in linked(web, f"/jobs/{job.id}")
    assert noted(web) == 303
    assert web.dlq.notes(DLQ, GROUP)[0].text == "mended"
    stored(web)
    assert linked(web, GROUPS).count(f"groups/{GROUP}") == 1


def test_a_cause_that_comes_again_is_counted_anew() -> None:
    """What its page says of the time before its letters were gone, it does not know."""
    web = pages()
    for _ in range(3):
        stored(web)
    web.dlq.discard(DLQ, fingerprint=GROUP)
    stored(web)
    found = web.dlq.group(DLQ, GROUP)
    assert (found.last_hour, sum(found.course)) == (1, 1)
    body = linked(web, PAGE)
    assert "<dt>last hour</dt><dd>+1</dd>" in body
    assert "<dt>counted since</dt><dd>it was last empty, " in body
    assert linked(web, GROUPS).count("Since it was last empty") == 3


def test_a_mended_queue_is_not_hot() -> None:
    """It had many letters in the last hour, and has none now."""
    web = pages()
    letter = stored(web)
    other = a_letter(dead_letter_queue="mail-DLQ")
    web.dlq.assembly.backend.letters.dead_letter(other, key_of(other))
    web.dlq.assembly.backend.letters.remove(DLQ, [letter.id])
    assert [*web.dlq.assembly.reading().busiest()] == ["mail-DLQ", DLQ]
    assert web.handle(get("/")).body.count(b'class="hot"') == 1


def linked(web: Pages, path: str) -> str:
    """The source of a page's content."""
    return web.handle(get(path)).body.decode().partition("<main")[2]


def noted(web: Pages) -> int:
    """Add a note; the status of the answer."""
    cookie, token = form_of()
    fields = urlencode({"text": "mended"})
    request = post(f"{PAGE}/notes", cookie, token, fields=fields, headers=SAME_SITE)
    return web.handle(request).status


def test_the_page_of_a_discard_has_the_way_back() -> None:
    """Its button makes a plan of what this job discarded; who starts it gets just that back."""
    web = pages()
    mine = stored(web)
    web.dlq.discard(DLQ, ids={mine.id})
    (job,) = web.dlq.jobs()
    theirs = stored(web)
    web.dlq.discard(DLQ, ids={theirs.id})
    assert "Restore what it discarded" in shown(web, f"/jobs/{job.id}")
    cookie, token = form_of()
    answer = web.handle(post(f"/jobs/{job.id}/restore", cookie, token, headers=SAME_SITE))
    assert answer.status == 303
    plan = next(job for job in web.dlq.jobs() if job.kind == "restore")
    assert f"1 letter that job {job.id} discarded" in shown(web, f"/jobs/{plan.id}")
    web.dlq.start(plan.id)
    web.dlq.assembly.jobs().run_next(lambda: False)
    assert [letter.id for letter in web.dlq.letters(DLQ)] == [mine.id]


def test_letters_that_a_redrive_skipped_are_not_among_the_published() -> None:
    """Another command has them all."""
    web = pages()
    letter = stored(web)
    web.dlq.store.claims.claim(DLQ, [letter.id], owner="other", lease_seconds=60)
    plan = web.dlq.plan("redrive", DLQ)
    assert plan.preview["claimed"] == 1
    assert "1 of these letters would be skipped now" in shown(web, f"/jobs/{plan.id}")
    job_id = web.dlq.redrive(DLQ, force=True).redrive_id
    assert "0 of 1 letters published 1 skipped or kept" in shown(web, f"/jobs/{job_id}")
    assert "done 0 of 1 1 skipped or kept" in shown(web, "/jobs")


def test_those_that_died_again_are_counted_as_long_as_they_are_here() -> None:
    """Redriven once more, they are not: the page says what the number is of."""
    web = pages()
    stored(web)
    job_id = web.dlq.redrive(DLQ, force=True).redrive_id
    stored(web, headers=f'{{"dlq_redrive": "{job_id}"}}')
    text = shown(web, f"/jobs/{job_id}")
    assert "1 died again (still here)" in text
    assert "died again, still here" not in text


def test_as_many_letters_as_may_be_ticked_are_taken() -> None:
    """The number that is refused is that of letters, not of fields."""
    web = pages()
    stored(web)
    ids = [("ids", f"{number:032x}") for number in range(MAX_TICKED)]
    query = urlencode([("only", "ticked"), ("task_name", "shop.charge"), *ids])
    assert web.handle(get(f"{GROUPS}/redrive", query=query)).status == 200
    more = urlencode([("only", "ticked"), ("ids", "x"), *ids])
    refused = web.handle(get(f"{GROUPS}/redrive", query=more))
    assert (refused.status, b"at most 200 ticked letters" in refused.body) == (400, True)
