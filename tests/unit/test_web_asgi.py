"""The pages as an ASGI app: under any path, for any bytes, and over in time."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest
from celery import Celery
from fresh import fresh_conf
from starlette.applications import Starlette
from starlette.routing import Mount
from web_pages import ALL, ROUTES

from celery_dlq import DeadLetters
from celery_dlq.web import User
from celery_dlq.web.asgi import MAX_FORM_BYTES, DeadLettersApp
from celery_dlq.web.http import Call, Page, get

NAMES = ["a/b", "100%", "a b", "..", ".", "é", "?x#y", "%2F", "\ud800", "a\nb", '"><script>']


def echo(call: Call) -> Page:
    """Say what arrived, and how it is linked to."""
    found = {
        "name": call.parts["name"],
        "root": call.root,
        "link": call.link("echo", name=call.parts["name"]),
        "form": call.form,
        "client": call.client,
        "user": call.user.name if call.user else "",
    }
    return Page(content_type="application/json", body=json.dumps(found).encode())


def parts(_: Call) -> Page:
    """A body that is made while it is sent."""

    def made() -> Iterator[bytes]:
        for n in range(3):
            yield b"%d\n" % n

    return Page(content_type="text/plain", body=made())


ECHO = get("/echo/{name}", echo, None)
OWN = (
    ECHO,
    replace(ECHO, name="send", method="POST"),
    get("/who/{name}", echo, name="who"),
    get("/parts", parts, None),
)


def an_app(access: Callable[..., Any] | None = None, **changes: Any) -> DeadLettersApp:
    """An app with routes of our own beside the real ones."""
    celery = Celery("pages", broker="memory://")
    celery.conf.update(fresh_conf())
    return DeadLettersApp(DeadLetters(celery), access=access, routes=[*ROUTES, *OWN], **changes)


def ask(app: Any, method: str, path: str, root_path: str = "", **more: Any) -> httpx.Response:
    """Send one request, as a server would pass it on."""

    async def asking() -> httpx.Response:
        transport = httpx.ASGITransport(app, root_path=root_path, client=("10.0.0.7", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, path, **more)

    return asyncio.run(asking())


def mounted(app: Any) -> Any:
    """An app inside two others."""
    return Starlette(routes=[Mount("/ops", routes=[Mount("/dead letters", app)])])


PLACES: dict[str, tuple[Callable[[], Any], str, str, str]] = {
    # how it is served, root_path of the server, prefix of the path that arrives, root that is seen
    "at the root": (an_app, "", "", ""),
    "mounted": (lambda: mounted(an_app()), "", "/ops/dead%20letters", "/ops/dead letters"),
    "kept by a proxy": (an_app, "/dlq", "/dlq", "/dlq"),
    "removed by a proxy": (an_app, "/dlq", "", "/dlq"),
    "removed by a proxy, added by uvicorn": (an_app, "/dlq", "/dlq", "/dlq"),
    "kept by a proxy, added by uvicorn": (an_app, "/dlq", "/dlq/dlq", "/dlq"),
    "removed, by our option": (lambda: an_app(root_path="/dlq/"), "", "", "/dlq"),
    "kept, by our option": (lambda: an_app(root_path="/dlq"), "", "/dlq", "/dlq"),
}


@pytest.mark.parametrize("place", PLACES)
def test_it_is_served_under_any_path(place: str) -> None:
    """Links lead where the browser is, with any name in them."""
    make, root_path, prefix, root = PLACES[place]
    app = make()
    for name in NAMES:
        here = ECHO.link("", {"name": name})
        answer = ask(app, "GET", prefix + here, root_path)
        assert answer.status_code == 200, (name, here, answer.text)
        found = answer.json()
        assert found["root"] == root
        assert found["name"] == name.encode("utf-8", "backslashreplace").decode()
        assert found["link"] == ECHO.link(root, {"name": name})
    assert ask(app, "GET", f"{prefix}/healthz", root_path).text == "ok\n"
    page = ask(app, "GET", f"{prefix}/jobs/x/nowhere", root_path)
    assert page.status_code == 404
    encoded = root.replace(" ", "%20")
    assert f'href="{encoded}/static/' in page.text


@pytest.mark.parametrize(
    "path",
    ["", "/", "//", "/%00", "/\udcff", "/%ED%A0%80", "/echo/%0A", "/echo/" + "x" * 60_000],
    ids=ascii,
)
def test_no_path_is_a_failure(path: str) -> None:
    """Any path gets a page with the content policy."""
    app = an_app(access=lambda _: None)
    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "root_path": "",
        "query_string": b"a=%ED%A0%80&b=\xff",
        "headers": [(b"host", b"127.0.0.1"), (b"cookie", b"\xff=\xff")],
        "client": None,
    }
    sent = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] < 500
    assert b"content-security-policy" in dict(sent[0]["headers"])


def test_it_lives_beside_django_in_asgi_py() -> None:
    """As the page about it says."""
    pytest.importorskip("django", reason="this is about Django")
    code = (
        "import asyncio, httpx\n"
        "from django.conf import settings\n"
        "settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=['*'], SECRET_KEY='x')\n"
        "urlpatterns = []\n"
        "from django.core.asgi import get_asgi_application\n"
        "django = get_asgi_application()\n"
        "from celery import Celery\n"
        "from celery_dlq import DeadLetters\n"
        "from starlette.applications import Starlette\n"
        "from starlette.routing import Mount\n"
        "app = Celery('proj', broker='memory://')\n"
        "from celery_dlq.testing import embedded\n"
        "app.conf.dlq_url = embedded()\n"
        "dlq = DeadLetters(app)\n"
        "application = Starlette(routes=[Mount('/dlq', dlq.asgi()), Mount('/', django)])\n"
        "async def main():\n"
        "    transport = httpx.ASGITransport(application)\n"
        "    async with httpx.AsyncClient(transport=transport, base_url='http://[::]') as client:\n"
        "        for path in ('/dlq/events/poll', '/elsewhere'):\n"
        "            print((await client.get(path)).status_code)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["200", "404"]


def test_static_files_are_kept_and_pages_are_not() -> None:
    """A file's path changes with its content."""
    app = an_app()
    for name, digest in app.site.templates.static.items():
        answer = ask(app, "GET", f"/static/{digest}/{name}")
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
        head = ask(app, "HEAD", f"/static/{digest}/{name}")
        assert head.content == b""
        assert head.headers["content-length"] == str(len(answer.content))
        assert ask(app, "GET", f"/static/000000000000/{name}").status_code == 404
    assert ask(app, "GET", "/nowhere").headers["cache-control"] == "no-store"


def test_a_body_can_be_made_while_it_is_sent() -> None:
    """And HEAD makes none of it."""
    app = an_app()
    assert ask(app, "GET", "/parts").text == "0\n1\n2\n"
    assert ask(app, "HEAD", "/parts").content == b""


def test_only_urlencoded_forms_of_some_size_are_read() -> None:
    """Nothing else is parsed, so nothing else can be attacked."""
    app = an_app()

    def status(**more: Any) -> int:
        return ask(app, "POST", "/echo/x", **more).status_code

    assert status(json={"a": 1}) == 415
    assert status(files={"a": b"x"}) == 415
    assert status(data={"a": "x" * MAX_FORM_BYTES}) == 413
    assert status(data={str(n): "x" for n in range(300)}) == 400
    assert status(data={"a": "x"}) == 403  # read, and not ours
    assert ask(app, "GET", "/echo/x", params={str(n): n for n in range(300)}).status_code == 400


def test_who_may_is_the_apps_to_say() -> None:
    """By a function or a coroutine function of Starlette's request."""

    def plain(request: Any) -> User | None:
        name = request.headers.get("x-name")
        return User(name=name, permissions=ALL) if name else None

    async def slow(request: Any) -> User | None:
        await asyncio.sleep(0)
        return plain(request)

    for access in (plain, slow):
        app = mounted(an_app(access))
        path = "/ops/dead%20letters/who/x"
        assert ask(app, "GET", path).status_code == 401
        assert ask(app, "GET", path, headers={"x-name": "olga"}).json()["user"] == "olga"


def test_a_rule_that_returns_something_else_lets_nobody_in(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """True is no user."""
    assert ask(an_app(lambda _: True), "GET", "/who/x").status_code == 500
    assert "celery_dlq.web.User" in caplog.text


def test_without_a_rule_everybody_looks_and_nobody_changes() -> None:
    """The app that it is mounted in decides who reaches it."""
    celery = Celery("mounted", broker="memory://")
    celery.conf.update(fresh_conf())
    app = DeadLetters(celery).asgi(title="staging", home="/")
    state = ask(app, "GET", "/events/poll").json()
    assert state.pop("at") > 0
    assert state == {"letters": {}, "hour": {}, "held": {}, "in_force": [], "jobs": {}}
    page = ask(app, "GET", "/nowhere").text
    assert "staging" in page
    assert "Back to the application" in page
    assert "read-only" not in page, "nobody has asked who this is"
    assert "read-only" in ask(app, "GET", "/policies").text


@pytest.mark.parametrize("path", ["/", "/events/poll", "/queues/orders-DLQ", "/nowhere"])
@pytest.mark.parametrize("how", ["alone", "mounted"])
def test_another_sites_name_for_this_address_gets_nothing(path: str, how: str) -> None:
    """A site that points its own name here would read the letters in its visitor's browser."""
    celery = Celery("mounted", broker="memory://")
    celery.conf.update(fresh_conf())
    app: Any = DeadLetters(celery).asgi(access=lambda _: User(permissions=ALL))
    if how == "mounted":
        app, path = mounted(app), "/ops/dead%20letters" + path
    answer = ask(app, "GET", path, headers={"host": "evil.example:8000"})
    assert answer.status_code == 421
    for said in ("evil.example", "localhost", "asgi(url=...)", "asgi(hosts=...)"):
        assert said in answer.text
    headers = {"host": "evil.example", "origin": "http://evil.example"}
    assert ask(app, "POST", path, headers=headers).status_code == 421


HOSTS = ["localhost:8000", "127.0.0.1", "[::1]:8000", "10.0.0.7:80", "OPS.example", "dlq.internal"]


@pytest.mark.parametrize("host", HOSTS)
def test_names_of_this_app_are_answered(host: str) -> None:
    """Addresses, which nobody else can point here; that of the url; those that are given."""
    celery = Celery("mounted", broker="memory://")
    celery.conf.update(**fresh_conf())
    app = DeadLetters(celery).asgi(url="https://ops.example/dlq", hosts=["DLQ.internal"])
    assert ask(app, "GET", "/events/poll", headers={"host": host}).status_code == 200
    unchecked = DeadLetters.of(celery).asgi(hosts=None)
    assert ask(unchecked, "GET", "/", headers={"host": "any.example"}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "",
        "localhost.evil.example",
        "127.0.0.1.example",
        "[",
        ":80",
        "[::1].evil.example",
        "[::1]x:80",
    ],
)
def test_a_name_that_looks_like_ours_is_not_ours(host: str) -> None:
    """Nor is none at all."""
    celery = Celery("mounted", broker="memory://")
    celery.conf.update(fresh_conf())
    answer = ask(DeadLetters(celery).asgi(), "GET", "/events/poll", headers={"host": host})
    assert answer.status_code == 421


@pytest.mark.parametrize("package", ["starlette", "anyio", "itsdangerous"])
def test_a_missing_package_is_named_with_its_extra(package: str) -> None:
    """As one clear sentence; most people know none of what the extra brings."""
    code = (
        f"import sys; sys.modules['{package}'] = None\n"
        "from celery import Celery\n"
        "from celery_dlq import DeadLetters\n"
        "from celery_dlq.errors import MissingExtra\n"
        "try: DeadLetters(Celery('missing', broker='memory://')).asgi()\n"
        "except MissingExtra as exc: print(exc)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "dlq.asgi() needs the extra 'web'" in done.stdout
    assert "pip install 'celery_dlq[web]'" in done.stdout


def test_nothing_of_the_pages_is_imported_before_they_are_asked_for() -> None:
    """Every worker and every publisher imports the plugin."""
    code = (
        "import sys, celery_dlq.plugin; "
        "print(*[m for m in sys.modules if m.partition('.')[0] in "
        "('starlette', 'uvicorn', 'jinja2', 'itsdangerous', 'anyio') or '_dlq.web' in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.fixture
def app() -> DeadLettersApp:
    """Give an app."""
    return an_app()


def test_a_store_that_is_away_is_said_and_no_end(
    app: DeadLettersApp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also a mistake of ours."""

    def state(*_: object) -> dict[str, Any]:
        raise ValueError("a mistake")

    monkeypatch.setattr("celery_dlq.web.status.numbers_of", state)
    assert json.loads(app.site.status.numbers())["away"] is True
    assert "could not be read" in caplog.text


def test_the_store_is_read_once_for_all_who_ask(
    app: DeadLettersApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred open pages cost what one costs."""
    reads = []

    def numbers(*_: object) -> dict[str, Any]:
        reads.append(1)
        return {"letters": {"orders-DLQ": len(reads)}, "hour": {}, "jobs": {}}

    monkeypatch.setattr("celery_dlq.web.status.numbers_of", numbers)
    with ThreadPoolExecutor(8) as many:
        found = {*many.map(lambda _: app.site.status.numbers(), range(100))}
    assert len(reads) == len(found) == 1


def test_the_end_of_the_server_is_the_end_of_the_pages(app: DeadLettersApp) -> None:
    """By ASGI's lifespan; web sockets are refused."""

    async def live() -> list[Any]:
        sent: list[Any] = []
        messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]

        async def receive() -> Any:
            return messages.pop(0)

        async def send(message: Any) -> None:
            sent.append(message["type"])

        await app({"type": "lifespan"}, receive, send)
        await app({"type": "websocket"}, receive, send)
        return sent

    assert asyncio.run(live()) == [
        "lifespan.startup.complete",
        "lifespan.shutdown.complete",
        "websocket.close",
    ]
