"""The entry in the admin's index, and the pages below it."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from celery import current_app
from django.contrib import admin
from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
from django.middleware.csrf import get_token
from django.urls import path, re_path, reverse

from celery_dlq import DeadLetters as Plugin
from celery_dlq.contrib.django.models import PERMISSIONS, DeadLetters
from celery_dlq.web import Permission, Request, User

if TYPE_CHECKING:
    from celery_dlq.web.web import Web


class DjangoForms:
    """Django's own protection of forms; its middleware has checked them before we see them."""

    field = "csrfmiddlewaretoken"

    def token(self, request: Any, _response: Any) -> str:
        """Return Django's token."""
        return str(get_token(request.raw))

    def check(self, request: Any) -> None:
        """Nothing is left to check."""


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


@lru_cache(maxsize=1)
def pages() -> Web:
    """The pages of the project's Celery app."""
    return Plugin.of(current_app).web(
        access=who,
        forms=DjangoForms(),
        hosts=None,  # Django checks ALLOWED_HOSTS
        home=reverse("admin:index"),
        runs_jobs=True,
    )


@admin.register(DeadLetters)
class DeadLettersAdmin(admin.ModelAdmin):
    """Shows the pages in place of a list of rows."""

    def get_urls(self) -> list[Any]:
        """Everything below the entry's path is ours."""
        view = self.admin_site.admin_view(self.dead_letters)
        return [
            path("", view, name="celery_dlq_deadletters_changelist"),
            re_path(r"^(?P<below>.+)$", view, name="celery_dlq_deadletters_page"),
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
        root = request.path[: len(request.path) - len(below)].rstrip("/")
        answer = pages().handle(
            Request(
                method=request.method or "GET",
                path="/" + below,
                root=root,
                query={name: request.GET.getlist(name) for name in request.GET},
                form={name: request.POST.getlist(name) for name in request.POST},
                headers={name.lower(): value for name, value in request.headers.items()},
                scheme=request.scheme or "http",
                raw=request,
            )
        )
        response: HttpResponseBase
        if isinstance(answer.body, bytes):
            response = HttpResponse(answer.body, status=answer.status)
        else:
            response = StreamingHttpResponse(answer.body, status=answer.status)
        response["content-type"] = answer.content_type
        for name, value in answer.headers:
            response[name] = value
        return response
