"""The value of a group in Redis, over days: bounded, and right after each hour."""

from __future__ import annotations

from typing import Any

from celery_dlq.backends.redis.connect import connect
from celery_dlq.backends.redis.scripts import source

HOUR, FIVE_MINUTES = 3_600_000, 300_000


def grown(redis_url: str, times: list[int], releases: list[str]) -> list[str]:
    """The parts of the value after letters at some times (milliseconds) with some releases."""
    script = f"""{source("parts/group")}
    local group = nil
    for n = 1, #ARGV, 2 do
      group = grown(group, ARGV[n], 'id', tonumber(ARGV[n]), ARGV[n + 1], '{{"a": "|"}}')
    end
    return group"""
    pairs: list[Any] = [part for pair in zip(times, releases, strict=True) for part in pair]
    text: bytes = connect(redis_url, 2.0).eval(script, 0, *pairs)
    return text.decode().split("|", 6)


def test_a_course_has_the_hours_of_one_day(redis_url: str) -> None:
    """Hours without letters take no place; older ones go."""
    times = [n * HOUR for n in (1000, 1000, 1003, 1023, 1024, 1024)]
    parts = grown(redis_url, times, ["r1"] * len(times))
    assert parts[3] == "1024:2,1023:1,1003:1"
    assert parts[0] == str(1000 * HOUR)
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


def test_the_span_of_a_number_is_not_found_in_another(redis_url: str) -> None:
    """``10`` is not ``100``."""
    assert grown(redis_url, [100 * HOUR, 110 * HOUR], ["1", "11"])[3:6] == [
        "110:1,100:1",
        f"{110 * 12}:1",
        "11,1",
    ]
