"""The sample of successful messages: from a real worker to files, and its bounds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import redis
from builders import a_delivery, a_key, a_message, a_request
from waiting import poll
from workers import Worker

from celery_dlq import DeadLetter
from celery_dlq.config import Settings
from celery_dlq.errors import ExportError, SettingsError
from celery_dlq.features.differences import sampling
from celery_dlq.features.differences.sampling import LONGEST_ARGUMENTS, Sampler, Samples
from celery_dlq.plugin import utc_now
from celery_dlq.policies.policy import Policy
from celery_dlq.policies.resolved import ResolvedPolicy
from celery_dlq.store.keys import Keys
from celery_dlq.store.store import Store
from celery_dlq.worker.observer import SUCCEEDED
from celery_dlq.writing.letter import LetterMaker
from celery_dlq.writing.lifecycle import InFlight

Letters = Callable[..., list[DeadLetter]]
Start = Callable[..., Worker]

STREAM = Keys().samples("orders-DLQ")
SECRET = "4111-1111-secret"
KEY = b"k" * 32


def rows_in(folder: Path) -> list[dict[str, Any]]:
    """All rows of an export, the earliest first."""
    tables = [pq.read_table(file) for file in sorted(folder.rglob("dlq=*/**/*.parquet"))]
    found = [row for table in tables for row in table.to_pylist()]
    return sorted(found, key=lambda row: row["dead_lettered_at"])


def test_a_worker_samples_what_succeeds(
    poison: ModuleType, start_worker: Start, letters: Letters, redis_url: str, tmp_path: Path
) -> None:
    """Each guarded success is one row with arguments, place and delivery; failures are none."""
    start_worker({"dlq_sample_successes": 1.0, "dlq_release": "v7"})
    for number in range(3):
        poison.healthy.apply_async(kwargs={"key": f"{SECRET}-{number}"}).get(timeout=20)
    poison.to_dlq.delay("bad")
    letters()
    with redis.Redis.from_url(redis_url) as client:
        poll(lambda: client.xlen(STREAM) == 3)
        assert 0 < client.ttl(STREAM) <= sampling.KEPT_SECONDS
    folder = tmp_path / "successes"
    report = poison.dlq.export(folder, successes=True, redact=["kwargs.key"], redact_key=KEY)
    assert report.letters == 3
    rows = rows_in(folder)
    first = rows[0]
    assert {row["task_name"] for row in rows} == {"poison_app.healthy"}
    assert (first["reason"], first["deliveries"], first["source_queue"]) == (
        "succeeded",
        1,
        "orders",
    )
    assert (first["release"], first["fingerprint"], first["body"]) == ("v7", None, None)
    assert first["worker_hostname"].startswith("celery@")
    assert json.loads(first["headers"]) == {"dlq_sample_share": 1.0}
    tokens = {json.loads(row["kwargs_json"])["key"] for row in rows}
    assert len(tokens) == 3
    assert all(token.startswith("redacted:") for token in tokens)
    assert not [
        file
        for file in folder.rglob("*")
        if file.is_file() and SECRET.encode() in file.read_bytes()
    ]

    # The next export adds what is new; letters and successes do not mix.
    poison.healthy.delay("later").get(timeout=20)
    with redis.Redis.from_url(redis_url) as client:
        poll(lambda: client.xlen(STREAM) == 4)
    options: dict[str, Any] = {"redact": ["kwargs.key"], "redact_key": KEY}
    assert poison.dlq.export(folder, successes=True, **options).letters == 1
    assert len(rows_in(folder)) == 4
    with pytest.raises(ExportError, match="to be a folder of letters, got one of successes"):
        poison.dlq.export(folder, **options)
    assert poison.dlq.export(tmp_path / "letters").letters == 1
    with pytest.raises(ExportError, match="to be a folder of successes, got one of letters"):
        poison.dlq.export(tmp_path / "letters", successes=True)
    with pytest.raises(SettingsError, match="no filter and no then_trim with successes"):
        poison.dlq.export(tmp_path / "other", successes=True, reason="failed")


def test_nothing_is_sampled_unless_asked(
    poison: ModuleType, start_worker: Start, redis_url: str
) -> None:
    """By default Redis holds nothing of messages that succeeded."""
    worker = start_worker()
    poison.healthy.delay("x").get(timeout=20)
    worker.stop()
    with redis.Redis.from_url(redis_url) as client:
        assert not client.exists(STREAM)


class Noted:
    """Samples, in a list."""

    def __init__(self) -> None:
        self.found: list[Mapping[str, bytes]] = []

    def add_sample(self, dead_letter_queue: str, fields: Mapping[str, bytes]) -> None:
        self.found.append(fields)

    def send_samples(self) -> None:
        """Nothing waits."""


def a_success(**kwargs: Any) -> tuple[Any, InFlight]:
    """A request whose task returned, with what the guard knows of it."""
    message = a_message(body=json.dumps([[], kwargs, {}]).encode())
    request = SimpleNamespace(id="1", message=message, request_dict=a_request(), worker_pid=7)
    resolved = ResolvedPolicy("orders", "orders-DLQ", Policy(max_deliveries=3), None)
    return request, InFlight(resolved, a_key(), a_delivery(number=2), first=False)


def test_the_share_is_kept_and_arguments_are_bounded() -> None:
    """One of four is chosen, which costs the others nothing; long arguments are left out."""
    noted, numbers = Noted(), iter([0.9, 0.3, 0.249, 0.5, 0.1])
    parts: Any = SimpleNamespace(
        backend=SimpleNamespace(part=lambda _kind: noted),
        settings=Settings(features={"sample_successes": 0.25}),
        make=LetterMaker(clock=utc_now, hostname="celery@a", pid=1),
    )
    sampler = Sampler(parts, chance=lambda: next(numbers))
    for text in ("a", "b", "c", "d", "x" * LONGEST_ARGUMENTS):
        sampler.after_end(*a_success(text=text), SUCCEEDED)
    assert [fields.get("kwargs_json") for fields in noted.found] == [b'{"text": "c"}', None]
    assert noted.found[0]["deliveries"] == b"2"
    assert json.loads(noted.found[0]["headers"]) == {"dlq_sample_share": 0.25}


def test_a_redriven_success_names_the_cause_that_it_died_of() -> None:
    """Only the newest one, and nothing of what its publisher wrote besides."""
    noted = Noted()
    parts: Any = SimpleNamespace(
        backend=SimpleNamespace(part=lambda _kind: noted),
        settings=Settings(features={"sample_successes": 1.0}),
        make=LetterMaker(clock=utc_now, hostname="celery@a", pid=1),
    )
    lives = [{"fingerprint": "a" * 16}, {"fingerprint": "b" * 16, "exception": SECRET}]
    request, in_flight = a_success(text="a")
    for earlier in (json.dumps(lives), "[{}]", "{", None):
        request.request_dict["dlq_earlier"] = earlier
        Sampler(parts, chance=lambda: 0.0).after_end(request, in_flight, SUCCEEDED)
    redriven, *others = (json.loads(fields["headers"]) for fields in noted.found)
    assert json.loads(redriven.pop("dlq_earlier")) == [{"fingerprint": "b" * 16}]
    assert [redriven, *others] == [{"dlq_sample_share": 1.0}] * 4


def test_the_stream_stays_bounded(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """About the newest ten thousand successes of a queue are kept."""
    monkeypatch.setattr(sampling, "MOST_SAMPLES", 200)
    store = Store(redis_url, timeout_seconds=2)
    kept = store.part(Samples)
    for burst in range(2):
        for number in range(1500):  # more than one tick takes
            kept.add_sample(
                "orders-DLQ", {"id": b"%d" % (burst * 1500 + number), "reason": b"succeeded"}
            )
        kept.send_samples()
        store.connection.send_and_wait("PING")
    with redis.Redis.from_url(redis_url) as client:
        assert 200 <= client.xlen(STREAM) <= 400
        newest = client.xrevrange(STREAM, count=1)[0][1]
    assert newest[b"id"] == b"2499"
    store.close()
