"""The project; the Celery app is loaded with Django, so that `shared_task` finds it."""

from proj.celery import app as celery_app

__all__ = ["celery_app"]
