"""The names of other packages that celery_dlq wraps, replaces or relies on: the one list.

Each release of those packages may break one of them. ``tests/programs/house.py`` counts them,
``tests/programs/reference.py`` makes a table of them for ``docs/explanation/internals.md``, and
``tests/unit/test_foreign_names.py`` compares the list with the code: a method that overrides one of
kombu's, py-amqp's or uvicorn's must have a row here. So must a private name, which
``tests/lint/test_rows_of_foreign_names.py`` looks for.

A name is written ``Owner.name``; what begins with an underscore is private. What another package
documents for such a use is none of these, and stands in a list of its own with the page that says
so: what its guide tells users to override, call or read; what its reference lists and we call; and
the methods of kombu's virtual transport, of which transports are made. Tests pin both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """Names that are used together, for one purpose."""

    names: str  # ``Owner.name``, separated by blanks
    files: str  # Below celery_dlq, separated by blanks
    why: str
    price: str  # What falls, or what more it costs, without them
    # What fails when the other package changes: functions of tests/unit/test_celery_internals.py,
    # or files, separated by blanks
    tests: str


@dataclass(frozen=True, slots=True)
class Documented:
    """Names that another package documents for what we do with them."""

    names: str
    files: str
    where: str
    tests: str


_OWN = "tests/unit/test_celery_internals.py"

TABLES: dict[str, tuple[Row, ...]] = {
    "Requests": (
        Row(
            "Request.execute_using_pool Request.on_success",
            "worker/request.py",
            "The guard's mix-in wraps what the class defines that Celery derives: it calls no "
            "`super()`.",
            "Counting a start before it happens: a task that kills its process runs without end.",
            "test_celery_makes_a_subclass_that_defines_what_we_wrap",
        ),
        Row(
            "Request.acknowledge Request.reject Request._announce_revoked",
            "worker/request.py",
            "How a delivery ends; an acknowledgement waits for the letter.",
            "A message would be acknowledged, or given back, before its letter is stored.",
            "test_the_hooks_of_a_request_are_as_we_override_them",
        ),
        Row(
            "Request._announce_cancelled Request._retry_worker_lost Request._success_was_stored",
            "worker/request.py",
            "A shutdown is not charged (5.5); some acknowledgements are no death; a result of an "
            "earlier message with the same id is none of this one (5.7).",
            "A deploy is charged to the tasks that it interrupts; some acknowledgements become "
            "letters; on Celery 5.7 a lost message is taken for a success.",
            "test_hooks_that_only_newer_versions_have_are_there",
        ),
        Row(
            "Request.revoked",
            "worker/request.py",
            "A message that was redriven after its revocation runs.",
            "A message that was redriven after `revoke` never runs.",
            "test_celery_asks_a_request_whether_it_is_revoked_at_its_receipt_and_its_start",
        ),
        Row(
            "celery.concurrency.apply_target",
            "worker/dispatched.py worker/in_process.py",
            "An exception from the accept callback (solo, threads, gevent, eventlet): the task "
            "does not start.",
            "With solo, threads and greenlets a task whose count was refused runs all the same.",
            "test_pools_of_this_process_say_that_a_task_starts_right_before_it_does",
        ),
        Row(
            "billiard.ExceptionInfo",
            "worker/request.py worker/in_process.py worker/dispatched.py",
            "What `on_success` and the time limit of gevent get (threads, gevent, eventlet, "
            "solo): the task was left by what is no `Exception`. A process of a prefork pool sends "
            "it without Celery's own frames.",
            "A task that leaves by `sys.exit`, `CancelledError` or `gevent.Timeout` counts as a "
            "success: no letter. A failure takes 1.15 to 1.2 of plain Celery's CPU, not 0.9.",
            "test_pools_of_this_process_report_what_no_task_handles_as_a_success "
            "tests/unit/test_dispatched.py",
        ),
        Row(
            "Request.cancel Request.terminate",
            "worker/request.py worker/in_process.py features/dead_letter/observer.py",
            "The `(False, None, None)` of a killed greenlet is no success. `dlq dead-letter` ends"
            " a running task as Celery's commands do.",
            "A killed greenlet counts as a success; `dlq dead-letter` ends no task that runs.",
            "test_a_greenlet_that_is_killed_reports_a_success_of_its_own_form",
        ),
    ),
    "Revocations, states": (
        Row(
            "Panel.data",
            "worker/revoked.py",
            "The commands `revoke`, `terminate`, `revoke_by_stamped_headers`: Redis notes when "
            "they came; Celery's set, which workers share, has no common clock.",
            "Nobody knows which came first, the redrive or the revocation: a redriven message is "
            "skipped in silence.",
            "test_commands_that_revoke_are_found_by_their_names_and_take_ids_and_stamps",
        ),
    ),
    "The consumer": (
        Row(
            "Consumer.update_strategies",
            "worker/bootsteps.py",
            "The guard is mixed into the class, for later tasks too.",
            "Tasks that are registered later, or get a policy by an override, have no guard.",
            "test_strategies_are_built_from_the_tasks_request_when_the_consumer_starts",
        ),
        Row(
            "AsynPool.on_partial_read",
            "worker/bootsteps.py",
            "Reads first whether a dead process had begun the job.",
            "When two processes die at once, a job starts again uncounted.",
            "test_a_pool_gives_a_job_that_nobody_accepted_to_another_process",
        ),
    ),
    "Messages that Celery drops": (
        Row(
            "Consumer.on_unknown_message Consumer.on_unknown_task Consumer.on_invalid_task "
            "Consumer.on_decode_error",
            "worker/dropped.py",
            "The letter comes first.",
            "What Celery drops has no letter: reasons `unknown_task`, `invalid_message` and "
            "`undecodable_message` go.",
            "test_the_consumer_drops_messages_through_these_methods",
        ),
        Row(
            "Message.reject_log_error",
            "worker/dropped.py",
            "Acknowledges once the letter is stored.",
            "The broker's own dead-letter exchange gets a copy, and SQS keeps the message.",
            "test_the_consumer_drops_a_message_by_rejecting_it",
        ),
        Row(
            "Consumer.create_task_handler",
            "worker/dropped.py",
            "An unreadable message must not end the worker.",
            "A message that Celery cannot take apart ends the worker, and the next one.",
            "test_the_handler_of_messages_is_made_anew_for_each_connection",
        ),
        Row(
            "Consumer.on_close",
            "worker/dropped.py",
            "Takes back counts of starts that never happened; also in the consumer's blueprint.",
            "A lost connection is charged to messages that never started.",
            "test_the_consumer_is_called_when_it_closes",
        ),
        Row(
            "amqp.serialization.PROPERTY_CLASSES",
            "transport/amqp.py",
            "Unreadable properties end no worker.",
            "One message with odd properties ends every worker of its RabbitMQ queue.",
            "tests/unit/test_amqp_properties.py",
        ),
    ),
    "What a pool has": (
        Row(
            "AsynPool.process_flush_queues ResultHandler.on_state_change "
            "ResultHandler._flush_outqueue",
            "worker/dispatched.py worker/bootsteps.py",
            "What is left of a result that was half read when its process died, or at a shutdown, "
            "is not taken for another one.",
            "A process that is killed while it reports a large result may end its worker, or keep "
            "it from ending. On Celery 5.4 a second, uncounted start.",
            "test_a_pool_reads_what_a_dead_process_reported_before_it_asks_about_its_jobs "
            "tests/unit/test_dispatched.py",
        ),
        Row(
            "ApplyResult.discard ApplyResult._write_to ApplyResult._writer AsynPool._pool "
            "AsynPool._cache BasePool.active",
            "worker/dispatched.py worker/bootsteps.py",
            "What was written to a process starts; the rest is not charged.",
            "A lost connection or a shutdown is charged to jobs that no process took, or not to "
            "those that will run.",
            "test_a_pool_drops_what_no_process_accepted "
            "test_a_pool_of_processes_says_whether_it_takes_jobs "
            "test_a_pool_that_closes_drops_what_it_is_given tests/unit/test_dispatched.py",
        ),
        Row(
            "AsynPool._result_handler ResultHandler._recv_message ResultHandler.handle_event "
            "outq._reader",
            "worker/dispatched.py",
            "Results are read by one call, not by four; one that is half read survives a lost "
            "connection.",
            "After a lost connection the results of a process are never read again. Reading those "
            "of a no-op takes 14 µs of CPU, and 6 with it.",
            "test_a_result_is_read_by_a_generator_that_the_hub_forgets_when_it_is_reset "
            "tests/unit/test_dispatched.py",
        ),
    ),
    "What a pool is given": (
        Row(
            "AsynPool.on_poll_start AsynPool.outbound_buffer AsynPool._all_inqueues "
            "Hub.consolidate_callback Hub.remove_writer Hub.writers",
            "worker/dispatched.py",
            "Jobs are written once a turn of the event loop, as soon as all of them are counted, "
            "without watching pipes first.",
            "No-ops of RabbitMQ with prefork take 0.1 more of plain Celery's CPU.",
            "test_a_pool_writes_to_processes_as_jobs_are_written_in_its_place "
            "tests/integration/test_jobs_of_a_pool.py",
        ),
        Row(
            "amqp.Channel.basic_ack",
            "transport/amqp.py",
            "Acknowledgements of prefork's one thread, in one call.",
            "No-ops of RabbitMQ with prefork take 2 % more of plain Celery's CPU.",
            "tests/integration/test_frames_of_rabbitmq.py tests/unit/test_frames.py",
        ),
    ),
    "Signals and logs": (
        Row(
            "celery.WorkerLostError",
            "worker/shutdown_signals.py worker/request.py",
            "Its text (read): the signal of a shutdown ended a pool process.",
            "A deploy whose signal reaches the pool's processes is charged to their tasks.",
            "test_the_state_of_a_shutdown_and_the_text_of_a_lost_process_are_as_we_read_them",
        ),
    ),
    "Fetching from Redis": (
        Row(
            "Consumer.connect Consumer.ensure_connected Connection.get_transport_cls",
            "transport/held.py transport/redis/fetch.py transport/sqs/channel.py",
            "Only the connection that consumes is ours, after a failover too.",
            "Reliable fetch ends with the first failover.",
            "test_a_connection_makes_its_transport_of_the_class_that_it_is_told "
            "tests/unit/test_transport.py",
        ),
        Row(
            "Channel.active_queues",
            "transport/redis/channel.py",
            "One script instead of `BRPOP`: kombu sees no queue to fetch from.",
            "A message that Redis has handed out is lost if its worker dies before it has read it.",
            "test_a_fetch_is_sent_where_brpop_is "
            "test_kombus_redis_transport_has_what_the_transport_overrides_and_calls",
        ),
        Row(
            "Transport.register_with_event_loop Hub.on_tick MultiChannelPoller.handle_event "
            "MultiChannelPoller.get MultiChannelPoller.fds",
            "transport/redis/wake.py transport/redis/channel.py",
            "The socket that wakes: in each turn of the event loop, and without one (gevent, "
            "eventlet).",
            "A worker waits for up to a second for each message, or asks without pause; a turn of "
            "the loop takes two system calls more for each socket of kombu's.",
            "test_the_poller_waits_for_sockets_as_the_wake_connection_registers_its_own "
            "test_kombus_redis_transport_has_what_the_transport_overrides_and_calls "
            "tests/unit/test_transport.py",
        ),
        Row(
            "QoS.restore_by_tag Channel.QoS Channel._do_restore_message",
            "transport/redis/leases.py transport/redis/channel.py",
            "Own tags and leases; records in `unacked` that kombu can read.",
            "Of copies of one message, one acknowledges the other; a task longer than the "
            "visibility timeout runs twice.",
            "test_kombu_reads_our_records_of_unacknowledged_messages "
            "test_a_channel_that_closes_restores_and_acknowledges_as_we_override_it "
            "test_a_channel_has_the_names_that_its_keys_are_made_of",
        ),
        Row(
            "Connection._sock Connection._connect",
            "transport/redis/wake.py transport/redis/channel.py transport/redis/broker.py "
            "store/pipelined.py store/connect.py store/failover.py",
            "redis-py's connections: messages that are no replies; replies that are read later, "
            "of commands that `os.writev` wrote, which saves a system call; a list of servers for"
            " a failover.",
            "No-ops on Redis take 33 to 42 % less CPU than plain Celery with them; a command whose"
            " reply is awaited takes 12 to 15 % of a no-op from RabbitMQ.",
            "test_redis_pys_connections_are_made_and_read_as_we_do_it "
            "tests/integration/test_redis_connection.py",
        ),
    ),
    "Other transports, and publishing": (
        Row(
            "SQS.Channel._message_to_python SQS.Channel._on_messages_ready SQS.Channel._get_async"
            " SQS.Channel.get_message_attributes SQS.Channel.QoS",
            "transport/sqs/channel.py",
            "Renewed visibility.",
            "A task longer than SQS's visibility timeout runs twice; messages that are not "
            "kombu's end the worker.",
            "tests/unit/test_sqs_internals.py",
        ),
        Row(
            "SQS.Channel._predefined_queue_clients",
            "transport/sqs/aws.py",
            "Before kombu 5.7, channels share the clients of predefined queues: a redrive's own "
            "repeats nothing in silence.",
            "A redrive to a predefined queue publishes twice when a reply is lost; it goes with "
            "kombu 5.6.",
            "tests/integration/test_publishing.py",
        ),
        Row(
            "amqp.transport._read_buffer amqp.Connection.on_inbound_frame "
            "amqp.Connection.drain_events",
            "transport/amqp.py",
            "The hub's reader of RabbitMQ's socket, with gevent `drain_events`: several frames "
            "with one system call.",
            "No-ops of RabbitMQ with threads: 1.67 of plain Celery's CPU, and 1.38 with it.",
            "tests/unit/test_frames.py tests/integration/test_frames_of_rabbitmq.py",
        ),
        Row(
            "Celery.send_task",
            "transport/default_delay.py",
            "The delay comes before Celery's native delayed delivery.",
            "No `default_delay`: the signal before publishing comes after Celery's choice of "
            "native delayed delivery.",
            "test_what_may_be_given_to_send_task_by_position_is_as_we_name_it "
            "tests/unit/test_send_task.py",
        ),
        Row(
            "Router.lookup_route",
            "transport/default_delay.py",
            "Users' route functions are called once a message.",
            "A random route may name another queue than the one whose delay the message got.",
            "test_routes_of_a_mapping_look_at_the_tasks_name_only",
        ),
    ),
    "Tasks and features": (
        Row(
            "PromiseProxy.__then__",
            "decorators.py",
            "A policy above `@app.task`, which makes its task later.",
            "`@dead_letter_policy` works below `@app.task` only, and finalizes no app too early.",
            "test_lazy_tasks_say_when_they_are_made tests/unit/test_decorators.py",
        ),
        Row(
            "Task.run Task._orig_run",
            "features/exceptions/observer.py",
            "Celery's own retry, also under `autoretry_for`.",
            "No policy key `exceptions`: only the process that runs a task has its exception.",
            _OWN,
        ),
        Row(
            "Task.apply",
            "testing/eager.py",
            "In users' tests: eager executions behave as guarded ones.",
            "Users' tests in eager mode see no guard.",
            "tests/integration/test_testing_plugin.py",
        ),
    ),
}
"""Rows by what they are about, in the order of the page."""

DOCUMENTED = (
    Documented(
        "Task.Request Request.on_failure Request.on_timeout",
        "worker/bootsteps.py worker/request.py",
        "https://docs.celeryq.dev/en/stable/userguide/tasks.html#requests-and-custom-requests",
        "test_the_hooks_of_a_request_are_as_we_override_them "
        "test_strategies_are_built_from_the_tasks_request_when_the_consumer_starts",
    ),
    Documented(
        "celery.TaskRevokedError Request.send_event Request.on_accepted",
        "worker/request.py worker/settling.py",
        "https://docs.celeryq.dev/en/stable/reference/celery.worker.request.html",
        "test_the_worker_skips_a_request_that_says_it_is_revoked "
        "test_the_hooks_of_a_request_are_as_we_override_them tests/acceptance/test_deaths.py",
    ),
    Documented(
        "Consumer.timer Consumer.qos Consumer.cancel_task_queue Consumer.add_task_queue "
        "Consumer.apply_eta_task Consumer.event_dispatcher",
        "worker/delayed.py worker/guard.py worker/bootsteps.py features/hold/observer.py",
        "https://docs.celeryq.dev/en/stable/userguide/extending.html#consumer",
        "test_a_message_that_waits_is_put_into_the_timer_as_celery_does_it "
        "test_with_quorum_queues_prefetch_counts_are_fixed "
        "tests/acceptance/test_holds.py tests/unit/test_celery_internals.py",
    ),
    Documented(
        "conf.worker_enable_prefetch_count_reduction",
        "transport/amqp.py",
        "https://docs.celeryq.dev/en/stable/userguide/configuration.html"
        "#worker-enable-prefetch-count-reduction",
        "test_the_prefetch_count_is_lowered_and_restored_by_one_setting",
    ),
    Documented(
        "Hub.add_reader Hub.call_repeatedly Hub.call_later",
        "transport/redis/channel.py transport/redis/wake.py",
        "https://docs.celeryq.dev/projects/kombu/en/stable/reference/kombu.asynchronous.hub.html",
        "tests/unit/test_transport.py",
    ),
    Documented(
        "Consumer.call_soon",
        "worker/bootsteps.py",
        "https://docs.celeryq.dev/en/stable/reference/celery.worker.consumer.consumer.html",
        "test_the_consumers_loop_calls_what_it_is_asked_to",
    ),
    Documented(
        "state.task_ready state.revoked state.revoked_stamps "
        "state.active_requests state.should_stop state.should_terminate",
        "worker/settling.py worker/delayed.py worker/revoked.py worker/bootsteps.py "
        "worker/shutdown_signals.py",
        "https://docs.celeryq.dev/en/stable/reference/celery.worker.state.html",
        "tests/unit/test_revocations.py tests/acceptance/test_deaths.py "
        "test_the_state_of_a_cold_shutdown_is_where_we_look "
        "test_a_message_that_waits_is_put_into_the_timer_as_celery_does_it",
    ),
    Documented(
        "signals.task_failure",
        "worker/settling.py",
        "https://docs.celeryq.dev/en/stable/userguide/signals.html#task-failure",
        "tests/acceptance/test_deaths.py",
    ),
    Documented(
        "task.Context",
        "worker/settling.py",
        "https://docs.celeryq.dev/en/stable/reference/celery.app.task.html",
        "tests/acceptance/test_own_parts.py",
    ),
    Documented(
        "backend.mark_as_failure",
        "worker/settling.py",
        "https://docs.celeryq.dev/en/stable/reference/celery.backends.base.html",
        "tests/acceptance/test_deaths.py",
    ),
    Documented(
        "Transport.establish_connection Transport.close_connection Transport.cycle "
        "Channel.Message Channel.basic_consume Channel.basic_cancel Channel.close QoS.append "
        "QoS.ack QoS.reject QoS.restore_unacked QoS.restore_visible",
        "transport/redis/channel.py transport/redis/leases.py",
        "https://docs.celeryq.dev/projects/kombu/en/stable/reference/kombu.transport.virtual.html",
        "test_kombus_redis_transport_has_what_the_transport_overrides_and_calls "
        "test_a_channel_that_closes_restores_and_acknowledges_as_we_override_it",
    ),
    Documented(
        "SQS.Channel.Message SQS.Channel.basic_ack SQS.Channel.basic_consume SQS.QoS.append "
        "SQS.QoS.ack SQS.QoS.reject SQS.QoS.restore_unacked",
        "transport/sqs/channel.py",
        "https://docs.celeryq.dev/projects/kombu/en/stable/reference/kombu.transport.virtual.html",
        "tests/unit/test_sqs_internals.py",
    ),
    Documented(
        "SQS.Channel.entity_name SQS.Channel.canonical_queue_name SQS.Channel.sqs "
        "SQS.Channel.predefined_queues",
        "operations/broker_limits.py transport/sqs/aws.py transport/sqs/channel.py",
        "https://docs.celeryq.dev/projects/kombu/en/stable/reference/kombu.transport.SQS.html",
        "tests/unit/test_sqs_internals.py",
    ),
    Documented(
        "Connection.connection_class",
        "transport/redis/channel.py transport/redis/broker.py store/connect.py store/failover.py",
        "https://redis.readthedocs.io/en/stable/connections.html",
        "test_redis_pys_connections_are_made_and_read_as_we_do_it",
    ),
    Documented(
        "Client.before_send Client.before_send_transaction",
        "features/sentry/integration.py",
        "https://docs.sentry.io/platforms/python/configuration/filtering/",
        "tests/acceptance/test_sentry.py tests/acceptance/test_redact.py",
    ),
    Documented(
        "amqp.Channel.confirm_select amqp.Channel.wait amqp.Connection.on_blocked "
        "amqp.Connection.on_unblocked",
        "transport/confirmed.py transport/confirms.py",
        "https://docs.celeryq.dev/projects/amqp/en/latest/reference/",
        "tests/integration/test_publishing.py",
    ),
)
"""Names that we use as their package's documentation says."""


def rows() -> Iterator[Row]:
    """Every row of the names that nobody promises."""
    for found in TABLES.values():
        yield from found


def all_rows() -> Iterator[Row | Documented]:
    """Every row, also of documented names."""
    yield from rows()
    yield from DOCUMENTED


def names() -> list[str]:
    """Every name, once."""
    return sorted({name for row in rows() for name in row.names.split()})


def is_private(name: str) -> bool:
    """True if the package that owns a name does not promise it to anybody."""
    last = name.rpartition(".")[2]
    return last.startswith("_") and not last.endswith("__")
