"""``dlq web`` and ``dlq web-user``: the pages, and who may log in to them."""

from __future__ import annotations

import logging
import secrets
import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from celery_dlq.cli.context import dead_letters_of
from celery_dlq.errors import DLQError, MissingExtra
from celery_dlq.web.http import Permission, User

if TYPE_CHECKING:
    from celery_dlq.config import Settings
    from celery_dlq.web.http import Access
    from celery_dlq.web.routes import Routes

_READ_ONLY = "This server was started without --allow-changes."
_NOT_YOURS = "Your line of the users' file does not have it: `dlq web-user NAME --may …`."


@click.command(short_help="Serve pages to look at letters in a browser.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=9809,
    show_default=True,
    help="Port to listen on; 0 takes a free one.",
)
@click.option("--allow-changes", is_flag=True, help="Let users redrive, discard and edit.")
@click.option("--auth-file", metavar="FILE", help="Users who log in; see dlq web-user.")
@click.option("--trusted-header", metavar="NAME", help="Header in which a proxy names the user.")
@click.option(
    "--trusted-proxy",
    metavar="ADDRESS",
    multiple=True,
    help="Proxy whose headers are believed: an IP address or a network; may be repeated.",
)
@click.option(
    "--host-name",
    metavar="NAME",
    multiple=True,
    help="Name under which browsers may ask, beside localhost, IP addresses and dlq_web_url; may "
    "be repeated.",
)
@click.option("--title", default="", help="Name of the environment, e.g. production.")
@click.option("--root-path", default="", metavar="PATH", help="Path below which a proxy serves it.")
@click.pass_context
def web(ctx: click.Context, /, **options: Any) -> None:
    """Serve pages to look at letters in a browser.

    Nothing can be changed without --allow-changes. Another address than the
    default needs --auth-file, or --trusted-header with --trusted-proxy.
    """
    try:
        from celery_dlq.web import asgi, forms, server, site, users  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as exc:
        raise MissingExtra("dlq web", exc.name or "starlette", "web") from exc
    dead_letters = dead_letters_of(ctx)
    settings = dead_letters.settings
    _check(options, loopback=server.is_loopback(options["host"]))
    _check_root_path(options["root_path"], site.ROUTES)
    secret = settings.web_secret or secrets.token_urlsafe(32)
    changes = options["allow_changes"]
    access: Access | None = None
    login: users.Login | None = None
    may = frozenset(Permission) if changes else frozenset({Permission.VIEW})
    if options["auth_file"]:
        known = users.UsersFile(options["auth_file"])
        known.load()
        why_not = _NOT_YOURS if changes else _READ_ONLY
        access = login = users.Login(known, secret, allow_changes=changes, why_not=why_not)
    elif options["trusted_header"]:
        header = options["trusted_header"].lower()
        access = users.TrustedHeader(name=header, permissions=may, why_not=_READ_ONLY)
    pages = dead_letters.web(
        access=access or (lambda _: User(permissions=may, why_not=_READ_ONLY)),
        forms=forms.SignedForms(secret, settings.web_origin),
        login=login,
        hosts=(options["host"], *options["host_name"]),
        title=options["title"],
        runs_jobs=changes,
    )
    proxies = asgi.Proxies(options["trusted_proxy"])
    app = asgi.DeadLettersApp(
        pages,
        proxies,
        root_path=options["root_path"],
        scheme=urlsplit(settings.web_url or "").scheme,
    )
    sock = server.listening(options["host"], options["port"])
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")  # if nobody has yet
    url = settings.web_url or server.url_of(sock, options["root_path"])
    server.serve(app, sock, lambda: click.echo(_said(url, options, settings)))
    click.echo("Ended.")


def _check(options: dict[str, Any], *, loopback: bool) -> None:
    """Refuse what cannot be meant."""
    if options["auth_file"] and options["trusted_header"]:
        raise click.UsageError("take --auth-file or --trusted-header, not both")
    if options["trusted_header"] and not options["trusted_proxy"]:
        raise click.UsageError("--trusted-header needs --trusted-proxy: who may set that header?")
    if not loopback and not (options["auth_file"] or options["trusted_header"]):
        raise DLQError(
            f"expected --auth-file or --trusted-header with --host {options['host']}, which others "
            f"can reach, got neither; make a file with `dlq web-user NAME`, or stay at 127.0.0.1"
        )


def _check_root_path(path: str, routes: Routes) -> None:
    """Refuse a path that is also one of a page: with a proxy that removes it, neither is known."""
    first = path.strip("/").partition("/")[0]
    if path and (
        not path.startswith("/") or first in {one.pattern.split("/")[1] for one in routes.all}
    ):
        raise click.UsageError(
            f"expected --root-path to begin with / and a name that no page has, such as /dlq, got "
            f"{path!r}"
        )


def _said(url: str, options: dict[str, Any], settings: Settings) -> str:
    """What is printed when the pages can be opened."""
    mode = "" if options["allow_changes"] else ", read-only without --allow-changes"
    said = f"Serving dead letters at {url} (Ctrl-C ends it{mode})"
    if settings.web_secret is None and options["auth_file"]:
        said += "\ndlq_web_secret is not set: logins end with this process."
    return said


@click.command(name="web-user", short_help="Add a user for dlq web.")
@click.argument("name")
@click.option("--file", "path", default="dlq-users", show_default=True, help="The users' file.")
@click.option(
    "--may",
    type=click.Choice(["redrive", "discard", "edit_policies", "all"]),
    multiple=True,
    help="What they may do beside looking; may be repeated.  [default: only look]",
)
@click.option("--remove", is_flag=True, help="Remove the user; their sessions end.")
def web_user(*, name: str, path: str, may: tuple[str, ...], remove: bool) -> None:
    """Add a user for dlq web --auth-file, or replace one.

    Asks for the password, or reads it from the standard input. The file has its
    scrypt hash; a running dlq web reads it again.
    """
    try:
        from celery_dlq.web.users import UsersFile  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as exc:
        raise MissingExtra("dlq web-user", exc.name or "itsdangerous", "web") from exc
    users = UsersFile(path)
    if remove:
        users.remove(name)
        click.echo(f"Removed {name} from {path}")
        return
    permissions = [*Permission] if "all" in may else [Permission(text) for text in may]
    users.put(name, _password(name), permissions)
    shown = ", ".join(dict.fromkeys(["view", *map(str, permissions)]))
    click.echo(f"Wrote {name} to {path}: {shown}")


def _password(name: str) -> str:
    if not sys.stdin.isatty():
        return sys.stdin.readline().rstrip("\r\n")
    asked: str = click.prompt(
        f"Password of {name}", hide_input=True, confirmation_prompt=True, err=True
    )
    return asked
