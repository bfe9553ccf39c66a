"""Dead letters in Django's admin: add ``celery_dlq.web.django`` to ``INSTALLED_APPS``.

The pages are those of ``celery dlq web``. Staff log in as for the rest of the admin; what they may
do is five permissions of this app: *view*, *redrive*, *discard*, *hold* and *edit policies*, whose
names in the admin say what each is for. The audit names the user. The Celery app is the one that
the project's ``__init__.py`` imports, as Celery's documentation says.

Source: https://docs.celeryq.dev/en/stable/django/first-steps-with-django.html
"""
