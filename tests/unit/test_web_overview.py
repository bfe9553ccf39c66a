"""The overview says what is so: each reason, each warning, and why there are no letters."""

from __future__ import annotations

import re
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
