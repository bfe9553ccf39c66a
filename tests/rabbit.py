"""A real RabbitMQ for tests: a node of its own on free ports with a folder of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import amqp
from servers import _free_port

_START_SECONDS = 60.0
_MOST_PORTS = 3
_ROOM = 4 * 1024**3


def rabbitmq_executable() -> str | None:
    """The path of ``rabbitmq-server``; Debian puts it outside of most people's PATH.

    ``CELERY_DLQ_TEST_RABBITMQ`` is the path of another one, with its ``rabbitmqctl`` beside it.

    Raises:
        LookupError: There is none: any other server would make the run say something it has not
            seen.
    """
    asked = os.environ.get("CELERY_DLQ_TEST_RABBITMQ", "")
    if asked:
        if not (os.access(asked, os.X_OK) and os.access(_beside(asked), os.X_OK)):
            raise LookupError(f"expected rabbitmq-server and rabbitmqctl at {asked!r}; found none")
        return asked
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/lib/rabbitmq/bin"
    return shutil.which("rabbitmq-server", path=path)


def _quick_folder() -> str | None:
    """A folder in memory if there is one: a quorum queue syncs its disc for every message.

    The node's data only have to outlive its process.
    """
    memory = Path("/dev/shm")  # noqa: S108 - a folder of random name in it
    roomy = (
        memory.is_dir() and shutil.disk_usage(memory).free >= _ROOM and os.access(memory, os.W_OK)
    )
    return str(memory) if roomy else None


def _beside(executable: str) -> str:
    return str(Path(executable).with_name("rabbitmqctl"))


def _inner(executable: str) -> str:
    """The wrappers of Debian change users and need a service; the scripts inside do not."""
    if os.environ.get("CELERY_DLQ_TEST_RABBITMQ"):
        return executable
    inner = Path("/usr/lib/rabbitmq/bin") / Path(executable).name
    return str(inner if inner.exists() else executable)


class RabbitServer:
    """A RabbitMQ node; a context manager that ends it and its port mapper."""

    def __init__(self) -> None:
        self._choose()

    def _choose(self) -> None:
        """Choose ports that are free just now, and a folder."""
        self.port = _free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="rabbit-", dir=_quick_folder()))
        self._process: subprocess.Popen[bytes] | None = None
        self._closing: threading.Thread | None = None
        name = f"test-{self.port}@localhost"
        self._env = {
            **os.environ,
            "HOME": str(self._folder),
            "RABBITMQ_NODENAME": name,
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(_free_port()),
            "ERL_EPMD_PORT": str(_free_port()),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_MNESIA_BASE": str(self._folder / "data"),
            "RABBITMQ_LOG_BASE": str(self._folder / "log"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self._folder / "plugins"),
            "RABBITMQ_CONFIG_FILE": str(self._folder / "rabbitmq"),
            "RABBITMQ_PID_FILE": str(self._folder / "pid"),
            # Two schedulers are plenty, and busy waiting takes the tests' processors.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none",
        }
        (self._folder / "plugins").write_text("[].\n")
        # RabbitMQ 4 takes 16 MiB by default, a version before it 128 MiB, as here.
        (self._folder / "rabbitmq.conf").write_text(
            "loopback_users = none\nmax_message_size = 134217728\n"
        )

    def __enter__(self) -> RabbitServer:
        for left in reversed(range(_MOST_PORTS)):
            try:
                self.start()
                break
            except BaseException as exc:
                # Somebody else took a port between our look and the node's start.
                taken = isinstance(exc, RuntimeError) and "eaddrinuse" in str(exc)
                self.close()
                if not (taken and left):
                    raise
                self._choose()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """The URL of the default virtual host."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    @property
    def pid(self) -> int:
        """The process id of the node's first process; the others are its children."""
        assert self._process is not None, "expected a node that runs"
        return self._process.pid

    def delete_queues(self, *names: str) -> None:
        """Delete queues with all they hold, and exchanges of their names.

        Those that are not there count as deleted. Celery makes the exchange of a queue a direct
        one, or a topic for native delays; tests of both use this node.
        """
        with amqp.Connection(f"127.0.0.1:{self.port}") as connection:
            for name in names:
                connection.channel().queue_delete(name)
                connection.channel().exchange_delete(name)

    def add_virtual_host(self, name: str) -> str:
        """Make a virtual host; its URL."""
        self._control("add_vhost", name)
        self._control("set_permissions", "-p", name, "guest", ".*", ".*", ".*")
        return f"amqp://guest:guest@127.0.0.1:{self.port}/{name}"

    def add_user(self, name: str, *, configure: str, write: str, read: str) -> str:
        """Make a user, whose password is its name, with these permissions; its URL."""
        self._control("add_user", name, name)
        self._control("set_permissions", name, configure, write, read)
        return f"amqp://{name}:{name}@127.0.0.1:{self.port}//"

    def close_connections(self, *, wait: bool = True) -> None:
        """Close all connections of all clients, as a failing node does.

        Args:
            wait: Until they are closed; Erlang's tools take seconds to start.
        """
        self._closing = threading.Thread(
            target=self._control, args=("close_all_connections", "--global", "closed by the test")
        )
        self._closing.start()
        if wait:
            self._closing.join()

    @contextlib.contextmanager
    def closing_connections(self, times: int, *, every_seconds: float) -> Iterator[None]:
        """Close all connections of all clients again and again, by the node itself.

        Args:
            times: At most so often; the end of the block ends it, too.
            every_seconds: The time between two closings.
        """
        self._control(
            "eval",
            "register(closing, spawn(fun() -> lists:foreach(fun(_) -> "
            '[rabbit_networking:close_connection(C, "closed by the test") '
            "|| C <- rabbit_networking:connections()], "
            f"timer:sleep({round(every_seconds * 1000)}) end, lists:seq(1, {times})) end)).",
        )
        try:
            yield
        finally:
            self._control("eval", "catch exit(whereis(closing), kill).")

    @contextlib.contextmanager
    def closing_what_waits(self, seconds: float) -> Iterator[None]:
        """Close channels, made in the block, with a message that was not acknowledged for so long.

        That is RabbitMQ's ``consumer_timeout``; it looks every two seconds.
        """
        for name, value in (("consumer_timeout", seconds), ("channel_tick_interval", 2)):
            self._control("eval", f"application:set_env(rabbit, {name}, {round(value * 1000)}).")
        try:
            yield
        finally:
            for name, value in (("consumer_timeout", 1800), ("channel_tick_interval", 60)):
                self._control("eval", f"application:set_env(rabbit, {name}, {value * 1000}).")

    @contextlib.contextmanager
    def blocking_publishers(self) -> Iterator[None]:
        """Block all connections that publish, as RabbitMQ does when memory or disk run out."""
        limit = "{{resource_limit, memory, node()}, []}"
        self._control("eval", f"rabbit_alarm:set_alarm({limit}).")
        try:
            yield
        finally:
            self._control("eval", "rabbit_alarm:clear_alarm({resource_limit, memory, node()}).")

    def suspend_log(self, seconds: float) -> None:
        """Keep quorum queues from writing their log, so from doing anything, for a while."""
        self._control(
            "eval",
            "spawn(fun() -> sys:suspend(ra_log_wal), "
            f"timer:sleep({round(seconds * 1000)}), sys:resume(ra_log_wal) end).",
        )

    def block_publishers(self, seconds: float) -> None:
        """Raise the memory alarm for a while: whoever publishes is not read from until it ends."""
        self._control(
            "eval",
            "Was = vm_memory_monitor:get_vm_memory_high_watermark(), "
            "vm_memory_monitor:set_vm_memory_high_watermark(0), "
            f"timer:sleep({round(seconds * 1000)}), "
            "vm_memory_monitor:set_vm_memory_high_watermark(Was).",
        )

    def start(self) -> None:
        """Start the node and wait until it answers.

        Raises:
            RuntimeError: It did not come up.
        """
        executable = rabbitmq_executable()
        assert executable is not None
        log = (self._folder / "output").open("ab")
        command = [_inner(executable)]
        self._process = subprocess.Popen(
            command,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        log.close()
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with amqp.Connection(f"127.0.0.1:{self.port}", connect_timeout=1):
                    return
            except (OSError, amqp.AMQPError):
                time.sleep(0.2)
        output = (self._folder / "output").read_text()[-8000:]
        raise RuntimeError(f"rabbitmq-server did not come up: {output}")

    def state(self) -> str:
        """What the node itself says of its queues and consumers: for the message of a test."""
        columns = ("name", "messages_ready", "messages_unacknowledged", "consumers")
        return self._control("list_queues", *columns) + self._control("list_consumers")

    def _control(self, *arguments: str) -> str:
        return subprocess.run(
            [_inner(_beside(rabbitmq_executable() or "")), *arguments],
            env=self._env,
            check=True,
            capture_output=True,
            text=True,
            timeout=2 * _START_SECONDS,  # Erlang takes its time on a busy machine
        ).stdout

    def close(self) -> None:
        """End the node, its port mapper, and remove its folder."""
        if self._closing is not None:
            self._closing.join()
        if self._process is not None:
            try:
                os.killpg(self._process.pid, signal.SIGTERM)
                self._process.wait(20)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                pass
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        epmd = shutil.which("epmd")
        if epmd:
            subprocess.run(
                [epmd, "-port", self._env["ERL_EPMD_PORT"], "-kill"],
                env=self._env,
                capture_output=True,
                check=False,
            )
        shutil.rmtree(self._folder, ignore_errors=True)
