"""The filter of a page: what its URL or form says."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from html import unescape
from typing import Any

import pytest
from web_pages import SAME_SITE, form_of, pages, post, recorded

from celery_dlq.letters.filters import LetterFilter
from celery_dlq.web.http import Call, RequestError, fields_of
from celery_dlq.web.pages import filter_of, query_of
from celery_dlq.web.templating import Templates, exact, plain

NO_SITE: Any = None


def asked(query: str) -> LetterFilter:
    """The filter of a request."""
    return filter_of(Call(site=NO_SITE, query=fields_of(query)))


def test_ticked_letters_are_the_filter() -> None:
    """Beside the fields of the form."""
    found = asked("only=ticked&ids=a&ids=b&task_name=")
    assert found == LetterFilter(ids=frozenset({"a", "b"}))


def test_no_ticked_letter_is_not_all_letters() -> None:
    """Redriving or discarding the ticked ones would begin with the whole queue."""
    for query in ("only=ticked", "only=ticked&ids=", "only=ticked&task_name=shop.charge"):
        with pytest.raises(RequestError, match="expected letters to be ticked"):
            asked(query)
    assert not asked("ids=&task_name=")


def test_an_age_has_a_unit_and_a_year_has_none() -> None:
    """As on the command line."""
    now = datetime.now(timezone.utc)
    since = asked("since=2h").since
    assert since is not None
    assert timedelta(hours=2) <= now - since + timedelta(seconds=30) < timedelta(hours=2, minutes=1)
    with pytest.raises(RequestError, match="since"):
        asked("since=2026")


@pytest.mark.parametrize(
    "text",
    ["line\nend", "\u202egnihton", "bell\x07", " padded ", "a\r\nb", "\u200b", "\"<&>'", "\udcff"],
)
def test_a_form_carries_the_filter_that_its_page_shows(text: str) -> None:
    """Browsers change line ends of fields, and pages show invisible characters as escapes."""
    where = LetterFilter(grep=text, task_name=text)
    hidden = Templates().environment.from_string(
        '{% from "parts.html" import hidden %}{{ hidden(query) }}'
    )
    found = re.search(r'name="where" value="([^"]*)"', hidden.render(query=query_of(where)))
    assert found is not None
    sent = unescape(found[1]).replace("\n", "\r\n")
    form = {"where": [sent.encode("ascii").decode()], "ids": [""]}
    assert filter_of(Call(site=NO_SITE, form=form)) == where


@pytest.mark.parametrize("text", ["[]", "{", '{"grep": [5]}', '{"grep": 5}', "[" * 100_000])
def test_a_carried_filter_that_is_none_is_refused(text: str) -> None:
    """It must not become the whole queue."""
    with pytest.raises(RequestError):
        filter_of(Call(site=NO_SITE, form={"where": [text]}))


def test_what_a_page_says_of_a_filter_has_its_invisible_characters() -> None:
    """In one line, and not cut where the filter goes on."""
    assert exact("a\n\u202eb  c") == "a\\n\\u202eb  c"


def test_a_huge_number_is_no_failing_page() -> None:
    """An override of 400 digits ended every page that shows it."""
    assert plain(10**400) == "a number of many digits"
    assert plain(12_345) == "12,345"


@pytest.mark.parametrize("other", ["a b=1", '"', "x=\x01", "é=1", "[]={}", "=", "path=/"])
def test_an_odd_cookie_of_another_application_hides_none_of_ours(other: str) -> None:
    """All applications of a host share one header."""
    cookie, token = form_of()
    web = pages()
    reached = recorded(web)
    asked = post("/holds", f"{other}; {cookie}; {other}", token, headers=SAME_SITE)
    assert web.handle(asked).status == 200
    assert reached == ["hold"]
