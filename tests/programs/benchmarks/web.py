"""The pages at a million letters: ``python -m benchmarks web``.

A real ``celery dlq web`` answers requests over one kept-alive connection. The time is the whole
request as a browser on this machine sees it, so the server's own time is below it.

The letters are those of a week: nine of ten have one of 300 common causes, the largest a sixth of
all, the others a cause of their own; they are of six tasks and five reasons. One rare cause has
ten letters, as far from each other as can be. Of the newest causes, 2,000 are resolved or muted.
Beside that queue are thousands of small ones, and a hold has messages.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.parse import quote
from uuid import UUID

from benchmarks.letters import entries
from benchmarks.processes import Tree
from benchmarks.report import LIMIT_MS
from builders import DLQ, a_letter, key_of
from celery import Celery
from servers import RedisServer

from celery_dlq import DeadLetters
from celery_dlq.letters.packing import packed
from celery_dlq.letters.record import Reason
from celery_dlq.store.keys import Keys

_START_SECONDS = 30.0
_WEEK_MILLIS = 7 * 24 * 3600 * 1000
_COMMON = 300
_RARE, _RARE_LETTERS = 90_000_001, 10
_STATES = 2_000
_DISTINCT = 4_800
_TASKS = [f"shop.{name}" for name in ("charge", "ship", "mail", "index", "refund", "sync")]
_REASONS = [*Reason][:5]
_NONE = {"reason": "adopted"}
_ERRORS = ("shop.Down", "ValueError", "requests.exceptions.ReadTimeout", "KeyError")


@dataclass(frozen=True)
class Size:
    """How many letters, groups, requests of each page, other queues, and held messages."""

    letters: int
    groups: int
    requests: int
    queues: int = 2_000
    held: int = 20_000


FULL = Size(letters=1_000_000, groups=100_000, requests=40)
QUICK = Size(letters=2_000, groups=200, requests=3, queues=20, held=200)


def measure(size: Size, tell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """One result: a row for each page, and a failure if one is above the limit."""
    with RedisServer() as server:
        client = server.client()
        groups = _fill(client, size)
        tell(f"web: {size.letters:,} letters stored")
        app = Celery(broker=server.url)
        app.conf.dlq_queues = {"orders": {"max_deliveries": 3}}
        dlq = DeadLetters(app)
        dlq.discard(DLQ, limit=size.letters // 50)
        job = dlq.redrive(DLQ, limit=size.letters // 2000, force=True).redrive_id
        for number, one in enumerate(dlq.groups(DLQ, by="newest", limit=_STATES)):
            (dlq.resolve if number % 2 else dlq.mute)(DLQ, one.fingerprint)
        _as_if_long_ago(client, job)
        _add_queues(dlq, size.queues)
        hold = _hold(dlq, client, size.held)
        plan = dlq.plan("redrive", DLQ, seconds=1.0).id
        with _served(server.url) as (port, tree):
            rows = [
                _row(name, path, port, tree, size.requests)
                for name, path in _pages(client, job, plan, hold).items()
            ]
        yield {"cell": f"{size.letters:,} letters, {groups:,} causes", "rows": rows}
        tell(f"web: the server took {max(row['memory_mib'] for row in rows):.1f} MiB")
    above = [row["name"] for row in rows if row["p95_ms"] > LIMIT_MS]
    if size == FULL and above:
        raise RuntimeError(f"expected at most {LIMIT_MS:.0f} ms of each page, got more of {above}")


def _pages(client: Any, job: str, plan: str, hold: str) -> dict[str, str]:
    """The path of each page by its name."""
    keys, queue = Keys(), f"/queues/{quote(DLQ)}"
    letter = client.hrandfield(keys.ids(DLQ)).decode()
    largest = client.zrevrange(keys.groups(DLQ), 0, 0)[0].decode()
    rare = _fingerprint(_RARE)
    letters, none = f"{queue}/letters", "letters of none, a part, by"
    filters = ("task_name", "reason", "exception_type", "release", "worker_hostname", "root_id")
    held = client.hrandfield(_held_keys().ids(hold)).decode()
    return {
        "overview": "/",
        "causes, newest": queue,
        "causes, largest": f"{queue}?by=letters",
        "causes, open": f"{queue}?state=open",
        "causes, resolved": f"{queue}?state=resolved",
        "causes, muted": f"{queue}?state=muted",
        "causes, page 100": f"{queue}?page=100",
        "causes with a text that none has": f"{queue}?q=nowhere",
        "causes with a text that many have": f"{queue}?q=charge",
        "a small queue": "/queues/q0007-DLQ",
        "queues with a text": "/?q=q00",
        "the largest cause": f"{queue}/groups/{largest}",
        "how the largest cause differs": f"{queue}/groups/{largest}/differences",
        "a rare cause": f"{queue}/groups/{rare}",
        "how a rare cause differs": f"{queue}/groups/{rare}/differences",
        "letters": letters,
        "letters of the largest cause": f"{letters}?fingerprint={largest}",
        "letters of a rare cause, a part": f"{letters}?fingerprint={rare}",
        "letters with a text that none has, a part": f"{letters}?grep=nowhere",
        "letters with an argument that none has, a part": f"{letters}?conditions=kwargs.x%3D1",
        **{f"{none} {one}": f"{letters}?{one}={_NONE.get(one, 'none')}" for one in filters},
        "letters of an hour": f"{letters}?since=1h",
        "letters of a day long ago": f"{letters}?since=3d&until=2d",
        "one letter": f"{letters}/{letter}",
        "body of a letter": f"{letters}/{letter}/body",
        "form of an edit": f"{letters}/{letter}/edit",
        "form of a redrive": f"{queue}/redrive",
        "form of a discard by task": f"{queue}/discard?task_name={_TASKS[0]}",
        "form of a redrive by reason": f"{queue}/redrive?reason={_REASONS[0].value}",
        "discarded letters": f"{queue}/discarded",
        "jobs": "/jobs",
        "a plan": f"/jobs/{plan}",
        "holds": "/holds",
        "messages of a hold": f"/holds/{hold}",
        "messages with an argument that none has, a part": f"/holds/{hold}?where=kwargs.x%3D1",
        "a held message": f"/holds/{hold}/{held}",
        "find what is nowhere, a part": "/find?q=nowhere",
        "find a task": f"/find?q=task%3D{_TASKS[0]}",
        "find a cause": f"/find?q={rare[:8]}",
        "find an argument that none has, a part": "/find?q=kwargs.x%3D1",
        "find an id that none has, a part": f"/find?q={UUID(int=1)}",
        "find a letter": f"/find?q={letter}",
        "words to find": "/find/words?q=task",
        "a redrive of long ago": f"/jobs/{job}",
        "policies": "/policies",
        "audit": "/audit",
        "live numbers": "/events/poll",
        "health": "/healthz",
    }


def _fill(client: Any, size: Size) -> int:
    """Store letters as ``dead_letter.lua`` does, but many in one write; returns the groups."""
    keys, chance = Keys(), random.Random(7)  # noqa: S311 - data, not secrets
    shares = [*accumulate(1 / (place + 1) for place in range(_COMMON))]
    samples, now = _samples(), int(time.time() * 1000)
    known: dict[int, list[Any]] = {}  # by cause: first and last time, example
    reasons, spans = Counter[str](), defaultdict[int, Counter[int]](Counter)
    client.sadd(keys.queues(), DLQ)
    for start in range(0, size.letters, 1000):
        pipe, places = client.pipeline(transaction=False), {}
        for number in range(start, min(size.letters, start + 1000)):
            cause = _COMMON + number if chance.random() < size.groups / size.letters else -1
            if cause < 0:
                (cause,) = chance.choices(range(_COMMON), cum_weights=shares)
            if number % (size.letters // _RARE_LETTERS) == size.letters // _RARE_LETTERS // 2:
                cause = _RARE
            at = now - _WEEK_MILLIS + number * _WEEK_MILLIS // size.letters
            letter, place = str(UUID(int=chance.getrandbits(128))), f"{at}-{number % 1000}"
            some = samples[cause % len(samples)]
            own = {b"id": letter, b"fingerprint": _fingerprint(cause)}
            entry = {**some[number % len(some)], **own, b"dead_lettered_at": at * 1000}
            flat = [part for pair in entry.items() for part in pair]
            pipe.execute_command("XADD", keys.letters(DLQ), place, *flat)
            places[letter] = place
            known.setdefault(cause, [at, at, letter])[1:] = at, letter
            reasons[_facts(cause)["reason"]] += 1
            spans[cause][at // 300_000] += 1
        pipe.hset(keys.ids(DLQ), mapping=places)
        pipe.execute()
    pipe = client.pipeline(transaction=False)
    for reason, letters in reasons.items():
        pipe.hset(keys.tally(DLQ), f"reason:{reason}", letters)
    for cause, (first, last, letter) in known.items():
        fingerprint, counts = _fingerprint(cause), spans[cause]
        course = _course(counts, now)
        text = f"{first}000|{last}000|{letter}|{course}|1,2,3|{json.dumps(_facts(cause))}"
        pipe.hset(keys.tally(DLQ), f"group:{fingerprint}", text)
        pipe.zadd(keys.groups(DLQ), {fingerprint: counts.total()})
        pipe.zadd(keys.newest_groups(DLQ), {fingerprint: last * 1000})
    pipe.execute()
    return len(known)


def _held_keys() -> Keys:
    return Keys(f"{Keys().prefix}:held")


def _add_queues(dlq: DeadLetters, queues: int) -> None:
    """Many queues with a letter each."""
    for number in range(queues):
        letter = a_letter(dead_letter_queue=f"q{number:04d}-DLQ")
        dlq.store.dead_letter(letter, key_of(letter))


def _hold(dlq: DeadLetters, client: Any, held: int) -> str:
    """A hold with messages, which look like letters; returns its id."""
    hold, keys, samples = dlq.hold(queue="orders").id, _held_keys(), _samples()[0]
    client.sadd(keys.queues(), hold)
    pipe = client.pipeline(transaction=False)
    for number in range(held):
        letter = str(UUID(int=number))
        entry = {**samples[number % len(samples)], b"id": letter, b"dead_letter_queue": hold}
        flat = [part for pair in entry.items() for part in pair]
        pipe.execute_command("XADD", keys.letters(hold), f"{number + 1}-0", *flat)
        pipe.hset(keys.ids(hold), letter, f"{number + 1}-0")
    pipe.execute()
    return hold


def _samples() -> list[list[dict[bytes, bytes]]]:
    """Entries as Redis keeps them, those of one task, reason and error in a list."""
    kinds: list[list[dict[bytes, bytes]]] = [[] for _ in range(60)]
    for number, fields in enumerate(entries(_DISTINCT)):
        kind = number % len(kinds)
        facts = {name: value.encode() for name, value in _facts(kind).items()}
        host = {"worker_hostname": b"celery@web-%d" % (number % 7), "release": b"%d" % (kind % 3)}
        made = packed({**fields, **facts, **host})
        kinds[kind].append({name.encode(): value for name, value in made.items()})
    return kinds


def _facts(cause: int) -> dict[str, str]:
    """What the letters of a cause share."""
    task, reason = _TASKS[cause % len(_TASKS)], _REASONS[cause % len(_REASONS)].value
    return {
        "task_name": task,
        "reason": reason,
        "exception_type": _ERRORS[cause % len(_ERRORS)],
    }


def _fingerprint(cause: int) -> str:
    return f"{cause * 2654435761 % 2**32:08x}{cause:08x}"


def _course(counts: Counter[int], now: int) -> str:
    """The letters of a group's last hours, then of its last hour, as ``parts/group.lua`` does."""
    newest, oldest = max(counts), now // 300_000 - 24 * 12
    hours = Counter[int]()
    for span, letters in counts.items():
        if oldest < span < newest:
            hours[span // 12] += letters
    recent = {span: counts[span] for span in counts if newest - 12 < span}
    texts = (
        ",".join(f"{one}:{each[one]}" for one in sorted(each, reverse=True))
        for each in (hours, recent)
    )
    return "|".join(texts)


def _as_if_long_ago(client: Any, job: str) -> None:
    """Let a redrive have ended before half of the letters were stored, and 499 more after it."""
    keys, half = Keys(), int(time.time() * 1000) - _WEEK_MILLIS // 2
    state = json.loads(client.hget(keys.jobs(), job))
    others = (f"{number:08d}-000000000-abcdef" for number in range(20_260_000, 20_260_499))
    jobs = {one: json.dumps({**state, "id": one}) for one in others}
    jobs[job] = json.dumps({**state, "until": f"{half}-0"})
    client.hset(keys.jobs(), mapping=jobs)


def _row(name: str, path: str, port: int, tree: Tree, requests: int) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    times, cpu, length = [], [], 0
    for number in range(requests + 1):
        begun, spent = time.perf_counter(), tree.cpu_seconds()
        connection.request("GET", path)
        answer = connection.getresponse()
        length = len(answer.read())
        if answer.status not in (200, 303):  # a search that finds one letter leads to it
            raise RuntimeError(f"{path} answered {answer.status}")
        if number:  # the first one reads what is kept for a few seconds
            times.append((time.perf_counter() - begun) * 1e3)
            cpu.append((tree.cpu_seconds() - spent) * 1e3)
    connection.close()
    return {
        "name": name,
        "path": path,
        "rounds": requests,
        "least_ms": min(times),
        "cpu_ms": sum(cpu) / len(cpu),
        "median_ms": median(times),
        "p95_ms": quantiles(times, n=20)[-1],
        "page_bytes": length,
        "memory_mib": tree.memory_bytes() / 2**20,
    }


@contextmanager
def _served(url: str) -> Iterator[tuple[int, Tree]]:
    """Start ``celery dlq web`` and wait until it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join(str(place) for place in Path(__file__).parents[1:4])
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "celery", "-A", "benchmarks.web_app"),
            *("dlq", "web", "--port", str(port)),
        ],
        env={**os.environ, "PYTHONPATH": path, "BENCHMARK_URL": url},
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise
                time.sleep(0.1)
        yield port, Tree(process.pid)
    finally:
        process.terminate()
        process.wait(10)
