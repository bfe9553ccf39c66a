"""A fleet and a flood on paper: where does it break first, and which setting moves that?

The costs are those of docs/performance.md, measured on one core of 2.5 GHz; give your own.
Standard library only.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

TASK_US = 84  # Redis's CPU for a guarded no-op; plain Celery: 92
LETTER_US = 350  # Redis's CPU to store a letter
BEAT_US = 70  # Redis's CPU for an idle worker, each second
WAKE_US = 500  # Redis's CPU for a message that wakes an idle worker, however many are idle
TASK_BYTES = 2_375  # on the wire, both ways
CONNECTIONS = 11  # of a worker to the broker's Redis
LETTER_BYTES = 3_533  # in Redis, for a body of 1 KB
CUT_SHARE = 0.75  # of a letter without its traceback and history
SPOOL_FILES = 100_000  # letters that wait on the disk of a host
EXPORT_A_SECOND = 40_000


def arguments() -> argparse.Namespace:
    """What the fleet is like."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=1_000)
    parser.add_argument("--hosts", type=int, default=50)
    parser.add_argument("--idle", type=float, default=0.3, help="share of workers that wait")
    parser.add_argument("--tasks", type=float, default=1_000, help="a second")
    parser.add_argument("--letters", type=int, default=10_000_000, help="of the flood")
    parser.add_argument("--flood", type=float, default=500, help="letters a second")
    parser.add_argument("--maxmemory", type=float, default=16, help="GB of Redis")
    parser.add_argument("--maxclients", type=int, default=10_000, help="of Redis")
    parser.add_argument("--letter-bytes", type=int, default=LETTER_BYTES)
    parser.add_argument("--memory-limit", type=float, default=0.8, help="dlq_memory_limit")
    parser.add_argument("--exported", action="store_true", help="dlq export --follow, and trimmed")
    parser.add_argument("--own-redis", action="store_true", help="dlq_url is another Redis")
    parser.add_argument("--breaker", action="store_true", help="a circuit_breaker on the queue")
    return parser.parse_args()


def fleet(given: argparse.Namespace) -> Iterator[tuple[str, float, float, str]]:
    """What the broker's Redis carries: name, load, most, and what moves it."""
    idle = given.workers * given.idle
    letters = 0 if given.own_redis else flood_rate(given) * LETTER_US
    tasks, beats = given.tasks * TASK_US, given.workers * BEAT_US
    # Beyond some hundred messages a second, the woken worker has not slept again yet.
    wakes = min(given.tasks, 150) * WAKE_US if idle else 0.0
    core = (tasks + beats + wakes + letters) / 1e6
    yield "core of Redis: tasks", tasks / 1e6, 1, "another broker for some queues"
    yield "core of Redis: heartbeats", beats / 1e6, 1, "fewer, larger workers (--concurrency)"
    yield "core of Redis: idle workers woken", wakes / 1e6, 1, "another broker for some queues"
    yield "core of Redis: letters", letters / 1e6, 1, "dlq_url: a Redis of their own"
    yield "core of Redis: sum", core, 1, "the largest of the four lines above"
    clients = given.workers * CONNECTIONS
    yield "connections", clients, given.maxclients, "maxclients of Redis"
    yield "MB a second on the wire", given.tasks * TASK_BYTES / 1e6, 100, "another broker"


def flood_rate(given: argparse.Namespace) -> float:
    """Letters a second; a circuit breaker lets a few probes through."""
    return 0.1 if given.breaker else given.flood


def flood(given: argparse.Namespace) -> Iterator[tuple[float, str]]:
    """What happens when: seconds, and the event."""
    rate, stored, seconds = flood_rate(given), 0.0, 0.0
    if given.exported and rate <= EXPORT_A_SECOND:
        yield 0, "letters go to files as fast as they come, and are trimmed"
        return
    most = given.maxmemory * 1e9
    steps = (
        (given.memory_limit, given.letter_bytes, "letters lose traceback and history"),
        ((1 + given.memory_limit) / 2, given.letter_bytes * CUT_SHARE, "letters wait on the disks"),
    )
    used = 0.0
    for share, size, event in steps:
        room = max(0.0, share * most - used) / size
        if stored + room >= given.letters:
            yield given.letters / rate, "the flood is over"
            return
        stored, used = stored + room, share * most
        seconds = stored / rate
        yield seconds, event
    spool = given.hosts * SPOOL_FILES
    left = given.letters - stored
    if left <= spool:
        yield given.letters / rate, f"the flood is over; {left:,.0f} letters are on the disks"
        return
    event = "the disks are full: what is acknowledged late stays on the broker, the rest is lost"
    yield seconds + spool / rate, event


def main() -> None:
    """Print the fleet and the flood."""
    given = arguments()
    print(f"{given.workers:,} workers, {given.tasks:,g} tasks a second\n")
    over = []
    for name, load, most, moves in fleet(given):
        print(f"  {name:34}{load:10,.2f} of {most:<8,g}{load / most:6.0%}")
        if load > most:
            over.append((load / most, name, moves))
    print(f"\nA flood of {given.letters:,} letters, {flood_rate(given):,g} a second\n")
    events = list(flood(given))
    for seconds, event in events:
        print(f"  after {seconds / 3600:5.1f} h  {event}")
    print()
    for share, name, moves in sorted(over, reverse=True):
        print(f"breaks: {name} is {share:.1f} times too much. It moves with: {moves}.")
    if any("lost" in event for _seconds, event in events):
        print("breaks: the disks. It moves with: dlq export --follow, dead_letter_max_length,")
        print("        a circuit_breaker, more maxmemory.")
    elif not over:
        print("It holds.")


if __name__ == "__main__":
    main()
