"""Says how far a redrive is, phase by phase: planned, canary, sending, watching."""

from celery_dlq.registry import Feature

FEATURE = Feature(name="phases", panels={"job_phases": "pages:phases"})
