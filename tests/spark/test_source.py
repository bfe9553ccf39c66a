"""The data source: live letters in Spark."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis
from builders import a_letter, key_of
from servers import RedisServer

from celery_dlq import DeadLetter
from celery_dlq.letters.record import field_kinds
from celery_dlq.store.store import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.usefixtures("pyspark")

PASSWORD = "hush-hush-4711"
HERE = Path(__file__).parent

Fill = Callable[[Iterable[DeadLetter]], None]


@pytest.fixture
def source(spark: SparkSession) -> SparkSession:
    """Give the session, with the format registered."""
    from celery_dlq.spark.source import register

    register(spark)
    return spark


@pytest.fixture
def fill(redis_url: str) -> Fill:
    """Give a function that stores letters."""
    return lambda letters: store(redis_url, letters)


def store(url: str, letters: Iterable[DeadLetter]) -> None:
    """Put letters into their queues."""
    place = Store(url, timeout_seconds=5).letters
    for letter in letters:
        place.dead_letter(letter, key_of(letter))
    place.close()


def now() -> datetime:
    """The present, as Redis has it too."""
    return datetime.now(timezone.utc)


def live(spark: SparkSession, url: str, **options: Any) -> DataFrame:
    """The letters of a Redis."""
    named = {name: str(value) for name, value in options.items()}
    return spark.read.format("celery_dlq").option("url", url).options(**named).load()


def ids(df: DataFrame) -> list[str]:
    """The letters' ids, sorted."""
    return sorted(row[0] for row in df.select("id").collect())


def message_of(ask: Callable[[], object]) -> str:
    """The last line of the error that Spark shows."""
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException) as caught:
        ask()
    lines = [line.strip() for line in str(caught.value).splitlines()]
    ours = [line for line in lines if line.startswith("celery_dlq.errors.")]
    assert ours, str(caught.value)
    return ours[-1].partition(": ")[2]


# -- reading ----------------------------------------------------------------------


def test_live_letters_are_those_of_the_store(
    source: SparkSession, redis_url: str, fill: Fill
) -> None:
    """Every field comes as it is in exported files, of all queues, each letter once."""
    letters = [
        a_letter(dead_letter_queue=f"q{n % 2}-DLQ", dead_lettered_at=now(), body=b"\x80\xff\x00")
        for n in range(60)
    ]
    fill(letters)
    df = live(source, redis_url)
    assert df.columns == list(field_kinds())
    assert ids(df) == sorted(letter.id for letter in letters)
    row = df.where(f"id = '{letters[3].id}'").selectExpr("*", "unix_micros(dead_lettered_at) m")
    found = row.collect()[0]
    assert (found["body"], found["dead_letter_queue"]) == (b"\x80\xff\x00", "q1-DLQ")
    assert found["m"] == round(letters[3].dead_lettered_at.timestamp() * 1_000_000)


def test_options_choose_queue_columns_and_time(
    source: SparkSession, redis_url: str, fill: Fill
) -> None:
    """Options do what a WHERE and a SELECT would, before anything travels."""
    old, new = now() - timedelta(days=2), now()
    fill(
        [
            a_letter(dead_letter_queue=queue, dead_lettered_at=moment, description=f"{queue} {n}")
            for queue in ("a-DLQ", "b-DLQ")
            for n, moment in enumerate((old, new))
        ]
    )
    day_ago = (now() - timedelta(days=1)).isoformat()
    df = live(source, redis_url, Queue="a-DLQ", columns="description, id", SINCE=day_ago)
    assert df.columns == ["description", "id"]
    assert [row["description"] for row in df.collect()] == ["a-DLQ 1"]
    until = live(source, redis_url, queue="b-DLQ", until=day_ago)
    assert [row["description"] for row in until.collect()] == ["b-DLQ 0"]
    chosen = source.read.format("celery_dlq").schema("id STRING, deliveries BIGINT")
    assert chosen.option("url", redis_url).load().agg({"deliveries": "sum"}).first()[0] == 4


def test_conditions_on_arguments_choose_letters(
    source: SparkSession, redis_url: str, fill: Fill
) -> None:
    """The option ``where`` is that of the commands; the column need not be read."""
    letters = [
        a_letter(
            dead_lettered_at=now(),
            kwargs_json=json.dumps({"tenant": tenant}),
            headers=json.dumps({"x-from": name}),
        )
        for tenant in (42, "42", 7)
        for name in ("web", "cron")
    ]
    fill(letters)
    df = live(source, redis_url, columns="id", where="kwargs.tenant=42\nheaders.x-from~eb")
    assert ids(df) == sorted([letters[0].id, letters[2].id])


def test_filters_reach_the_source(redis_url: str, fill: Fill) -> None:
    """A condition on queue or time plans fewer tasks, and begins in the middle of a stream."""
    from pyspark.sql import datasource as ds

    from celery_dlq.spark.options import ReadOptions
    from celery_dlq.spark.source import FilteringReader

    fill([a_letter(dead_letter_queue=f"q{n}-DLQ", dead_lettered_at=now()) for n in range(3)])
    options = ReadOptions.parse({"url": redis_url})

    def planned(*conditions: Any) -> list[Any]:
        reader = FilteringReader(options, ("id",))
        assert list(reader.pushFilters(list(conditions))) == list(conditions)
        copy = pickle.loads(pickle.dumps(reader))
        return [part.span for part in copy.partitions() if part.span]

    queue, died = ("dead_letter_queue",), ("dead_lettered_at",)
    assert len(planned()) == 3
    assert [span.queue for span in planned(ds.EqualTo(queue, "q1-DLQ"))] == ["q1-DLQ"]
    assert [s.queue for s in planned(ds.In(queue, ("q0-DLQ", "q2-DLQ")))] == ["q0-DLQ", "q2-DLQ"]
    assert planned(ds.GreaterThan(died, now() + timedelta(days=1))) == []
    (span,) = planned(
        ds.EqualTo(queue, "q1-DLQ"), ds.GreaterThan(died, now() - timedelta(minutes=5))
    )
    assert span.after != "0-0"
    assert planned(ds.Not(ds.EqualTo(queue, "q1-DLQ"))) == planned()


def test_pushed_filters_leave_letters_unread(redis_url: str, fill: Fill) -> None:
    """What a filter of letters compares is compared before rows are made."""
    from pyspark.sql import datasource as ds

    from celery_dlq.spark.options import ReadOptions
    from celery_dlq.spark.source import FilteringReader

    letters = [
        a_letter(release=f"r{n % 2}", root_id=f"root-{n}", deliveries=n, exception_type="a.B")
        for n in range(4)
    ]
    fill(letters)

    def read(*conditions: Any) -> list[int]:
        reader = FilteringReader(ReadOptions.parse({"url": redis_url}), ("deliveries",))
        assert list(reader.pushFilters(list(conditions))) == list(conditions)
        reader = pickle.loads(pickle.dumps(reader))
        batches = [batch for part in reader.partitions() for batch in reader.read(part)]
        return sorted(value for batch in batches for value in batch["deliveries"].to_pylist())

    release, deliveries = ("release",), ("deliveries",)
    assert read(ds.EqualTo(release, "r1")) == [1, 3]
    assert read(ds.EqualTo(release, "r1"), ds.EqualTo(("root_id",), "root-3")) == [3]
    assert read(ds.EqualTo(("reason",), "rejected")) == []
    assert read(ds.EqualTo(("exception_type",), "a.B")) == [0, 1, 2, 3]
    assert read(ds.GreaterThan(deliveries, 1)) == [2, 3]
    assert read(ds.GreaterThanOrEqual(deliveries, 1), ds.GreaterThan(deliveries, -1)) == [1, 2, 3]
    for all_of_them in (
        ds.GreaterThanOrEqual(deliveries, 0),
        ds.LessThan(deliveries, 2),
        ds.EqualTo(("reason",), "of another version"),
        ds.EqualNullSafe(("group_id",), None),
        ds.EqualTo(("headers", "release"), "r1"),
        ds.Not(ds.EqualTo(release, "r1")),
    ):
        assert read(all_of_them) == [0, 1, 2, 3]


def test_pushed_filters_give_the_same_rows(
    source: SparkSession, redis_url: str, fill: Fill
) -> None:
    """With push-down on or off, a query has one answer, also at the edges of time."""
    begun = now()
    letters = [
        a_letter(dead_letter_queue=f"q{n % 2}-DLQ", dead_lettered_at=begun - timedelta(hours=n))
        for n in range(6)
    ]
    fill(letters)
    edge = letters[3].dead_lettered_at.isoformat()
    where = f"dead_letter_queue = 'q1-DLQ' AND dead_lettered_at <= timestamp '{edge}'"
    expected = sorted(letter.id for letter in (letters[3], letters[5]))
    df = live(source, redis_url).where(where)
    assert ids(df) == expected
    assert ids(df.where("deliveries > 0 AND task_name = 'shop.charge'")) == expected
    source.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    try:
        assert ids(live(source, redis_url).where(where)) == expected
    finally:
        source.conf.set("spark.sql.python.filterPushdown.enabled", "true")


# -- what Redis answers before rows travel --------------------------------------


def many(number: int) -> list[DeadLetter]:
    """Letters as apps have them, about 2 KB each: two causes, in the order of storing."""
    begun, headers = now(), json.dumps({"lang": "py", "stamps": {"x": "y" * 700}})
    return [
        a_letter(
            dead_lettered_at=begun - timedelta(minutes=number - n),
            fingerprint=("aa" if n % 100 else "bb") * 8,
            body=json.dumps([[n], {"note": f"{n} " * 200}, {}]).encode(),
            kwargs_json=json.dumps({"note": f"{n} " * 200}),
            headers=headers,
            traceback=f"Traceback of {n}\n" * 40,
            release=f"v{n % 3}",
        )
        for n in range(number)
    ]


@pytest.fixture
def sent(redis_url: str) -> Callable[[Callable[[], Any]], tuple[Any, int]]:
    """Give a function that says what a call returns, and how many bytes Redis sent meanwhile."""
    client = redis.Redis.from_url(redis_url)

    def of(ask: Callable[[], Any]) -> tuple[Any, int]:
        before = client.info("stats")["total_net_output_bytes"]
        found = ask()
        return found, client.info("stats")["total_net_output_bytes"] - before

    return of


def test_redis_answers_id_cause_queue_and_time(
    source: SparkSession,
    redis_url: str,
    fill: Fill,
    sent: Callable[[Callable[[], Any]], tuple[Any, int]],
) -> None:
    """As options and, pushed down, as conditions: what does not match is never sent."""
    letters = many(2_000)
    fill([*letters, *(a_letter(dead_letter_queue="other-DLQ") for _ in range(5))])
    everything, all_bytes = sent(lambda: ids(live(source, redis_url)))
    assert len(everything) == 2_005
    assert all_bytes > 2_000_000
    few = sorted(letter.id for letter in letters[701:704])
    hour = (letters[1000].dead_lettered_at.isoformat(), letters[1060].dead_lettered_at.isoformat())
    rare = sorted(letter.id for letter in letters if letter.fingerprint.startswith("b"))
    in_hour = sorted(letter.id for letter in letters[1000:1060])
    asked = (
        ({"id": ",".join(few)}, "true", few, 40_000),
        ({}, f"id = '{few[0]}'", few[:1], 40_000),
        ({}, f"id IN ('{few[0]}', '{few[2]}', 'none')", [few[0], few[2]], 40_000),
        ({"fingerprint": "bb"}, "true", rare, 150_000),
        ({"fingerprint": "bb,cc", "columns": "id"}, "true", rare, 60_000),
        ({}, f"fingerprint = '{'bb' * 8}'", rare, 150_000),
        ({"queue": "orders-DLQ"}, f"fingerprint IN ('{'bb' * 8}', 'x')", rare, 150_000),
        ({"since": hour[0], "until": hour[1]}, "true", in_hour, 300_000),
        (
            {},
            f"dead_lettered_at >= '{hour[0]}' AND dead_lettered_at < '{hour[1]}'",
            in_hour,
            300_000,
        ),
        ({}, "dead_letter_queue IN ('orders-DLQ', 'x') AND id = 'none'", [], 40_000),
        ({}, f"id = '{few[0]}' AND fingerprint = '{'bb' * 8}'", [], 40_000),
    )
    for options, where, expected, most in asked:
        df = live(source, redis_url, **options).where(where)
        found, size = sent(lambda df=df: ids(df))  # type: ignore[misc]
        assert (found, size < most) == (expected, True), (options, where, size)


def test_columns_that_nobody_reads_are_not_sent(
    source: SparkSession,
    redis_url: str,
    fill: Fill,
    sent: Callable[[Callable[[], Any]], tuple[Any, int]],
) -> None:
    """Bodies, headers and tracebacks stay in Redis; what is asked for is as it is stored."""
    letters = [
        *many(1_000),
        # Other layouts: a compressed body's arguments, values that are long, a place in headers.
        *(
            a_letter(
                dead_lettered_at=now(),
                task_id=f"task-of-a-long-name-{n}",
                headers=json.dumps({"id": f"task-of-a-long-name-{n}", "argsrepr": "('x' * 99)"}),
                argsrepr="('x' * 99)",
                description="d" * (n * 40),
                body=b"\x1e\x00" * n,
                args_json=json.dumps(["z" * 300]),
                release="with\x1eseparator",
            )
            for n in range(12)
        ),
    ]
    fill(letters)
    of_all, all_bytes = sent(
        lambda: {row["id"]: row.asDict() for row in live(source, redis_url).collect()}
    )
    parts = ("id", "id,release,description", "id,task_id,argsrepr", "id,args_json", "id,traceback")
    for columns in (*parts, "id,body", "id,history,root_id,exception_message,headers"):
        df = live(source, redis_url, columns=columns)
        rows, size = sent(df.collect)
        names = columns.split(",")
        assert {row["id"]: row.asDict() for row in rows} == {
            letter_id: {name: row[name] for name in names} for letter_id, row in of_all.items()
        }, columns
        assert size < all_bytes, columns
        if columns in parts[:3]:
            assert size < 600 * len(letters), (columns, size)
    with_time = live(source, redis_url, columns="id", where="kwargs.note~7 7")
    assert with_time.count() >= 1


def test_a_filtered_read_is_right_while_letters_come_and_go(redis_url: str, fill: Fill) -> None:
    """Each letter that is there from beginning to end is read once, and no letter twice."""
    from celery_dlq.spark.options import ReadOptions
    from celery_dlq.spark.source import LetterReader

    staying, leaving = many(1_500), many(300)
    fill([one for pair in zip_longest(staying, leaving) for one in pair if one])
    options = {"url": redis_url, "columns": "id", "fingerprint": "aa,bb", "queue": "orders-DLQ"}
    reader = LetterReader(ReadOptions.parse(options), ("id",))
    ended, stores = threading.Event(), Store(redis_url, timeout_seconds=5).letters

    def come_and_go() -> None:
        for letter in leaving:
            stores.remove(letter.dead_letter_queue, [letter.id])
            store(redis_url, [a_letter(dead_lettered_at=now(), fingerprint="aa" * 8)])
            if ended.is_set():
                return

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(3):
            batches = [b for part in reader.partitions() for b in reader.read(part)]
            found = [one for batch in batches for one in batch["id"].to_pylist()]
            assert len(set(found)) == len(found)
            assert {letter.id for letter in staying} <= set(found)
    finally:
        ended.set()
        thread.join()
        stores.close()
    wanted = LetterReader(ReadOptions.parse({**options, "id": staying[7].id}), ("id",))
    (part,) = wanted.partitions()
    Store(redis_url).letters.remove(staying[7].dead_letter_queue, [staying[7].id])
    assert list(wanted.read(part)) == []


def test_partitions_have_about_the_same_size(
    redis_url: str, fill: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks share the letters of a stream evenly, without gap or overlap."""
    from celery_dlq.letters.filters import LetterFilter
    from celery_dlq.spark.live import LiveLetters, PositionRange
    from celery_dlq.spark.options import ReadOptions

    monkeypatch.setattr("celery_dlq.spark.live.LETTERS_PER_TASK", 100)
    letters = [a_letter(dead_lettered_at=now()) for _ in range(400)]
    fill(letters)
    with LiveLetters(ReadOptions.parse({"url": redis_url})) as reader:
        spans = reader.split_range(
            PositionRange("orders-DLQ", "0-0", reader.end_position("orders-DLQ"))
        )
        parts = [
            [row for batch in reader.batches(span, LetterFilter(), ("id",)) for row in batch["id"]]
            for span in spans
        ]
    assert [len(part) for part in parts] == [100] * 4
    assert [str(one) for part in parts for one in part] == [letter.id for letter in letters]


def test_empty_redis_has_no_rows(source: SparkSession, redis_url: str) -> None:
    """Before the first death there are columns, and no letters."""
    assert live(source, redis_url).count() == 0


def test_letters_in_a_cluster_are_read_by_spark(source: SparkSession, cluster_url: str) -> None:
    """Executors ask its nodes; the options are those of the settings."""
    backend = Store(cluster_url)
    for queue in ("orders-DLQ", "mail-DLQ", "slow-DLQ"):
        for _ in range(10):
            letter = a_letter(dead_letter_queue=queue)
            backend.letters.dead_letter(letter, key_of(letter))
    backend.close()
    rows = live(source, cluster_url)
    counts = rows.groupBy("dead_letter_queue").count().collect()
    assert sorted(row["count"] for row in counts) == [10, 10, 10]


def test_a_url_carries_all_that_reaches_the_letters() -> None:
    """Sentinels, their password, TLS and the prefix of keys are in its query."""
    from celery_dlq.spark.options import ReadOptions

    url = "sentinel://a;sentinel://b/1?master_name=shop&sentinel_password=s%3F&key_prefix=team"
    options = ReadOptions.parse({"url": url})
    assert options.key_prefix == "team"
    assert options.address.urls == ("sentinel://a", "sentinel://b/1")
    assert options.address.options["master_name"] == "shop"
    assert options.address.options["sentinel_kwargs"] == {"password": "s?"}
    (connection,) = ReadOptions.parse(
        {"url": "rediss://h:1/2?ssl_ca_certs=ca.pem&key_prefix=x"}
    ).address.connections()
    assert (connection["ssl_ca_certs"], connection["db"]) == ("ca.pem", 2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, r"option 'url' to be set"),
        ({"url": "sentinel://a"}, r"query\['master_name'\]"),
        ({"useSsl": "yes"}, "got 'usessl'"),
        ({"url": "localhost"}, r"option 'url' to be a Redis URL"),
        ({"queu": "a"}, r"got 'queu'; did you mean 'queue'\?"),
        ({"columns": "idd"}, r"got 'idd'; did you mean 'id'\?"),
        ({"columns": "id,id"}, "each column once"),
        ({"since": "yesterday"}, "option 'since' to be an ISO 8601 time, got 'yesterday'"),
        ({"id": "a,,b"}, "option 'id' to be names separated by commas, got 'a,,b'"),
        ({"where": "tenant=42"}, "in the option 'where': expected args, kwargs or headers"),
        ({"where": " \n"}, "option 'where' to be conditions such as kwargs.tenant=42, got"),
        ({"startingOffset": "latest"}, "got 'startingoffset'"),
        ({"url": f"redis://:{PASSWORD[:4]}/{PASSWORD[4:]}@h"}, "percent-encoded"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, str], text: str) -> None:
    """A mistake in an option is named before anything runs, and shows no password."""
    from celery_dlq.errors import SettingsError
    from celery_dlq.spark.options import ReadOptions

    with pytest.raises(SettingsError, match=text) as caught:
        ReadOptions.parse({"url": "redis://localhost", **options} if options else {})
    assert PASSWORD[:4] not in str(caught.value)


def test_spark_shows_our_words(source: SparkSession, redis_url: str, fill: Fill) -> None:
    """An error out of Spark ends in one line that says what to do."""
    fill([a_letter()])
    assert "did you mean 'queue'?" in message_of(lambda: live(source, redis_url, queu="x"))
    missing = message_of(lambda: live(source, redis_url, queue="order-DLQ").count())
    assert missing.endswith("got 'order-DLQ'; did you mean 'orders-DLQ'?")


def test_password_is_shown_nowhere(source: SparkSession) -> None:
    """Plans, errors and logs do not hold the secret of the store."""
    with RedisServer() as server:
        server.client().config_set("requirepass", PASSWORD)
        url = server.url.replace("redis://", f"redis://:{PASSWORD}@")
        store(url, [a_letter()])
        df = live(source, url)
        frames = {"cached": df.cache(), "plain": live(source, url).where("id > ''")}
        said = [repr(df), *(f._jdf.queryExecution().toString() for f in frames.values())]
        assert frames["cached"].count() == 1
        df.unpersist()
        place = server.url.partition("//")[2].partition("/")[0]
        wrong = url.replace(PASSWORD, f"{PASSWORD}-wrong")
        said.append(message_of(lambda: live(source, wrong).count()))
        assert f"redis://{place}" in said[-1]
    sessions = import_module("celery_dlq.spark.session")
    said.append((sessions.spark_folder() / "spark.log").read_text("utf-8", "replace"))
    assert [text for text in said if PASSWORD in text] == []


def test_import_needs_neither_celery_nor_redis() -> None:
    """Executors import the source on machines without Celery, and Redis only to read."""
    code = (
        "import sys, celery_dlq.spark.source;"
        "print([n for n in ('celery', 'kombu', 'redis', 'pyarrow') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_times_at_the_ends_of_the_calendar_are_pushed_down() -> None:
    """An hour before the first one and a microsecond after the last one is no time."""
    from pyspark.sql.datasource import GreaterThanOrEqual, LessThanOrEqual

    from celery_dlq.spark.live import LiveLetters
    from celery_dlq.spark.options import ReadOptions
    from celery_dlq.spark.source import FilteringReader
    from celery_dlq.store.records import FIRST_POSITION

    first = datetime.min.replace(tzinfo=timezone.utc)
    last = datetime.max.replace(tzinfo=timezone.utc)
    options = ReadOptions.parse({"url": "redis://localhost"})
    column = ("dead_lettered_at",)
    FilteringReader(options, ("id",)).pushFilters(
        [GreaterThanOrEqual(column, first), LessThanOrEqual(column, last)]
    )
    with LiveLetters(options) as live:
        assert live.start_position(first) == FIRST_POSITION
        assert live.start_position(now()) > "1"
