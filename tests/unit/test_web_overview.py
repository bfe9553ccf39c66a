"""The overview says what is so: each reason, each warning, and why there are no letters."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from html import unescape
from typing import Any

import pytest
from builders import DLQ, NOW, a_letter, key_of
from celery import Celery
from fresh import fresh_conf
from web_pages import Pages, get, pages

from celery_dlq import DeadLetters
from celery_dlq.letters.record import Reason
from celery_dlq.store.worker_records import WorkerInfo


def shown(web: Pages, path: str = "/") -> str:
    """The text of a page."""
    response = web.handle(get(path))
    assert response.status == 200, response.body
    main = response.body.decode().partition("<main")[2]
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", main)))


def test_each_reason_is_shown() -> None:
    """The rarest may be the one that no redrive heals."""
    web = pages()
    for number, reason in enumerate(Reason):
        for one in range(len(Reason) - number):
            letter = a_letter(reason=reason, id=f"{number}-{one}", task_id=f"{number}-{one}")
            web.dlq.assembly.backend.letters.dead_letter(letter, key_of(letter))
    text = shown(web)
    for number, reason in enumerate(Reason):
        assert f"{reason.value} {len(Reason) - number}" in text


def an_app(**conf: Any) -> DeadLetters:
    """An app whose letters are in memory."""
    app = Celery("overview", broker="memory://", set_as_current=False)
    app.conf.update(**fresh_conf(), **conf)
    return DeadLetters(app)


def test_no_letters_without_a_policy_or_without_a_worker_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only a worker with the plugin makes letters, and only for what has a policy."""
    monkeypatch.setattr("celery._state._on_app_finalizers", set())  # shared tasks of other tests
    assert "Nothing is guarded" in shown(Pages(an_app()))
    guarded = an_app(dlq_queues={"celery": {"max_deliveries": 3}})
    assert "No live worker has the plugin" in shown(Pages(guarded))
    info = WorkerInfo(
        hostname="celery@a", pid=1, version="0.1.0", started_at=NOW, queues=("celery",), tasks=()
    )
    guarded.assembly.backend.workers.register(info)
    assert "There are no dead letters" in shown(Pages(guarded))


def test_remarks_on_the_configuration_are_counted() -> None:
    """The doctor says what they are, and what to do."""
    dlq = an_app(
        dlq_queues={name: {"max_deliveries": 3} for name in ("unknown-a", "unknown-b", "unknown-c")}
    )
    page = Pages(dlq).handle(get("/")).body.decode()
    assert re.search(r"[1-9] remarks? on the configuration: .*dlq doctor", page)


@pytest.mark.parametrize(
    "text", ["\u200b", "\u00ad", "\ufeff", "\u3164", "\U000e0041", "\u200d", "\ufe0f"]
)
def test_names_that_look_the_same_are_told_apart(text: str) -> None:
    """Characters without a shape are shown as escapes."""
    web = pages()
    for number, queue in enumerate((DLQ, f"{DLQ}{text}")):
        letter = a_letter(dead_letter_queue=queue, id=f"{number}", task_id=f"{number}")
        web.dlq.assembly.backend.letters.dead_letter(letter, key_of(letter))
    body = web.handle(get("/")).body.decode()
    assert text not in body
    assert text.encode("unicode_escape").decode() in body


def rolled(web: Pages, queue: str, hours: dict[int, int], *, now: int, gone: bool = False) -> None:
    """A cause with letters at some hours before, and now; Redis keeps them as it would have."""
    backend = web.dlq.assembly.backend
    for number in range(now or 1):
        letter = a_letter(
            dead_letter_queue=queue,
            id=f"{queue}-{gone}-{number}",
            fingerprint=("f" if gone else "a") * 16,
        )
        backend.letters.dead_letter(letter, key_of(letter))
    key, field = backend.keys.tally(queue), f"group:{letter.fingerprint}"
    parts = (backend.client.hget(key, field) or b"").decode().split("|", 6)
    hour = int(backend.letters.overviews.now().timestamp()) // 3600
    parts[3] = ",".join(f"{hour - before}:{count}" for before, count in sorted(hours.items()))
    backend.client.hset(key, field, "|".join(parts))
    if gone:
        backend.letters.remove(queue, [letter.id])


def test_a_queue_grows_by_the_day_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the rest of its hour alone; also letters that left count to the day."""
    monkeypatch.setattr("celery_dlq.features.trends.growth.SECONDS", 10)
    web, day = pages(), range(2, 24)
    rolled(web, "orders-DLQ", dict.fromkeys(day, 6), now=10)
    rolled(web, "usual-DLQ", dict.fromkeys(day, 290), now=5)
    rolled(web, "first-DLQ", {}, now=5)
    rolled(web, "mended-DLQ", dict.fromkeys(day, 2), now=1, gone=True)
    text = shown(web)
    # A little less if the minute has just begun.
    assert re.search(
        r"orders-DLQ is growing: (9|10) a minute, (100|9\d) times the day before; "
        r"first-DLQ is growing: [45] a minute, nothing the day before\.",
        text,
    )
    assert re.search("[45] a minute, as usual", text)
    body = web.handle(get()).body.decode()
    hot = re.findall(r'<tr class="hot">\s*<th scope="row"><a[^>]*>([^<]*)', body)
    assert {*hot} == {"orders-DLQ", "first-DLQ"}
    rolled(web, "orders-DLQ", dict.fromkeys(day, 54), now=1, gone=True)
    of_sixty = r"orders-DLQ is growing: (10|11) a minute, (11|10\.?\d*) times the day before"
    assert re.search(of_sixty, shown(web))


def test_a_day_that_is_not_known_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many causes to read: the rest of the hour decides."""
    monkeypatch.setattr("celery_dlq.features.trends.growth.SECONDS", 10)
    monkeypatch.setattr("celery_dlq.features.trends.growth.MOST_CAUSES", 1)
    web = pages()
    for number in range(2):
        now = datetime.now(timezone.utc)
        letter = a_letter(id=f"{number}", fingerprint=f"{number}" * 16, dead_lettered_at=now)
        web.dlq.assembly.backend.letters.dead_letter(letter, key_of(letter))
    assert re.search(rf"{DLQ} is growing: (2 a minute|1[01]\d an hour)\.", shown(web))


def test_a_queue_without_a_policy_says_what_mends_it() -> None:
    """Its letters are of tasks with a policy, or of before."""
    dlq = an_app(dlq_queues={"mails": {"max_deliveries": 3}})
    web = Pages(dlq)
    letter = a_letter()
    dlq.assembly.backend.letters.dead_letter(letter, key_of(letter))
    text = shown(web)
    assert "orders-DLQ: no policy of its queue" in text
    assert 'app.conf.dlq_queues = {"orders": {"max_deliveries": 5}}' in text


def test_queues_whose_causes_were_not_looked_into_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The list of causes is of the queues that grow most; it says how many others there are."""
    monkeypatch.setattr("celery_dlq.features.trends.growth.SECONDS", 10)
    web = pages()
    for number in range(4):
        letter = a_letter(dead_letter_queue=f"lab-{number}-DLQ", fingerprint="0123456789abcdef")
        web.dlq.assembly.backend.letters.dead_letter(letter, key_of(letter))
        if number == 2:
            assert "Not looked into" not in shown(web)
    assert "Not looked into: 1 more queue with letters of the last hour" in shown(web)
