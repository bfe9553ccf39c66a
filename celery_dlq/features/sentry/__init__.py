"""Reports letters to Sentry, once for each cause."""

from __future__ import annotations

from celery_dlq.registry import Feature, Setting

FEATURE = Feature(
    name="sentry",
    observer="observer:observer",
    settings={
        "sentry": Setting(
            check=":true_or_false",
            default=True,
            doc="Whether Sentry gets one event a cause when it is new, came back or grew tenfold, "
            "instead of the CeleryIntegration's event a failure, if sentry_sdk is initialised in "
            "the worker. Defaults to True.",
        )
    },
)
