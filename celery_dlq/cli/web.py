"""``dlq web``: the pages, served by this process."""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from celery_dlq.cli.context import dead_letters_of
from celery_dlq.errors import MissingExtra

if TYPE_CHECKING:
    from collections.abc import Iterable

    from celery_dlq.web.http import Route

_READ_ONLY = "This server was started without --allow-changes."


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
@click.option(
    "--token",
    envvar="DLQ_WEB_TOKEN",
    show_envvar=True,
    help="Secret that browsers must send, 16 characters or more.  [default: none on this machine; "
    "else a random one, which is printed]",
)
@click.option("--trusted-header", metavar="NAME", help="Header in which a proxy names the user.")
@click.option(
    "--trusted-proxy",
    metavar="ADDRESS",
    multiple=True,
    help="IP address or network of that proxy; may be repeated.",
)
@click.option(
    "--url",
    envvar="DLQ_WEB_URL",
    show_envvar=True,
    help="Address that browsers use, e.g. that of a proxy.  [default: that of each request]",
)
@click.option(
    "--secret",
    envvar="DLQ_WEB_SECRET",
    show_envvar=True,
    help="Key that signs forms; processes behind one proxy share it.  [default: --token or random]",
)
@click.option(
    "--host-name",
    metavar="NAME",
    multiple=True,
    help="Another host name that browsers may use; may be repeated.",
)
@click.option("--title", default="", help="Name that the pages show, e.g. production.")
@click.option(
    "--root-path", default="", metavar="PATH", help="Path at which a proxy serves the pages."
)
@click.pass_context
def web(ctx: click.Context, /, **options: Any) -> None:
    """Serve pages to look at letters in a browser.

    The pages are read-only without --allow-changes. On another --host than the default,
    browsers need a token, or a proxy names the users: --trusted-proxy, --trusted-header.
    """
    try:
        from celery_dlq.web import access, asgi, server, site  # noqa: PLC0415 - an extra
        from celery_dlq.web.http import Permission, User  # noqa: PLC0415
    except ModuleNotFoundError as exc:
        raise MissingExtra("dlq web", exc.name or "starlette", "web") from exc
    token, header, changes = options["token"], options["trusted_header"], options["allow_changes"]
    if token is not None and header:
        raise click.UsageError("take --token or --trusted-header, not both")
    if header and not options["trusted_proxy"]:
        raise click.UsageError("--trusted-header needs --trusted-proxy: who may set that header?")
    _check_root_path(options["root_path"], site.all_routes())
    access.networks(options["trusted_proxy"])  # uvicorn would take any text
    may = frozenset(Permission) if changes else frozenset({Permission.VIEW})
    user = User(permissions=may, why_not=_READ_ONLY)
    secret = options["secret"] or token
    shown = ""
    who: asgi.Access = lambda _: user  # noqa: E731
    if header:
        who = access.ProxyUser(header, options["trusted_proxy"], user)
    elif token is not None or not server.is_loopback(options["host"]):
        shown = "" if token is not None else secrets.token_urlsafe(32)
        token = access.check_secret("--token", token or shown)
        secret = secret or token
        who = access.Token(token, secret, user)
    app = asgi.DeadLettersApp(
        dead_letters_of(ctx),
        access=who,
        secret=secret,
        url=options["url"],
        hosts=(options["host"], *options["host_name"]),
        title=options["title"],
        root_path=options["root_path"],
        runs_jobs=changes,
    )
    sock = server.listening(options["host"], options["port"])
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")  # if nobody has yet
    url = options["url"] or server.url_of(sock, options["root_path"])
    url += f"?token={quote(shown)}" if shown else ""
    mode = "" if changes else ", read-only without --allow-changes"
    text = f"Serving dead letters at {url} (Ctrl-C ends it{mode})"
    server.serve(app, sock, lambda: click.echo(text), options["trusted_proxy"])
    click.echo("Ended.")


def _check_root_path(path: str, routes: Iterable[Route]) -> None:
    """Refuse a path that is also one of a page: with a proxy that removes it, neither is known."""
    first = path.strip("/").partition("/")[0]
    if path and (
        not path.startswith("/") or first in {one.pattern.split("/")[1] for one in routes}
    ):
        raise click.UsageError(
            f"expected --root-path to begin with / and a name that no page has, such as /dlq, got "
            f"{path!r}"
        )
