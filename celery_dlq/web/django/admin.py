"""The entry in the admin's index, and the pages below it."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import AsyncIterator, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from celery import current_app
from django.contrib import admin
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
from django.middleware.csrf import get_token
from django.urls import path, re_path, reverse

from celery_dlq import DeadLetters as Plugin
from celery_dlq.web import Permission, Request, User
from celery_dlq.web.django.models import PERMISSIONS, DeadLetters

if TYPE_CHECKING:
    from celery_dlq.web.http import Response
    from celery_dlq.web.web import Web


class DjangoForms:
    """Django's own protection of forms; its middleware has checked them before we see them."""

    field = "csrfmiddlewaretoken"

    def token(self, request: Any, _response: Any) -> str:
        """Return Django's token."""
        return str(get_token(request.raw))

    def check(self, request: Any) -> None:
        """Nothing is left to check: `AdminSite.admin_view` does it without the middleware, too."""


def allowed(user: Any) -> frozenset[Permission]:
    """The permissions of the pages that a user of Django has."""
    return frozenset(
        Permission(name)
        for name, code in PERMISSIONS.items()
        if user.has_perm(f"celery_dlq.{code}")
    )


def who(request: Any) -> User:
    """The user of Django who asks."""
    user = request.raw.user
    why_not = "Somebody who administers users of this site can give you more permissions."
    return User(name=user.get_username(), permissions=allowed(user), why_not=why_not)


_making = threading.Lock()


def pages() -> Web:
    """The pages of the project's Celery app; made at the first request, so after a fork."""
    with _making:
        return _pages()


@lru_cache(maxsize=1)
def _pages() -> Web:
    made = Plugin.of(current_app).web(
        access=who,
        forms=DjangoForms(),
        hosts=None,  # Django checks ALLOWED_HOSTS
        runs_jobs=True,
    )
    atexit.register(made.close)  # a job ends after its batch, and waits for another process
    return made


@admin.register(DeadLetters)
class DeadLettersAdmin(admin.ModelAdmin):
    """Shows the pages in place of a list of rows."""

    def get_urls(self) -> list[Any]:
        """Everything below the entry's path is ours."""
        view = self.admin_site.admin_view(self.dead_letters)
        kept = self.admin_site.admin_view(self.dead_letters, cacheable=True)
        return [
            path("", view, name="celery_dlq_deadletters_changelist"),
            re_path(r"^(?P<below>static/.+)$", kept),
            re_path(r"^(?P<below>.+)$", view),
        ]

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Shown in the index to those who may view."""
        return self.has_view_permission(request)

    def has_view_permission(self, request: HttpRequest, obj: object = None) -> bool:
        """The permission *view*."""
        del obj
        return Permission.VIEW in allowed(request.user)

    def has_add_permission(self, request: HttpRequest, obj: object = None) -> bool:
        """Nobody adds a letter."""
        del request, obj
        return False

    has_change_permission = has_delete_permission = has_add_permission

    def dead_letters(self, request: HttpRequest, below: str = "") -> HttpResponseBase:
        """Answer a request with the pages."""
        # Not from `request.path`: below FORCE_SCRIPT_NAME, ASGI servers leave that out of it.
        root = unquote(self._path("celery_dlq_deadletters_changelist")).rstrip("/")
        answer = pages().handle(
            Request(
                method=request.method or "GET",
                path="/" + below,
                root=root,
                query=dict(request.GET.lists()),
                form=dict(request.POST.lists()),
                headers={name.lower(): value for name, value in request.headers.items()},
                scheme=request.scheme or "http",
                client=request.META.get("REMOTE_ADDR", ""),
                home=self._path("index"),
                raw=request,
            )
        )
        return _response(request, answer)

    def _path(self, name: str) -> str:
        return str(reverse(f"admin:{name}", current_app=self.admin_site.name))


def _response(request: HttpRequest, answer: Response) -> HttpResponseBase:
    made: HttpResponseBase
    if isinstance(answer.body, bytes):
        made = HttpResponse(answer.body, status=answer.status)
    else:
        parts: Any = () if request.method == "HEAD" else answer.body
        # Of a plain iterator Django makes all parts in memory before ASGI sends the first.
        parts = _in_threads(parts) if isinstance(request, ASGIRequest) else parts
        made = StreamingHttpResponse(parts, status=answer.status)
    for name, value in [("content-type", answer.content_type), *answer.headers]:
        made[name] = value
    return made


async def _in_threads(parts: Iterable[bytes]) -> AsyncIterator[bytes]:
    iterator = iter(parts)
    while (part := await asyncio.to_thread(next, iterator, None)) is not None:
        yield part
