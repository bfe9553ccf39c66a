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
            doc="What Sentry gets, if sentry_sdk is initialised in the worker. groups: one event a "
            "cause when it is new, came back or grew tenfold, instead of the CeleryIntegration's "
            "event a failure. beside: the integration's events stay, and deaths that it does not "
            "see are reported. off: nothing of ours. Defaults to groups.",
        )
    },
)
