"""What a page leaves out for want of time it says; and one cause has one rate."""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from urllib.parse import urlencode

import intervals
import pytest
from builders import DLQ
from test_web_groups import GROUP, GROUPS, PAGE, shown, stored
from web_pages import SAME_SITE, Pages, form_of, get, pages, post

from celery_dlq.features.differences.operations import NOT_IN_TIME
from celery_dlq.operations.incidents import Incidents
from celery_dlq.store.overviews import read_group

TENANT = "kwargs.tenant=nordic"


def a_cause_and_others(web: Pages, minutes: float = 4) -> None:
    """Letters of one tenant that came evenly until now, and those of others."""
    now = datetime.now(timezone.utc)
    for number in range(60):
        at = now - timedelta(minutes=minutes) * (1 - number / 60)
        own, other = {"tenant": "nordic", "order": number}, {"tenant": f"t{number % 9}"}
        stored(web, id=f"a{number}", kwargs_json=json.dumps(own), dead_lettered_at=at)
        other_one = {"id": f"b{number}", "fingerprint": "f" * 16, "dead_lettered_at": at}
        stored(web, **other_one, kwargs_json=json.dumps(other))


def test_a_comparison_without_time_says_so_on_the_page_and_in_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hold of all of a task must not look as if nothing set its letters apart."""
    seconds = "celery_dlq.features.differences.operations.AT_ONCE_SECONDS"
    monkeypatch.setattr(seconds, 10.0)
    web = pages()
    a_cause_and_others(web)
    text = shown(web, PAGE)
    assert NOT_IN_TIME not in text
    assert f"Hold shop.charge with {TENANT}" in text
    monkeypatch.setattr(seconds, 1e-9)
    text = shown(web, PAGE)
    assert f"{NOT_IN_TIME} Look again" in text
    assert f"All of the task. {NOT_IN_TIME}" in text
    assert TENANT not in text
    assert all(one.remark for one in web.dlq.incidents())


def test_the_time_of_a_comparison_is_that_of_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is busy with other work the answer is the same."""
    web = pages()
    a_cause_and_others(web)
    clock = iter(range(10**9))
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
    incidents = Incidents(web.dlq.assembly)
    group = web.dlq.group(DLQ, GROUP)
    found = incidents.of_cause(DLQ, group, incidents.example_of(DLQ, group))
    assert (found.remark, found.conditions) == ("", (TENANT,))


def test_the_list_of_causes_says_what_it_had_no_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that most letters share, and what happened to the newest ones."""
    web = pages()
    a_cause_and_others(web)
    monkeypatch.setattr("celery_dlq.features.differences.shares.SECONDS", 60.0)
    monkeypatch.setattr("celery_dlq.web.pages.queues.EXAMPLES_SECONDS", 60.0)
    assert "no time" not in shown(web, GROUPS)
    monkeypatch.setattr("celery_dlq.features.differences.shares.SECONDS", 0.0)
    monkeypatch.setattr("celery_dlq.web.pages.queues.EXAMPLES_SECONDS", -1.0)
    text = shown(web, GROUPS)
    assert text.count("what they share is not known: no time") == 2
    assert "newest letters of 2 causes is left out: there was no time to read them" in text


def test_the_overview_says_that_it_had_no_time_for_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An empty message would be one that the letter has not."""
    web = pages()
    stored(web)
    for slow, other in (("thread_time", "monotonic"), ("monotonic", "thread_time")):
        clock = {slow: iter((0.0, 0.0, 0.0, 9.0)).__next__, other: lambda: 0.0}
        monkeypatch.setattr("celery_dlq.features.trends.growth.time", SimpleNamespace(**clock))
        assert "no time to read its message" in shown(web, "/"), slow


@pytest.mark.parametrize("minutes", [4.0, 30.0])
def test_a_cause_has_one_rate_on_every_page(minutes: float) -> None:
    """Its sentence says how it goes on, and no number of its own."""
    web = pages()
    a_cause_and_others(web, minutes)
    for page, times in ((GROUPS, 2), (PAGE, 2), ("/", 1)):
        found = re.findall(r"([\d.]+) an? \w+", shown(web, page))
        same = pytest.approx(web.dlq.group(DLQ, GROUP).per_minute, rel=0.1)
        assert sum(float(one) == same for one in found) >= times, found
        assert page == "/" or len(found) == times, found
    assert "Steady; all of these letters" in shown(web, PAGE)


@pytest.mark.parametrize(
    ("before", "since", "at", "began", "expected"),
    [
        (0, 30, 130, -3600, 30 * 60 / 130),  # it came back
        (0, 30, 130, 60, 30 * 60 / 70),  # it is as young as that
        (0, 30, 40, 20, 30),  # and has a minute at least
        (50, 10, 60, -3600, 10),  # it goes on
        (50, 0, 20, -3600, 50 * 60 / 320),  # perhaps it does
        (50, 0, 31, -3600, 0),  # it would have come
        (1, 0, 290, -3600, 60 / 590),  # rarely
    ],
)
def test_how_fast_a_cause_comes(
    before: int, since: int, at: int, began: int, expected: float
) -> None:
    """By its counts of five minutes each: those before, those that run, and the time of both."""
    clock = 1_800_000_000
    counts = ",".join(f"{clock // 300 + n}:{k}" for n, k in ((0, since), (-1, before)) if k)
    text = f"{(clock + began) * 1_000_000}|0|||{counts}||"
    now = datetime.fromtimestamp(clock + at, timezone.utc)
    assert read_group(GROUP, 1, text, now=now).per_minute == pytest.approx(expected)


def test_a_cause_that_never_was_empty_is_not_said_to_have_been() -> None:
    """Only one whose letters had all left begins anew."""
    web = pages()
    stored(web)
    assert b"it was last empty" not in web.handle(get(PAGE)).body
    web.dlq.discard(DLQ, fingerprint=GROUP)
    stored(web)
    assert "counted since it was last empty, " in shown(web, PAGE)


def test_a_hold_says_before_what_it_would_have_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the letters of the last minutes with its task and argument, and not more than those."""
    intervals.change(monkeypatch, page=10.0)
    web = pages()
    a_cause_and_others(web)

    def charge() -> None:
        """Nothing runs it."""

    web.dlq.app.task(charge, name="shop.charge", shared=False)
    cookie, token = form_of()
    for where, expected in (
        (TENANT, "60 of these messages died in the last 10 min; "),
        ("", "120 of these messages died in the last 10 min; "),
        ("kwargs.tenant=nobody", "0 of these messages died in the last 10 min; "),
    ):
        fields = urlencode({"task": "shop.charge", "where": where})
        request = post("/holds", cookie, token, fields=fields, headers=SAME_SITE)
        body = web.handle(request).body.decode()
        assert re.search(expected, body), body
    assert web.dlq.holds() == []


def test_long_names_break_at_dots_and_underscores_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short one is a text as any other; what a name has is escaped as ever."""
    monkeypatch.setattr("celery_dlq.features.trends.growth.SECONDS", 10.0)
    intervals.change(monkeypatch, page=10.0)
    web = pages()
    stored(web, task_name="lab.transmissions.send_observation_report<b>\x1b")
    broken = "lab.<wbr>transmissions.<wbr>send_<wbr>observation_<wbr>report&lt;b&gt;\\x1b</span>"
    for path in ("/", GROUPS, PAGE, f"{GROUPS}/letters"):
        body = web.handle(get(path)).body.decode()
        assert f'<span class="name">{broken}' in body, path
