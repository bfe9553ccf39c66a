"""A redrive where broker and letters share a Redis database: one script publishes and removes."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from builders import DLQ, a_letter, a_request, an_app, key_of
from fork_server import ForkedProcess
from killing import KILLED, ends_of
from kombu import Queue
from kombu.transport.redis import Channel
from servers import RedisServer, _free_port, redis_executable
from waiting import poll

from celery_dlq import DeadLetter, DeadLetters
from celery_dlq.errors import StoreUnavailable
from celery_dlq.letters.headers import CONTENT_TYPE_OF_ENTRY
from celery_dlq.letters.record import Delivery
from celery_dlq.store.claims import Claims, ClaimState
from celery_dlq.store.keys import Keys
from celery_dlq.store.letters import Letters
from celery_dlq.store.records import QueueEntry, Seed
from celery_dlq.store.stream import ReadAhead
from celery_dlq.store.worker_records import MessageKey

Make = Callable[..., DeadLetters]
ALWAYS = ("letters", "ids", "tally", "groups", "claims", "ends")


@pytest.fixture
def step_by_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on, letters are as if they were elsewhere."""
    return lambda: monkeypatch.setattr(Claims, "marker", lambda *_: None)


def put(store: Letters, count: int = 1, **changes: Any) -> list[DeadLetter]:
    """Store letters of tasks."""
    letters = []
    for _ in range(count):
        letter = a_letter(properties='{"priority": 0}', **changes)
        if "headers" not in changes:
            headers = a_request(id=letter.task_id, root_id=letter.task_id)
            letter = a_letter(
                **{**changes, "task_id": letter.task_id, "headers": json.dumps(headers)}
            )
        store.dead_letter(letter, key_of(letter))
        letters.append(letter)
    return letters


def went(client: redis.Redis, queue: str = "orders") -> list[str]:
    """The letters whose messages wait in a queue, oldest first."""
    entries = reversed(client.lrange(queue, 0, -1))
    return [json.loads(entry)["headers"]["dlq_letter"] for entry in entries]


def entry_of(store: Letters, letter: DeadLetter, **changes: Any) -> QueueEntry:
    """What a letter becomes."""
    found = store.entry(DLQ, letter.id)
    assert found is not None
    values = {
        "letter_id": letter.id,
        "position": found[0],
        "reason": letter.reason.value.encode(),
        "fingerprint": letter.fingerprint.encode(),
        "list_key": b"orders",
        "entry": f"message of {letter.id}",
    }
    return QueueEntry(**{**values, **changes})


# -- the script --------------------------------------------------------------------------


def test_what_is_redriven_is_removed_as_ever(make: Make, client: redis.Redis) -> None:
    """Index, tally, groups, claims and expiries end as after a removal, whichever letters go."""
    store = make().store
    kinds = [{"fingerprint": f"{n % 3:016x}", "expires": None} for n in range(9)]
    letters = [put(store, **kind)[0] for kind in kinds]
    before = {name: client.dump(getattr(Keys(), name)(DLQ)) for name in ALWAYS}
    gone = [letters[n] for n in (0, 1, 3, 4, 6, 8)]

    def state() -> dict[str, Any]:
        keys = Keys()
        return {
            "letters": [entry for entry, _ in client.xrange(keys.letters(DLQ))],
            "ids": client.hgetall(keys.ids(DLQ)),
            "tally": client.hgetall(keys.tally(DLQ)),
            "groups": client.zrange(keys.groups(DLQ), 0, -1, withscores=True),
            "claims": client.hgetall(keys.claims(DLQ)),
            "ends": client.zrange(keys.ends(DLQ), 0, -1, withscores=True),
        }

    entries = [entry_of(store, letter) for letter in gone]
    call = store.claims.redrive(DLQ, entries, job_id="job", owner="me", database=0)
    states = call.wait_for_states()
    redriven = state()
    for name, dumped in before.items():
        key = getattr(Keys(), name)(DLQ)
        client.delete(key)
        if dumped is not None:
            client.restore(key, 0, dumped)
    assert store.remove(DLQ, [letter.id for letter in gone]) == len(gone)

    assert states == [ClaimState.CLAIMED] * len(gone)
    assert redriven == state()
    assert client.lrange("orders", 0, -1) == [
        f"message of {letter.id}".encode() for letter in reversed(gone)
    ]


def test_claims_of_others_are_respected(make: Make, client: redis.Redis) -> None:
    """Held letters stay, published ones are only removed, those of dead operations are doubtful."""
    store = make().store
    free, held, published, expired, ours = put(store, 5)
    claims: list[tuple[DeadLetter, str, float]] = [
        (held, "live", 60.0),
        (published, "dead", 60.0),
        (expired, "dead", 0.0),
        (ours, "job:1@host", 60.0),
    ]
    for letter, owner, lease in claims:
        store.claims.claim(DLQ, [letter.id], owner=owner, lease_seconds=lease)
    store.claims.mark_published(DLQ, [published.id], owner="dead")
    asked = [entry_of(store, letter) for letter in (free, held, published, expired, ours)]
    asked += [asked[0], asked[0]._replace(letter_id="unknown")]

    call = store.claims.redrive(
        DLQ, asked, job_id="job", owner="job:2@host", database=0, previous_run_prefix="job:"
    )
    states = call.wait_for_states()

    assert states == [
        ClaimState.CLAIMED,
        ClaimState.HELD,
        ClaimState.PUBLISHED,
        ClaimState.RECLAIMED,
        ClaimState.RECLAIMED,
        ClaimState.GONE,
        ClaimState.GONE,
    ]
    assert {found.letter.id for found in store.letters(DLQ, newest_first=False)} == {held.id}
    assert client.hkeys(Keys().claims(DLQ)) == [held.id.encode()]
    assert client.llen("orders") == 3


def test_a_seeded_count_is_written_only_for_a_letter_that_goes(
    make: Make, client: redis.Redis
) -> None:
    """A count written too late would let a message that runs already start once more."""
    store = make().store
    free, held = put(store, 2)
    store.claims.claim(DLQ, [held.id], owner="live", lease_seconds=60.0)
    keys = [
        MessageKey(dead_letter_queue=DLQ, task_id=letter.task_id, redrives=1)
        for letter in (free, held)
    ]
    last = Delivery(number=3, started_at=free.dead_lettered_at, worker_hostname="celery@web-1")
    store.claims.redrive(
        DLQ,
        [
            entry_of(store, letter, seed=Seed(key, 2, last))
            for letter, key in zip((free, held), keys, strict=True)
        ],
        job_id="job",
        owner="me",
        database=0,
    ).wait_for_states()
    written = client.hgetall(Keys().run(keys[0]))
    ttl = client.pttl(Keys().run(keys[0]))
    client.delete(Keys().run(keys[0]))
    store.claims.seed_count(keys[0], 2, last)
    assert written == client.hgetall(Keys().run(keys[0]))
    assert 0 < ttl <= 72 * 3600 * 1000
    assert not client.exists(Keys().run(keys[1]))


@pytest.mark.parametrize("database", [0, 5])
@pytest.mark.parametrize("why", ["full", "another type", "no permission"])
def test_what_is_refused_changes_nothing(
    make: Make, server: RedisServer, client: redis.Redis, why: str, database: int
) -> None:
    """The refusal comes before the first message, and the redrive goes on step by step."""
    url = server.url.replace("redis://", "redis://letters:pw@")
    dlq = make(dlq_url=f"{url.removesuffix('0')}{database}")
    client.acl_setuser(
        "letters", enabled=True, passwords=["+pw"], commands=["+@all"], keys=["*"], channels=["*"]
    )
    letters = put(dlq.store, 3, fingerprint="f" * 16)
    letters += put(dlq.store, source_queue="other")
    entries = [
        entry_of(dlq.store, letter, list_key=letter.source_queue.encode()) for letter in letters
    ]
    if why == "full":
        client.config_set("maxmemory", 1)
    elif why == "another type":
        client.set("other", "text")
    else:
        client.acl_setuser("letters", reset_keys=True, keys=["dlq:*", "orders"])
        poll(lambda: client.acl_getuser("letters")["keys"])

    call = dlq.store.claims.redrive(DLQ, entries, job_id="job", owner="me", database=0)
    assert call.wait_for_states() is None

    assert client.llen("orders") == 0
    assert dlq.store.length(DLQ) == 4
    if why == "full":
        client.config_set("maxmemory", 0)
    report = dlq.redrive(DLQ)
    if why == "another type":
        assert (report.published, report.failures) == (3, 1) or report.failures == 4
        client.delete("other")
        report = dlq.redrive(DLQ)
    assert dlq.store.length(DLQ) == 0
    assert {*went(client), *went(client, "other")} == {letter.id for letter in letters}


# -- which way a redrive goes ------------------------------------------------------------


def claims_made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the claims of redrives that go step by step."""
    made: list[int] = []
    inner = Claims.claim

    def claim(self: Claims, queue: str, ids: Any, **options: Any) -> Any:
        made.append(len(ids))
        return inner(self, queue, ids, **options)

    monkeypatch.setattr(Claims, "claim", claim)
    return made


@pytest.mark.parametrize(
    ("broker", "letters", "shared"),
    [
        ("/0", "/0", True),
        ("/0", "/1", True),
        ("/1", "/0", True),
        ("/1", "/1", True),
        ("elsewhere/0", "/0", False),
        ("elsewhere/1", "/0", False),
    ],
)
def test_one_step_where_the_server_is_the_same(
    make: Make,
    server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    broker: str,
    letters: str,
    shared: bool,
) -> None:
    """Databases of one server share a step; those with one number, of two servers, do not."""
    url = server.url.removesuffix("/0")
    with RedisServer() as elsewhere:
        there = broker.replace("elsewhere", elsewhere.url.removesuffix("/0"))
        dlq = make(
            broker_url=url + broker if there == broker else there,
            dlq_url=url.replace("127.0.0.1", "localhost") + letters,
            broker_transport_options={"global_keyprefix": "shop:"},
        )
        made = claims_made(monkeypatch)
        (letter,) = put(dlq.store)
        assert dlq.redrive(DLQ).published == 1
        with redis.Redis.from_url(dlq.app.conf.broker_url) as client:
            assert went(client, "shop:orders") == [letter.id]
        assert bool(made) is not shared
        assert dlq.store.length(DLQ) == 0


def test_who_may_not_select_a_database_goes_step_by_step(
    make: Make, server: RedisServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The permission to select is missing in scripts, too; nothing is lost by it."""
    client.acl_setuser(
        "letters",
        enabled=True,
        passwords=["+pw"],
        commands=["+@all", "-select"],
        keys=["*"],
        channels=["*"],
    )
    made = claims_made(monkeypatch)
    dlq = make(
        broker_url=server.url.removesuffix("0") + "1",
        dlq_url=server.url.replace("redis://", "redis://letters:pw@"),
    )
    (letter,) = put(dlq.store)
    assert dlq.redrive(DLQ).published == 1
    with redis.Redis.from_url(dlq.app.conf.broker_url) as there:
        assert went(there) == [letter.id]
    assert made == [1]


def test_one_step_over_a_unix_socket_and_through_sentinel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What counts is the database that is reached, not how."""
    made = claims_made(monkeypatch)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = f"{folder}/redis.sock"
        server = stack.enter_context(RedisServer("--unixsocket", path))
        config, port = Path(folder, "sentinel.conf"), _free_port()
        config.write_text(f"port {port}\nsentinel monitor shop 127.0.0.1 {server.port} 1\n")
        process = subprocess.Popen(
            [redis_executable() or "redis-server", str(config), "--sentinel"],
            stdout=subprocess.DEVNULL,
        )
        stack.callback(process.wait)
        stack.callback(process.terminate)
        poll(lambda: _answers(port))
        for broker, options in (
            (f"redis+socket://{path}", {}),
            (f"sentinel://127.0.0.1:{port}/0", {"master_name": "shop"}),
        ):
            app = an_app(broker_url=broker, dlq_url=server.url, broker_transport_options=options)
            dlq = DeadLetters(app)
            stack.callback(dlq.close)
            (letter,) = put(dlq.store)
            assert dlq.redrive(DLQ).published == 1
            assert went(server.client())[-1] == letter.id
    assert not made


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.skipif(not hasattr(Channel, "_maybe_update_queues_expire"), reason="new in kombu 5.6")
def test_a_queue_that_expires_gets_its_messages_from_kombu(
    make: Make, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end is put off, as by every publish."""
    dlq = make(task_queues=[Queue("orders", expires=60)])
    made = claims_made(monkeypatch)
    put(dlq.store, 2)
    assert dlq.redrive(DLQ).published == 2
    assert made == [2]
    assert 0 < client.pttl("orders") <= 60_000


# -- whatever breaks ---------------------------------------------------------------------


def lose_replies(dlq: DeadLetters, client: redis.Redis, monkeypatch: Any, times: int) -> None:
    """Cut the connection after a redrive was executed, before its reply is read."""
    store_client = dlq.assembly.backend.client
    parse, answer, lost = store_client.parse_response, ReadAhead.wait_for_reply, []

    def lose() -> bool:
        if len(lost) < times:
            lost.append(poll(lambda: client.llen("orders")))
            return True
        return False

    def lost_answer(self: ReadAhead) -> Any:
        if self.command is not None and self.command[0] == "EVALSHA" and lose():
            self.close()
            raise StoreUnavailable("the connection was cut")
        return answer(self)

    def lost_response(connection: Any, command: str, **options: Any) -> Any:
        if (
            command in ("EVAL", "EVALSHA") and client.llen("orders") and lose()
        ):  # not where the queue ends
            connection.disconnect()
            raise redis.ConnectionError("the connection was cut")
        return parse(connection, command, **options)

    monkeypatch.setattr(ReadAhead, "wait_for_reply", lost_answer)
    monkeypatch.setattr(store_client, "parse_response", lost_response)


@pytest.mark.parametrize("times", [1, 2])
def test_a_lost_reply_is_asked_for_again(
    make: Make, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """The script is called once more, and replies what it did the first time."""
    dlq = make()
    put(dlq.store)
    dlq.redrive(DLQ)  # else the first reply would be that the script is not known
    client.delete("orders")
    letters = put(dlq.store, 700)
    lose_replies(dlq, client, monkeypatch, times)
    report = dlq.redrive(DLQ)
    assert (report.published, report.skipped, report.maybe_twice) == (700, 0, 0)
    assert went(client) == [letter.id for letter in letters]
    assert dlq.job(report.redrive_id).counts["published"] == 700
    assert dlq.changes(limit=1)[0].letters == 700


def test_a_redrive_that_loses_its_redis_is_finished_by_resuming_its_job(
    make: Make, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Letters of the batch whose reply never came are published, and the job says so."""
    dlq = make()
    put(dlq.store)
    dlq.redrive(DLQ)  # else the first reply would be that the script is not known
    client.delete("orders")
    letters = put(dlq.store, 700)
    lose_replies(dlq, client, monkeypatch, times=100)
    with pytest.raises(StoreUnavailable):
        dlq.redrive(DLQ)
    monkeypatch.undo()
    job, _first = dlq.jobs()
    assert (job.state, dlq.store.length(DLQ)) == ("failed", 600)
    report = dlq.resume(job.id)
    assert went(client) == [letter.id for letter in letters]
    assert (report.state, report.skipped, report.maybe_twice) == ("done", 0, 0)
    assert report.published == 700


def test_ctrl_c_while_a_batch_is_on_its_way_counts_it(
    make: Make, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been sent or not: the call is made again, and does nothing twice."""
    dlq = make()
    put(dlq.store)
    dlq.redrive(DLQ)
    client.delete("orders")
    letters = put(dlq.store, 250)
    answer = ReadAhead.wait_for_reply

    def interrupted(self: ReadAhead) -> Any:
        if self.command is not None and self.command[0] == "EVALSHA":
            poll(lambda: client.llen("orders"))
            raise KeyboardInterrupt
        return answer(self)

    monkeypatch.setattr(ReadAhead, "wait_for_reply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dlq.redrive(DLQ)
    assert went(client) == [letter.id for letter in letters[:100]]
    assert dlq.store.length(DLQ) == 150
    assert dlq.jobs()[0].counts["published"] == 100


REDRIVES = """
import sys
from builders import DLQ, an_app
from celery_dlq import DeadLetters
from celery_dlq.operations.redrive import one_step
one_step.OneStep.batch_size = 20
dlq = DeadLetters(an_app(broker_url=sys.argv[1], dlq_url=sys.argv[2]))
print("ready", flush=True)
jobs = [job for job in dlq.jobs() if job.state == "interrupted"]
dlq.resume(jobs[0].id) if jobs else dlq.redrive(DLQ)
"""


@pytest.mark.parametrize("database", [0, 3])
def test_killed_at_any_instant_each_letter_is_here_or_published(
    make: Make, server: RedisServer, client: redis.Redis, database: int
) -> None:
    """Never both, never neither; and the next run does the rest."""
    url = f"{server.url.removesuffix('0')}{database}"
    store = make(dlq_url=url).store
    sent = [letter.id for letter in put(store, 2000)]
    ends: list[int] = []

    def moves(process: ForkedProcess) -> None:
        poll(partial(_moves, process, store, store.length(DLQ)))

    for end in ends_of(REDRIVES, server.url, url, wait=moves, kills=6, step_seconds=0.002):
        ends.append(end)
        here = [found.letter.id for found in store.letters(DLQ, newest_first=False)]
        assert went(client) + here == sent
    assert ends.count(KILLED) >= 3
    assert store.length(DLQ) == 0
    with redis.Redis.from_url(url) as there:
        assert there.hlen(Keys().claims(DLQ)) == 0
        assert there.zcard(Keys().groups(DLQ)) == 0
    (job,) = make(dlq_url=url).jobs()
    assert job.counts["published"] == 2000


def test_what_survives_of_a_redrive_across_databases_is_whole() -> None:
    """A step is one transaction in the append-only file and for a replica, wherever they end."""
    with RedisServer("--appendonly", "yes") as server, RedisServer() as replica:
        replica.client().replicaof("127.0.0.1", server.port)
        url = server.url.removesuffix("0")
        dlq = DeadLetters(an_app(broker_url=f"{url}1", dlq_url=f"{url}2"))
        sent = [letter.id for letter in put(dlq.store, 150)]
        assert dlq.redrive(DLQ, limit=140).published == 140  # in steps of 100 and 40
        dlq.close()
        poll(lambda: _here_and_there(replica) == (sent[140:], sent[:140]))
        folder = Path(server.client().config_get("dir")["dir"])
        server.kill()
        (file,) = [path for path in folder.rglob("*.aof") if b"LPUSH" in path.read_bytes()]
        whole, gone = file.read_bytes(), set()
        last = whole.rindex(b"LPUSH")
        begin = whole.rindex(b"MULTI", 0, last)
        end = whole.index(b"EXEC", last)
        for cut in (len(whole), *range(end, begin - 200, -((end - begin) // 9))):
            file.write_bytes(whole[:cut])
            server.start()
            here, there = _here_and_there(server)
            server.kill()
            gone.add(len(there))
            assert there + here == sent
        assert {100, 140} <= gone


def _here_and_there(server: RedisServer) -> tuple[list[str], list[str]]:
    """The letters in database 2, and those whose messages are in database 1."""
    url = server.url.removesuffix("0")
    with redis.Redis.from_url(f"{url}1") as there, redis.Redis.from_url(f"{url}2") as here:
        letters = here.xrange(Keys().letters(DLQ))
        return [fields[b"id"].decode() for _, fields in letters], went(there)


def _moves(process: ForkedProcess, store: Letters, letters: int) -> bool:
    return process.poll() is not None or store.length(DLQ) < letters


# -- entries that were no messages -------------------------------------------------------


@pytest.mark.parametrize("where", ["in one step", "step by step"])
def test_an_entry_that_was_no_message_goes_back_as_it_was(
    make: Make, client: redis.Redis, step_by_step: Callable[[], None], where: str
) -> None:
    """Its bytes are the entry, without an envelope."""
    if where == "step by step":
        step_by_step()
    dlq = make()
    raw = b"\xff\x00 no {json"
    put(dlq.store, body=raw, content_type=CONTENT_TYPE_OF_ENTRY, headers=None)
    (other,) = put(dlq.store)
    assert dlq.redrive(DLQ).published == 2
    message, entry = client.lrange("orders", 0, -1)
    assert entry == raw
    assert json.loads(base64.b64decode(json.loads(message)["body"])) == json.loads(other.body)
    assert dlq.store.length(DLQ) == 0


def test_only_a_redis_broker_takes_such_an_entry_back(make: Make) -> None:
    """Elsewhere it stays, and the report says why."""
    dlq = make(broker_url="memory://")
    (letter,) = put(dlq.store, body=b"no message", content_type=CONTENT_TYPE_OF_ENTRY)
    report = dlq.redrive(DLQ)
    assert (report.published, report.failures, report.doubtful) == (0, 1, 0)
    assert "only a broker of that kind can take it back" in report.failed[letter.id]
    assert dlq.store.length(DLQ) == 1


def test_a_large_letter_goes_alone(make: Make, client: redis.Redis) -> None:
    """Fifty megabytes are one step, and the letters beside it are others."""
    dlq = make()
    sizes = []
    inner = dlq.store.claims.redrive

    def redrive(queue: str, entries: Any, **options: Any) -> Any:
        sizes.append(len(entries))
        return inner(queue, entries, **options)

    dlq.store.claims.redrive = redrive  # type: ignore[method-assign]
    put(dlq.store, 2)
    (large,) = put(dlq.store, body=os.urandom(50 * 1024 * 1024), content_type="application/data")
    put(dlq.store, 2)
    assert dlq.redrive(DLQ).published == 5
    assert sizes == [2, 1, 2]
    message = json.loads(client.lindex("orders", 2))
    assert base64.b64decode(message["body"]) == large.body
