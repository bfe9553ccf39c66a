"""A cluster as the store: slots that move, masters that die; nothing that was confirmed is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from builders import a_delivery, a_key, a_letter, key_of
from cluster import ClusterServers
from letter_writers import QUEUES, more, writing
from redis.crc import key_slot
from waiting import poll

from celery_dlq.errors import StoreUnavailable
from celery_dlq.store.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable


def backend_of(servers: ClusterServers) -> Callable[[], Store]:
    """What makes backends in a cluster."""
    return lambda: Store(servers.url, timeout_seconds=1.0)


def letters_key(queue: str) -> str:
    """The key of a queue's letters."""
    return f"dlq:{{{queue}}}:letters"


@pytest.mark.parametrize("queue", QUEUES[:3])
def test_letters_are_stored_once_while_a_slot_moves(
    cluster_servers: ClusterServers, queue: str
) -> None:
    """A slot is on its way, then elsewhere: MOVED, ASK and TRYAGAIN are not the operator's."""
    cluster_servers.flush()
    with writing(backend_of(cluster_servers)) as writers:
        key = letters_key(queue)
        slot, source = key_slot(key.encode()), cluster_servers.holder(key)
        target = next(s for s in cluster_servers.masters if s is not source)
        cluster_servers.begin_move(slot, source, target)
        more(writers[3:], 5)
        cluster_servers.end_move(slot, source, target)
        more(writers)


def test_letters_that_were_confirmed_survive_the_death_of_their_master() -> None:
    """A replica has them before they are confirmed, and it takes over."""
    with ClusterServers(masters=3, replicas=1) as servers, writing(backend_of(servers)) as writers:
        key = letters_key(QUEUES[0])
        lost = servers.holder(key)
        lost.kill()
        servers.wait_for_takeover(key, lost)
        more(writers)
        assert writers[0].refused > 0


def test_counts_follow_a_slot_that_moves(cluster_servers: ClusterServers) -> None:
    """Starts are written without waiting for replies, so a refusal is seen later, and mended."""
    cluster_servers.flush()
    backend = Store(cluster_servers.url, timeout_seconds=2.0)
    counter = backend.counter
    keys = [a_key(dead_letter_queue=QUEUES[0]) for n in range(30)]
    for key in keys[:10]:
        assert counter.count_first(key, a_delivery())
    counter.flush()
    cluster_servers.move(letters_key(QUEUES[0]))
    for key in keys[10:]:
        assert counter.count_first(key, a_delivery())
    counter.flush()
    other = Store(cluster_servers.url, timeout_seconds=2.0)
    assert [len(other.counter.history(key)) for key in keys] == [1] * len(keys)
    for one in (backend, other):
        one.close()


def test_a_dead_master_does_not_stop_the_work_of_the_others() -> None:
    """Without a replica its queues wait; all others are counted and stored."""
    with ClusterServers() as servers:
        lost = servers.holder(letters_key(QUEUES[0]))
        others = [queue for queue in QUEUES if servers.holder(letters_key(queue)) is not lost]
        backend = Store(servers.url, timeout_seconds=1.0)
        for queue in QUEUES:
            letter = a_letter(dead_letter_queue=queue)
            backend.letters.dead_letter(letter, key_of(letter))
        for server in servers.masters:
            server.client().config_set("cluster-require-full-coverage", "no")
        lost.kill()
        for queue in others:
            letter = a_letter(dead_letter_queue=queue)
            poll(lambda letter=letter: _is_stored(backend, letter), timeout_seconds=20)
        letter = a_letter(dead_letter_queue=QUEUES[0])
        with pytest.raises(StoreUnavailable):
            backend.letters.dead_letter(letter, key_of(letter))
        backend.close()


def _is_stored(backend: Store, letter: object) -> bool:
    try:
        backend.letters.dead_letter(letter, key_of(letter))  # type: ignore[arg-type]
    except StoreUnavailable:
        return False
    return True
