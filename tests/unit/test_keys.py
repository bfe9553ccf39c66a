"""Redis key names: one hash slot per dead-letter queue."""

from __future__ import annotations

import pytest
from builders import a_key
from redis.crc import key_slot

from celery_dlq.store.keys import Keys


def keys_of(keys: Keys, queue: str) -> list[str]:
    """All keys of one dead-letter queue, and of two messages on their way there."""
    return [
        keys.letters(queue),
        keys.ids(queue),
        keys.tally(queue),
        keys.claims(queue),
        keys.leases(queue),
        keys.ends(queue),
        keys.outbox(queue),
        keys.samples(queue),
        keys.report(queue, "0123456789abcdef"),
        keys.allowance(queue),
        keys.groups(queue),
        keys.newest_groups(queue),
        keys.gone_groups(queue),
        keys.notes(queue),
        keys.noted(queue),
        keys.arrivals(queue),
        keys.bin(queue),
        keys.binned(queue),
        keys.workers(queue),
        keys.run(a_key(dead_letter_queue=queue, task_id="a")),
        keys.run(a_key(dead_letter_queue=queue, task_id="{b}", redrives=2)),
    ]


@pytest.mark.parametrize(
    "queue", ["orders-DLQ", "{celery}-DLQ", "a}b-DLQ", "süß-DLQ", "a:b c", "}", "}a-DLQ", "\udcff"]
)
def test_all_keys_of_a_dead_letter_queue_are_on_one_slot(queue: str) -> None:
    """Each move is one script on one node of a cluster, whatever the queue's name."""
    slots = {key_slot(key.encode()) for key in keys_of(Keys(), queue)}
    assert len(slots) == 1


def test_no_two_names_share_their_keys() -> None:
    """Also those whose names cannot be a tag as they are."""
    names = ["}a", "%7Da", "%257Da", "a", "%", "%25"]
    assert len({Keys().letters(name) for name in names}) == len(names)


def test_the_tag_is_the_name_of_the_dead_letter_queue() -> None:
    """An operator finds the keys of a queue by its name."""
    assert Keys("shop").letters("orders-DLQ") == "shop:{orders-DLQ}:letters"


def test_all_keys_differ_and_begin_with_the_prefix() -> None:
    """Several apps may share one Redis."""
    keys = [Keys("shop").queues(), *keys_of(Keys("shop"), "orders-DLQ")]
    assert len(set(keys)) == len(keys)
    assert all(key.startswith("shop:") for key in keys)


def test_redrives_are_counted_apart_and_retries_together() -> None:
    """A redriven message begins a new run; a retry belongs to the same run."""
    keys = Keys()
    assert keys.run(a_key(task_id="t", retries=0)) == keys.run(a_key(task_id="t", retries=3))
    assert keys.run(a_key(task_id="t", redrives=0)) != keys.run(a_key(task_id="t", redrives=1))
