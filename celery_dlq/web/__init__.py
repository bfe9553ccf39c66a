"""Pages to look at dead letters in a browser, and to act on them.

The pages know no framework: a `Web` takes a `Request` and returns a `Response`. Starlette
(`celery_dlq.web.asgi`) and Django (`celery_dlq.web.django`) are adapters of a few lines.
"""

from celery_dlq.web.http import Permission, Request, User

__all__ = ["Permission", "Request", "User"]
