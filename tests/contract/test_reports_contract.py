"""The contract of every `Reports`, and Redis with many workers."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any
from uuid import uuid4

import pytest
import redis
from builders import DLQ, NOW, a_letter, key_of

from celery_dlq.errors import StoreUnavailable
from celery_dlq.features.sentry.reports import (
    BURST,
    GAP_SECONDS,
    MOST_IDS,
    QUIET_SECONDS,
    REFILL_SECONDS,
    Report,
    ReportCause,
    Reports,
)
from celery_dlq.letters.record import DeadLetter
from celery_dlq.store.keys import Keys
from celery_dlq.store.scripts import whole_script
from celery_dlq.store.store import Store


def redis_reports(url: str, **options: Any) -> Reports:
    made = Store(url, timeout_seconds=2.0).part(Reports)
    vars(made).update(options)
    return made


@pytest.fixture
def reports(parts: Store) -> Reports:
    """Give each in turn, empty."""
    return parts.part(Reports)


def letters(count: int, **changes: Any) -> list[DeadLetter]:
    return [a_letter(**changes) for _ in range(count)]


def test_a_group_is_reported_when_it_is_new_and_when_it_grew_tenfold(reports: Reports) -> None:
    """Each report names the newest letters, the reported one first."""
    group = letters(120)
    found = {number: reports.report_of(letter) for number, letter in enumerate(group, 1)}
    reported = {number: report for number, report in found.items() if report is not None}
    assert reported == {
        1: Report(why=ReportCause.NEW, number=1, letter_ids=(group[0].id,)),
        10: Report(
            why=ReportCause.GREW, number=10, letter_ids=tuple(x.id for x in reversed(group[:10]))
        ),
        100: Report(
            why=ReportCause.GREW,
            number=100,
            letter_ids=tuple(x.id for x in reversed(group[100 - MOST_IDS : 100])),
        ),
    }


def test_asking_again_changes_nothing(reports: Reports) -> None:
    """A letter that could not be stored is asked about again, with its retries in between."""
    first, *others = letters(10)
    assert reports.report_of(first) == reports.report_of(first)
    for letter in others[:-1]:
        assert reports.report_of(letter) is None
        assert reports.report_of(letter) is None
    tenth = reports.report_of(others[-1])
    assert tenth is not None
    assert tenth.number == 10
    assert reports.report_of(others[-1]) == tenth


def test_groups_and_queues_are_counted_apart(reports: Reports) -> None:
    """Two causes are two reports."""
    reported = [
        reports.report_of(a_letter()),
        reports.report_of(a_letter(fingerprint="fedcba9876543210")),
        reports.report_of(a_letter(dead_letter_queue="mails-DLQ")),
    ]
    assert [report.number for report in reported if report] == [1, 1, 1]


def test_many_workers_report_each_number_once(redis_url: str) -> None:
    """The decision is one atomic script, whoever asks."""
    workers = [redis_reports(redis_url) for _ in range(4)]
    found = [workers[n % 4].report_of(letter) for n, letter in enumerate(letters(100))]
    assert [report.number for report in found if report] == [1, 10, 100]


IN_BULK = """
local function ask(KEYS, ARGV)
  {script}
end
local states, groups = {{}}, {{unpack(ARGV, 8)}}
for number = tonumber(ARGV[1]), tonumber(ARGV[2]) do
  local group = groups[number % #groups + 1]
  local reply = ask({{KEYS[1] .. group, KEYS[2], KEYS[3], KEYS[4]}},
    {{'letter-' .. number, group, ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7], '0', ''}})
  states[#states + 1] = reply[1]
end
return states
"""


OPTIONS = (
    int(QUIET_SECONDS * 1000),
    int(GAP_SECONDS * 1000),
    BURST,
    int(REFILL_SECONDS * 1000),
    MOST_IDS,
)


def ask_in_bulk(url: str, groups: list[str], count: int) -> Counter[int]:
    """Run the script itself for many letters, in few journeys; how often each reply came."""
    keys = Keys()
    states: Counter[int] = Counter()
    places = (keys.report(DLQ, ""), keys.tally(DLQ), keys.allowance(DLQ), keys.states(DLQ))
    with redis.Redis.from_url(url) as client:
        script = client.register_script(
            IN_BULK.format(script=whole_script("report", "celery_dlq.features.sentry"))
        )
        for begin in range(0, count, 5_000):
            args = [begin, begin + 4_999, *OPTIONS, *groups]
            states.update(script(keys=places, args=args))
    return states


def test_a_flood_of_100_000_letters_is_fewer_than_50_reports(redis_url: str) -> None:
    """Of seven causes: 1, 10, 100, 1,000 and 10,000 of each at most, and the allowance."""
    states = ask_in_bulk(redis_url, [uuid4().hex[:16] for _ in range(7)], 100_000)
    assert states.total() == 100_000
    assert 7 <= states.total() - states[0] < 50


def test_a_flood_of_causes_is_held_to_the_allowance_and_made_up_for_later(redis_url: str) -> None:
    """Letters that were put off are reported with the group's next one."""
    groups = [uuid4().hex[:16] for _ in range(5_000)]
    states = ask_in_bulk(redis_url, groups, 5_000)
    assert states == {1: BURST, 0: 5_000 - BURST}

    late = a_letter(fingerprint=groups[-1])
    reports = redis_reports(redis_url)
    assert reports.report_of(late) is None
    with redis.Redis.from_url(redis_url) as client:  # as if an hour had passed
        client.hset(Keys().allowance(DLQ), "at", int((time.time() - 3600) * 1000))
    report = reports.report_of(a_letter(fingerprint=groups[-1]))
    assert report is not None
    assert (report.why, report.number) == (ReportCause.NEW, 3)


def test_a_group_came_back_when_it_was_emptied_before(redis_url: str) -> None:
    """But not again and again while it is redriven again and again."""
    store = Store(redis_url, timeout_seconds=2.0).letters

    def dies(reports: Reports) -> Report | None:
        letter = a_letter(dead_lettered_at=NOW)
        report = reports.report_of(letter)
        store.dead_letter(letter, key_of(letter))
        return report

    patient = redis_reports(redis_url)
    first = dies(patient)
    assert first is not None
    assert first.why is ReportCause.NEW
    store.remove(DLQ, [letter_id for _, letter_id in store.ids([DLQ], "", most=100)])
    assert dies(patient) is None  # five minutes are not over

    impatient = redis_reports(redis_url, gap_seconds=0)
    assert dies(impatient) is None  # its group is not empty
    store.remove(DLQ, [letter_id for _, letter_id in store.ids([DLQ], "", most=100)])
    again = dies(impatient)
    assert again is not None
    assert (again.why, again.number) == (ReportCause.CAME_BACK, 1)
    store.close()


def test_a_group_came_back_when_a_redriven_message_of_it_dies(redis_url: str) -> None:
    """It may die before the redrive has removed the letters; each round is reported once."""
    store = Store(redis_url, timeout_seconds=2.0).letters
    reports = redis_reports(redis_url, gap_seconds=0)
    whys = []
    for redrives in (0, 0, 1, 1, 0, 2, 2):
        letter = a_letter(redrives=redrives)
        report = reports.report_of(letter)
        store.dead_letter(letter, key_of(letter))
        whys.append(report and report.why)
    assert whys == [
        ReportCause.NEW,
        None,
        ReportCause.CAME_BACK,
        None,
        None,
        ReportCause.CAME_BACK,
        None,
    ]
    store.close()


def test_a_group_known_to_the_store_but_not_here_came_back(redis_url: str) -> None:
    """It was quiet for a day, and what was remembered of it expired."""
    store = Store(redis_url, timeout_seconds=2.0).letters
    letter = a_letter()
    store.dead_letter(letter, key_of(letter))
    reports = redis_reports(redis_url)
    report = reports.report_of(a_letter())
    assert report is not None
    assert report.why is ReportCause.CAME_BACK
    with redis.Redis.from_url(redis_url) as client:
        assert client.ttl(Keys().report(DLQ, letter.fingerprint)) > 3600
    store.close()


def test_a_redis_that_is_away_says_so() -> None:
    """The letter is stored without a report."""
    reports = redis_reports("redis://127.0.0.1:1/0")
    with pytest.raises(StoreUnavailable):
        reports.report_of(a_letter())
