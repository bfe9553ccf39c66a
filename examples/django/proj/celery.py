"""The Celery app of the project: settings from Django, tasks from every app."""

import os

from celery import Celery

from celery_dlq import DeadLetters

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "proj.settings")

app = Celery("proj")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
dlq = DeadLetters(app)
