"""The filter of a page: what its URL or form says."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest

from celery_dlq.filters import LetterFilter
from celery_dlq.web.http import Request, RequestError, fields_of
from celery_dlq.web.pages.common import filter_of


def asked(query: str) -> LetterFilter:
    """The filter of a request."""
    call: Any = SimpleNamespace(request=Request(method="GET", path="/", query=fields_of(query)))
    return filter_of(call)


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
