"""Holds a task by itself while nearly all of its executions die."""

from __future__ import annotations

from celery_dlq.registry import Feature

FEATURE = Feature(name="circuit_breaker", commands={"breaker": "command:breaker"})
