"""Gauges that features have: the exporter reads them at each scrape."""

from __future__ import annotations

from builders import an_app

from celery_dlq import DeadLetters
from celery_dlq.features.prometheus.exporter import Exporter
from celery_dlq.store.holds import RELEASING, Circuit, Hold


def test_holds_and_circuit_breakers_are_shown_with_their_labels(redis_url: str) -> None:
    """Each hold with the number of its messages; each breaker that is not closed."""
    dlq = DeadLetters(an_app(dlq_url=redis_url, broker_url=redis_url))
    instructions = dlq.assembly.backend.instructions
    instructions.give(Hold(id="hold-1", task="shop.charge"))
    values = {"opened_at": 1, "probe_every": 1.0, "probes": 1, "probed_at": 1}
    for queue, state in (("orders", "open"), ("mails", RELEASING)):
        circuit = Circuit(task="shop.pay", queue=queue, state=state, **values)
        instructions.give(Hold(id=f"breaker-{queue}", circuit=circuit))
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in Exporter(dlq.assembly).collect()
        for sample in family.samples
    }
    dlq.close()
    assert found["celery_dlq_held", "hold-1", "shop.charge"] == 0
    assert found["celery_dlq_circuit_open", "shop.pay", "orders"] == 1
    assert found["celery_dlq_circuit_open", "shop.pay", "mails"] == 0.5
    assert found["celery_dlq_up",] == 1
