"""Amazon SQS as the broker: real workers, moto's server.

What moto does otherwise than SQS is in `sqs`.
"""

from __future__ import annotations

import base64
import json
import signal
import time
from collections.abc import Callable
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import ModuleType
from typing import Any

import pytest
from kombu import Connection
from kombu.transport import SQS
from raw import JSON, headers
from sqs import SqsServer
from tcp_proxy import TcpProxy
from waiting import poll
from workers import Worker, run_python

from celery_dlq import DeadLetter, Reason

Letters = Callable[..., list[DeadLetter]]
Ran = Callable[[str], int]
Start = Callable[..., Worker]

MAX = Reason.MAX_DELIVERIES_EXCEEDED
COUNTS = hasattr(SQS.Channel, "get_message_attributes")
"""Whether kombu asks for the receive count with an event loop and without one: 5.6 does."""
SHORT = 3
"""Seconds of the visibility timeout where a test outlasts it."""


def environment(sqs: SqsServer, **options: Any) -> dict[str, str]:
    """What a worker on this broker needs; ``options`` go to ``broker_transport_options``."""
    return {
        "POISON_BROKER": sqs.url,
        "POISON_OPTIONS": json.dumps({**sqs.options, **options}),
    }


def send(
    sqs: SqsServer, task: str, *args: Any, queue: str = "orders", eta: str = "", **more: Any
) -> None:
    """Publish a task as Celery does; its id is its name and its arguments."""
    body = json.dumps([args, {}, {}]).encode()
    name = "-".join([task, *map(str, args)])
    known = headers(f"poison_app.{task}", name, **({"eta": eta} if eta else {}))
    with Connection(sqs.url, transport_options=sqs.options) as connection:
        producer = connection.Producer()
        producer.publish(body, exchange="", routing_key=queue, headers=known, **JSON, **more)


def in_seconds(seconds: float) -> str:
    """A time as Celery writes it into the header ``eta``."""
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() + seconds))


def is_empty(sqs: SqsServer, url: str) -> bool:
    """True if a queue has no message, visible or not."""
    found = sqs.attributes(url)
    names = ("ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible")
    return not any(int(found[name]) for name in names)


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
def test_a_message_stays_with_its_worker_beyond_the_visibility_timeout(
    poison: ModuleType, sqs_server: SqsServer, start_worker: Start, ran: Ran, pool: str
) -> None:
    """While its task runs, and while it waits for its time; another worker asks all along."""
    if pool == "gevent":
        pytest.importorskip("gevent")
    url = sqs_server.queue("orders", VisibilityTimeout=str(SHORT))
    env = environment(sqs_server)
    busy = "sleeps" if pool in ("prefork", "threads") else "blocks"
    first = start_worker(env=env, pool=pool, arguments=("--concurrency", "2"))
    send(sqs_server, busy, "busy", 2.5 * SHORT)
    poll(lambda: ran("busy"), timeout_seconds=30)
    send(sqs_server, "sleeps_early", "waits", 0, eta=in_seconds(2.5 * SHORT))
    second = start_worker(env=env)

    poll(lambda: ran("waits") and is_empty(sqs_server, url), timeout_seconds=60)

    assert (ran("busy"), ran("waits")) == (1, 1), first.output[-3000:]
    for worker in (first, second):
        assert "this worker renews the visibility of its messages" in worker.output
        assert "is delivered again" not in worker.output
        assert "Traceback" not in worker.output
    assert not poison.dlq.queues()


def test_a_worker_that_stood_still_starts_nothing_that_others_own(
    poison: ModuleType, sqs_server: SqsServer, start_worker: Start, ran: Ran
) -> None:
    """Nor does it delete it."""
    url = sqs_server.queue("orders", VisibilityTimeout=str(SHORT))
    env = environment(sqs_server)
    first = start_worker(env=env)
    send(sqs_server, "healthy", "waits", eta=in_seconds(SHORT + 6))
    poll(lambda: "healthy-waits] received" in first.output, timeout_seconds=30)
    first.process.send_signal(signal.SIGSTOP)
    second = start_worker(env=env)
    poll(lambda: "healthy-waits] received" in second.output, timeout_seconds=30)
    first.process.send_signal(signal.SIGCONT)

    poll(lambda: is_empty(sqs_server, url), timeout_seconds=30)

    poll(lambda: "does not start here" in first.output, timeout_seconds=30)
    assert "stood still" in first.output
    assert ran("waits") == 1
    assert "healthy-waits] succeeded" in second.output


def test_a_dead_workers_message_is_back_after_the_visibility_timeout_and_a_stopped_ones_at_once(
    poison: ModuleType, sqs_server: SqsServer, start_worker: Start, ran: Ran
) -> None:
    """The dead one renews no more; the other one gives back what it has not started."""
    url = sqs_server.queue("orders", VisibilityTimeout=str(SHORT))
    env = environment(sqs_server)
    first = start_worker(env=env, wait=True)
    send(sqs_server, "healthy", "waits", eta=in_seconds(3600))
    poll(lambda: "healthy-waits] received" in first.output, timeout_seconds=30)
    time.sleep(1.5 * SHORT)  # it would be back without the renewal
    assert sqs_server.attributes(url)["ApproximateNumberOfMessages"] == "0"
    first.kill()
    second = start_worker(env=env)
    poll(lambda: "healthy-waits] received" in second.output, timeout_seconds=30)
    sqs_server.client().set_queue_attributes(QueueUrl=url, Attributes={"VisibilityTimeout": "900"})
    third = start_worker(env=env)
    second.process.terminate()

    poll(lambda: "healthy-waits] received" in third.output, timeout_seconds=30)

    assert ran("waits") == 0
    assert not poison.dlq.queues()


@pytest.mark.parametrize("how", ["SIGQUIT", "SIGTERM"])
def test_a_shutdown_gives_back_at_once_what_it_ends_or_has_not_started(
    poison: ModuleType, sqs_server: SqsServer, start_worker: Start, ran: Ran, how: str
) -> None:
    """The visibility timeout of a quarter of an hour does not matter."""
    sqs_server.queue("orders", VisibilityTimeout="900")
    env = environment(sqs_server)
    first = start_worker(env=env, arguments=("--concurrency", "1"))
    send(sqs_server, "sleeps", "busy", 60 if how == "SIGQUIT" else 4)
    poll(lambda: ran("busy") == 1, timeout_seconds=30)
    send(sqs_server, "healthy", "waits", eta=in_seconds(3600))
    if how == "SIGTERM":  # with one process, the prefetch window is full until the task ends
        poll(lambda: "healthy-waits] received" in first.output, timeout_seconds=30)
    first.process.send_signal(getattr(signal, how))
    assert first.process.wait(30) is not None
    second = start_worker(env=env)

    poll(lambda: "healthy-waits] received" in second.output, timeout_seconds=30)

    if how == "SIGQUIT":
        poll(lambda: ran("busy") == 2, timeout_seconds=30)
    assert not poison.dlq.queues()


@pytest.mark.parametrize(
    ("pool", "notices"),
    [("prefork", "is deleted later"), ("gevent", "Connection to broker lost")],
)
def test_a_lost_connection_neither_doubles_what_runs_nor_loses_its_end(
    poison: ModuleType,
    sqs_server: SqsServer,
    start_worker: Start,
    ran: Ran,
    pool: str,
    notices: str,
) -> None:
    """Their messages are deleted when SQS is there again."""
    if pool == "gevent":
        pytest.importorskip("gevent")
    url = sqs_server.queue("orders", VisibilityTimeout="30")
    with TcpProxy(sqs_server.port) as proxy:
        proxy.open()
        env = environment(sqs_server, **{"client-config": {"retries": {"total_max_attempts": 1}}})
        env["POISON_BROKER"] = env["POISON_BROKER"].replace(str(sqs_server.port), str(proxy.port))
        worker = start_worker(env=env, pool=pool, arguments=("--concurrency", "4"))
        send(sqs_server, "sleeps", "runs", 12)
        send(sqs_server, "sleeps", "ends", 3)
        poll(lambda: ran("ends") and ran("runs"), timeout_seconds=30)
        proxy.shut()
        poll(lambda: notices in worker.output, timeout_seconds=30)
        proxy.open()
        poll(lambda: is_empty(sqs_server, url), timeout_seconds=30)
    assert (ran("ends"), ran("runs")) == (1, 1)
    assert "sleeps-runs-12] succeeded" in worker.output
    assert "Unrecoverable error" not in worker.output


class Denying:
    """A proxy of SQS that denies DeleteMessage, as AWS does after a change of permissions."""

    def __init__(self, port: int) -> None:
        self.denied = 0
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("X-Amz-Target", "").endswith(".DeleteMessage") and proxy.denies:
                    proxy.denied += 1
                    error = {"__type": "AccessDenied", "message": "no sqs:DeleteMessage"}
                    self._answer(403, json.dumps(error).encode(), "application/x-amz-json-1.0")
                    return
                connection = HTTPConnection("127.0.0.1", port)
                connection.request("POST", self.path, body, dict(self.headers.items()))
                reply = connection.getresponse()
                self._answer(reply.status, reply.read(), reply.headers["Content-Type"])
                connection.close()

            def _answer(self, status: int, body: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        self.denies = True
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """End."""
        self._server.shutdown()
        self._server.server_close()


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_denied_deletion_is_made_later_and_the_message_does_not_run_again(
    poison: ModuleType, sqs_server: SqsServer, start_worker: Start, ran: Ran, pool: str
) -> None:
    """For longer than the visibility timeout; the worker lives, and says what it needs."""
    url = sqs_server.queue("orders", VisibilityTimeout=str(SHORT))
    proxy = Denying(sqs_server.port)
    try:
        env = environment(sqs_server)
        env["POISON_BROKER"] = env["POISON_BROKER"].replace(str(sqs_server.port), str(proxy.port))
        worker = start_worker(env=env, pool=pool)
        send(sqs_server, "healthy", "ends")
        begun = time.monotonic()
        poll(
            lambda: proxy.denied > 1 and time.monotonic() > begun + 2.5 * SHORT, timeout_seconds=40
        )
        assert not is_empty(sqs_server, url)
        proxy.denies = False
        poll(lambda: is_empty(sqs_server, url), timeout_seconds=40)
    finally:
        proxy.close()
    assert worker.process.poll() is None
    assert "is deleted later" in worker.output
    assert "Workers need sqs:DeleteMessage" in worker.output
    assert "Unrecoverable error" not in worker.output
    assert ran("ends") == 1, worker.output


def test_a_killed_task_of_a_queue_with_kombus_backoff_policy_does_not_end_the_worker(
    poison: ModuleType, sqs_server: SqsServer, start_worker: Start, letters: Letters, ran: Ran
) -> None:
    """Its policy asks what kombu has forgotten of a message that it gave back."""
    names = ("orders", "slow", "patient", "unguarded")
    policy = {"backoff_policy": {1: 1, 2: 1, 3: 1}, "backoff_tasks": ["poison_app.killed"]}
    predefined = {
        name: {"url": sqs_server.queue(name, VisibilityTimeout="30"), **policy} for name in names
    }
    worker = start_worker(env=environment(sqs_server, predefined_queues=predefined))
    send(sqs_server, "killed", "x")

    (letter,) = letters(timeout_seconds=60)

    assert (letter.reason, letter.deliveries, ran("x")) == (MAX, 3, 3)
    assert worker.process.poll() is None
    assert "goes back without kombu's backoff_policy" in worker.output


def test_a_redrive_policy_below_twice_max_deliveries_is_warned_of(
    poison: ModuleType, sqs_server: SqsServer, start_worker: Start
) -> None:
    """SQS would move a message before it has died here, and nobody makes a letter of it."""
    dead = sqs_server.attributes(sqs_server.queue("dead"))["QueueArn"]
    policy = {"deadLetterTargetArn": dead, "maxReceiveCount": 5}
    sqs_server.queue("orders", RedrivePolicy=policy)
    sqs_server.queue("slow", RedrivePolicy={**policy, "maxReceiveCount": 1000})
    env = environment(sqs_server)
    worker = start_worker(env=env)
    poll(lambda: "A message may make no letter" in worker.output, timeout_seconds=30)
    (line,) = [one for one in worker.output.splitlines() if "may make no letter" in one]
    assert "queue 'orders' to have a maxReceiveCount of at least 6" in line
    assert "then moves it to 'dead'" in line
    adopting = start_worker({"dlq_adopt": {"dead": "orders-DLQ"}}, env=env)
    poll(lambda: "renews the visibility" in adopting.output, timeout_seconds=30)
    assert "may make no letter" not in adopting.output


FOREIGN = {
    "a text": "hello",
    "another program's JSON": '{"order": 7}',
    "a list": "[1, 2]",
    "a number": "7",
    "XML": "<order>7</order>",
    "Base64 of something": base64.b64encode(b"something").decode(),
    "no properties of kombu": '{"body": "x", "properties": 1}',
    "no delivery information": '{"body": "x", "properties": {"delivery_tag": "t"}}',
    "a body that is no text": json.dumps(
        {"body": ["x"], "properties": {"delivery_info": {"exchange": "", "routing_key": "orders"}}}
    ),
    "a broken body": json.dumps(
        {
            "body": "x",
            "properties": {
                "body_encoding": "base64",
                "delivery_info": {"exchange": "", "routing_key": "orders"},
            },
        }
    ),
    "not only ASCII": "ü ☃ 🦄",
}
"""Bodies that kombu did not write."""


@pytest.mark.parametrize(("pool", "renews"), [("prefork", True), ("threads", False)])
def test_a_message_that_is_not_kombus_is_a_letter_with_its_body_and_goes_back_as_it_was(
    poison: ModuleType,
    sqs_server: SqsServer,
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    redis_url: str,
    pool: str,
    renews: bool,
) -> None:
    """In the dead-letter queue of its queue, under a policy for all queues too."""
    url = sqs_server.queue("orders")
    client = sqs_server.client()
    env = environment(sqs_server)
    conf = {"dlq_queues": {"*": {"max_deliveries": 3}}, "dlq_reliable_fetch": renews}
    worker = start_worker(conf, env=env, pool=pool)
    for body in [*FOREIGN.values(), FOREIGN["a text"]]:
        client.send_message(QueueUrl=url, MessageBody=body)
    send(sqs_server, "healthy", "after")

    found = letters(count=len(FOREIGN) + 1, timeout_seconds=60)

    assert sorted(letter.body.decode() for letter in found) == sorted(
        [*FOREIGN.values(), FOREIGN["a text"]]
    )
    assert {letter.reason for letter in found} == {Reason.UNDECODABLE_MESSAGE}
    assert {letter.source_queue for letter in found} == {"orders"}
    assert [queue.name for queue in poison.dlq.queues()] == ["orders-DLQ"]
    poll(lambda: ran("after") == 1 and is_empty(sqs_server, url), timeout_seconds=30)
    assert worker.process.poll() is None
    assert ("the visibility of messages is not renewed" in worker.output) is not renews
    worker.stop()
    code = "import poison_app as p; print(p.dlq.redrive('orders-DLQ').published)"
    done = run_python(redis_url, "-c", code, **env)
    assert done.stdout.strip() == str(len(found)), done.stderr
    back: list[str] = []

    def are_back() -> bool:
        received = client.receive_message(QueueUrl=url, MaxNumberOfMessages=10)
        back.extend(message["Body"] for message in received.get("Messages", ()))
        return len(back) >= len(found)

    # A long poll of the stopped worker may have taken one, which is then invisible for 30 s.
    poll(are_back, timeout_seconds=60)
    assert sorted(back) == sorted([*FOREIGN.values(), FOREIGN["a text"]])


def test_a_fifo_queue_keeps_its_groups_over_death_and_redrive(
    poison: ModuleType,
    sqs_server: SqsServer,
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    redis_url: str,
) -> None:
    """SQS would drop a redrive under the first publish's deduplication id in silence."""
    url = sqs_server.queue("orders.fifo", FifoQueue="true", VisibilityTimeout="30")
    conf = {"dlq_queues": {"orders.fifo": {"max_deliveries": 2}}}
    env = environment(sqs_server)
    arguments = ("--queues", "orders.fifo")
    ids = {"MessageGroupId": "customer-7", "MessageDeduplicationId": "first-publish"}
    send(sqs_server, "requeues", "again", queue="orders.fifo", **ids)
    ids = {"MessageGroupId": "customer-8", "MessageDeduplicationId": "second-publish"}
    send(sqs_server, "fails", "once", queue="orders.fifo", **ids)
    ids = {"MessageGroupId": "customer-9", "MessageDeduplicationId": "third-publish"}
    sqs_server.client().send_message(QueueUrl=url, MessageBody="hello", **ids)
    worker = start_worker(conf, env=env, arguments=arguments)

    found = letters("orders.fifo-DLQ", count=3, timeout_seconds=60)

    reasons = {letter.task_id: letter.reason for letter in found}
    assert (reasons["requeues-again"], reasons["fails-once"]) == (MAX, Reason.FAILED)
    assert ran("again") == 2
    poll(lambda: is_empty(sqs_server, url), timeout_seconds=30)
    worker.stop()
    code = "import poison_app as p; print(p.dlq.redrive('orders.fifo-DLQ').published)"
    done = run_python(redis_url, "-c", code, conf=conf, **env)
    assert done.stdout.strip() == "3", done.stderr
    received: dict[str, dict[str, str]] = {}

    def all_are_back() -> bool:
        reply = sqs_server.client().receive_message(
            QueueUrl=url, MaxNumberOfMessages=10, AttributeNames=["All"]
        )
        for message in reply.get("Messages", ()):
            body = message["Body"]
            if body != "hello":
                body = json.loads(base64.b64decode(body))["headers"]["id"]
            received[body] = message["Attributes"]
        return len(received) == 3

    poll(all_are_back, timeout_seconds=20)
    assert received["requeues-again"]["MessageGroupId"] == "customer-7"
    assert received["fails-once"]["MessageGroupId"] == "customer-8"
    assert received["hello"]["MessageGroupId"] == ("customer-9" if COUNTS else "default")
    now = {attributes["MessageDeduplicationId"] for attributes in received.values()}
    assert now == {letter.id for letter in found}


def test_a_redriven_message_runs_once_with_its_id(
    poison: ModuleType,
    sqs_server: SqsServer,
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    redis_url: str,
) -> None:
    """The letter has SQS's message id, and not a second copy of the body."""
    url = sqs_server.queue("orders")
    env = environment(sqs_server)
    start_worker(env=env)
    send(sqs_server, "fails", "price")
    (letter,) = letters()
    about = letter.decoded("properties")["delivery_info"]["sqs_message"]
    assert about["MessageId"]
    assert "Body" not in about
    code = (
        "import poison_app as p, redis; redis.Redis.from_url(p.URL + '/2').set('fixed', 1)\n"
        "print(p.dlq.redrive('orders-DLQ').published)"
    )
    assert run_python(redis_url, "-c", code, **env).stdout.strip() == "1"

    poll(lambda: ran("price") == 2 and is_empty(sqs_server, url), timeout_seconds=30)

    assert poison.app.AsyncResult("fails-price").get(timeout=10) == "price done"
    assert poison.dlq.queues() == [] or poison.dlq.queues()[0].letters == 0


@pytest.mark.skipif(not COUNTS, reason="this kombu does not ask SQS for the receive count")
def test_a_worker_killed_between_storing_and_deleting_leaves_one_letter(
    poison: ModuleType, sqs_server: SqsServer, start_worker: Start, letters: Letters, ran: Ran
) -> None:
    """The late copy is not executed, and not counted."""
    url = sqs_server.queue("orders", VisibilityTimeout=str(SHORT))
    env = environment(sqs_server)
    worker = start_worker(env={**env, "POISON_DIE_AFTER_STORING": "1"})
    send(sqs_server, "fails", "once")
    worker.process.wait(30)
    start_worker(env=env)

    poll(lambda: is_empty(sqs_server, url), timeout_seconds=30)

    (letter,) = letters()
    assert (letter.task_id, letter.deliveries, ran("once")) == ("fails-once", 1, 1)


@pytest.mark.parametrize("by", ["a command", "a worker"])
def test_what_a_redrive_policy_moved_is_adopted(
    by: str,
    poison: ModuleType,
    sqs_server: SqsServer,
    start_worker: Start,
    letters: Letters,
    redis_url: str,
) -> None:
    """Messages of Celery and others, into the dead-letter queue of their own queue."""
    dead = sqs_server.queue("shop-dead")
    policy = {"deadLetterTargetArn": sqs_server.attributes(dead)["QueueArn"], "maxReceiveCount": 1}
    url = sqs_server.queue("shop-orders", VisibilityTimeout="0", RedrivePolicy=policy)
    env = environment(sqs_server, queue_name_prefix="shop-")
    with_prefix = {**sqs_server.options, "queue_name_prefix": "shop-"}
    with Connection(sqs_server.url, transport_options=with_prefix) as connection:
        connection.Producer().publish(
            [["x"], {}, {}],
            exchange="",
            routing_key="orders",
            headers=headers("poison_app.fails", "of-celery"),
        )
    client = sqs_server.client()
    client.send_message(QueueUrl=url, MessageBody="hello")
    for _ in range(3):
        client.receive_message(QueueUrl=url, MaxNumberOfMessages=10)
    assert sqs_server.attributes(dead)["ApproximateNumberOfMessages"] == "2"

    if by == "a worker":
        start_worker({"dlq_adopt": {"dead": "orders-DLQ"}}, env=env)
    else:
        command = ("-m", "celery", "-A", "poison_app", "dlq", "import")
        done = run_python(redis_url, *command, "dead", "--to", "orders-DLQ", **env)
        assert done.returncode == 0, done.stderr
    found = {letter.body.decode(): letter for letter in letters(count=2)}

    assert {letter.reason for letter in found.values()} == {Reason.ADOPTED}
    assert {letter.source_queue for letter in found.values()} == {"orders"}
    assert found["hello"].content_type == "application/vnd.kombu.entry"
    (of_celery,) = [letter for letter in found.values() if letter.task_id == "of-celery"]
    assert of_celery.deliveries == (2 if COUNTS else 0)  # once from each queue
    poll(lambda: is_empty(sqs_server, dead), timeout_seconds=30)


def test_a_queue_that_sqs_does_not_have_is_refused_and_not_created(
    poison: ModuleType, sqs_server: SqsServer, redis_url: str
) -> None:
    """One line, and no queue of that name afterwards."""
    command = ("-m", "celery", "-A", "poison_app", "dlq", "import", "mistyped")
    done = run_python(redis_url, *command, **environment(sqs_server))
    assert done.returncode == 1
    assert "there is no queue 'mistyped' at Amazon SQS" in done.stderr
    assert "Traceback" not in done.stderr
    assert "QueueUrls" not in sqs_server.client().list_queues(QueueNamePrefix="mistyped")


def test_with_predefined_queues_and_another_region_all_is_as_without(
    poison: ModuleType, sqs_server: SqsServer, start_worker: Start, letters: Letters, ran: Ran
) -> None:
    """Each queue has its own URL and credentials; the thread finds them, too."""
    names = ("orders", "slow", "patient", "unguarded")
    urls = {name: sqs_server.queue(name, VisibilityTimeout=str(SHORT)) for name in names}
    predefined = {
        name: {"url": url, "access_key_id": "other", "secret_access_key": "x"}
        for name, url in urls.items()
    }
    worker = start_worker(env=environment(sqs_server, predefined_queues=predefined))
    send(sqs_server, "sleeps", "busy", 2 * SHORT)
    send(sqs_server, "fails", "price")

    (letter,) = letters(timeout_seconds=30)
    poll(lambda: is_empty(sqs_server, urls["orders"]), timeout_seconds=30)

    assert letter.task_id == "fails-price"
    assert ran("busy") == 1
    assert "are not renewed" not in worker.output
