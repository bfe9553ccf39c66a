"""Serves the metrics of workers and queues to Prometheus."""

from __future__ import annotations

from celery_dlq.registry import Block, Feature

FEATURE = Feature(
    name="prometheus",
    block=Block.SERVE,
    commands={"exporter": "exporter:exporter"},
    operations={"serve_metrics": "exporter:Exporter.serve_metrics"},
)
