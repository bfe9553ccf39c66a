"""Says how far a redrive is, phase by phase, and what is next after each verdict on it."""

from celery_dlq.registry import Feature

FEATURE = Feature(
    name="phases",
    panels={"job_phases": "pages:phases", "job_next": "pages:next_steps"},
    operations={"next_steps": "steps:Steps.next_steps"},
)
