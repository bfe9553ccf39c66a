"""Finds how some letters differ from others."""

from __future__ import annotations

from celery_dlq.registry import Feature

FEATURE = Feature(
    name="differences",
    observer="sampling:observer",
    pages="pages:ROUTES",
    explains="operations:explained",
    panels={"group_links": "pages:link"},
    commands={"differences": "command:differences"},
    operations={"differences": "operations:Comparison.differences"},
)
