"""The names of other packages that celery_dlq wraps, replaces or relies on: the one list.

Each release of those packages may break one of them. ``tests/programs/house.py`` counts them,
``tests/programs/reference.py`` makes a table of them for ``docs/explanation/internals.md``, and
``tests/unit/test_foreign_names.py`` compares the list with the code: a method that overrides one of
kombu's, py-amqp's or uvicorn's must have a row here. So must a private name, which
``tests/lint/test_rows_of_foreign_names.py`` looks for.

A name is written ``Owner.name``; what begins with an underscore is private. A documented hook of
another package (a signal, a bootstep, an option) is none of these.
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
    # What fails when the other package changes: functions of tests/unit/test_celery_internals.py,
    # or files, separated by blanks
    tests: str


_OWN = "tests/unit/test_celery_internals.py"

TABLES: dict[str, tuple[Row, ...]] = {
    "Requests": (
        Row(
            "Request.execute_using_pool Request.on_success",
            "worker/request.py",
            "The guard's mix-in wraps what the class defines that Celery derives: it calls no"
            " `super()`.",
            "test_celery_makes_a_subclass_that_defines_what_we_wrap",
        ),
        Row(
            "Request.on_accepted Request.on_failure Request.on_timeout Request.acknowledge"
            " Request.reject Request._announce_revoked",
            "worker/request.py",
            "How a delivery ends; an acknowledgement waits for the letter.",
            "test_the_hooks_of_a_request_are_as_we_override_them",
        ),
        Row(
            "Request._announce_cancelled Request._retry_worker_lost Request._success_was_stored",
            "worker/request.py",
            "A shutdown is not charged (5.5); some acknowledgements are no death; a result of an"
            " earlier message with the same id is none of this one (5.7).",
            "test_hooks_that_only_newer_versions_have_are_there",
        ),
        Row(
            "Request.revoked Request._already_revoked Request._already_cancelled Request._context",
            "worker/request.py worker/settling.py",
            "A message that was redriven after its revocation runs; one that Celery revoked or"
            " cancelled ends once.",
            "test_celery_asks_a_request_whether_it_is_revoked_at_its_receipt_and_its_start",
        ),
        Row(
            "celery.TaskRevokedError",
            "worker/request.py",
            "Our `TaskRevokedError` from `execute_using_pool`: the message is skipped and its slot"
            " released.",
            "test_the_worker_skips_a_request_that_says_it_is_revoked",
        ),
        Row(
            "celery.concurrency.apply_target",
            "worker/dispatched.py worker/request.py",
            "An exception from the accept callback (solo, threads, gevent, eventlet): the task does"
            " not start.",
            "test_pools_of_this_process_say_that_a_task_starts_right_before_it_does",
        ),
        Row(
            "state.task_ready backend.mark_as_failure signals.task_failure Request.send_event",
            "worker/settling.py",
            "A refused message ends as a failed one.",
            "tests/acceptance/test_deaths.py",
        ),
        Row(
            "billiard.ExceptionInfo",
            "worker/request.py",
            "What `on_success` and the time limit of gevent get (threads, gevent, eventlet, solo):"
            " the task was left by what is no `Exception`.",
            "test_pools_of_this_process_report_what_no_task_handles_as_a_success",
        ),
        Row(
            "Request.cancel Request.terminate",
            "worker/request.py features/dead_letter/observer.py",
            "The `(False, None, None)` of a killed greenlet is no success. `dlq dead-letter` ends a"
            " running task as Celery's commands do.",
            "test_a_greenlet_that_is_killed_reports_a_success_of_its_own_form",
        ),
    ),
    "Revocations, states": (
        Row(
            "Panel.data",
            "worker/revoked.py",
            "The commands `revoke`, `terminate`, `revoke_by_stamped_headers`: Redis notes when they"
            " came; Celery's set, which workers share, has no common clock.",
            "test_commands_that_revoke_are_found_by_their_names_and_take_ids_and_stamps",
        ),
        Row(
            "state.revoked state.revoked_stamps",
            "worker/revoked.py",
            "What Celery will not run (read).",
            "tests/unit/test_revocations.py",
        ),
        Row(
            "Request.dlq_state",
            "writing/lifecycle.py",
            "Attributes of ours on the request: the state of its delivery.",
            "test_a_request_has_room_for_the_state_of_its_delivery",
        ),
        Row(
            "Channel.closed",
            "writing/lifecycle.py",
            "A channel that is closed, or has no connection: the broker delivers its messages"
            " again.",
            "test_a_closed_channel_says_so",
        ),
    ),
    "The consumer": (
        Row(
            "Task.Request Consumer.update_strategies",
            "worker/bootsteps.py",
            "The guard is mixed into the class, for later tasks too.",
            "test_strategies_are_built_from_the_tasks_request_when_the_consumer_starts",
        ),
        Row(
            "Consumer.call_soon",
            "worker/bootsteps.py transport/amqp.py",
            "The consumer's own loop changes the consumer.",
            "test_the_consumers_loop_calls_what_it_is_asked_to",
        ),
        Row(
            "Timer.entry",
            "worker/bootsteps.py",
            "The entry of what the timers of gevent and eventlet return: it ends what repeats with"
            " its connection.",
            "test_a_green_timer_repeats_the_entry_that_its_greenlet_has",
        ),
        Row(
            "Consumer.on_task_request",
            "worker/guard.py worker/delayed.py",
            "Called once more: a message that was put off.",
            "test_the_consumer_hands_a_request_to_its_pool_by_this_name",
        ),
        Row(
            "Consumer.timer Consumer.qos state.task_reserved Consumer.cancel_task_queue"
            " Consumer.add_task_queue",
            "worker/delayed.py features/hold/observer.py",
            "A message waits after a crash as Celery's own wait for their ETA. The queue of a full"
            " hold.",
            "test_a_message_that_waits_is_put_into_the_timer_as_celery_does_it"
            " tests/acceptance/test_holds.py",
        ),
        Row(
            "kombu.detect_quorum_queues",
            "worker/delayed.py",
            "With quorum queues (5.5) the prefetch count of a consumer is fixed.",
            "test_with_quorum_queues_prefetch_counts_are_fixed",
        ),
        Row(
            "Consumer.event_dispatcher",
            "worker/bootsteps.py",
            "Sends `task-dead-lettered` to Flower and others.",
            _OWN,
        ),
        Row(
            "AsynPool.on_partial_read",
            "worker/bootsteps.py",
            "Reads first whether a dead process had begun the job.",
            "test_a_pool_gives_a_job_that_nobody_accepted_to_another_process",
        ),
        Row(
            "state.should_terminate state.should_stop state.active_requests",
            "worker/shutdown_signals.py worker/bootsteps.py",
            "Shutdowns; queues with running tasks (read).",
            "test_the_state_of_a_cold_shutdown_is_where_we_look",
        ),
    ),
    "Messages that Celery drops": (
        Row(
            "Consumer.on_unknown_message Consumer.on_unknown_task Consumer.on_invalid_task"
            " Consumer.on_decode_error",
            "worker/dropped.py",
            "The letter comes first.",
            "test_the_consumer_drops_messages_through_these_methods",
        ),
        Row(
            "Message.reject_log_error",
            "worker/dropped.py",
            "Acknowledges once the letter is stored.",
            "test_the_consumer_drops_a_message_by_rejecting_it",
        ),
        Row(
            "Consumer.create_task_handler",
            "worker/dropped.py",
            "An unreadable message must not end the worker.",
            "test_the_handler_of_messages_is_made_anew_for_each_connection",
        ),
        Row(
            "Consumer.on_close",
            "worker/dropped.py",
            "Takes back counts of starts that never happened; also in the consumer's blueprint.",
            "test_the_consumer_is_called_when_it_closes",
        ),
        Row(
            "amqp.serialization.PROPERTY_CLASSES",
            "worker/dropped.py",
            "Unreadable properties end no worker.",
            "tests/unit/test_amqp_properties.py",
        ),
    ),
    "What a pool has": (
        Row(
            "AsynPool.process_flush_queues ResultHandler.on_state_change",
            "worker/dispatched.py worker/bootsteps.py",
            "On Celery 5.4 only: there the pool does not read what a dead process reported.",
            "test_a_pool_reads_what_a_dead_process_reported_before_it_asks_about_its_jobs",
        ),
        Row(
            "ApplyResult._accepted ApplyResult._job ApplyResult.discard ApplyResult._write_to"
            " ApplyResult._worker_pid ApplyResult._writer ApplyResult._payload AsynPool._put_back"
            " AsynPool._pool AsynPool._state AsynPool._cache AsynPool.outbound_buffer",
            "worker/dispatched.py worker/bootsteps.py",
            "What was written to a process starts; the rest is not charged.",
            "test_a_pool_drops_what_no_process_accepted"
            " test_a_pool_that_closes_drops_what_it_is_given tests/unit/test_dispatched.py",
        ),
        Row(
            "Request._apply_result",
            "worker/request.py",
            "With the pool's job in `_cache`, future `f`, or greenlet: does the pool still have the"
            " task?",
            "test_a_pool_can_be_asked_for_what_it_was_given",
        ),
        Row(
            "AsynPool._result_handler ResultHandler._recv_message AsynPool._fileno_to_outq"
            " outq._reader",
            "worker/dispatched.py",
            "A half-read result survives a lost connection.",
            "test_a_result_is_read_by_a_generator_that_the_hub_forgets_when_it_is_reset"
            " tests/unit/test_dispatched.py",
        ),
    ),
    "Signals and logs": (
        Row(
            "celery.platforms.signals",
            "worker/shutdown_signals.py",
            "Celery's handlers of SIGINT, SIGTERM and SIGQUIT: one that interrupts our code, or"
            " py-amqp's writing, could wait for its lock for ever. It runs a moment later.",
            "test_handlers_of_shutdowns_are_installed_through_celerys_signals"
            " tests/acceptance/test_shutdowns.py",
        ),
        Row(
            "celery.WorkerLostError",
            "worker/shutdown_signals.py worker/request.py",
            "Its text (read): the signal of a shutdown ended a pool process.",
            "test_the_state_of_a_shutdown_and_the_text_of_a_lost_process_are_as_we_read_them",
        ),
        Row(
            "celery.app.trace celery.pool celery.redirected celery.worker.consumer.consumer"
            " celery.worker.control celery.worker.request celery.worker.strategy",
            "worker/masked_log.py",
            "The names of Celery's loggers, with `dlq_redact`: no line shows a hidden value.",
            "tests/unit/test_masked_log.py tests/acceptance/test_redact.py",
        ),
    ),
    "Fetching from Redis": (
        Row(
            "Consumer.connect Consumer.ensure_connected Connection.get_transport_cls",
            "transport/held.py transport/redis/fetch.py transport/sqs/channel.py",
            "Only the connection that consumes is ours, after a failover too.",
            "test_a_connection_makes_its_transport_of_the_class_that_it_is_told"
            " tests/unit/test_transport.py",
        ),
        Row(
            "Channel._brpop_start Channel._brpop_read Channel._queue_cycle"
            " Channel._update_queue_cycle Channel.active_queues Channel.basic_consume"
            " Channel._poll_error Channel._deliver",
            "transport/redis/channel.py",
            "One script instead of `BRPOP`.",
            "test_a_fetch_is_sent_where_brpop_is"
            " test_kombus_redis_transport_has_what_the_transport_overrides_and_calls",
        ),
        Row(
            "MultiChannelPoller._register_BRPOP MultiChannelPoller._register_LISTEN"
            " MultiChannelPoller.on_poll_start MultiChannelPoller.fds"
            " MultiChannelPoller.on_readable MultiChannelPoller.handle_event MultiChannelPoller.get"
            " MultiChannelPoller._channels MultiChannelPoller._fd_to_chan"
            " MultiChannelPoller._chan_to_sock Channel._in_listen",
            "transport/redis/wake.py transport/redis/channel.py",
            "The socket that wakes.",
            "test_the_poller_waits_for_sockets_as_the_wake_connection_registers_its_own",
        ),
        Row(
            "Transport.establish_connection Transport.register_with_event_loop"
            " Transport.close_connection Transport.cycle Transport._avail_channels",
            "transport/redis/channel.py",
            "Leases begin and end with the connection; the worker's loop looks now and then.",
            "test_kombus_redis_transport_has_what_the_transport_overrides_and_calls",
        ),
        Row(
            "QoS.append QoS.ack QoS.reject QoS.restore_unacked QoS.restore_visible"
            " QoS.restore_by_tag QoS._delivered Channel.QoS Channel._do_restore_message"
            " Channel.close",
            "transport/redis/leases.py transport/redis/channel.py",
            "Own tags and leases; records in `unacked` that kombu can read.",
            "test_kombu_reads_our_records_of_unacknowledged_messages"
            " test_a_channel_that_closes_restores_and_acknowledges_as_we_override_it"
            " test_a_channel_has_the_names_that_its_keys_are_made_of",
        ),
        Row(
            "Channel.Message Message._raw",
            "transport/redis/channel.py transport/redis/entries.py transport/sqs/channel.py",
            "The fetch's tag; entries that are no message.",
            "test_a_message_of_a_cancelled_queue_goes_back_by_its_own_tag",
        ),
        Row(
            "Producer._delivery_details Channel._get_message_priority Channel._q_for_pri",
            "transport/redis/entries.py transport/redis/broker.py transport/redis/channel.py"
            " features/adopt/sources.py",
            "kombu's envelope and list keys, without `Producer`: a redrive publishes in a script.",
            "tests/integration/test_envelope.py",
        ),
        Row(
            "Connection._sock Connection._parser Connection.connection_class"
            " Connection.connection_kwargs Connection._connect",
            "transport/redis/wake.py transport/redis/channel.py transport/redis/broker.py"
            " store/pipelined.py store/connect.py",
            "redis-py's connections: messages that are no replies; replies that are read later, of"
            " commands that `os.writev` wrote, which saves a system call; a list of servers for a"
            " failover.",
            "test_redis_pys_connections_are_made_and_read_as_we_do_it"
            " tests/integration/test_redis_connection.py",
        ),
    ),
    "Other transports, and publishing": (
        Row(
            "SQS.Channel._message_to_python SQS.Channel._on_messages_ready SQS.Channel._get_async"
            " SQS.Channel._restore SQS.Channel.basic_ack SQS.Channel.basic_consume"
            " SQS.Channel.get_message_attributes SQS.Channel.QoS SQS.Channel.Message"
            " SQS.Channel._new_queue SQS.Channel._optional_b64_decode"
            " SQS.QoS.append SQS.QoS.ack SQS.QoS.reject SQS.QoS.restore_unacked SQS.QoS._delivered",
            "transport/sqs/channel.py",
            "Renewed visibility.",
            "tests/unit/test_sqs_internals.py",
        ),
        Row(
            "SQS.QoS.apply_backoff_policy",
            "transport/sqs/channel.py",
            "Its error ends no worker.",
            "tests/unit/test_sqs_internals.py",
        ),
        Row(
            "SQS.Channel._resolve_queue_url SQS.Channel.entity_name",
            "transport/sqs/aws.py assembly.py",
            "Redrive policies (called).",
            "tests/unit/test_sqs_internals.py",
        ),
        Row(
            "amqp.Channel.wait amqp.Channel.confirm_select amqp.Connection.drain_events"
            " amqp.Connection.on_blocked amqp.Connection.on_unblocked"
            " SQS.Channel._predefined_queue_clients Channel._size Channel._has_queue",
            "operations/redrive/publisher.py operations/redrive/checks.py transport/amqp.py"
            " transport/sqs/aws.py",
            "Operators' publishing repeats nothing in silence.",
            "tests/integration/test_publishing.py",
        ),
        Row(
            "amqp.transport._read_buffer amqp.transport.having_timeout amqp.transport.read_frame"
            " amqp.Connection.on_inbound_frame",
            "transport/amqp.py",
            "The hub's reader of RabbitMQ's socket, with gevent `drain_events`: several frames with"
            " one system call.",
            "tests/unit/test_frames.py tests/integration/test_frames_of_rabbitmq.py",
        ),
        Row(
            "Consumer._restore_prefetch_count_after_connection_restart",
            "transport/amqp.py",
            "The event loop calls it, for it reads a reply from RabbitMQ.",
            "test_the_prefetch_count_is_restored_where_a_message_is_acknowledged",
        ),
        Row(
            "Celery.send_task",
            "transport/default_delay.py",
            "The delay comes before Celery's native delayed delivery.",
            "test_what_may_be_given_to_send_task_by_position_is_as_we_name_it"
            " tests/unit/test_send_task.py",
        ),
        Row(
            "Router.lookup_route",
            "transport/default_delay.py",
            "Users' route functions are called once a message.",
            "test_routes_of_a_mapping_look_at_the_tasks_name_only",
        ),
    ),
    "Tasks and features": (
        Row(
            "PromiseProxy.__then__ celery.connect_on_app_finalize _state._get_active_apps"
            " _state._tls _state._set_current_app",
            "decorators.py",
            "A policy above `@app.task` or `@shared_task`.",
            "test_lazy_tasks_say_when_they_are_made tests/unit/test_decorators.py",
        ),
        Row(
            "Task.run Task._orig_run",
            "features/exceptions/observer.py",
            "Celery's own retry, also under `autoretry_for`.",
            _OWN,
        ),
        Row(
            "sentry_sdk.scope.global_event_processors sentry_sdk.SentryDeduplicator"
            " Client.before_send Client.before_send_transaction",
            "features/sentry/observer.py",
            "One event a cause; with `dlq_redact` no hidden value in one.",
            "tests/acceptance/test_sentry.py tests/acceptance/test_redact.py",
        ),
        Row(
            "Task.apply",
            "testing/eager.py",
            "In users' tests: eager executions behave as guarded ones.",
            "tests/integration/test_testing_plugin.py",
        ),
        Row(
            "SparkContext._gateway",
            "spark/session.py",
            "Whether a JVM runs already: PySpark has no public attribute for it.",
            "tests/spark/test_session.py",
        ),
    ),
}
"""Rows by what they are about, in the order of the page."""


def rows() -> Iterator[Row]:
    """Every row."""
    for found in TABLES.values():
        yield from found


def names() -> list[str]:
    """Every name, once."""
    return sorted({name for row in rows() for name in row.names.split()})


def is_private(name: str) -> bool:
    """True if the package that owns a name does not promise it to anybody."""
    last = name.rpartition(".")[2]
    return last.startswith("_") and not last.endswith("__")
