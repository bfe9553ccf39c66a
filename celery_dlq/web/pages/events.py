"""The live state of `celery_dlq.web.live`: as a stream, or once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_dlq.web.http import Response

if TYPE_CHECKING:
    from celery_dlq.web.web import Call

_HEADERS = (
    # Proxies neither keep, compress nor collect what comes bit by bit.
    ("cache-control", "no-store, no-transform"),
    ("x-accel-buffering", "no"),
)


def events(call: Call) -> Response:
    """Begin a stream; 204 tells the browser not to ask again, where there is none."""
    if not call.web.options.stream:
        return Response(status=204)
    return Response(content_type="text/event-stream; charset=utf-8", headers=[*_HEADERS], live=True)


def poll(call: Call) -> Response:
    """Give the state once: for servers that cannot stream, and for streams that are blocked."""
    return Response(content_type="application/json", body=call.web.live.read())
