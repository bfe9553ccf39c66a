"""How often the parts look, and how long they wait: the intervals inside the package.

None is a setting: these depend on each other, and on what the code does between two looks. What a
user knows better has one, as ``dlq_lease``. Tests shorten them in one way: they replace `current`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The intervals; every number is in seconds."""

    # Workers
    tick: float = 1.0  # Between two rounds of housekeeping; most else that is periodic counts them
    worker_silent: float = 30.0  # Without a heartbeat for so long, a worker is no longer live
    counter_beat: float = 1.0  # Between two heartbeats for the counters of its queues
    counter_stale: float = 5.0  # Without one for so long, its deliveries are over
    metrics_flush: float = 5.0  # A process that is killed loses the counts of at most so long
    start_look: float = 1.0  # Between two attempts to reach a store that is away at the start
    signal_again: float = 0.01  # Until a signal that interrupted our code is sent again
    signal_wait: float = 30.0  # Then it interrupts us; all we wait for has a shorter time-out
    last_try: float = 3.0  # A worker that ends tells a store that is away for so long
    signal_follows: float = 0.25  # A pool process dies so long before the main one gets the signal
    spool_after: float = 60.0  # A letter waits in memory so long, then in `dlq_spool_dir`
    consumer_timeout: float = 1800.0  # RabbitMQ's, by default; nothing waits half so long
    # Leases of fetched messages; each is shorter where `dlq_lease` is short
    lease_tick: float = 0.24  # Between two rounds: renew, confirm, give back, look for the dead
    lease_retry: float = 1.0  # The same after a failure: others take what is not renewed
    # Between two confirmations of acknowledgements, and looks if messages wait for one that hangs
    lease_wait: float = 0.73
    bell: float = 20.0  # Longest wait for the bell; a worker that hangs takes one token
    lease_max_look: float = 3.6  # Between two looks for the dead; no idle connection is closed so
    lease_max_loop: float = 1.0  # Own leases come first: what is left goes on in the next round
    lease_max_hold_off: float = 10.0  # After a silence of Redis nobody is taken for dead so long
    lease_reply: float = 5.0  # A connection that hangs must not cost the leases
    # A store with a replica
    replica_first: float = 1.0  # Longest wait for the first answer of a replica
    replica_wait: float = 0.1  # The same later, for each letter
    replica_look: float = 30.0  # Without any replica, until the next question for one
    replica_doubt: float = 10.0  # After an answer of a replica, its silence means a lost master
    # Jobs
    job_look: float = 2.0  # Between two looks for jobs that wait, or for letters behind one
    unfinished: float = 900.0  # A redrive with `at_most` stops if none of its messages ends so long
    short_look: float = 0.2  # Between two looks at what another process does soon, e.g. a canary
    job_beat: float = 1.0  # Between two heartbeats of a job, each of which is a write
    job_silent: timedelta = timedelta(seconds=15)  # Without one for so long, a job has died
    claim: float = 60.0  # Letters of a batch are ours for so long; renewed after a quarter of it
    grace: timedelta = timedelta(minutes=1)  # Until a change of what happens to letters begins
    # Publishing
    publish_reply: float = 10.0  # Longest wait for a broker's reply: less than `job_silent`
    publish_retry: float = 0.2  # Before the second attempt; twice as long before the third
    confirm: float = 60.0  # Longest wait for the end of an alarm, and for one confirmation
    pace_beat: float = 0.5  # Between two heartbeats of a job that waits because of its rate
    # Readers that follow a queue
    poll: float = 0.5  # Between two looks for new letters
    max_poll: float = 10.0  # The same, while the store is away
    export_lease: float = 15.0  # A killed export keeps others out for so long
    export_note: float = 3600.0  # An export that follows into a local folder says that it lives
    page: float = 0.04  # A page searches and counts so long; the rest of 0.1 s is for its HTML
    remote_control: float = 1.0  # All workers together have so long for their replies
    # Held messages
    hold_noticed: timedelta = timedelta(seconds=3)  # Workers hold messages until they notice
    release_look: float = 0.5  # Between two looks whether its circuit breaker has opened again
    release_retry: timedelta = timedelta(minutes=1)  # After a release that failed
    # What tests changed of the intervals that features have: `celery_dlq.registry.interval`
    of_features: Mapping[str, Any] = field(default_factory=dict)


current = Timing()
"""What the parts read, each time."""

CONNECT: dict[str, Any] = {"max_retries": 1, "interval_start": 0.2, "interval_step": 0.2}
"""How a connection to a broker is tried, as kombu's ``ensure_connection`` takes it."""


class Backoff:
    """The one back-off: each pause is twice as long as the one before, up to a bound."""

    def __init__(self, first: float, longest: float) -> None:
        self._first, self._longest = min(first, longest), longest
        self._next, self.failures = self._first, 0

    def failed(self) -> float:
        """Return how long to pause after one more failure."""
        pause, self._next = self._next, min(2 * self._next, self._longest)
        self.failures += 1
        return pause

    def worked(self) -> None:
        """Begin with the shortest pause again."""
        self._next, self.failures = self._first, 0
