"""What `dlq doctor` finds: each kind of finding on an app or a real server where it is so."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import intervals
import kombu
import pytest
from builders import DLQ, a_letter, an_app, key_of
from click.testing import CliRunner
from kombu import Queue
from kombu.transport import pyamqp
from rabbit import RabbitServer
from servers import RedisServer
from sqs import SqsServer
from waiting import poll

from celery_dlq import DeadLetters, dead_letter_policy
from celery_dlq.cli.commands import dlq as commands
from celery_dlq.features.doctor.finding import KINDS, Finding
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.operations.redrive.message import RedriveOptions
from celery_dlq.store.metrics import WorkerGauges
from celery_dlq.store.store import Store
from celery_dlq.store.worker_records import WorkerInfo
from celery_dlq.transport.redis.broker import mismatch

SOUND = {
    "task_default_queue": "orders",
    "task_acks_late": True,
    "task_reject_on_worker_lost": True,
    "dlq_queues": {"orders": {"max_deliveries": 3, "dead_letter_ttl": 3600}},
}


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A Redis as the documentation wants it, which each test may make wrong."""
    arguments = ("--maxmemory", "64mb", "--maxmemory-policy", "noeviction", "--appendonly", "yes")
    with RedisServer(*arguments) as started:
        yield started


Make = Callable[..., DeadLetters]


@pytest.fixture
def shop(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make an app with a task and a live worker; nothing is wrong with it but what is given."""
    made = []
    intervals.change(monkeypatch, remote_control=0.02)  # the worker is a record: nobody answers
    # So long kombu waits, when it closes a connection, for the end of a read.
    monkeypatch.setattr("kombu.transport.redis.Transport.brpop_timeout", 0.02)

    def make(*, clock: Any = None, worker: bool = True, **settings: Any) -> DeadLetters:
        app = an_app(**{"broker_url": server.url, **SOUND, **settings})
        app.task(name="shop.charge", shared=False)(charge)
        app.finalize()
        for name in [*app.tasks]:  # shared tasks of other tests and of installed packages
            if not name.startswith(("shop.", "celery.")):
                del app.tasks[name]
        dlq = DeadLetters(app, **({"clock": clock} if clock else {}))
        if worker:
            policies = {**SOUND, **settings}["dlq_queues"]
            Store(server.url).workers.register(a_worker(policies=policies))
        made.append(dlq)
        return dlq

    yield make
    for dlq in made:
        dlq.close()


def charge(order_id: int) -> int:
    """A task."""
    return order_id


def a_worker(**changes: Any) -> WorkerInfo:
    """A worker's info, with the policies of `SOUND`."""
    info = WorkerInfo(
        hostname="celery@web-1",
        pid=1,
        version="0.1.0",
        started_at=datetime.now(timezone.utc),
        queues=("orders",),
        policies={"orders": {"max_deliveries": 3, "dead_letter_ttl": 3600.0}},
    )
    return replace(info, **changes)


def stored(dlq: DeadLetters, **changes: Any) -> None:
    """Store a letter."""
    letter = a_letter(**changes)
    dlq.store.dead_letter(letter, key_of(letter))


def one(dlq: DeadLetters, check: str) -> Finding:
    """The only finding, which is of a kind."""
    found = dlq.doctor()
    assert [finding.check for finding in found] == [check]
    finding: Finding = found[0]
    assert (finding.symptom, finding.mend) == KINDS[check]
    return finding


def test_a_sound_app_has_no_finding(shop: Make, server: RedisServer) -> None:
    """And the keys in its Redis are those of before, but for its format, and kombu's own."""
    dlq = shop()
    before = set(server.client().keys())
    assert dlq.doctor() == []
    assert set(server.client().keys()) - before <= {
        b"dlq:{app}:format",
        b"_kombu.binding_deadlines",
    }


@pytest.mark.parametrize(
    ("check", "settings", "sentence"),
    [
        ("nothing-guarded", {"dlq_queues": {}}, "No queue and no task"),
        (
            "queue-without-policy",
            {"task_queues": [Queue("orders"), Queue("mails")]},
            "No policy applies to mails.",
        ),
        (
            "unknown-queue",
            {"dlq_queues": {**SOUND["dlq_queues"], "oders": {"dead_letter_ttl": 60}}},
            "'oders'",
        ),
        (
            "queue-without-policy",
            {"task_routes": {"shop.charge": {"queue": "mails"}}},
            "No policy applies to mails (shop.charge).",
        ),
        (
            "no-limit",
            {"dlq_queues": {"orders": {"dead_letter_ttl": 3600}}},
            "No policy limits the starts of tasks of 'orders': shop.charge.",
        ),
        ("always-eager", {"task_always_eager": True}, "task_always_eager"),
        ("kept-for-ever", {"dlq_queues": {"orders": {"max_deliveries": 3}}}, DLQ),
        ("early-acknowledgement", {"task_acks_late": False}, "'orders'"),
        ("reject-on-worker-lost", {"task_reject_on_worker_lost": False}, "'orders'"),
        ("fetch", {"dlq_reliable_fetch": False}, "kombu"),
        ("fetch", {"broker_transport_options": {"ack_emulation": False}}, "ack_emulation"),
        ("spool-not-writable", {"dlq_spool_dir": "/proc/spool"}, "/proc/spool"),
        ("spool-not-writable", {"dlq_spool_dir": f"{__file__}/spool"}, "Not a directory"),
        ("settings", {"dlq_queus": {}}, "did you mean"),
        ("settings", {"broker_url": "nonsense://me:secret@x"}, "a transport of kombu"),
        ("result-backend", {"result_backend": "redis://127.0.0.1:1/0"}, "127.0.0.1:1"),
    ],
)
def test_settings(shop: Make, check: str, settings: dict[str, Any], sentence: str) -> None:
    """What the app says of itself is enough, or what its result backend does not say."""
    finding = one(shop(**settings), check)
    assert sentence in finding.sentence
    assert "secret" not in finding.sentence


def test_a_task_that_runs_longer_than_the_visibility_timeout(shop: Make) -> None:
    """Only where nobody renews."""
    options = {"broker_transport_options": {"visibility_timeout": 600}, "task_time_limit": 900}
    assert shop(**options).doctor() == []
    found = shop(**options, dlq_reliable_fetch=False).doctor()
    assert [finding.check for finding in found] == ["fetch", "visibility-timeout"]
    assert "600 s" in found[1].sentence


@pytest.mark.parametrize(
    ("broker", "store", "redrive"),
    [
        ("redis://localhost/0", "redis://127.0.0.1:6379", "exactly once"),
        ("redis://localhost/1", "redis://localhost/0", "exactly once"),
        ("redis://localhost/0", "redis://localhost:6380/0", "at least once"),
        ("amqp://guest@localhost//", "redis://localhost", "at least once"),
    ],
)
def test_what_a_redrive_guarantees(shop: Make, broker: str, store: str, redrive: str) -> None:
    """Exactly once needs one server; a RabbitMQ of a URL without a port is not the letters'."""
    rows = shop(broker_url=broker, dlq_url=store).guarantees()
    assert {row.redrive for row in rows} == {redrive}


@pytest.mark.parametrize(
    ("policy", "throws", "cells"),
    [
        ({"max_deliveries": 3}, (), ["yes", "yes", "yes"]),
        ({"max_crashes": 3}, (), ["yes, of crashes", "yes", "yes"]),
        (
            {"max_crashes": {"times": 3, "within": 60}},
            (),
            ["yes, of crashes within 60 s", "yes", "yes"],
        ),
        ({"max_retries": 1}, (), ["no", "yes", "yes"]),
        (
            {"max_deliveries": 3, "reasons": ["failed"]},
            (),
            ["yes", "yes, of the reasons kept", "yes"],
        ),
        (
            {"max_deliveries": 3, "exceptions": {"builtins.KeyError": "ignore"}},
            (),
            ["yes", "yes, of the reasons kept", "yes"],
        ),
        ({"max_deliveries": 3}, (KeyError,), ["yes", "yes, of the reasons kept", "yes"]),
    ],
)
def test_each_cell_follows_from_the_policy_of_the_task(
    shop: Make, policy: dict[str, Any], throws: tuple[type, ...], cells: list[str]
) -> None:
    """Of its queue, and of its decorator."""
    dlq = shop(dlq_queues={"orders": policy})
    dlq.app.tasks["shop.charge"].throws = throws
    (row,) = dlq.guarantees()
    assert [row.cell(name) for name in ("bounded", "lossless", "exact")] == cells
    task = dlq.app.tasks["shop.charge"]
    dlq.app.conf.dlq_queues = {"orders": {}}
    dead_letter_policy(**policy)(task)
    (row,) = dlq.guarantees()
    assert [row.cell(name) for name in ("bounded", "lossless", "exact")] == cells


def test_an_override_that_ends_the_limit(shop: Make) -> None:
    """What an operator did counts, too."""
    dlq = shop()
    dlq.override_policy("orders", timedelta(hours=1), max_deliveries=False)
    assert [row.bounded for row in dlq.guarantees(dlq.doctor())] == [False]
    (found,) = dlq.doctor()
    assert (found.check, found.queues) == ("no-limit", ("orders",))
    assert found.mend == "End the override with: dlq policies unset orders max_deliveries"


def test_a_worker_without_celery_dlq_on_a_guarded_queue(
    shop: Make, server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deploy that is half done: nobody counts what it starts."""
    intervals.change(monkeypatch, remote_control=1.0)
    dlq = shop()
    (tmp_path / "plain.py").write_text(
        f"import celery\napp = celery.Celery('plain', broker={server.url!r})\n"
    )
    command = [sys.executable, "-m", "celery", "-A", "plain", "worker", "-P", "solo"]
    with (tmp_path / "log").open("w") as log:
        worker = subprocess.Popen(
            [*command, "-Q", "orders", "-n", "plain@old"], cwd=tmp_path, stdout=log, stderr=log
        )
    try:
        poll(dlq.doctor, timeout_seconds=60)
        found = one(dlq, "plain-workers")
        assert "take from 'orders': plain@old." in found.sentence
        assert "remote control" not in shown(dlq, exit_code=1)
        (row,) = dlq.guarantees([found])
        assert [row.cell(name) for name in ("bounded", "lossless", "exact")] == ["no", "no", "no"]
    finally:
        worker.kill()
        worker.wait()


def test_a_fetch_that_redis_refuses(shop: Make, server: RedisServer) -> None:
    """The user lacks a key of the fetch: kombu fetches instead, and may lose a message."""
    rules = ["on", ">hush", "~dlq:*", "~orders*", "~_kombu*", "&*", "+@all"]
    server.client().execute_command("ACL", "SETUSER", "app", *rules)
    dlq = shop(broker_url=server.url.replace("redis://", "redis://app:hush@"))
    found = one(dlq, "fetch")
    assert "expected Redis to allow" in found.sentence
    assert [row.lossless for row in dlq.guarantees([found])] == [False]


def test_a_package_that_is_missing(shop: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting wants Sentry, and it is not installed."""
    dlq = shop(dlq_sentry=True)
    assert dlq.doctor() == []
    monkeypatch.setitem(sys.modules, "sentry_sdk", None)
    monkeypatch.setattr(
        "celery_dlq.features.doctor.settings_checks.find_spec",
        lambda name: None if name == "sentry_sdk" else object(),
    )
    assert "celery_dlq[sentry]" in one(dlq, "missing-package").sentence


@pytest.mark.skipif(kombu.VERSION < (5, 7), reason="kombu before 5.7 works with older ones")
def test_a_redis_py_that_is_too_old_for_kombu(shop: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says both versions; RabbitMQ needs no redis-py of kombu's choice."""
    dlq = shop()
    monkeypatch.setattr("redis.VERSION", (6, 3, 0))
    sentence = one(dlq, "redis-py").sentence
    assert sentence.startswith("expected redis-py 6.4 or later beside kombu 5")
    assert mismatch(pyamqp.Transport) is None


@pytest.mark.parametrize(
    ("check", "name", "value"),
    [
        ("no-maxmemory", "maxmemory", "0"),
        ("eviction", "maxmemory-policy", "allkeys-lru"),
        ("eviction", "maxmemory-policy", "volatile-lru"),
        ("append-only-file", "appendonly", "no"),
        ("idle-timeout", "timeout", "30"),
    ],
)
def test_the_configuration_of_redis(
    shop: Make, server: RedisServer, check: str, name: str, value: str
) -> None:
    """Each is one line of its configuration."""
    server.client().config_set(name, value)
    one(shop(), check)


def test_a_redis_that_forbids_to_ask_is_not_guessed_at(shop: Make, server: RedisServer) -> None:
    """A managed Redis allows neither CONFIG nor INFO."""
    dlq = shop()
    server.client().acl_setuser(
        "app",
        enabled=True,
        passwords=["+pw"],
        keys=["*"],
        channels=["*"],
        categories=["+@all"],
        commands=["-info", "-config"],
    )
    dlq.app.conf.broker_url = server.url.replace("redis://", "redis://app:pw@")
    assert dlq.doctor() == []


def test_a_redis_that_forbids_what_is_needed(shop: Make, server: RedisServer) -> None:
    """One line, that names the command and no password."""
    dlq = shop()
    server.client().acl_setuser(
        "app",
        enabled=True,
        passwords=["+hush"],
        keys=["*"],
        categories=["+@all"],
        commands=["-xadd"],
    )
    url = server.url.replace("redis://", "redis://app:hush@")
    found = shop(broker_url=server.url, dlq_url=url).doctor()
    (finding,) = (one for one in found if one.check == "store-refuses")
    assert "xadd" in finding.sentence.lower()
    assert "hush" not in finding.sentence
    dlq.close()


def test_a_clock_that_is_wrong(shop: Make) -> None:
    """This host is an hour behind."""
    dlq = shop(clock=lambda: datetime.now(timezone.utc) - timedelta(hours=1))
    assert "differ by -3600 s" in one(dlq, "clock").sentence


def test_no_worker(shop: Make) -> None:
    """Nobody runs tasks."""
    one(shop(worker=False), "no-worker")


def test_workers_of_two_versions(shop: Make) -> None:
    """In the middle of a deploy."""
    dlq = shop()
    dlq.registry.register(a_worker(hostname="celery@web-2", version="0.2.0"))
    assert "0.1.0, 0.2.0" in one(dlq, "worker-versions").sentence


def test_workers_with_two_policies(shop: Make) -> None:
    """One was not restarted."""
    dlq = shop()
    policies = {"orders": {"max_deliveries": 9, "dead_letter_ttl": 3600.0}}
    dlq.registry.register(a_worker(hostname="celery@web-2", policies=policies))
    assert "max_deliveries 3 and 9" in one(dlq, "worker-policies").sentence


WEAK_WORKERS = [
    ({}, "max_deliveries 3 and not set", ["no", "no", "no"]),
    ({"orders": {}}, "max_deliveries 3 and not set", ["no", "yes", "yes"]),
    (
        {"orders": {"max_crashes": 3}},
        "max_deliveries 3 and not set",
        ["yes, of crashes", "yes", "yes"],
    ),
    (
        {"*": {"max_deliveries": 3, "dead_letter_ttl": 3600.0, "reasons": ["failed"]}},
        "reasons not set and ['failed']",
        ["yes", "yes, of the reasons kept", "yes"],
    ),
    (
        {"orders": {"max_deliveries": 3}, "task:shop.charge": {"max_deliveries": False}},
        "max_deliveries not set and False",
        ["no", "yes", "yes"],
    ),
]


@pytest.mark.parametrize(("policies", "difference", "cells"), WEAK_WORKERS)
def test_workers_that_have_other_policies_than_this_app(
    shop: Make, policies: dict[str, Any], difference: str, cells: list[str]
) -> None:
    """They were not restarted: what they do counts, and `dlq policies` says it too."""
    dlq = shop(worker=False)
    dlq.registry.register(a_worker(policies=policies, tasks=("shop.charge",)))
    found = dlq.doctor()
    assert {one.check for one in found} == {"worker-policies"}
    text = " ".join(one.sentence for one in found)
    assert "this app and celery@web-1 have different policies" in text
    assert difference in text
    (row,) = dlq.guarantees(found)
    assert [row.cell(name) for name in ("bounded", "lossless", "exact")] == cells
    assert "this app and celery@web-1" in " ".join(dlq.policies().warnings)


def test_an_app_without_the_limit_that_its_workers_have(shop: Make) -> None:
    """The command ran with other settings: the next start of a worker has no limit."""
    dlq = shop(dlq_queues={"orders": {"dead_letter_ttl": 3600}}, worker=False)
    dlq.registry.register(a_worker())
    found = dlq.doctor()
    assert [one.check for one in found] == ["no-limit", "worker-policies"]
    assert "max_deliveries not set and 3" in found[1].sentence
    assert [row.bounded for row in dlq.guarantees(found)] == [False]


def test_workers_of_other_queues_and_a_task_always_eager(shop: Make) -> None:
    """Another app in the same store is no worker of this one; an eager task has no guarantee."""
    dlq = shop()
    dlq.registry.register(a_worker(hostname="m@1", queues=("mails",), policies={"mails": {}}))
    assert dlq.doctor() == []
    dlq.app.conf.task_always_eager = True
    (row,) = dlq.guarantees()
    assert [row.cell(name) for name in ("bounded", "lossless", "exact")] == ["no", "no", "no"]


def test_a_spool_that_is_not_empty(shop: Make) -> None:
    """Letters wait on a worker's disk."""
    dlq = shop()
    dlq.assembly.backend.metrics.add_counts(
        {}, WorkerGauges(worker="celery@web-1", spool=7, waiting=0)
    )
    assert "7 letters on the disk of celery@web-1" in one(dlq, "spool-not-empty").sentence


def test_a_hold(shop: Make) -> None:
    """Somebody forgot it."""
    dlq = shop()
    hold = dlq.hold(task="shop.charge", span=timedelta(hours=1), reason="SHOP-17")
    assert hold.id in one(dlq, "hold").sentence


def test_a_circuit_breaker_that_is_open(shop: Make) -> None:
    """Its messages are held."""
    policies = {"orders": {"max_deliveries": 3, "dead_letter_ttl": 3600, "circuit_breaker": {}}}
    dlq = shop(dlq_queues=policies)
    dlq.registry.register(a_worker(policies={"orders": dlq.settings.queues["orders"].to_json()}))
    dlq.open_breaker("shop.charge", queue="orders")
    assert "shop.charge" in one(dlq, "circuit-breaker").sentence


def test_a_job_that_was_interrupted(shop: Make) -> None:
    """Its process was killed."""
    dlq = shop()
    stored(dlq)
    jobs = dlq.assembly.jobs()
    run = jobs.new("redrive", DLQ, LetterFilter(), RedriveOptions())
    old = replace(run.job, state="running", updated_at=run.job.updated_at - timedelta(minutes=9))
    dlq.job_store.write(old.id, old.to_stored())
    found = one(dlq, "job")
    assert f"Job {old.id}, redrive of {DLQ}, is interrupted" in found.sentence
    assert "resume ID. One that waits also runs once a worker" in found.mend  # this one does not


def test_letters_without_end(shop: Make) -> None:
    """More than a thousand in an hour."""
    dlq = shop()
    for _ in range(1_000):
        stored(dlq)
    assert "1,000 letters in the last hour" in one(dlq, "flood").sentence


def test_letters_that_are_about_to_be_removed(shop: Make) -> None:
    """The policy was shortened."""
    dlq = shop(dlq_queues={"orders": {"max_deliveries": 3, "dead_letter_max_length": 1}})
    policies = {"orders": dlq.settings.queues["orders"].to_json()}
    dlq.registry.register(a_worker(policies=policies))
    for _ in range(2):
        stored(dlq)
    assert DLQ in one(dlq, "retention").sentence


def test_a_chord_behind_a_dead_member(shop: Make) -> None:
    """Its body waits for ever."""
    dlq = shop()
    stored(dlq)
    stored(dlq, body=json.dumps([[], {}, {"chord": {"task": "shop.sum"}}]).encode())
    assert "1 letter of" in one(dlq, "chord").sentence


def test_servers_that_are_away(shop: Make, server: RedisServer) -> None:
    """Broker and store, a line each, and no password."""
    url = "redis://:hush@127.0.0.1:1/0"
    found = shop(broker_url=url).doctor()
    assert [finding.check for finding in found] == ["store", "broker"]
    assert not any("hush" in finding.sentence for finding in found)


def test_a_wrong_password_and_a_store_that_is_silent_are_findings_of_their_own(
    shop: Make, server: RedisServer
) -> None:
    """Beside one that is away: each has its mend."""
    with RedisServer() as letters:
        letters.client().config_set("requirepass", "other")
        url = letters.url.replace("redis://", "redis://:hush@")
        assert "user and password" in one(shop(dlq_url=url), "store-refuses").sentence
        letters.pause()
        assert "Timeout reading" in one(shop(dlq_url=url), "store-slow").sentence
        letters.resume()


def test_servers_that_are_silent_end_in_ten_seconds(shop: Make) -> None:
    """They take the connection and never answer: as long as one of them, not as all together."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        began = time.monotonic()
        found = shop(broker_url=url, result_backend=url).doctor()
        assert time.monotonic() - began < 10
    assert [finding.check for finding in found] == ["store-slow", "broker", "result-backend"]


def test_rabbitmq(shop: Make, rabbit_server: RabbitServer, server: RedisServer) -> None:
    """Publishers that do not wait, and a limit of RabbitMQ's own."""
    quorum = {"x-queue-type": "quorum", "x-delivery-limit": 4}
    rabbit = {
        "broker_url": rabbit_server.url,
        "dlq_url": server.url,
        "broker_transport_options": {"confirm_publish": True},
    }
    sound = shop(**rabbit)
    poll(lambda: sound.doctor() == [], timeout_seconds=60)  # a node that has just started is slow
    one(shop(**{**rabbit, "broker_transport_options": {}}), "publisher-confirms")
    queues = [Queue("orders", queue_arguments=quorum)]
    limited = shop(**rabbit, task_queues=queues)
    found = one(limited, "delivery-limit")
    assert "'orders'" in found.sentence
    assert [row.lossless for row in limited.guarantees([found])] == [False]


def test_a_redrive_policy_of_sqs(shop: Make, sqs_server: SqsServer, server: RedisServer) -> None:
    """SQS moves a message before it has died here; an app may adopt what is moved."""
    dead = sqs_server.attributes(sqs_server.queue("dead"))["QueueArn"]
    sqs_server.queue("orders", RedrivePolicy={"deadLetterTargetArn": dead, "maxReceiveCount": 5})
    conf = {
        "broker_url": sqs_server.url,
        "dlq_url": server.url,
        "broker_transport_options": sqs_server.options,
    }
    limited = shop(**conf)
    found = one(limited, "redrive-policy")
    assert "maxReceiveCount of at least 6" in found.sentence
    assert [row.lossless for row in limited.guarantees([found])] == [False]
    assert shop(**conf, dlq_adopt={"dead": "orders-DLQ"}).doctor() == []


def shown(dlq: DeadLetters, *arguments: str, exit_code: int) -> str:
    """What the command prints."""

    class Context:
        app = dlq.app

    done = CliRunner(env={"COLUMNS": "80"}).invoke(commands, ["doctor", *arguments], obj=Context())
    assert done.exit_code == exit_code, done.output
    return done.output


def test_the_command_says_what_to_do_and_what_is_guaranteed(shop: Make) -> None:
    """Exit code 1 on a finding, as text and as JSON."""
    dlq = shop(task_acks_late=False)
    text = shown(dlq, exit_code=1)
    assert "Set task_acks_late = True" in text
    assert "Guarantees of guarded tasks on Redis" in text
    assert max(map(len, text.splitlines())) <= 80
    finding, guarantee, unseen = map(json.loads, shown(dlq, "--json", exit_code=1).splitlines())
    assert finding["check"] == "early-acknowledgement"
    assert unseen["warning"].startswith("No worker answered remote control")
    assert "No worker answered remote control" in text
    assert "shop.charge" in guarantee.pop("tasks")
    assert guarantee == {
        "broker": "Redis",
        "acknowledgement": "early",
        "bounded": True,
        "lossless": False,
        "exact": True,
        "conditions": {"exact": "but for cold shutdowns"},
        "redrive": "exactly once",
    }


def test_the_command_of_a_sound_app_exits_with_0(shop: Make, server: RedisServer) -> None:
    """Letters in another database than the broker's: a redrive is exactly once, too."""
    assert "No fault was found." in shown(shop(), exit_code=0)
    other = shop(dlq_url=server.url.replace("/0", "/1"))
    Store(server.url.replace("/0", "/1")).workers.register(a_worker())
    row, _unseen = map(json.loads, shown(other, "--json", exit_code=0).splitlines())
    assert (row["acknowledgement"], row["redrive"]) == ("late", "exactly once")


def test_every_kind_is_tried_here() -> None:
    """A finding that nobody has seen is not there yet."""
    here = Path(__file__).read_text("utf-8")
    assert [kind for kind in KINDS if f'"{kind}"' not in here] == []


def test_an_app_that_cannot_be_imported_is_one_line(tmp_path: Path) -> None:
    """As Celery says it."""
    command = [sys.executable, "-m", "celery", "-A", "nothing", "dlq", "doctor"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
