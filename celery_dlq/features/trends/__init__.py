"""Says how the letters of a cause came over time, and which queues grow."""

from celery_dlq.registry import Feature

FEATURE = Feature(
    name="trends",
    panels={"confirm": "lately:before", "group_course": "course:course", "growth": "growth:growth"},
)
