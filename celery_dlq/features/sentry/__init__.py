"""Letters as events in Sentry."""

from __future__ import annotations

from celery_dlq.registry import Feature, Setting

FEATURE = Feature(
    name="sentry",
    observer="observer:observer",
    settings={
        "sentry": Setting(
            check="observer:setting",
            default="groups",
            doc="What Sentry gets, if sentry_sdk is initialised in the worker: groups (one event "
            "per group of letters when it is new, came back or grew tenfold, instead of the "
            "CeleryIntegration's event per failure), beside (the integration's events stay, and "
            "only deaths that it does not see are reported), or off. Defaults to groups.",
        )
    },
)
