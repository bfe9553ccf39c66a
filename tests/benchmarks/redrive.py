"""How fast letters are redriven: ``cd tests && python -m benchmarks.redrive --letters 100000``."""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import resource
import time

from benchmarks.letters import fill
from builders import DLQ, an_app
from servers import RedisServer

from celery_dlq import DeadLetters
from celery_dlq.backends.redis.keys import Keys


def main() -> None:
    """Fill a queue of a server of its own, redrive all of it, tell the rate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--letters", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    with RedisServer() as server:
        client = server.client()
        for _ in range(options.runs):
            client.flushall()
            fill(client, Keys(), options.letters)
            app = an_app(dlq_url=server.url)
            app.conf.broker_url = server.url
            dlq = DeadLetters(app)
            gc.freeze()  # as the command line does
            profiler = cProfile.Profile() if options.profile else None
            before = resource.getrusage(resource.RUSAGE_SELF)
            client.config_resetstat()
            start = time.perf_counter()
            call = profiler.runcall if profiler is not None else lambda f, *args: f(*args)
            report = call(dlq.redrive, DLQ)
            seconds = time.perf_counter() - start
            after = resource.getrusage(resource.RUSAGE_SELF)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            assert report.published == options.letters, report
            assert client.llen("orders") == options.letters
            assert client.xlen(Keys().letters(DLQ)) == 0
            print(
                f"{options.letters:,} letters in {seconds:.1f} s: "
                f"{options.letters / seconds:,.0f}/s; "
                f"{cpu / options.letters * 1e6:.0f} us CPU a letter; "
                f"{after.ru_maxrss / 1024:.0f} MiB at most"
            )
            stats = client.info("commandstats")
            told = {name[8:]: stat["usec"] / options.letters for name, stat in stats.items()}
            print("us of Redis a letter:", {n: round(u, 1) for n, u in told.items() if u > 0.3})
            dlq.close()
            app.close()
            if profiler is not None:
                pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
