"""Pages to look at dead letters in a browser, and to act on them."""

from celery_dlq.web.http import Permission, User

__all__ = ["Permission", "User"]
