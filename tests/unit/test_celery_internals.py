"""Assumptions of `celery_dlq.worker` about Celery; they fail loudly when Celery changes it."""

from __future__ import annotations

import inspect
import pickle
import re
import signal
import socket
import sys
from types import SimpleNamespace
from typing import Any

import amqp
import billiard.common
import billiard.pool
import pytest
from amqp.transport import TCPTransport
from billiard.common import human_status
from billiard.pool import ApplyResult
from billiard.pool import Pool as BilliardPool
from celery import VERSION, Celery, bootsteps, signals
from celery.app.autoretry import add_autoretry_behaviour
from celery.app.routes import MapRoute
from celery.app.task import Context, Task
from celery.app.trace import build_tracer, fast_trace_task
from celery.apps import worker as celery_apps_worker
from celery.concurrency import asynpool, get_implementation, thread
from celery.concurrency.asynpool import AsynPool
from celery.concurrency.base import BasePool, apply_target
from celery.events.dispatcher import EventDispatcher, group_from
from celery.events.state import TASK_EVENT_TO_STATE
from celery.exceptions import Ignore, Reject, Retry, TaskPredicate, WorkerLostError
from celery.local import PromiseProxy
from celery.worker import control, loops, state
from celery.worker.consumer.consumer import Consumer
from celery.worker.consumer.events import Events
from celery.worker.consumer.tasks import Tasks
from celery.worker.control import Panel
from celery.worker.pidbox import Pidbox
from celery.worker.request import Request, create_request_cls
from celery.worker.strategy import default
from celery.worker.worker import WorkController
from kombu import Connection, Exchange, Producer
from kombu.asynchronous import Hub
from kombu.entity import maybe_delivery_mode
from kombu.message import Message
from kombu.pidbox import Node
from kombu.transport import pyamqp, virtual
from kombu.transport import redis as kombu_redis
from kombu.utils.scheduling import round_robin_cycle
from redis.connection import Connection as RedisConnection

from celery_dlq.transport.amqp import keep_prefetch_count
from celery_dlq.transport.default_delay import MERGES_OPTIONS, PARAMETERS
from celery_dlq.transport.redis.entries import end_of_list, priority_of
from celery_dlq.transport.redis.leases import ReliableQoS
from celery_dlq.worker.shutdown_signals import LEFT_BY_SIGNAL


class Pool:
    """The part of a task that `create_request_cls` reads."""

    def apply_async(self, *_: Any, **__: Any) -> None:
        """Nothing is executed here."""


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_celery_makes_a_subclass_that_defines_what_we_wrap() -> None:
    """The mix-in wraps these two from ``__init_subclass__``, because they do not call super."""
    app = Celery("internals", set_as_current=False)

    @app.task(name="internals.task", shared=False)
    def task() -> None:
        """Do nothing."""

    made: list[type] = []

    class Base(Request):  # type: ignore[misc]
        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            made.append(cls)

    created = create_request_cls(Base, task, Pool(), "host", None, app=app)

    assert made == [created]
    assert {"execute_using_pool", "on_success"} <= set(vars(created))
    assert parameters(vars(created)["execute_using_pool"]) == ["self", "pool", "kwargs"]
    assert parameters(vars(created)["on_success"]) == ["self", "failed__retval__runtime", "kwargs"]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("on_failure", ["self", "exc_info", "send_failed_event", "return_ok"]),
        ("on_timeout", ["self", "soft", "timeout"]),
        ("acknowledge", ["self"]),
        ("reject", ["self", "requeue"]),
        ("revoked", ["self"]),
        ("on_accepted", ["self", "pid", "time_accepted"]),
        ("_announce_revoked", ["self", "reason", "terminated", "signum", "expired"]),
    ],
)
def test_the_hooks_of_a_request_are_as_we_override_them(method: str, expected: list[str]) -> None:
    """Names and arguments of what the mix-in overrides."""
    assert parameters(getattr(Request, method)) == expected


def test_kombus_redis_channel_names_lists_as_a_redrive_does() -> None:
    """`celery_dlq.transport.redis.entries` makes its entries; test_envelope.py compares them."""
    for prefix in ("", "app:"):
        channel = object.__new__(kombu_redis.Channel)
        channel.priority_steps, channel.sep = [0, 3, 6, 9], "\x06"
        for priority in range(10):
            kombus = channel._q_for_pri(prefix + "q", priority)
            assert kombus == prefix + "q" + end_of_list(channel, priority)
    channel = object.__new__(kombu_redis.Channel)
    for properties in ({}, None, *({"priority": n} for n in (None, "x", "4", -3, 0, 5, 200, 2.7))):
        envelope = {"properties": properties}
        kombus = channel._get_message_priority(envelope, reverse=False)
        assert kombus == priority_of(channel, envelope)
    assert parameters(kombu_redis.Channel.encode_body) == ["self", "body", "encoding"]
    for mode in (None, 1, "transient"):
        kombus = Producer._delivery_details(SimpleNamespace(), Exchange("x"), mode)[1]
        assert kombus == maybe_delivery_mode(mode or Exchange("x").delivery_mode)
    assert (kombu_redis.Channel.global_keyprefix, kombu_redis.Channel.default_priority) == ("", 0)
    assert isinstance(kombu_redis.Channel.pool, property)
    source = inspect.getsource(kombu_redis.Channel._put)
    assert "_q_for_pri(queue, pri)" in source
    assert "lpush" in source
    # Whoever writes more for a queue than its entry must be known to `Envelopes.expires`.
    assert ("pexpire" in source) is ("self._expires" in source)


def test_hooks_that_only_newer_versions_have_are_there() -> None:
    """An override of a method that is gone would do nothing, silently."""
    if VERSION >= (5, 5):
        assert callable(Request._announce_cancelled)
    if VERSION >= (5, 7):
        assert callable(Request._retry_worker_lost)
        assert callable(Request._success_was_stored)


def test_commands_that_revoke_are_found_by_their_names_and_take_ids_and_stamps() -> None:
    """`Panel.data` is what a worker's mailbox calls, with the command's arguments by name."""
    assert parameters(Panel.data["revoke"])[:2] == ["state", "task_id"]
    assert parameters(Panel.data["terminate"])[:3] == ["state", "signal", "task_id"]
    assert parameters(Panel.data["revoke_by_stamped_headers"])[:2] == ["state", "headers"]
    assert "handlers=control.Panel.data" in inspect.getsource(Pidbox)
    assert "(self.state, **arguments)" in inspect.getsource(Node.handle)


def test_celery_asks_a_request_whether_it_is_revoked_at_its_receipt_and_its_start() -> None:
    """An id in the set, and expiry, which adds the id to the set; no time of a revocation."""
    assert "req.revoked()" in inspect.getsource(default)
    assert "self.revoked()" in inspect.getsource(create_request_cls)
    assert "revoked_tasks.add(self.id)" in inspect.getsource(Request.maybe_expire)
    assert "self.id in revoked_tasks" in inspect.getsource(Request.revoked)
    assert "_announce_revoked(" in inspect.getsource(Request.revoked)


def test_the_worker_skips_a_request_that_says_it_is_revoked() -> None:
    """That is how a message is not executed and its slot is released."""
    source = inspect.getsource(WorkController._process_task)
    assert "req.execute_using_pool(self.pool)" in source
    assert "except TaskRevokedError" in source
    assert "_quick_release" in source


def test_strategies_are_built_from_the_tasks_request_when_the_consumer_starts() -> None:
    """Tasks are guarded in a worker bootstep, which is before that."""
    assert "c.update_strategies()" in inspect.getsource(Tasks.start)
    assert "create_request_cls(Request, task" in inspect.getsource(default)
    assert "symbol_by_name(task.Request)" in inspect.getsource(default)
    assert isinstance(Task.Request, (str, type))


def test_the_consumer_drops_messages_through_these_methods() -> None:
    """They are replaced on the consumer before it builds its handler."""
    assert parameters(Consumer.on_unknown_message) == ["self", "body", "message"]
    assert parameters(Consumer.on_unknown_task) == ["self", "body", "message", "exc"]
    assert parameters(Consumer.on_invalid_task) == ["self", "body", "message", "exc"]
    assert parameters(Consumer.on_decode_error) == ["self", "message", "exc"]
    source = inspect.getsource(Consumer.create_task_handler)
    for name in ("on_unknown_message", "on_unknown_task", "on_invalid_task", "on_decode_error"):
        assert f"self.{name}" in source
    assert "on_decode_error=c.on_decode_error" in inspect.getsource(Tasks.start)


def test_a_pool_drops_what_no_process_accepted() -> None:
    """`AtWork.keep_jobs` says first what will start all the same."""
    flush = inspect.getsource(AsynPool.flush)
    assert "if not job._accepted:" in flush
    assert "self.outbound_buffer.clear()" in flush
    assert "self.pool.flush()" in inspect.getsource(Consumer.on_close)
    write = inspect.getsource(AsynPool._create_write_handlers)
    assert "job._write_to = proc" in write
    assert "job._writer = ref(cor)" in write
    assert not ApplyResult._write_to


def test_a_pool_writes_to_processes_as_jobs_are_written_in_its_place() -> None:
    """Its handlers are made for each connection; what writes takes the pipes that it may use."""
    write = inspect.getsource(AsynPool._create_write_handlers)
    assert "hub.consolidate_callback = schedule_writes" in write
    assert "def schedule_writes(ready_fds, " in write
    assert "if is_fair_strategy and ready_fd in busy_workers:" in write
    assert "if ready_fd in active_writes:" in write
    assert "add_writer(ready_fd, cor)" in write  # what is not written whole
    assert "all_inqueues = self._all_inqueues" in write
    assert "outbound = self.outbound_buffer" in write
    assert "hub.remove_writer(fd)" in write or "hub_remove(fd)" in write  # as Celery 5.4 has it
    watch = write[write.index("def on_poll_start") : write.index("self.on_poll_start = ")]
    assert watch.count("iterate_file_descriptors_safely(") == 2  # all it does: pipes in, or out
    assert "hub.on_tick.add(self.on_poll_start)" in inspect.getsource(
        AsynPool.register_with_event_loop
    )
    remove = inspect.getsource(Hub.remove_writer)
    assert "self.add(fd, cb, READ | ERR, args)" in remove  # the readers stay
    assert "dest = self.readers if flags & READ else self.writers" in inspect.getsource(Hub.add)


def test_a_pool_that_closes_drops_what_it_is_given() -> None:
    """So such a start is not counted."""
    assert "if self._state != RUN:\n            return" in inspect.getsource(
        BilliardPool.apply_async
    )


def test_pools_of_this_process_say_that_a_task_starts_right_before_it_does() -> None:
    """And an exception in there keeps the task from starting."""
    source = inspect.getsource(apply_target)
    assert source.index("accept_callback(") < source.index("try:") < source.index("target(*args")


def test_pools_of_this_process_report_what_no_task_handles_as_a_success() -> None:
    """What a task was left by is the context of the error that Celery makes of it."""
    reported: list[Any] = []

    def leave() -> None:
        raise SystemExit("config is broken")

    apply_target(leave, callback=reported.append)
    (info,) = reported
    error = info.exception.exc
    assert isinstance(error, WorkerLostError)
    assert isinstance(error.__context__, SystemExit)
    gevent = pytest.importorskip("celery.concurrency.gevent")
    assert "return timeout_callback(False, timeout)" in inspect.getsource(gevent.apply_timeout)


def test_the_consumer_is_called_when_it_closes() -> None:
    """`on_close` is bound when the consumer is made; both places are replaced."""
    assert "on_close=self.on_close" in inspect.getsource(Consumer.__init__)
    assert "self.on_close()" in inspect.getsource(Consumer.start)
    assert "self.consumer.shutdown()" in inspect.getsource(WorkController.on_stopped)


def test_the_handler_of_messages_is_made_anew_for_each_connection() -> None:
    """By this name, on the consumer."""
    assert "obj.create_task_handler()" in inspect.getsource(loops.asynloop)
    assert "obj.create_task_handler()" in inspect.getsource(loops.synloop)


def test_what_may_be_given_to_send_task_by_position_is_as_we_name_it() -> None:
    """Behind the object and the name; the rest is options."""
    assert parameters(Celery.send_task)[1 :: len(PARAMETERS) + 1] == ["name", "options"]
    assert PARAMETERS[:4] == ("args", "kwargs", "countdown", "eta")
    assert {"retries", "router", "route_name", "task_type"} < {*PARAMETERS}


def test_a_message_gets_its_tasks_options_from_the_version_on_that_we_think() -> None:
    """A place that only the task names decides its delay, if the message goes there."""
    assert ("_get_exec_options" in inspect.getsource(Celery.send_task)) is MERGES_OPTIONS


def test_routes_of_a_mapping_look_at_the_tasks_name_only() -> None:
    """So the queue that they name is kept for the next message."""
    assert parameters(MapRoute.__call__) == ["self", "name", "args", "kwargs"]
    source = inspect.getsource(MapRoute.__call__)
    assert not re.search(r"\bk?w?args\b", source.split(":", 1)[1])


def test_lazy_tasks_say_when_they_are_made() -> None:
    """``@dead_letter_policy`` above ``@app.task`` waits for it."""
    assert parameters(PromiseProxy.__then__) == ["self", "fun", "args", "kwargs"]


def test_a_retry_keeps_our_headers() -> None:
    """``dlq_redrives`` is part of a message's key, over all its retries."""
    context = Context({"id": "x", "retries": 1, "headers": None, "dlq_redrives": 2})
    assert context.as_execution_options()["headers"] == {"dlq_redrives": 2}


def test_a_tasks_run_is_what_celery_calls_and_what_autoretry_wraps() -> None:
    """`celery_dlq.features.exceptions.observer` wraps it; under autoretry, what that wraps."""
    assert "else task.run" in inspect.getsource(build_tracer)
    assert "return self.run(" in inspect.getsource(Task.__call__)
    source = inspect.getsource(add_autoretry_behaviour)
    assert "task._orig_run, task.run = task.run, run" in source
    assert "return task._orig_run(*args, **kwargs)" in source
    assert "except Retry:" in source
    assert issubclass(Reject, TaskPredicate)
    assert issubclass(Ignore, TaskPredicate)
    assert issubclass(Retry, TaskPredicate)


def test_a_retry_reads_its_limit_from_the_task_and_is_published_in_its_name() -> None:
    """It is called on a copy of the task, with the limit of a policy."""
    source = inspect.getsource(Task.retry)
    assert parameters(Task.retry)[:8] == [
        *("self", "args", "kwargs", "exc", "throw", "eta", "countdown", "max_retries")
    ]
    assert "max_retries = self.max_retries if max_retries is None else max_retries" in source
    assert "raise_with_context(exc)" in source
    assert "self.signature_from_request(" in source
    assert not hasattr(Task, "__slots__")


def test_a_failure_is_signalled_while_its_exception_is_handled() -> None:
    """The original is found there; the signal's own may be a base class in its place."""
    seen: list[object] = []
    app = Celery("internals", set_as_current=False, backend="cache+memory://")

    class LocalError(ValueError):
        def __init__(self, code: int, text: str) -> None:
            super().__init__(text)

    @app.task(name="internals.fails", shared=False)
    def fails() -> None:
        raise LocalError(1, "x")

    def note(einfo: Any, **_: Any) -> None:
        einfo.noted = "x"
        seen.append(sys.exc_info()[0])

    app.finalize()
    signals.task_failure.connect(note)
    try:
        task = app.tasks["internals.fails"]
        done = build_tracer(task.name, task, app=app)("t-1", (), {}, {"id": "t-1"})
    finally:
        signals.task_failure.disconnect(note)
    assert seen == [LocalError]
    assert pickle.loads(pickle.dumps(done.retval)).noted == "x"


def test_the_state_of_a_cold_shutdown_is_where_we_look() -> None:
    """``None`` or ``False`` while the worker runs, an exit code once it stops."""
    assert not state.should_terminate
    assert hasattr(state, "active_requests")


def test_the_state_of_a_shutdown_and_the_text_of_a_lost_process_are_as_we_read_them() -> None:
    """A process that dies of the signal that ends its worker is interrupted."""
    assert "\nshould_stop = None\n" in inspect.getsource(state)
    assert "'Warm': 'should_stop'" in inspect.getsource(celery_apps_worker._shutdown_handler)
    assert "human_status(exitcode)" in inspect.getsource(BilliardPool.mark_as_worker_lost)
    assert human_status(-signal.SIGTERM).startswith("signal 15")


def test_handlers_of_shutdowns_are_installed_before_the_steps_of_a_worker_start() -> None:
    """And by these handlers for the next signal: ours wrap them then."""
    source = inspect.getsource(celery_apps_worker)
    started = inspect.getsource(celery_apps_worker.Worker.on_start)
    assert "self.install_platform_tweaks(self)" in started
    begins = inspect.getsource(bootsteps.Blueprint.start)
    assert begins.index("self.on_start()") < begins.index("step.start(parent)")
    assert "platforms.signals[sig] = _handle_request" in source
    assert {"SIGINT", "SIGTERM", "SIGQUIT"} <= set(re.findall(r"sig='(SIG\w+)'", source))


def test_the_consumers_loop_calls_what_it_is_asked_to() -> None:
    """In a loop of greenlets, its own greenlet does, between two reads."""
    assert "self._pending_operations.append(p)" in inspect.getsource(Consumer.call_soon)
    assert "perform_pending_operations()" in inspect.getsource(loops.synloop)


def test_a_pool_gives_a_job_that_nobody_accepted_to_another_process() -> None:
    """`read_before_put_back` has it look first whether the lost one had begun."""
    down = inspect.getsource(AsynPool.on_job_process_down)
    assert "self.on_partial_read(job, job._write_to)" in down
    put_back = inspect.getsource(AsynPool.on_partial_read)
    assert put_back.index("if not job._accepted:") < put_back.index("self._put_back(job)")


def test_a_pool_reads_what_a_dead_process_reported_before_it_asks_about_its_jobs() -> None:
    """And at a shutdown what the others still report; `Results` does both in its place."""
    joins = inspect.getsource(BilliardPool._join_exited_workers)
    assert joins.index("self.process_flush_queues(worker)") < joins.index("on_job_process_down")
    assert list(inspect.signature(AsynPool.process_flush_queues).parameters) == ["self", "proc"]
    flushes = inspect.getsource(asynpool.ResultHandler.on_stop_not_started)
    assert "iterate_file_descriptors_safely" in flushes
    assert "self._flush_outqueue," in flushes
    flush = inspect.signature(asynpool.ResultHandler._flush_outqueue)
    assert [*flush.parameters][1:] == ["fd", "remove", "process_index", "on_state_change"]
    assert "add_reader(fileno, it)" in inspect.getsource(asynpool.ResultHandler)


def test_a_pool_of_processes_says_whether_it_takes_jobs() -> None:
    """It closes what drops them a moment later, and tells before it ends it."""
    pool = get_implementation("prefork")(1)
    assert not pool.active
    closes = inspect.getsource(BasePool.close)
    assert closes.index("self._state = self.CLOSE") < closes.index("self.on_close()")
    ends = inspect.getsource(BasePool.terminate)
    assert ends.index("self._state = self.TERMINATE") < ends.index("self.on_terminate()")


def test_the_consumer_drops_a_message_by_rejecting_it() -> None:
    """That is replaced on a message whose letter is stored: it is acknowledged."""
    for drop in (Consumer.on_unknown_message, Consumer.on_unknown_task, Consumer.on_invalid_task):
        assert "message.reject_log_error(logger, self.connection_errors)" in inspect.getsource(drop)
    assert callable(Message.reject_log_error)
    assert callable(Message.ack_log_error)


def test_a_request_has_room_for_the_state_of_its_delivery() -> None:
    """It has slots, and a dictionary too."""
    assert Request.__dictoffset__


# -- celery_dlq.transport: kombu's Redis transport ------------------------------------

POLLER = kombu_redis.MultiChannelPoller
CHANNEL = kombu_redis.Channel


@pytest.mark.parametrize(
    ("owner", "method", "expected"),
    [
        (CHANNEL, "_brpop_start", ["self", "timeout"]),
        (CHANNEL, "_brpop_read", ["self", "options"]),
        (CHANNEL, "close", ["self"]),
        (virtual.Channel, "basic_consume", None),
        (CHANNEL, "basic_cancel", ["self", "consumer_tag"]),
        (kombu_redis.QoS, "append", ["self", "message", "delivery_tag"]),
        (kombu_redis.QoS, "ack", ["self", "delivery_tag"]),
        (kombu_redis.QoS, "reject", ["self", "delivery_tag", "requeue"]),
        (kombu_redis.QoS, "restore_unacked", ["self", "client"]),
        (kombu_redis.QoS, "restore_by_tag", ["self", "tag", "client", "leftmost"]),
        (virtual.QoS, "append", ["self", "message", "delivery_tag"]),
        (virtual.QoS, "ack", ["self", "delivery_tag"]),
        (virtual.QoS, "can_consume", ["self"]),
        (POLLER, "handle_event", ["self", "fileno", "event"]),
        (POLLER, "get", ["self", "callback", "timeout"]),
        (kombu_redis.Transport, "register_with_event_loop", ["self", "connection", "loop"]),
        (kombu_redis.Transport, "establish_connection", ["self"]),
        (kombu_redis.Transport, "close_connection", ["self", "connection"]),
        (virtual.Message, "__init__", ["self", "payload", "channel", "kwargs"]),
        (round_robin_cycle, "consume", ["self", "n"]),
        (round_robin_cycle, "rotate", ["self", "last_used"]),
        (Consumer, "connect", ["self"]),
        (Consumer, "ensure_connected", ["self", "conn"]),
        (Connection, "get_transport_cls", ["self"]),
    ],
)
def test_kombus_redis_transport_has_what_the_transport_overrides_and_calls(
    owner: type, method: str, expected: list[str] | None
) -> None:
    """An override of a method that is gone, or is called differently, would do nothing."""
    found = parameters(getattr(owner, method))
    if expected is None:  # its `no_ack` may be given by position
        assert found[:3] == ["self", "queue", "no_ack"]
    else:
        assert found == expected


def test_the_poller_waits_for_sockets_as_the_wake_connection_registers_its_own() -> None:
    """`ReliablePoller` keeps its own; ``poller``, the flags and ``on_tick`` are kombu's."""
    assert "self.poller.register(sock, self.eventflags)" in inspect.getsource(POLLER._register)
    assert "self.handle_event(fileno, event)" in inspect.getsource(POLLER.get)
    assert not POLLER().fds
    loop = inspect.getsource(kombu_redis.Transport.register_with_event_loop)
    assert "cycle.on_poll_init(loop.poller)" in loop
    assert "[add_reader(fd, on_readable, fd) for fd in cycle.fds]" in loop
    assert "on_readable = self.on_readable" in loop
    assert "dest[fd] = callback, args" in inspect.getsource(Hub.add)
    assert "conn.transport.register_with_event_loop(" in inspect.getsource(Consumer.connect)
    assert "in copy(self.on_tick):" in inspect.getsource(Hub.create_loop)
    for name in ("add_reader", "remove", "call_later", "call_repeatedly"):
        assert callable(getattr(Hub, name))


def test_a_fetch_is_sent_where_brpop_is() -> None:
    """Who sends, and when; kombu opens no connection to wait on for a channel without queues."""
    start = inspect.getsource(POLLER.on_poll_start)
    fetches = "if channel.active_queues:           # BRPOP mode?\n"
    assert fetches in start
    assert start.count("_register_BRPOP(channel)") == start.count(fetches)
    get = inspect.getsource(POLLER.get)
    assert get.count("_register_BRPOP(channel)") == get.count(fetches)
    assert "channel.qos.can_consume()" in start
    restore = inspect.getsource(POLLER.maybe_restore_messages)
    assert "if channel.active_queues:" in restore
    assert "num=channel.unacked_restore_limit," in restore
    if hasattr(CHANNEL, "unacked_restore_throttle"):
        assert "interval=channel.unacked_restore_throttle," in restore
    start, read = (inspect.getsource(getattr(CHANNEL, f"_brpop_{n}")) for n in ("start", "read"))
    assert "self._queue_cycle.consume(len(self.active_queues))" in start
    assert "for pri in self.priority_steps\n                for queue in queues" in start
    assert "self._queue_cycle.rotate(dest)" in read


def test_a_consumer_is_called_with_a_message_that_waits_for_its_acknowledgement() -> None:
    """So is ours, in kombu's place, as `basic_consume` was told."""
    assert parameters(virtual.Channel.basic_consume) == [
        *("self", "queue", "no_ack", "callback", "consumer_tag", "kwargs"),
    ]
    told = inspect.getsource(virtual.Channel.basic_consume)
    for part in ("message = self.Message(raw_message, channel=self)", "return callback(message)"):
        assert part in told
    assert "if not no_ack:\n                self.qos.append(message, message.delivery_tag)" in told


def test_kombu_reads_our_records_of_unacknowledged_messages() -> None:
    """An array of envelope, exchange and routing key; the exchange "" means the queue itself."""
    append = inspect.getsource(kombu_redis.QoS.append)
    assert "dumps([message._raw, EX, RK])" in append
    assert "pipe.zadd(self.unacked_index_key" in append
    restore = inspect.getsource(kombu_redis.QoS.restore_by_tag)
    assert "M, EX, RK = loads(bytes_to_str(p))" in restore
    assert "self.channel._do_restore_message(M, EX, RK, pipe, leftmost)" in restore
    source = inspect.getsource(CHANNEL._do_restore_message)
    assert "payload['headers']['redelivered'] = True" in source
    assert "payload['properties']['delivery_info']['redelivered'] = True" in source
    assert "for queue in self._lookup(exchange, routing_key)" in source
    assert "if not exchange:  # anon exchange" in inspect.getsource(virtual.Channel._lookup)


def test_a_channel_has_the_names_that_its_keys_are_made_of() -> None:
    """`broker_of` reads them: the lists, the hash and the index must be kombu's own."""
    assert (CHANNEL.unacked_key, CHANNEL.unacked_index_key) == ("unacked", "unacked_index")
    assert (CHANNEL.sep, CHANNEL.global_keyprefix) == ("\x06\x16", "")
    assert CHANNEL.priority_steps == [0, 3, 6, 9]
    assert CHANNEL.QoS is kombu_redis.QoS
    assert CHANNEL.Message is virtual.Message
    assert isinstance(CHANNEL.pool, property)
    assert "self.QoS = virtual.QoS" in inspect.getsource(CHANNEL.__init__)  # no ack_emulation


def test_a_connection_makes_its_transport_of_the_class_that_it_is_told() -> None:
    """``get_transport_cls`` is replaced on the consumer's connection, for failover too."""
    assert "self.get_transport_cls()(client=self)" in inspect.getsource(Connection.create_transport)
    assert "self.ensure_connected(" in inspect.getsource(Consumer.connection_for_read)
    assert "self.connection_for_read(" in inspect.getsource(Consumer.connect)
    made = Connection("redis://")
    assert made.get_transport_cls() is kombu_redis.Transport
    source = inspect.getsource(virtual.Transport.establish_connection)
    assert "self._avail_channels.append(self.create_channel(self))" in source
    assert "self.channels.append(channel)" in inspect.getsource(virtual.Transport.create_channel)


def test_redis_pys_connections_are_made_and_read_as_we_do_it() -> None:
    """The wake connection reads its socket itself; the pool's ``make_connection`` counts."""
    connection = RedisConnection(health_check_interval=25)
    assert connection._sock is None
    assert "check_health=kwargs.get" in inspect.getsource(RedisConnection.send_command)
    for name in ("connect", "can_read", "read_response", "pack_commands", "disconnect"):
        assert callable(getattr(connection, name))
    from redis import ConnectionPool

    pool = ConnectionPool(max_connections=1)
    assert pool.connection_class is RedisConnection
    assert isinstance(pool.connection_class(**pool.connection_kwargs), RedisConnection)


def test_py_amqp_and_kombu_read_frames_as_we_do_in_their_place() -> None:
    """Our reader of frames shares py-amqp's buffer and takes kombu's place in the loop."""
    transport = TCPTransport("localhost")
    assert transport._read_buffer == b""
    assert inspect.getsource(TCPTransport._read).count("self._read_buffer") >= 3
    assert "read(7, True)" in inspect.getsource(TCPTransport.read_frame)
    drains = inspect.getsource(amqp.Connection.drain_events)
    assert "while not self.blocking_read(timeout)" in drains
    reads = inspect.getsource(amqp.Connection.blocking_read)
    assert "self.on_inbound_frame(frame)" in reads
    registers = inspect.getsource(pyamqp.Transport.register_with_event_loop)
    assert "loop.add_reader(connection.sock, self.on_readable" in registers
    assert "register_with_event_loop(conn.connection, self.hub)" in inspect.getsource(
        Consumer.connect
    )
    hub, (one, other) = Hub(), socket.socketpair()
    with one, other:
        hub.add_reader(one, print)
        hub.add_reader(one, repr)  # takes its place
        assert hub.readers[one.fileno()] == (repr, ())
        hub.close()


def test_the_prefetch_count_is_lowered_and_restored_by_one_setting() -> None:
    """Celery restores it where a message is acknowledged, and waits there for a reply."""
    restore = inspect.getsource(Consumer._restore_prefetch_count_after_connection_restart)
    assert "self.qos.set(self.qos.value)" in restore
    off = "not self.app.conf.worker_enable_prefetch_count_reduction"
    assert restore.index(off) < restore.index("return") < restore.index("self.qos.set")
    lowers = inspect.getsource(Consumer.on_connection_error_after_connected)
    assert "if self.app.conf.worker_enable_prefetch_count_reduction:" in lowers


@pytest.mark.parametrize(("pool", "kept"), [("prefork", True), ("threads", False)])
def test_only_the_event_loop_asks_for_another_prefetch_count(pool: str, *, kept: bool) -> None:
    """It acknowledges the tasks of processes; a thread acknowledges its own."""
    app = Celery()
    keep_prefetch_count(SimpleNamespace(app=app, pool_cls=get_implementation(pool)))
    assert app.conf.worker_enable_prefetch_count_reduction is kept


def test_a_pool_can_be_asked_for_what_it_was_given() -> None:
    """A prefork pool by its cache, threads by a future, greenlets by the greenlet itself."""
    assert "return result" in inspect.getsource(create_request_cls)
    assert ApplyResult._write_to is None
    assert inspect.getsource(ApplyResult.__init__).count("cache[self._job] = self") == 1
    assert "self._cache.pop(self._job, None)" in inspect.getsource(ApplyResult._set)
    assert "return ApplyResult(f)" in inspect.getsource(thread.TaskPool.on_apply)
    assert "accept_callback(pid or getpid(), monotonic())" in inspect.getsource(apply_target)


def test_a_greenlet_that_is_killed_reports_a_success_of_its_own_form() -> None:
    """Results of tasks begin with a number."""
    gevent = pytest.importorskip("celery.concurrency.gevent")
    if not hasattr(gevent.TaskPool, "_make_killable_target"):
        return  # Celery 5.4 kills none
    killable = inspect.getsource(gevent.TaskPool._make_killable_target)
    assert "return (False, None, None)" in killable
    assert "id(getcurrent())" in inspect.getsource(gevent.TaskPool.__init__)
    assert "return (1, R, T) if I else (0, Rstr, T)" in inspect.getsource(fast_trace_task)
    cancel = inspect.getsource(Request.cancel)
    assert cancel.index("terminate_job") < cancel.index("_announce_cancelled")


def test_a_result_is_read_by_a_generator_that_the_hub_forgets_when_it_is_reset() -> None:
    """We keep it."""
    made = inspect.getsource(asynpool.ResultHandler._make_process_result)
    assert "recv_message = self._recv_message" in made
    assert "it = recv_message(add_reader, fileno, on_state_change)" in made
    assert "add_reader(fileno, it)" in made
    assert "return on_result_readable" in made
    assert "self.handle_event = self._make" in inspect.getsource(asynpool.ResultHandler)
    assert "unpack_from('>i', bufv)" in inspect.getsource(asynpool.ResultHandler._recv_message)
    assert "self.readers.clear()" in inspect.getsource(Hub)


def test_a_channel_that_closes_restores_and_acknowledges_as_we_override_it() -> None:
    """Kombu calls these; an acknowledgement works after the channel was closed."""
    assert "restore_unacked_once()" in inspect.getsource(virtual.Channel.close)
    assert "self.restore_unacked()" in inspect.getsource(virtual.QoS.restore_unacked_once)
    assert "self.qos.ack(" in inspect.getsource(virtual.Channel.basic_ack)
    assert "self.restore_by_tag(tag, client)" in inspect.getsource(kombu_redis.QoS.restore_visible)
    for name in ("ack", "reject", "restore_unacked", "restore_by_tag"):
        mine = inspect.signature(getattr(ReliableQoS, name))
        assert list(mine.parameters) == list(
            inspect.signature(getattr(kombu_redis.QoS, name)).parameters
        )


def test_a_worker_sends_events_of_tasks_as_we_send_ours() -> None:
    """The consumer has a dispatcher, or none yet; a name's first word decides if it is sent."""
    assert "c.event_dispatcher = None" in inspect.getsource(Events.__init__)
    assert "c.event_dispatcher = c.app.events.Dispatcher(" in inspect.getsource(Events.start)
    assert parameters(EventDispatcher.send)[:2] == ["self", "type"]
    assert group_from("task-dead-lettered") == "task"
    assert "if groups and group not in groups:" in inspect.getsource(EventDispatcher.send)
    assert "task-dead-lettered" not in TASK_EVENT_TO_STATE


def test_a_timer_has_the_requests_that_wait_for_their_eta() -> None:
    """`dlq dead-letter` looks for them there, as Celery's own commands do."""
    source = inspect.getsource(control._iter_schedule_requests)
    assert "in timer.schedule.queue" in source
    assert "waiting.entry.args[0]" in source
    assert Hub().timer.schedule.queue == []
    consumed = inspect.getsource(Consumer.apply_eta_task)
    assert "self.qos.decrement_eventually()" in consumed


def test_a_message_that_waits_is_put_into_the_timer_as_celery_does_it() -> None:
    """After a crash it waits like one with an ETA, which takes no place of another."""
    waits = inspect.getsource(default)
    assert "consumer.qos.increment_eventually()" in waits
    assert "priority=6" in waits
    starts = inspect.getsource(Consumer.apply_eta_task)
    for part in ("task_reserved(task)", "self.on_task_request(task)", "qos.decrement_eventually()"):
        assert part in starts
    assert parameters(Hub().timer.call_after)[:3] == ["secs", "fun", "args"]
    assert parameters(Consumer.cancel_task_queue)[1] == "queue"
    assert parameters(Consumer.add_task_queue)[1] == "queue"


@pytest.mark.skipif(VERSION < (5, 5), reason="Celery 5.4 cannot consume quorum queues")
def test_with_quorum_queues_prefetch_counts_are_fixed() -> None:
    """A change counts for later consumers only, so a queue is consumed anew."""
    source = inspect.getsource(Tasks.qos_global)
    assert "detect_quorum_queues(" in source
    assert "qos_global = False" in source


def test_billiard_leaves_by_its_own_code_after_a_signal() -> None:
    """A process that dies of SIGQUIT says so by an exit code."""
    assert billiard.common.EX_SOFTWARE == LEFT_BY_SIGNAL
    assert "os._exit(EX_SOFTWARE)" in inspect.getsource(billiard.common._shutdown_cleanup)


def test_a_terminated_request_is_announced_as_such() -> None:
    """A demand of an operator makes a letter of it there, before Celery acknowledges it."""
    source = inspect.getsource(Request.terminate)
    assert "self._announce_revoked('terminated', True, signal, False)" in source
    assert "if self.time_start:" in source
    assert "self._terminate_on_ack = pool, signal" in source


def test_py_amqp_awaits_confirmations_and_tells_of_alarms_as_we_use_it() -> None:
    """A wait that times out can be repeated, and is for the last message that was published."""
    assert parameters(amqp.Channel.wait)[:4] == ["self", "method", "callback", "timeout"]
    assert "confirm_select" in inspect.getsource(amqp.Channel.basic_publish_confirm)
    opened = parameters(amqp.Connection.__init__)
    assert {"confirm_publish", "on_blocked", "on_unblocked", "read_timeout"} <= {*opened}
    assert "self.on_blocked(reason)" in inspect.getsource(amqp.Connection._on_blocked)
    assert "self.on_unblocked()" in inspect.getsource(amqp.Connection._on_unblocked)


def test_a_closed_channel_says_so() -> None:
    """A letter that waits for the store is dropped when its message has gone back."""
    assert "self.connection, None" in inspect.getsource(amqp.Channel.collect)
    assert "self.connection.close_channel(self)" in inspect.getsource(virtual.Channel.close)
    assert "channel.connection = None" in inspect.getsource(virtual.Transport.close_channel)
