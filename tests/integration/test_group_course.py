"""The value of a group in Redis, over days: bounded, and right after each hour."""

from __future__ import annotations

from typing import Any

from celery_dlq.features.differences.operations import course_of
from celery_dlq.letters.course import CauseTiming, timings
from celery_dlq.letters.record import from_micros
from celery_dlq.store.connect import connect
from celery_dlq.store.overviews import read_group
from celery_dlq.store.records import Group
from celery_dlq.store.scripts import script_source

HOUR = 3_600_000


def grown(redis_url: str, times: list[int], releases: list[str]) -> list[str]:
    """The parts of the value after letters at some times (milliseconds) with some releases."""
    script = f"""{script_source("parts/group")}
    local group = nil
    for n = 1, #ARGV, 2 do
      group = grown(group, ARGV[n], 'id', tonumber(ARGV[n]), ARGV[n + 1], '{{"a": "|"}}')
    end
    return group"""
    pairs: list[Any] = [part for pair in zip(times, releases, strict=True) for part in pair]
    text: bytes = connect(redis_url, 2.0).eval(script, 0, *pairs)
    return text.decode().split("|", 6)


def test_hours_without_letters_take_no_place(redis_url: str) -> None:
    """Older ones than a day go; the newest five minutes are not in the hours yet."""
    times = [n * HOUR for n in (900, 1000, 1000, 1003, 1023, 1024, 1024)]
    parts = grown(redis_url, times, ["r1"] * len(times))
    assert parts[3:5] == ["1023:1,1003:1,1000:2", f"{1024 * 12}:2"]
    assert parts[0] == str(900 * HOUR)
    assert parts[6] == '{"a": "|"}'


def test_a_group_that_always_grows_is_bounded(redis_url: str) -> None:
    """A letter every minute for three days, each with a release of its own."""
    times = [1_772_600_000_000 + n * 60_000 for n in range(3 * 24 * 60)]
    hours, recent, releases = grown(redis_url, times, [str(n) for n in range(len(times))])[3:6]
    assert len(hours.split(",")) == 24
    assert len(recent.split(",")) == 12
    assert {pair.split(":")[1] for pair in hours.split(",")[1:]} == {"60"}
    assert {pair.split(":")[1] for pair in recent.split(",")[1:]} == {"5"}
    assert releases.split(",") == ["4319", "4318", "4317", "4316", "0"]


def test_every_letter_is_in_the_course(redis_url: str) -> None:
    """As it is read: 90 minutes, one letter in each; the last five minutes have begun."""
    start = 492_400 * HOUR
    now = from_micros((start + 89 * 60_000) * 1000)
    text = "|".join(grown(redis_url, [start + n * 60_000 for n in range(90)], [""] * 90))
    group = read_group("aa", 90, text, now=now)
    assert tuple(group.course) == (*[0] * 22, 60, 30)
    assert group.last_hour == 60


def test_the_course_says_how_a_cause_grows_also_of_letters_that_left(redis_url: str) -> None:
    """By the hours of its group, beside another group's; of one that began anew, of both lives."""
    start, now = 492_400 * HOUR, 492_424 * HOUR - 60_000

    def read(minutes: list[int]) -> Group:
        times = [start + one * 60_000 for one in minutes]
        first, last, *others = grown(redis_url, times, [""] * len(times))
        text = "|".join((f"{first}000", f"{last}000", *others))  # microseconds, as letters have
        return read_group("aa", len(times), text, now=from_micros(now * 1000))

    def said(*lives: list[int]) -> CauseTiming:
        courses = {"a": course_of([*map(read, lives)], now / 1000)}
        courses["b"] = course_of([read([*range(0, 1439, 12)])], now / 1000)
        return timings(courses, {}, ["a"], starts_at=start / 1000, ends_at=now / 1000)["a"]

    growing = said([int(1438 * (n / 300) ** 0.5) for n in range(300)])
    assert growing.clauses == ("growing: 26 an hour now",)
    assert said([*range(0, 1439, 6)]).clauses == ("steady: 10 an hour",)
    anew = [*range(900, 1439, 6)]
    (since, _steady) = said(anew).clauses
    assert since.startswith(
        f"since {from_micros((start + 900 * 60_000) * 1000):%Y-%m-%d %H:%M} UTC"
    )
    assert said(anew, [*range(0, 900, 6)]).clauses == ("steady: 10 an hour",)


def test_the_number_of_an_hour_is_not_found_in_another(redis_url: str) -> None:
    """``10`` is not ``100``, nor is a release the beginning of another."""
    parts = grown(redis_url, [100 * HOUR, 110 * HOUR, 111 * HOUR], ["1", "11", "1"])
    assert parts[3:6] == ["110:1,100:1", f"{111 * 12}:1", "1,11"]


def test_the_course_of_a_cause_of_this_hour_has_parts_of_five_minutes() -> None:
    """Of one that died, was redriven and dies again, an hour would make one steady pace."""
    now = 1_760_001_000.0
    hour = int(now // 3600)

    def life(minutes: float, letters: int) -> Group:
        at = now - 60 * minutes
        text = f"{at * 1e6:.0f}|{at * 1e6 + 9e6:.0f}|||{int(at // 300)}:{letters}||"
        return read_group("a", letters, text, now=from_micros(int(now * 1e6)))

    lives = [life(1, 40), life(20, 30)]
    found = course_of(lives, now)
    places = {int((now - 60 * minutes) // 300): letters for minutes, letters in ((1, 40), (20, 30))}
    assert (found.width, found.buckets, found.letters) == (300, places, 70)
    older = course_of([*lives, life(120, 9)], now)
    assert (older.width, older.letters) == (3600, 79)
    assert older.buckets[hour - 2] == 9
