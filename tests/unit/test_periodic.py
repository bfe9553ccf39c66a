"""What a worker does once a second: one part that fails starves no other."""

from __future__ import annotations

from celery_dlq.errors import StoreUnavailable
from celery_dlq.worker.periodic import PeriodicTasks


class Part:
    """Counts its ticks; away while told so."""

    def __init__(self, *, away: bool = False) -> None:
        self.ticks, self.away = 0, away

    def tick(self) -> None:
        self.ticks += 1
        if self.away:
            raise StoreUnavailable("away")

    def close(self) -> None:
        """As a periodic task."""


def ticks(parts: list[Part], number: int) -> list[int]:
    """How often each ticked."""
    tasks = PeriodicTasks()
    tasks.add(*parts)
    for _ in range(number):
        tasks.tick()
    return [part.ticks for part in parts]


def test_a_part_whose_own_place_is_away_does_not_starve_those_before_it() -> None:
    """One master of a cluster is down, say: the heartbeat goes to another and must go on."""
    heartbeat, retention, metrics = Part(), Part(away=True), Part()
    assert ticks([heartbeat, retention, metrics], 100) == [100, 8, 0]


def test_while_the_store_is_away_all_rest_longer_and_longer() -> None:
    """Each attempt may cost a timeout, for which the user's tasks wait."""
    assert ticks([Part(), Part(away=True), Part()], 100)[1:] == [8, 0]
    assert ticks([Part(away=True), Part(), Part()], 100) == [8, 0, 0]


def test_what_answers_again_is_asked_each_second_again() -> None:
    """The rests begin with the shortest one once all parts have worked."""
    heartbeat, away, last = Part(), Part(away=True), Part()
    tasks = PeriodicTasks()
    tasks.add(heartbeat, away, last)
    for _ in range(8):
        tasks.tick()
    away.away = False
    for _ in range(16):
        tasks.tick()
    seen = away.ticks, last.ticks
    tasks.tick()
    assert (away.ticks, last.ticks) == (seen[0] + 1, seen[1] + 1)
    away.away = True
    tasks.tick()
    tried = away.ticks
    tasks.tick()
    tasks.tick()
    assert away.ticks == tried + 1
