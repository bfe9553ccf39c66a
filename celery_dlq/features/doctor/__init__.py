"""Says what endangers an app's messages and letters, and what to do about it."""

from __future__ import annotations

from celery_dlq.registry import Feature

FEATURE = Feature(
    name="doctor",
    commands={"doctor": "command:doctor"},
    operations={
        "doctor": "examination:Examination.findings",
        "guarantees": "examination:Examination.guarantees",
    },
)
