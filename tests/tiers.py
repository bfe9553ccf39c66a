"""The tests that `tox` runs; others are marked `full`. CONTRIBUTING.md says how long they take."""

from __future__ import annotations

import re

DEFAULT_TIER = (
    "tests/unit/",
    "tests/contract/",
    "tests/wire/",
    "tests/frozen/",
    "tests/integration/",
    # Of the acceptance tests, those that prove the guarantees of docs/guarantees.md.
    # One broker and one pool a guarantee; the matrix of both is in the full tier.
    "tests/acceptance/test_brokers.py::test_every_death_ends_as_one_letter[redis-prefork",
    "tests/acceptance/test_brokers.py::test_every_death_ends_as_one_letter[quorum-prefork",
    "tests/acceptance/test_counting.py::test_waiting_is_not_delivery",
    "tests/acceptance/test_counting.py::test_a_cold_or_soft_shutdown_is_recorded_and_not_charged[0",
    "tests/acceptance/test_counting.py::test_a_second_delivery_of_a_running_message_is_not_charged",
    "tests/acceptance/test_deaths.py::test_a_worker_that_is_killed_again_and_again",
    "tests/acceptance/test_deaths.py::test_a_worker_killed_between_storing_and_acknowledging",
    "tests/acceptance/test_dropped.py::test_each_message_that_celery_drops_becomes_one_letter_with_its_bytes[redis-prefork",
    "tests/acceptance/test_dropped.py::test_bad_input",
    "tests/acceptance/test_dropped.py::test_every_form_of_message",
    "tests/acceptance/test_dropped.py::test_nothing_is_kept",
    "tests/acceptance/test_any_entry.py::test_an_operator_sees_exports_and_discards_such_a_letter",
    (
        "tests/acceptance/test_group_signals.py::"
        "test_a_signal_to_the_whole_group_charges_nothing[warm-pool first-redis"
    ),
    "tests/acceptance/test_ids_used_again.py::test_a_copy_is_dropped",
    "tests/acceptance/test_ids_used_again.py::test_each_message_that_dies_is_a_letter_of_its_own[redis",
    "tests/acceptance/test_ids_used_again.py::test_the_copy_of_a_message",
    "tests/acceptance/test_leases.py::test_a_worker_that_stood_still_finds_out_what_others_own[prefork",
    "tests/acceptance/test_odd_messages.py::test_a_message_that_would_end_the_worker_at_its_receipt",
    "tests/acceptance/test_operations.py",
    "tests/acceptance/test_own_parts.py",
    "tests/acceptance/test_redrive.py",
    "tests/acceptance/test_revoked.py::test_an_expired_message_runs_when_it_is_redriven[redis-prefork",
    "tests/acceptance/test_revoked.py::test_what_is_revoked_before_its_redrive_runs_and_what_is_revoked_later_is_a_letter[redis-prefork",
    "tests/acceptance/test_shutdowns.py::test_a_cold_shutdown_during_a_count_ends_and_nothing_starts[classic-prefork-quit",
    "tests/acceptance/test_start.py::test_a_worker_starts_without_its_store_and_is_whole_when_it_comes_back[refused",
    "tests/acceptance/test_store_down.py",
    "tests/acceptance/test_unreported_ends.py::test_a_job_that_went_to_a_process_that_retires_runs_once[orders",
    # Of the pages in a browser: that there is one.
    "tests/browser/test_every_page.py::test_the_first_page_loads_without_a_complaint",
    "tests/examples/test_containers.py",
)
"""Beginnings of test ids."""

FULL_TIER = (
    "tests/contract/test_retention.py::test_a_worker_gets_round_many_queues[cluster",
    "tests/contract/test_reports_contract.py::test_a_flood_of_100_000_letters",
    "tests/acceptance/test_store_down.py::test_while_the_store_is_down_healthy_tasks_run_and_dying_ones_wait[read-only",
    "tests/acceptance/test_store_down.py::test_while_the_store_is_down_healthy_tasks_run_and_dying_ones_wait[wrong",
    "tests/integration/test_publishing.py::test_the_claims_of_a_slow_batch",
    "tests/integration/test_publishing.py::test_a_connection_that_stays_blocked",
    "tests/integration/test_web_server.py::test_numbers_are_live_until_the_server_ends_in_order[SIGTERM",
    "tests/integration/test_redis_addresses.py::test_letters_that_were_confirmed_survive_a_change_of_roles",
    "tests/acceptance/test_store_down.py::test_a_letter_that_waits_is_dropped",
    "tests/examples/test_containers.py::test_a_worker_runs_as_it_is_described",
    "tests/unit/test_public_names.py::test_an_editor_that_infers",
    "tests/integration/test_benchmarks.py",
    "tests/integration/test_timed_pages.py",
    "tests/integration/test_fleet.py",
    "tests/integration/test_installing.py",
    "tests/integration/test_planted.py",
    "tests/integration/test_export_kill.py::test_killed_at_any_step_each_letter_is_in_the_files_once[trim",
    "tests/integration/test_export_kill.py::test_killed_at_any_step_each_letter_is_in_the_files_once[back",
    "tests/integration/test_export_s3.py",
    "tests/integration/test_reading_by_bytes.py::test_an_export_that_follows",
    "tests/integration/test_reading_by_bytes.py::test_small_letters_before_large_ones_take_no_more_memory",
    "tests/integration/test_redis_addresses.py::test_letters_that_were_confirmed_survive_a_failover",
    "tests/integration/test_redis_addresses.py::test_a_replica_that_hangs",
    "tests/integration/test_redis_addresses.py::test_a_sentinel_that_does_not_know",
    "tests/integration/test_redis_addresses.py::test_the_brokers_sentinel_leads",
    "tests/integration/test_reliable_fetch.py::test_order_fairness_and_priorities_are_kombus",
    "tests/integration/test_web_server.py::test_idle_connections",
    "tests/integration/test_web_server.py::test_others_get_in",
    "tests/integration/test_big_bodies.py",
    "tests/integration/test_redis_cluster.py::test_letters_that_were_confirmed",
    "tests/integration/test_reliable_fetch.py::test_queues_that_are_added_and_cancelled_while_idle",
    "tests/integration/test_reliable_fetch_faults.py",
    "tests/integration/test_publishing.py::test_an_idle_connection_that_was_closed",
    "tests/integration/test_releases.py::test_killed_at_any_instant",
    "tests/integration/test_upstream.py",
    "tests/integration/test_without_a_feature.py::test_without_a_feature_the_rest_works",
    # Of what waits for a time-out, or kills at each of many steps, one of a kind.
    "tests/acceptance/test_operations.py::test_a_canary_nobody_runs",
    "tests/acceptance/test_operations.py::test_a_canary_that_is_held_has_not_died",
    "tests/acceptance/test_operations.py::test_a_discard_killed_anywhere_is_finished_by_resuming_its_job[before-purge",
    "tests/acceptance/test_operations.py::test_a_discard_killed_anywhere_is_finished_by_resuming_its_job[after",
    "tests/acceptance/test_operations.py::test_a_job_whose_runner_is_killed_anywhere_is_finished_by_another[Claims",
    "tests/acceptance/test_operations.py::test_a_job_whose_runner_is_killed_anywhere_is_finished_by_another[JobStore-replace-before",
    "tests/acceptance/test_operations.py::test_a_job_whose_runner_is_killed_anywhere_is_finished_by_another[Publisher-publish-before",
    "tests/acceptance/test_operations.py::test_a_redrive_killed_anywhere_is_finished_by_resuming_its_job[Claims",
    "tests/acceptance/test_operations.py::test_a_redrive_killed_anywhere_is_finished_by_resuming_its_job[Letters-remove-before",
    "tests/integration/test_redrive_from_files.py::test_killed_at_a_step_it_is_finished_by_resuming_its_job[claims-Claims",
    "tests/integration/test_redrive_from_files.py::test_killed_at_a_step_it_is_finished_by_resuming_its_job[claims-Letters-remove-before",
    "tests/acceptance/test_operations.py::test_the_audit_of_what_was_interrupted_says_what_was_done",
    "tests/acceptance/test_store_down.py::test_a_store_that_is_down_does_not_hold_up",
    "tests/integration/test_auto_redrive.py::test_a_cancelled_job_rests",
    "tests/integration/test_auto_redrive.py::test_a_job_that_was_paused",
    "tests/integration/test_auto_redrive.py::test_if_the_canary_dies",
    "tests/integration/test_auto_redrive.py::test_there_is_one_canary_at_a_time",
    "tests/integration/test_breaker_recovery.py::test_a_release_that_is_cancelled",
    "tests/integration/test_breaker_recovery.py::test_workers_that_are_killed",
    "tests/integration/test_damaged_records.py",
    "tests/integration/test_doctor.py::test_a_worker_without_celery_dlq",
    "tests/integration/test_doctor.py::test_servers_that_are_away",
    "tests/integration/test_doctor.py::test_a_wrong_password_and_a_store",
    "tests/integration/test_doctor.py::test_servers_that_are_silent",
    "tests/integration/test_exchange_publisher.py::test_a_broker_that_blocks_publishers",
    "tests/integration/test_exchange_publisher.py::test_a_slow_broker_gives_no_copies",
    "tests/integration/test_publishing.py::test_a_blocked_connection",
    "tests/integration/test_publishing.py::test_a_slow_broker",
    "tests/integration/test_redis_connection.py::test_a_hanging_redis_does_not_hold_up",
    "tests/integration/test_redis_connection.py::test_a_read_only_replica",
    "tests/integration/test_redis_connection.py::test_counts_of_many_threads",
    "tests/integration/test_redis_addresses.py::test_a_cluster_that_speaks_tls",
    "tests/integration/test_redis_cluster.py::test_a_dead_master",
    "tests/integration/test_redis_cluster.py::test_letters_are_stored_once_while_a_slot_moves[orders1",
    "tests/integration/test_redis_cluster.py::test_letters_are_stored_once_while_a_slot_moves[orders2",
    "tests/integration/test_redrive_in_one_step.py::test_killed_at_any_instant_each_letter_is_here_or_published[0",
    "tests/integration/test_reliable_fetch.py::test_a_redis_that_forgets_what_it_tracks",
    "tests/integration/test_reliable_fetch.py::test_each_fetch_reads_what_the_other_left",
    "tests/integration/test_lease_parts.py::test_giving_back_many_messages",
    "tests/integration/test_tail.py::test_following_letters_waits",
    "tests/integration/test_export_stores.py::test_following_waits",
    (
        "tests/unit/test_imports.py::"
        "test_a_worker_loads_what_it_needs_and_the_rest_when_that_is_due[no feature"
    ),
    "tests/unit/test_causes.py::test_noise_has_no_findings[200",
    "tests/unit/test_arguments.py::test_a_bomb_does_not_go_off[lzma",
    "tests/unit/test_send_task.py::test_sentry_gives_its_trace_whoever_comes_first[order1",
)
"""What is not in the default tier though its folder is."""

_WITH_ANY_BROKER = (
    "tests/integration/test_background_jobs.py",
    "tests/integration/test_redrive_checks.py",
)
"""Files on what is done the same way whether letters and broker share a Redis or not, and with
each kind of queue: in the default tier, they share it, and queues of RabbitMQ are classic ones."""


def has_default_tests(path: str) -> bool:
    """False if `tox` alone runs nothing of a file, and need not import it."""
    if path.startswith(tuple(one for one in FULL_TIER if "::" not in one)):
        return False
    return any(path.startswith(one) or one.startswith(f"{path}::") for one in DEFAULT_TIER)


def in_default_tier(test_id: str) -> bool:
    """True if `tox` alone runs a test."""
    if "[sqs" in test_id:
        return False  # each takes a quarter of a minute
    if test_id.startswith(_WITH_ANY_BROKER) and re.search(r"\[(elsewhere|quorum)", test_id):
        return False
    return test_id.startswith(DEFAULT_TIER) and not test_id.startswith(FULL_TIER)
