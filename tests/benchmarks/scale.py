"""What a large queue costs: ``cd tests && python -m benchmarks.scale --letters 1000000``.

Memory of Redis per letter beside the raw message, and the time that Redis works for the
first looks of an operator.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable

from benchmarks.letters import fill
from builders import DLQ, an_app
from servers import RedisServer

from celery_dlq import DeadLetters
from celery_dlq.backends.redis.keys import Keys


def main() -> None:
    """Fill a queue of a server of its own and look at it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--letters", type=int, default=100_000)
    parser.add_argument("--groups", type=int, default=20)
    options = parser.parse_args()
    with RedisServer() as server:
        client = server.client()
        empty = client.info("memory")["used_memory"]
        raw = fill(client, Keys(), options.letters, groups=options.groups)
        used = client.info("memory")["used_memory"] - empty
        print(
            f"{options.letters:,} letters, {options.groups:,} groups: "
            f"{used / options.letters:,.0f} bytes a letter in Redis, raw messages of "
            f"{raw / options.letters:,.0f} bytes: {used / raw:.2f} times"
        )
        app = an_app(dlq_url=server.url)
        app.conf.broker_url = server.url
        dlq = DeadLetters(app)
        dlq.queues()
        looks: dict[str, Callable[[], object]] = {
            "list": lambda: list(dlq.letters(DLQ, newest_first=True, limit=50)),
            "queues": dlq.queues,
            "groups": lambda: dlq.groups(DLQ, limit=100),
            "show": lambda: dlq.entry(next(iter(dlq.entries(DLQ, limit=1))).key),
        }
        for name, look in looks.items():
            client.config_resetstat()
            tracemalloc.start()
            start = time.perf_counter()
            look()
            seconds = time.perf_counter() - start
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            work = sum(stat["usec"] for stat in client.info("commandstats").values())
            print(
                f"{name}: {work / 1000:.1f} ms of Redis, {seconds * 1000:.0f} ms in all, "
                f"{most / 1024:,.0f} KiB of Python"
            )
        dlq.close()
        app.close()


if __name__ == "__main__":
    main()
