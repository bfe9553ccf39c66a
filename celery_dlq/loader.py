"""``celery_dlq.Loader``: the plugin for apps whose code is somebody else's."""

from __future__ import annotations

from typing import Any

from celery.loaders.app import AppLoader

from celery_dlq.plugin import DeadLetters


class Loader(AppLoader):
    """Celery's loader of apps, which also makes their `DeadLetters`: for somebody else's code.

    ``CELERY_LOADER=celery_dlq.Loader`` in the environment of every process of such an app, or
    ``celery --loader celery_dlq.Loader …`` for one command, does what ``DeadLetters(app)`` does.

    Celery makes an app's loader when it first reads the app's configuration: before a worker
    builds its parts, before ``Task.apply_async`` publishes. Only a message that is sent by name
    (``app.send_task``) before anything else gets no default delay.

    An app that was made with a ``loader`` of its own ignores the variable. An app that is nothing
    but a ``celeryconfig.py`` needs ``CELERY_CONFIG_MODULE=celeryconfig`` too, because Celery
    looks for that module by itself only with its own default loader.

    Args:
        app: The Celery app.

    Source: ``Celery._get_default_loader`` in
    https://github.com/celery/celery/blob/main/celery/app/base.py
    """

    def __init__(self, app: Any, **kwargs: Any) -> None:
        super().__init__(app, **kwargs)
        DeadLetters(app)
