"""One search on every page: letters, causes and queues, by the words of the command line."""

from __future__ import annotations

from celery_dlq.registry import Feature

_PANELS = {"every_page": "pages:field", "neighbours": "neighbours:links"}
FEATURE = Feature(name="search", pages="pages:ROUTES", panels=_PANELS)
