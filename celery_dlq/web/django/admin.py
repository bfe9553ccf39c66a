"""The entry in the admin's index, and the pages below it."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import AsyncIterator, Iterable
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from celery import current_app
from django.contrib import admin
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
from django.middleware.csrf import get_token
from django.urls import path, re_path, reverse

from celery_dlq import DeadLetters as Plugin
from celery_dlq.web.django.models import DeadLetters
from celery_dlq.web.http import Call, Page, Permission, Site, User
from celery_dlq.web.site import all_routes, handle

_WHY_NOT = "Somebody who administers users of this site can give you more permissions."
_making = threading.Lock()


def site_of_project() -> Site:
    """The pages of the project's Celery app; made at the first request, so after a fork."""
    with _making:
        return _make_site()


@lru_cache(maxsize=1)
def _make_site() -> Site:
    made = Site(Plugin.of(current_app), all_routes(), runs_jobs=True)
    atexit.register(made.close)  # a job ends after its batch, and waits for another process
    return made


@admin.register(DeadLetters)
class DeadLettersAdmin(admin.ModelAdmin):
    """Shows the pages in place of a list of rows."""

    def get_urls(self) -> list[Any]:
        """The pages' own paths; everything else below the entry's is ours, too."""
        view = self.admin_site.admin_view(self.dead_letters)
        kept = self.admin_site.admin_view(self.dead_letters, cacheable=True)
        found = []
        for pattern in dict.fromkeys(route.pattern for route in all_routes()):
            below = pattern[1:].replace("{", "<").replace("}", ">")
            name = "" if below else "celery_dlq_deadletters_changelist"
            of_path = kept if below.startswith("static/") else view
            found.append(path(below, of_path, {"pattern": pattern}, name=name or None))
        return [*found, re_path(r"^(?P<below>.+)$", view, {"pattern": ""})]

    def has_add_permission(self, request: HttpRequest, obj: object = None) -> bool:
        """Nobody adds a letter."""
        del request, obj
        return False

    has_change_permission = has_delete_permission = has_add_permission

    def dead_letters(self, request: HttpRequest, pattern: str, **parts: str) -> HttpResponseBase:
        """Answer a request of a path; Django and `AdminSite.admin_view` have checked the form."""
        site = site_of_project()
        # Not from `request.path`: below FORCE_SCRIPT_NAME, ASGI servers leave that out of it.
        root = unquote(self._path("celery_dlq_deadletters_changelist")).rstrip("/")
        user: Any = request.user
        may = [name for name in Permission if user.has_perm(f"celery_dlq.{name}_deadletters")]
        call = Call(
            site=site,
            method=request.method or "GET",
            path=request.path,
            root=root,
            origin=f"{request.scheme}://{request.get_host()}",
            parts={name: unquote(text) for name, text in parts.items()},
            query=dict(request.GET.lists()),
            form=dict(request.POST.lists()),
            client=request.META.get("REMOTE_ADDR", ""),
            home=self._path("index"),
            token_field="csrfmiddlewaretoken",  # noqa: S106 - its name
            token=lambda: str(get_token(request)),
            user=User(name=user.get_username(), permissions=may, why_not=_WHY_NOT),
        )
        return _response(request, handle(call, site.paths.get(pattern, {})))

    def _path(self, name: str) -> str:
        return str(reverse(f"admin:{name}", current_app=self.admin_site.name))


def _response(request: HttpRequest, page: Page) -> HttpResponseBase:
    if isinstance(page.body, bytes):
        return HttpResponse(page.body, status=page.status, headers=page.headers)
    parts: Any = () if request.method == "HEAD" else page.body
    # Of a plain iterator Django makes all parts in memory before ASGI sends the first.
    parts = _in_threads(parts) if isinstance(request, ASGIRequest) else parts
    return StreamingHttpResponse(parts, status=page.status, headers=page.headers)


async def _in_threads(parts: Iterable[bytes]) -> AsyncIterator[bytes]:
    iterator = iter(parts)
    while (part := await asyncio.to_thread(next, iterator, None)) is not None:
        yield part
