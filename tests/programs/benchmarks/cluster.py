"""How storing grows with masters: ``python -m benchmarks.cluster``.

Twelve dead-letter queues, one and three masters, in turn. All commands are packed before the clock
starts and written in batches, so that Redis is what takes the time. The machine may have fewer
cores than there are masters: what grows is then seen in the CPU time of the busiest master, which
bounds what a cluster can store on machines of its own.
"""

from __future__ import annotations

import argparse
import json
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median, quantiles

from benchmarks.processes import Tree
from builders import a_letter, key_of
from cluster import ClusterServers
from redis.connection import Connection

from celery_dlq.letters.packing import packed
from celery_dlq.store.keys import Keys
from celery_dlq.store.scripts import script_text

QUEUES = [f"orders-{number}-DLQ" for number in range(12)]
TRACEBACK = "".join(f'  File "/srv/shop/orders/step{n}.py", line {n}, in step\n' for n in range(40))
_BATCH = 100


@dataclass(frozen=True)
class Turn:
    """What one turn took: seconds, and CPU seconds of each master."""

    seconds: float
    cpu: Sequence[float]


class Contestant:
    """A cluster, and a connection to each of its masters."""

    def __init__(self, servers: ClusterServers) -> None:
        self._servers = servers
        self._places = {queue: servers.holder(f"{{{queue}}}") for queue in QUEUES}
        self._script = script_text("dead_letter")
        self._sockets = {}
        for server in servers.masters:
            server.client().script_load(self._script.text)
            self._sockets[server.port] = socket.create_connection(("127.0.0.1", server.port))

    def turn(self, letters: int) -> Turn:
        """Store letters, spread evenly over the queues."""
        work = self._packed(letters)
        trees = [Tree(server.pid) for server in self._servers.masters]
        before = [tree.cpu_seconds() for tree in trees]
        threads = [threading.Thread(target=self._write, args=item) for item in work.items()]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - begun
        cpu = [tree.cpu_seconds() - was for tree, was in zip(trees, before, strict=True)]
        stored = sum(self._stored(queue) for queue in QUEUES)
        self._servers.flush()
        assert stored == letters, f"expected {letters} letters, got {stored}"
        return Turn(seconds, cpu)

    def close(self) -> None:
        """Disconnect."""
        for one in self._sockets.values():
            one.close()

    def _packed(self, letters: int) -> dict[int, list[tuple[int, bytes]]]:
        """The batches for each master, by its port, as they go over the wire."""
        commands: dict[int, list[bytes]] = {}
        pack = Connection().pack_command
        for number in range(letters):
            queue = QUEUES[number % len(QUEUES)]
            command = b"".join(pack(*self._command(queue)))
            commands.setdefault(self._places[queue].port, []).append(command)
        return {
            port: [
                (len(some := all_[n : n + _BATCH]), b"".join(some))
                for n in range(0, len(all_), _BATCH)
            ]
            for port, all_ in commands.items()
        }

    def _command(self, queue: str) -> list[object]:
        letter, keys = a_letter(dead_letter_queue=queue, traceback=TRACEBACK), Keys()
        places = [
            keys.letters(queue),
            keys.arrivals(queue),
            keys.tally(queue),
            keys.run(key_of(letter)),
            keys.groups(queue),
            keys.ids(queue),
            keys.ends(queue),
            keys.newest_groups(queue),
        ]
        entry = [part for pair in packed(letter.to_fields()).items() for part in pair]
        facts = json.dumps({"task_name": letter.task_name, "reason": letter.reason.value})
        head = [letter.id, letter.reason.value, letter.fingerprint, 1, facts, 0, 3_600_000, "", ""]
        return ["EVALSHA", self._script.digest, len(places), *places, *head, *entry]

    def _write(self, port: int, batches: list[tuple[int, bytes]]) -> None:
        connection = self._sockets[port]
        for count, batch in batches:
            connection.sendall(batch)
            reply = b""
            while reply.count(b"\r\n") < count:
                reply += connection.recv(65536)
            assert b"-" not in reply, reply[:200]

    def _stored(self, queue: str) -> int:
        return int(self._places[queue].client().xlen(Keys().letters(queue)))


def main() -> None:
    """Measure in turns, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    parser.add_argument("--letters", type=int, default=24_000, help="a turn")
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    with ExitStack() as stack:
        contestants = {
            masters: Contestant(stack.enter_context(ClusterServers(masters))) for masters in (1, 3)
        }
        turns: dict[int, list[Turn]] = {masters: [] for masters in contestants}
        for number in range(options.rounds):
            for masters, contestant in contestants.items():
                turn = contestant.turn(options.letters)
                turns[masters].append(turn)
                print(f"round {number}, {masters} masters: {turn}", flush=True)
        for contestant in contestants.values():
            contestant.close()
    print("| masters | letters/s | quartiles | CPU µs a letter | of it at the busiest | bound |")
    print("|---|---|---|---|---|---|")
    for masters, done in turns.items():
        rates = [options.letters / turn.seconds for turn in done]
        low, _, high = quantiles(rates, n=4)
        all_cpu = median(sum(turn.cpu) for turn in done) / options.letters
        busiest = median(max(turn.cpu) for turn in done) / options.letters
        print(
            f"| {masters} | {median(rates):,.0f} | {low:,.0f} to {high:,.0f} | {all_cpu * 1e6:.1f} "
            f"| {busiest * 1e6:.1f} | {1 / busiest:,.0f}/s |"
        )


if __name__ == "__main__":
    main()
