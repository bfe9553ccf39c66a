"""One Celery worker of a benchmark: ``python -m benchmarks.node '{"queue": "q", …}'``.

Started by a script and not by the ``celery`` command, because that imports every installed
sub-command, ours too: a plain worker must be plain.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from typing import Any

PLAIN = "plain"
AGAIN = "plain again"
PLUGIN = "plugin, no policy"
QUEUE = "guarded queue"
DECORATOR = "guarded, decorator"
BARE = "plain, and a bare write"
"""Plain Celery that writes 150 bytes to Redis for each task and does nothing else with them.

Before a failed task is settled, it also stores two kilobytes, and waits for the reply. The bare
limit: whoever notes each start before it happens, and keeps each failure, pays at least this.
"""

WITHOUT_PLUGIN = (PLAIN, AGAIN, BARE)

LIMIT = 3
"""Most deliveries of a guarded message."""


def main() -> None:
    """Work until a signal."""
    options = json.loads(sys.argv[1])
    if options["pool"] == "gevent":
        from gevent import monkey

        monkey.patch_all()
    app = make_app(options)
    installed = "celery_dlq" in sys.modules
    expected = options["variant"] not in WITHOUT_PLUGIN
    assert installed == expected, f"expected the plugin to be loaded: {expected}, got {installed}"
    app.Worker(
        hostname=f"{options['queue']}@bench",
        pool_cls=options["pool"],
        concurrency=options["concurrency"],
        queues=options["queue"],
        loglevel="WARNING",
        logfile=options["log"],
        without_mingle=True,
    ).start()


def make_app(options: dict[str, Any]) -> Any:
    """The app of a variant."""
    from celery import Celery
    from kombu import Queue

    app = Celery("bench", broker=options["broker"])
    app.conf.task_queues = [Queue(options["queue"], **options.get("queue_options", {}))]
    app.conf.task_default_queue = options["queue"]
    app.conf.task_ignore_result = True
    app.conf.task_acks_late = True
    app.conf.task_reject_on_worker_lost = True
    app.conf.update(options.get("conf", {}))
    _add_tasks(app, options)
    if options["variant"] == BARE:
        note_each_start(options["letters"])
        app.Task.Request = _storing_failures(options["letters"])
    if options["variant"] not in WITHOUT_PLUGIN:
        from celery_dlq import DeadLetters

        app.conf.dlq_url = options["letters"]
        if options["variant"] == QUEUE:
            app.conf.dlq_queues = {options["queue"]: {"max_deliveries": LIMIT}}
        DeadLetters(app)
    return app


def note_each_start(url: str) -> None:
    """Let a plain worker write 150 bytes to Redis for each task that it receives."""
    from celery import signals

    note = _command(b"SET", b"note", b"x" * 110)
    state: list[Any] = [None, 0]

    def write(**_: object) -> None:
        state[0] = state[0] or _connected(url)
        state[0].sendall(note)
        state[1] += 1
        if state[1] % 56 == 0:
            state[0].recv(4096)

    signals.task_received.connect(write, weak=False)


def _storing_failures(url: str) -> type:
    """A class of requests that store a failure, as it is, before Celery settles its message."""
    from celery.worker.request import Request

    fields = (part for number in range(8) for part in (b"field %d" % number, b"x" * 250))
    letter = _command(b"XADD", b"letters", b"MAXLEN", b"1000", b"*", *fields)
    connections: list[socket.socket] = []

    class Storing(Request):  # type: ignore[misc]
        def on_failure(self, *args: Any, **kwargs: Any) -> Any:
            if not connections:
                connections.append(_connected(url))
            connections[0].sendall(letter)
            connections[0].recv(4096)
            return super().on_failure(*args, **kwargs)

    return Storing


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in words)


def _connected(url: str) -> socket.socket:
    host, _, port = url.removeprefix("redis://").partition("/")[0].partition(":")
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _add_tasks(app: Any, options: dict[str, Any]) -> None:
    decorate: Any = lambda function: function  # noqa: E731
    if options["variant"] == DECORATOR:
        from celery_dlq import dead_letter_policy

        decorate = dead_letter_policy(max_deliveries=LIMIT)
    tally = os.open(options["tally"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for task in tasks(tally):
        app.task(name=task.__name__)(decorate(task))


def tasks(tally: int) -> list[Any]:
    """The tasks; each run writes one byte to the tally, which is how the driver counts them."""

    def noop(*_: object) -> None:
        os.write(tally, b".")

    def busy_1ms(*_: object) -> None:
        _compute(0.001)
        os.write(tally, b".")

    def busy_10ms(*_: object) -> None:
        _compute(0.010)
        os.write(tally, b".")

    def fails(order: str = "", *_: object) -> None:
        os.write(tally, b".")
        charge(order)

    def kills(*_: object) -> None:
        os.write(tally, b".")
        os.kill(os.getpid(), signal.SIGKILL)

    return [noop, busy_1ms, busy_10ms, fails, kills]


def charge(order: str) -> None:
    """Fail as shops do."""
    raise ValueError(f"no such order: {order[:12]}")


def _compute(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


if __name__ == "__main__":
    main()
