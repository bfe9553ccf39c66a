"""Finds how some letters differ from others."""

from __future__ import annotations

from celery_dlq.registry import Feature, Setting

FEATURE = Feature(
    name="differences",
    observer="sampling:observer",
    settings={
        "sample_successes": Setting(
            check=":share",
            default=0.0,
            doc="Share of the successes of guarded messages that is recorded, for the triage to "
            "compare letters with (dlq export --successes): arguments, host, release, queue, time, "
            "delivery; about 10,000 of each queue. Unit: 0 to 1, e.g. 0.001. Special value: 0 "
            "records none. Defaults to 0.",
        )
    },
    pages="pages:ROUTES",
    explains="operations:explained",
    panels={
        "group_links": "pages:link",
        "group_row": "pages:in_row",
    },
    commands={"differences": "command:differences"},
    operations={"differences": "operations:Comparison.differences"},
)
