"""One search on every page: it reads the command line's words, and finds in all queues."""

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

from celery_dlq.errors import DLQError
from celery_dlq.features.search.words import WORDS, parsed
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.record import DeadLetter

OTHER = "mails-DLQ"


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a page search for as long as it takes, however busy the machine is."""
    intervals.change(monkeypatch, page=10.0)
    monkeypatch.setattr("celery_dlq.features.search.finding.NAMES_SECONDS", 10.0)


def stored(web: Pages, **changes: Any) -> DeadLetter:
    """A letter that is in the store."""
    letter = a_letter(**changes)
    web.dlq.store.dead_letter(letter, key_of(letter))
    return letter


def found(web: Pages, text: str, status: int = 200, **query: str) -> str:
    """The text of the page of what was found."""
    answer = web.handle(get("/find", query=urlencode({"q": text, **query})))
    assert answer.status == status, answer.body
    main = answer.body.decode().partition("<main")[2]
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", main)))


def test_words_are_those_of_the_command_line() -> None:
    """Each option of its filters, also as the URLs of lists have it; the rest is text."""
    asked = parsed("task=shop.charge arg:tenant=42 kwargs.total>100 root-id=r timeout after 10")
    assert asked.where == LetterFilter(
        task_name="shop.charge",
        root_id="r",
        conditions=("kwargs.tenant=42", "kwargs.total>100"),
    )
    assert asked.text == "timeout after 10"
    assert asked.letters.grep == asked.text
    assert parsed("task_name='a b' queue=orders").where == LetterFilter(task_name="a b")
    assert parsed("--task shop.charge --since 2h").where.since is not None
    assert parsed("it isn't there").text == "it isn't there"
    assert parsed("order=7").text == "order=7", "an unknown name is text"
    assert {"task", "reason", "where", "queue", "min-deliveries"} <= {*WORDS}


@pytest.mark.parametrize(
    "text",
    ["reason=nonsense", "since=soon", "min-deliveries=0", "arg:tenant", "--nobody", "x" * 1001],
)
def test_what_is_not_understood_is_said(text: str) -> None:
    """As a page, with what may be typed."""
    if text != "arg:tenant":  # no condition, so a text
        with pytest.raises(DLQError):
            parsed(text)
        assert "words of the command line" in found(pages(), text, status=400)


def test_a_letter_is_found_by_its_id_in_any_queue() -> None:
    """A whole id leads to its page; a beginning, and the id of its task, name it."""
    web = pages()
    for queue in (DLQ, OTHER):
        one = stored(
            web, dead_letter_queue=queue, task_id=f"7c9e6679-7425-40de-944b-{len(queue):012}"
        )
        answer = web.handle(get("/find", query=urlencode({"q": one.id})))
        assert answer.status == 303, answer.body
        assert dict(answer.headers)["location"] == f"/queues/{queue}/letters/{one.id}"
        assert f"{one.id} in {queue}" in found(web, one.id[:8])
    text = json.dumps({"id": "7c9e6679-7425-40de-944b-e07fc1f90ae7"})
    wanted = stored(web, task_name="shop.refund", headers=text)
    assert f"shop.refund {wanted.id}" in found(web, "7c9e6679-7425-40de-944b-e07fc1f90ae7")


def test_the_id_of_a_task_is_found_in_every_queue_whatever_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its index, or among the newest letters; the first queues must not use up the time."""
    intervals.change(monkeypatch, page=-1.0)
    monkeypatch.setattr("celery_dlq.features.search.finding.NAMES_SECONDS", -1.0)
    web, task_id = pages(), "7c9e6679-7425-40de-944b-e07fc1f90ae7"
    for queue in range(12):
        for number in range(4):
            stored(web, dead_letter_queue=f"lab-{queue}-DLQ", task_id=f"{queue}-{number}")
    one = stored(web, dead_letter_queue="zoo-DLQ", task_id=task_id, headers=f'{{"id":"{task_id}"}}')
    again = stored(web, dead_letter_queue="zoo-DLQ", task_id=task_id, retries=1)
    other = stored(web, dead_letter_queue="zoo-DLQ", headers=f'{{"root_id":"{task_id}"}}')
    text = found(web, task_id)
    assert "Letters of the task with this id" in text
    assert f"{one.id} in zoo-DLQ" in text
    assert f"{again.id} in zoo-DLQ" in text
    assert other.id not in text
    assert "not looked at" not in text
    assert web.handle(get("/find", query=urlencode({"q": one.id}))).status == 303
    monkeypatch.setattr("celery_dlq.features.search.places.MOST_SEARCHED", 1)
    stored(web, dead_letter_queue="zoo-DLQ", task_id=task_id, retries=2)
    assert "13 queues have older ones, which were not looked at" in found(web, task_id)


def test_a_text_is_searched_in_the_newest_letters_of_several_queues_whatever_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says what it left out: older letters, other queues, causes."""
    intervals.change(monkeypatch, page=-1.0)
    monkeypatch.setattr("celery_dlq.features.search.finding.NAMES_SECONDS", -1.0)
    web = pages()
    for queue in range(9):
        for number in range(3):
            letter = {"dead_letter_queue": f"lab-{queue}-DLQ", "id": f"{queue}-{number}"}
            stored(web, **letter, kwargs_json=json.dumps({"order": f"SO-{number}"}))
    text = found(web, "SO-1")
    assert text.count("1 letter matches of its 3.") == 8
    assert "1 queue of 9 was not searched: time ran out" in text
    assert "Causes and ids that begin so may be missing: time ran out" in text


def test_letters_are_counted_before_anything_can_be_done_with_them() -> None:
    """By a text in their arguments, and by filters, over all queues."""
    web = pages()
    for number in range(5):
        stored(
            web, id=f"a{number}", kwargs_json=json.dumps({"tenant": number % 2, "order": "SO-1042"})
        )
    stored(web, id="b", dead_letter_queue=OTHER, kwargs_json='{"tenant": 7}')
    text = found(web, "SO-1042")
    assert f"{DLQ} 5 letters match of its 5." in text
    assert OTHER not in text
    assert f"{DLQ} 2 letters match of its 5." in found(web, "arg:tenant=1")
    assert "5 letters match" not in found(web, "arg:tenant=1 SO-1042 queue=orders")
    assert f"{OTHER} 1 letter matches of its 1." in found(web, "arg:tenant=7")
    assert "Nothing has been found in 2 queues" in found(web, "SO-9")
    assert "did you mean" in found(web, "queue=ordres-DLQ SO-1042", status=400)


def test_a_value_inside_an_argument_is_found_by_its_path_and_the_page_says_how() -> None:
    """The name alone is one of an argument itself."""
    web = pages()
    inside = {"empfänger": {"mandant": "Klinikum Nord"}}
    stored(web, args_json=json.dumps([inside]), kwargs_json="{}")
    for words in (
        '"args[0].empfänger.mandant=Klinikum Nord"',
        'args[0].empfänger.mandant="Klinikum Nord"',
        "args[0].empfänger.mandant~Klinikum",
        "arg:mandant=1 queue=orders",
    ):
        text = found(web, words)
        says_how = "Write the path of a value inside another one" in text
        assert says_how is words.startswith("arg:"), text
        assert ("1 letter matches of its 1." in text) is not says_how, text


def test_causes_and_queues_are_found_by_name() -> None:
    """Also a cause by the beginning of its fingerprint, and one without letters."""
    web = pages()
    one = stored(web, fingerprint="0123456789abcdef", task_name="shop.charge", id="a")
    stored(
        web, fingerprint="fedcba9876543210", dead_letter_queue=OTHER, task_name="mail.send", id="b"
    )
    for words in (
        "CHARGE",
        "task=shop.charge",
        "01234567",
        "0123456789abcdef",
        "fingerprint=012345",
    ):
        text = found(web, words)
        assert f"shop.charge in {DLQ}: 1 letters" in text, words
        assert "mail.send in" not in text, words
    assert f"Queues {OTHER}" in found(web, "mails")
    web.dlq.note(DLQ, one.fingerprint, "look at the gateway")
    web.dlq.assembly.backend.letters.remove(DLQ, [one.id])
    assert f"{DLQ}: 0 letters" in found(web, one.fingerprint)


def test_a_search_that_was_cut_off_says_so_and_leads_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a queue from where it stopped, and to the queues that were not searched."""
    intervals.change(monkeypatch, page=0.0)
    web = pages()
    monkeypatch.setattr("celery_dlq.features.search.finding.LEAST_QUEUES", 1)
    for number in range(30):
        stored(web, id=f"a{number}")
        stored(web, id=f"b{number}", dead_letter_queue=OTHER)
    answer = web.handle(get("/find", query="q=nowhere"))
    body = answer.body.decode()
    assert "of the newest 25 of 30" in body
    on = re.search(r'href="(/queues/[^?"]*)\?([^"]*cursor=[^"]*)">Search on', body)
    assert on
    assert web.handle(get(on[1], query=unescape(on[2]))).status == 200
    others = re.search(r'href="/find\?([^"]*)">Search the others', body)
    assert others, body
    assert "1 queue of 2 was not searched: time ran out" in body
    second = web.handle(get("/find", query=unescape(others[1]))).body.decode()
    assert "time ran out" not in second
    assert {*re.findall(r"<h3>(\S+)</h3>", body + second)} == {DLQ, OTHER}


def test_names_and_values_are_completed_and_masked_values_are_not() -> None:
    """Each completion has what was typed before it."""
    web = pages()
    web.dlq.assembly.app.conf.dlq_redact = ["kwargs.card"]
    stored(web, task_name="shop.charge", kwargs_json='{"tenant": "nordic lights", "card": "4111"}')

    def completed(text: str) -> list[str]:
        answer = web.handle(get("/find/words", query=urlencode({"q": text})))
        assert answer.status == 200
        return list(json.loads(answer.body))

    assert completed("since=2h ta")[0] == "since=2h task="
    assert completed("task=sh") == ["task=shop.charge"]
    assert "shop.charge" in completed("charge")
    assert completed("arg:ten") == ["arg:tenant="]
    assert completed("arg:tenant=n") == ["arg:tenant='nordic lights'"]
    assert "4111" not in json.dumps(completed("arg:card="))
    assert completed(completed("reason=rej")[0]) == ["reason=rejected"]
    assert completed("x" * 2000) == []


def test_what_cannot_be_seen_is_no_completion() -> None:
    """Nor a lone surrogate, which no page can show."""
    web = pages()
    stored(web, task_name="odd\u202etask", kwargs_json='{"tenant": "\\ud800", "order": "A-1"}')
    for text, found in (("task=odd", []), ("arg:tenant=", []), ("arg:order=", ["arg:order=A-1"])):
        answer = web.handle(get("/find/words", query=urlencode({"q": text})))
        assert json.loads(answer.body) == found


def test_the_field_is_on_every_page_for_who_may_look() -> None:
    """A plain form; the page of results keeps what was typed."""
    web = pages()
    assert '<input id="find" name="q" type="search" value=""' in web.handle(get("/")).body.decode()
    assert 'value="a&#34;b"' in web.handle(get("/find", query='q=a"b')).body.decode()
    nobody = pages(access=lambda _: None)
    assert 'id="find"' not in nobody.handle(get("/")).body.decode()
