"""The pages below the admin of a real Django project, served as WSGI and as ASGI."""

from __future__ import annotations

import gzip
import json
import re
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import quote, unquote

import pytest
import redis
from builders import a_letter, key_of
from django_project import (
    DISCARD,
    EDIT_POLICIES,
    PAGES,
    REDRIVE,
    USERS,
    VIEW,
    Project,
    Visitor,
    letters_in,
    put,
)
from servers import RedisServer
from waiting import poll

from celery_dlq import DeadLetters, LetterFilter
from celery_dlq.store.holds import Hold
from celery_dlq.store.instructions import Override
from celery_dlq.web.http import Permission, Route
from celery_dlq.web.site import all_routes
from celery_dlq.web.templating import Templates

django = pytest.importorskip("django", reason="these tests need Django")

QUEUE = "orders-DLQ"
KINDS = ["wsgi", "asgi"]
HOST = "shop.example"


@pytest.fixture(scope="module")
def project(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with users of every kind."""
    return Project(tmp_path_factory.mktemp("django"), redis_server.url)


@pytest.fixture(scope="module")
def wsgi(project: Project) -> Iterator[int]:
    """The port of a WSGI server."""
    with project.served("wsgi") as served:
        yield served.port


@pytest.fixture(scope="module")
def asgi(project: Project) -> Iterator[int]:
    """The port of uvicorn."""
    with project.served("asgi") as served:
        yield served.port
        assert "must consume synchronous iterators" not in served.output


@pytest.fixture
def port(request: pytest.FixtureRequest, kind: str) -> int:
    """The port of a server."""
    found: int = request.getfixturevalue(kind)
    return found


@pytest.fixture(scope="module")
def cookies(wsgi: int) -> dict[str, dict[str, str]]:
    """Those of each user after the login; both servers have one database."""
    return {name: Visitor(wsgi).log_in(name).cookies for name in [*USERS, "anonymous"]}


Visit = Callable[[str], Visitor]


@pytest.fixture
def visit(port: int, cookies: dict[str, dict[str, str]]) -> Visit:
    """The browser of a user."""
    return lambda name: Visitor(port, cookies=dict(cookies[name]))


@pytest.fixture
def dlq(redis_url: str) -> Iterator[DeadLetters]:
    """The letters, from outside."""
    yield from letters_in(redis_url)


# -- Who may ask for what ------------------------------------------------------

REDRIVES = {"start", "cancel", "resume"}
"""Here the job decides: these are redrives."""

CONFIRMED = {"confirmed": "yes"}
"""The page that says what a form does was seen."""

POSTS: dict[str, tuple[dict[str, Any], int]] = {
    "add_note": ({"text": "seen"}, 303),
    "assign": ({"to": "me"}, 303),
    "edit_held": ({"args": "[7]", "kwargs": "{{}}"}, 303),
    "discard_held": (CONFIRMED, 303),
    "set_state": ({"state": "muted"}, 303),
    "hold": ({"queue": "orders", **CONFIRMED}, 303),
    "end_hold": ({"id": "{hold}", **CONFIRMED}, 303),
    "plan_redrive": ({"force": "1"}, 303),
    "plan_discard": ({"ids": "{letter}"}, 303),
    "restore": ({"id": "{discarded}", **CONFIRMED}, 303),
    "plan_edit": ({"args": "[7]", "kwargs": "{{}}", "force": "1"}, 303),
    "start": ({}, 303),
    "cancel": ({}, 303),
    "resume": ({}, 303),
    "restore_job": ({}, 303),
    "set_policy": (
        {
            "queue": "orders",
            "key": "max_deliveries",
            "value": "7",
            "for": "1h",
            **CONFIRMED,
        },
        303,
    ),
    "unset_policy": ({"queue": "orders", "key": "max_retries", **CONFIRMED}, 303),
}
"""The form of each route that changes something, and its answer to who may send it."""


def needed(route: Route) -> Permission | None:
    """The permission without which a route is refused."""
    return Permission.REDRIVE if route.name in REDRIVES else route.permission


def seeded(dlq: DeadLetters, route: Route) -> dict[str, str]:
    """Letters, a discarded one, an override, and a job in the state that a route is about."""
    letters = put(dlq, 3)
    dlq.discard(QUEUE, where=LetterFilter(ids=frozenset(letters[:1])))
    dlq.override_policy("orders", timedelta(hours=1), max_retries=3)
    static, hold = Templates().static, dlq.hold(queue="orders").id
    held = a_letter(
        dead_letter_queue=hold,
        content_type="application/json",
        body=b"[[], {}, {}]",
        args_json="[]",
    )
    dlq.assembly.backend.held.dead_letter(held, key_of(held))
    return {
        "queue": QUEUE,
        "letter": held.id if "{hold}" in route.pattern else letters[1],
        "discarded": letters[0],
        "fingerprint": "0123456789abcdef",
        "format": "jsonl",
        "file": "style.css",
        "hash": static["style.css"],
        "job": job_for(dlq, route.name),
        "hold": hold,
    }


def job_for(dlq: DeadLetters, name: str) -> str:
    """A redrive that is planned, or for ``resume`` was cancelled; a discard to restore; its id."""
    if name == "restore_job":
        job = dlq.plan("discard", QUEUE)
        dlq.start(job.id)
        poll(lambda: dlq.job(job.id).state == "done")
        put(dlq, 2)
        return job.id
    job = dlq.plan("redrive", QUEUE, force=True)
    if name == "resume":
        dlq.start(job.id)
        dlq.cancel(job.id)
    return job.id


def all_of(dlq: DeadLetters) -> dict[str, Any]:
    """All that the pages can change."""
    letters = [letter.id for letter in dlq.letters(QUEUE)]
    holds = dlq.assembly.backend.instructions.of(Hold)
    return {
        "letters": letters,
        "discarded": [entry.key for entry in dlq.discarded(QUEUE)],
        "jobs": [(job.id, job.state, job.actor) for job in dlq.jobs()],
        "changes": dlq.changes(),
        "overrides": dlq.assembly.backend.instructions.in_force(Override),
        "holds": [(hold.id, hold.until) for hold in holds],
        "held": [letter.args_json for hold in holds for letter in dlq.held_messages(hold.id)],
        "states": [(group.fingerprint, group.status) for group in dlq.groups(QUEUE)],
        "notes": dlq.assembly.backend.notes.notes(QUEUE, "0123456789abcdef"),
    }


def path_of(route: Route, parts: dict[str, str]) -> str:
    """The path of a route of these parts."""
    return PAGES + re.sub(r"\{(\w+)\}", lambda part: quote(parts[part[1]]), route.pattern)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("route", all_routes(), ids=lambda route: route.name)
def test_a_route_is_for_those_who_may(route: Route, visit: Visit, dlq: DeadLetters) -> None:
    """Others get 403, or the login, and change nothing; nor does anybody without a token."""
    parts = seeded(dlq, route)
    path, before = path_of(route, parts), all_of(dlq)
    fields, good = POSTS[route.name] if route.method == "POST" else ({}, 200)
    fields = {name: text.format(**parts) for name, text in fields.items()}
    allowed = [user for user, may in USERS.items() if needed(route) in {None, *may}]
    for user in USERS:
        if route.method == "POST":
            assert visit(user).post(path, fields).status == 403, user
            wrong = {**fields, "csrfmiddlewaretoken": "x" * 64}
            assert visit(user).post(path, wrong).status == 403, user
        if user not in allowed:
            asked = visit(user).send if route.method == "POST" else visit(user).get
            answer = asked(path, fields) if route.method == "POST" else asked(path)
            assert answer.status == 403, user
            assert "expected the permission" in answer.text
    asked = visit("anonymous")
    if route.method == "POST":
        assert asked.post(path, fields).status == 403
    answer = asked.send(path, fields) if route.method == "POST" else asked.get(path)
    assert answer.status == 302
    assert answer.headers["location"] == f"/admin/login/?next={quote(path)}"
    if route.method == "GET":
        for user in allowed:
            assert visit(user).get(path).status == good, user
            assert visit(user).get(path, "HEAD").body == b""
    if CONFIRMED.items() <= fields.items():
        unseen = {name: value for name, value in fields.items() if name not in CONFIRMED}
        shown = visit(allowed[-1]).send(path, unseen)
        assert (shown.status, "Nothing has been done yet" in shown.text) == (200, True)
    assert all_of(dlq) == before
    if route.method == "POST":
        assert visit(allowed[-1]).send(path, fields).status == good
        assert (all_of(dlq) != before) == (good == 303)
    if route.name in ("start", "resume"):  # so that it is not the next test's job
        poll(lambda: dlq.job(parts["job"]).state == "done")


def test_users_of_these_tests_are_of_every_kind() -> None:
    """For each permission one user has it beside *view*, and one has none."""
    assert {frozenset(may) for may in USERS.values()} >= {
        frozenset(),
        *(frozenset({VIEW, one}) for one in (VIEW, REDRIVE, DISCARD, EDIT_POLICIES)),
    }
    assert {str(permission) for permission in Permission} == USERS["root"]


@pytest.mark.parametrize("kind", ["wsgi"])
def test_a_job_asks_for_the_permission_of_its_kind(visit: Visit, dlq: DeadLetters) -> None:
    """Who may redrive starts no discard, and who may discard starts no redrive."""
    put(dlq)
    discard, redrive = dlq.plan("discard", QUEUE), dlq.plan("redrive", QUEUE, force=True)
    fields = {"typed": QUEUE}
    assert visit("operator").send(f"{PAGES}/jobs/{discard.id}/start", fields).status == 403
    assert visit("remover").send(f"{PAGES}/jobs/{redrive.id}/start", fields).status == 403
    assert [job.state for job in dlq.jobs()] == ["planned", "planned"]
    assert visit("remover").send(f"{PAGES}/jobs/{discard.id}/start", fields).status == 303
    poll(lambda: dlq.job(discard.id).state == "done")


@pytest.mark.parametrize("kind", ["wsgi"])
def test_the_index_shows_the_entry_to_those_who_may_view(visit: Visit) -> None:
    """Whatever else they may do."""
    for user, may in USERS.items():
        shown = f'href="{PAGES}/"' in visit(user).get("/admin/").text
        assert shown == (VIEW in may), user


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_admin_links_to_itself(visit: Visit, dlq: DeadLetters) -> None:
    """Pages, login and the way home are of the site that was asked."""
    put(dlq)
    page = visit("viewer").get("/second/celery_dlq/deadletters/queues/orders-DLQ").text
    links = re.findall(r'(?:href|src|action|data-root)="(/[^"]*)"', page)
    assert len(links) > 10
    assert {link for link in links if not link.startswith("/second/")} == set()
    assert '<a href="/second/">Back to the application</a>' in page
    sent = visit("anonymous").get("/second/celery_dlq/deadletters/").headers["location"]
    assert sent.startswith("/second/login/")


# -- The audit -----------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_audit_names_the_user_of_django(visit: Visit, dlq: DeadLetters) -> None:
    """Who planned and started it, also though a thread of the server did it."""
    put(dlq, 2)
    operator, lawgiver = visit("operator"), visit("lawgiver")
    planned = operator.send(f"{PAGES}/queues/{QUEUE}/redrive", {"force": "1"})
    job = planned.headers["location"]
    assert operator.send(f"{job}/start").headers["location"] == job
    poll(lambda: dlq.job(job.rpartition("/")[2]).state == "done")
    lawgiver.send(f"{PAGES}/policies", POSTS["set_policy"][0])
    found = {str(change.action): change.actor.partition(" via ")[0] for change in dlq.changes()}
    assert found == {"redriven": "operator", "policy_set": "lawgiver"}
    page = operator.get(f"{PAGES}/audit").text
    assert set(re.findall(r">(\w+) via ", page)) == {"operator", "lawgiver"}
    assert dlq.queues()[0].letters == 0


# -- Paths ---------------------------------------------------------------------

NAMES = ["a/b", "100%", "%2F", "?x#y", "a b", "..", "é", 'x"><script>', "a\nb", "\\"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_names_of_any_characters_are_found_again(name: str, visit: Visit, dlq: DeadLetters) -> None:
    """By the links that pages show, and with a form that comes back to them."""
    put(dlq, dead_letter_queue=name)
    operator = visit("operator")
    overview = operator.get(f"{PAGES}/").text
    (link,) = set(re.findall(rf'href="({PAGES}/queues/[^"/]+)"', overview))
    page = operator.get(link)
    assert page.status == 200
    (group,) = set(re.findall(rf'href="({re.escape(link)}/groups/[^"/]+)"', page.text))
    noted = operator.send(f"{group}/notes", {"text": "seen"})
    assert noted.headers["location"] == group
    assert dlq.notes(name, "0123456789abcdef")[0].actor.startswith("operator via ")
    lines = operator.get(f"{link}/export/jsonl").body.splitlines()
    assert [json.loads(line)["dead_letter_queue"] for line in lines] == [name]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "path",
    [
        "/queues/%ff%fe",
        "/queues/%ed%a0%80",
        "/queues/a%00b",
        "/queues/a%0Ab",
        "/queues/%25ed%25a0%2580",
        "//evil.example",
        "/../../x",
        "/queues/x?cursor=%ff",
    ],
)
@pytest.mark.usefixtures("redis_url")
def test_no_path_makes_an_error_of_the_server(path: str, visit: Visit) -> None:
    """Also bytes that are no UTF-8."""
    assert visit("viewer").get(PAGES + path).status in {301, 302, 400, 404}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", [True, False])
def test_pages_below_a_path_of_the_proxy(
    project: Project, dlq: DeadLetters, kind: str, kept: bool
) -> None:
    """FORCE_SCRIPT_NAME, whether the proxy leaves it in the path (ASGI) or not."""
    if kept and kind == "wsgi":
        pytest.skip("a WSGI server gives the rest of the path apart")
    if kept and django.VERSION < (5, 0):
        pytest.skip("Django 4.2 does not know its paths there")
    put(dlq, dead_letter_queue="a/b")
    prefix = "/shop%20of%20today"
    with project.served(kind, FORCE_SCRIPT_NAME=unquote(prefix)) as served:
        before = prefix if kept else ""

        def sent(path: str) -> str:
            return before + path.removeprefix(prefix)

        operator = Visitor(served.port)
        page = operator.get(f"{before}/admin/login/")
        fields = {"csrfmiddlewaretoken": page.token, "username": "operator", "password": "operator"}
        assert operator.post(f"{before}/admin/login/", fields).status == 302
        overview = operator.get(f"{before}{PAGES}/").text
        assert f'<a href="{prefix}/admin/">Back' in overview
        (link,) = set(re.findall(r'href="([^"]+/queues/[^"/]+)"', overview))
        assert link == f"{prefix}{PAGES}/queues/a%252Fb"
        form = operator.get(sent(f"{link}/redrive"))
        (action,) = re.findall(r'<form method="post" action="([^"]+)"', form.text)
        fields = {"csrfmiddlewaretoken": form.token, "force": "1"}
        planned = operator.post(sent(action), fields).headers["location"]
        assert planned.startswith(f"{prefix}{PAGES}/jobs/")
        assert operator.get(sent(planned)).status == 200


# -- Files ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_letters_are_sent_whole(visit: Visit, dlq: DeadLetters) -> None:
    """Also those of several batches."""
    ids = put(dlq, 1200)
    answer = visit("viewer").get(f"{PAGES}/queues/{QUEUE}/export/jsonl")
    assert answer.headers["content-disposition"] == f'attachment; filename="{QUEUE}.jsonl"'
    assert {json.loads(line)["id"] for line in answer.body.splitlines()} == set(ids)
    assert "content-length" not in answer.headers
    assert visit("viewer").get(f"{PAGES}/queues/{QUEUE}/export/parquet").status == 404


@pytest.mark.parametrize("kind", KINDS)
def test_browsers_keep_static_files_and_no_pages(visit: Visit, dlq: DeadLetters) -> None:
    """Their paths change with their content; pages may have secrets."""
    viewer = visit("viewer")
    page = viewer.get(f"{PAGES}/")
    assert "no-store" in page.headers["cache-control"]
    (style,) = re.findall(r'href="([^"]+/style\.css)"', page.text)
    assert viewer.get(style).headers["cache-control"] == "public, max-age=31536000, immutable"


# -- Hosts with settings of their own ------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_behind_a_proxy_that_speaks_https(project: Project, dlq: DeadLetters, kind: str) -> None:
    """Django believes the proxy; ours are its redirects, cookies, and origins of forms."""
    put(dlq)
    safe = {
        "SECURE_PROXY_SSL_HEADER": ["HTTP_X_FORWARDED_PROTO", "https"],
        "SECURE_SSL_REDIRECT": True,
        "SECURE_HSTS_SECONDS": 3600,
        "SECURE_REFERRER_POLICY": "no-referrer",
        "SECURE_CROSS_ORIGIN_OPENER_POLICY": "unsafe-none",
        "X_FRAME_OPTIONS": "SAMEORIGIN",
        "SESSION_COOKIE_SECURE": True,
        "CSRF_COOKIE_SECURE": True,
        "CSRF_USE_SESSIONS": True,
        "MORE_MIDDLEWARE": ["django.middleware.gzip.GZipMiddleware"],
    }
    hosts = {"DEBUG": False, "ALLOWED_HOSTS": [HOST, "127.0.0.1"]}
    with project.served(kind, **safe, **hosts) as served:
        sent = Visitor(served.port, {"Host": HOST}).get(f"{PAGES}/")
        assert sent.status == 301
        assert sent.headers["location"] == f"https://{HOST}{PAGES}/"
        proxied = {"Host": HOST, "X-Forwarded-Proto": "https", "Accept-Encoding": "identity"}
        operator = Visitor(served.port, proxied)
        origin = {"Origin": f"https://{HOST}"}
        form = operator.get("/admin/login/")
        fields = {"csrfmiddlewaretoken": form.token, "username": "operator", "password": "operator"}
        assert operator.post("/admin/login/", fields, **origin).status == 302
        form = operator.get(f"{PAGES}/queues/{QUEUE}/redrive")
        assert form.headers["strict-transport-security"] == "max-age=3600"
        assert form.headers["referrer-policy"] == "same-origin"
        assert form.headers["cross-origin-opener-policy"] == "same-origin"
        assert form.headers["x-frame-options"] == "DENY"
        assert "script-src 'self'" in form.headers["content-security-policy"]
        path, fields = f"{PAGES}/queues/{QUEUE}/redrive", {"force": "1"}
        fields["csrfmiddlewaretoken"] = form.token
        assert operator.post(path, fields).status == 403  # neither Origin nor Referer
        assert operator.post(path, fields, Origin="https://evil.example").status == 403
        assert operator.post(path, fields, Origin=f"http://{HOST}").status == 403
        assert dlq.jobs() == []
        planned = operator.post(path, fields, **origin)
        assert planned.status == 303
        assert planned.headers["location"] == f"{PAGES}/jobs/{dlq.jobs()[0].id}"
        packed = operator.get(f"{PAGES}/queues/{QUEUE}/letters", **{"Accept-Encoding": "gzip"})
        assert b"orders.tasks.charge" in gzip.decompress(packed.body)
        packed = operator.get(f"{PAGES}/queues/{QUEUE}/export/jsonl", **{"Accept-Encoding": "gzip"})
        assert b"orders.tasks.charge" in gzip.decompress(packed.body)


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_a_login(visit: Visit, project: Project, dlq: DeadLetters) -> None:
    """Pages lead to the login and back to where one was; nothing is changed meanwhile."""
    put(dlq)
    operator = visit("anonymous").log_in("operator")
    path = f"{PAGES}/queues/{quote(quote('a/b', safe=''))}/redrive"
    form = operator.get(f"{PAGES}/queues/{QUEUE}/redrive")
    project.run("-c", _END_SESSION, operator.cookies["sessionid"])
    asked = operator.get(path)
    assert asked.status == 302
    assert unquote(asked.headers["location"].partition("next=")[2]) == path
    assert operator.get(f"{PAGES}/events/poll").status == 302
    sent = operator.post(
        f"{PAGES}/queues/{QUEUE}/redrive", {"csrfmiddlewaretoken": form.token, "force": "1"}
    )
    assert sent.status == 302
    assert dlq.jobs() == []


_END_SESSION = """
import sys, django
django.setup()
from django.contrib.sessions.models import Session
Session.objects.filter(session_key=sys.argv[1]).delete()
"""


# -- Processes -----------------------------------------------------------------


def test_a_form_of_one_process_is_good_for_another(
    wsgi: int, asgi: int, cookies: dict[str, dict[str, str]], dlq: DeadLetters
) -> None:
    """Plan at one, start at another: the job runs in one of them, once."""
    put(dlq, 3)
    one = Visitor(wsgi, cookies=dict(cookies["operator"]))
    form = one.get(f"{PAGES}/queues/{QUEUE}/redrive")
    other = Visitor(asgi, cookies=one.cookies)
    token = {"csrfmiddlewaretoken": form.token}
    job = other.post(f"{PAGES}/queues/{QUEUE}/redrive", {**token, "force": "1"}).headers["location"]
    assert one.post(f"{job}/start", token).status == 303
    assert other.post(f"{job}/start", token).status == 303  # a second click
    poll(lambda: dlq.jobs()[0].state == "done")
    assert dict(dlq.jobs()[0].counts)["published"] == 3


@pytest.fixture
def elsewhere(redis_url: str) -> str:
    """Another database, whose jobs the servers of the other tests do not see."""
    return redis_url.rpartition("/")[0] + "/1"


@pytest.fixture
def there(elsewhere: str) -> Iterator[DeadLetters]:
    """Its letters."""
    yield from letters_in(elsewhere)


def started(port: int, dlq: DeadLetters) -> str:
    """Start a redrive that takes seconds; the job's id, once it runs."""
    operator = Visitor(port).log_in("operator")
    path = f"{PAGES}/queues/{QUEUE}/redrive"
    job = operator.send(path, {"force": "1", "rate": "100"}).headers["location"]
    assert operator.send(f"{job}/start").status == 303
    job_id = job.rpartition("/")[2]
    poll(lambda: dlq.job(job_id).counts.get("published"), timeout_seconds=30)
    return job_id


def sent_once(dlq: DeadLetters, ids: list[str], url: str) -> None:
    """Each letter's message is in the queue once, and no letter is left."""
    with redis.Redis.from_url(url) as client:
        messages = [json.loads(entry) for entry in client.lrange("orders", 0, -1)]
    assert len({message["headers"]["id"] for message in messages}) == len(messages) == len(ids)
    assert list(dlq.letters(QUEUE)) == []


@pytest.mark.parametrize("kind", ["wsgi", "runserver"])
def test_a_job_goes_on_in_the_next_process(
    project: Project, there: DeadLetters, elsewhere: str, kind: str
) -> None:
    """A server that ends in order, or loads new code, gives its job back after a batch."""
    ids = put(there, 600)
    with project.served(kind, elsewhere) as served:
        job_id = started(served.port, there)
        before = there.job(job_id)
        if kind == "wsgi":
            assert served.stop() == 0
        else:
            (project.folder / "proj/tested_urls.py").touch()
            poll(lambda: there.job(job_id).state == "waiting", timeout_seconds=30)
        assert there.job(job_id).state == "waiting"
        assert len(list(there.letters(QUEUE))) > 0
        if kind == "wsgi":
            served.start()
        poll(served.answers, timeout_seconds=30)
        Visitor(served.port).log_in("viewer").get(f"{PAGES}/jobs/{job_id}")
        poll(lambda: there.job(job_id).state == "done", timeout_seconds=60)
        assert there.job(job_id).pid != before.pid
    sent_once(there, ids, elsewhere)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_job_of_a_server_that_was_killed_is_resumed(
    project: Project, there: DeadLetters, elsewhere: str, number: signal.Signals
) -> None:
    """So ends uvicorn also after SIGTERM: it sends it to itself once requests are answered."""
    ids = put(there, 400)
    with project.served("asgi", elsewhere) as served:
        job_id = started(served.port, there)
        served.process.send_signal(number)
        assert served.process.wait(20) == -number
        poll(lambda: there.job(job_id).state == "interrupted", timeout_seconds=30)
        served.start()
        operator = Visitor(served.port).log_in("operator")
        assert operator.send(f"{PAGES}/jobs/{job_id}/resume").status == 303
        poll(lambda: there.job(job_id).state == "done", timeout_seconds=60)
    sent_once(there, ids, elsewhere)


# -- Installing it -------------------------------------------------------------


def test_nothing_is_left_to_migrate(project: Project) -> None:
    """Nothing is left to migrate, nothing to check, whatever kind of key the project prefers."""
    settings = json.dumps({"DEFAULT_AUTO_FIELD": "django.db.models.AutoField"})
    assert "No changes" in project.run("manage.py", "makemigrations", "--check")
    assert "no issues" in project.run("manage.py", "check", SHOP_SETTINGS=settings)


def test_the_check_says_what_is_missing(project: Project) -> None:
    """A project that does not import its Celery app, and one without the packages."""
    away = project.folder / "proj/__init__.py"
    text = away.read_text()
    away.write_text("")
    try:
        said = project.run("manage.py", "check", code=1)
    finally:
        away.write_text(text)
    assert "celery_dlq.E002) expected the project to make a Celery app" in said
    code = (
        "import sys; sys.modules['jinja2'] = None\n"
        "from django.core.management import execute_from_command_line as run\n"
        "run(['manage.py', 'check'])"
    )
    said = project.run("-c", code, code=1)
    assert "celery_dlq.web.django needs the extra 'django', of which the package jinja2" in said
    assert "celery_dlq[django]" in said


def test_the_pages_need_no_server_of_ours(project: Project) -> None:
    """Starlette, anyio and uvicorn come with `[web]` only."""
    code = (
        "import sys, django; django.setup()\n"
        "names = ('starlette', 'anyio', 'uvicorn', 'itsdangerous')\n"
        "for name in names: assert name not in sys.modules\n"
        "for name in names: sys.modules[name] = None\n"
        "from celery_dlq.web.django.admin import site_of_project\n"
        "from celery_dlq.web.http import Call\n"
        "site = site_of_project()\n"
        "methods = site.paths['/healthz']\n"
        "from celery_dlq.web.site import handle\n"
        "print(handle(Call(site=site), methods).status)\n"
    )
    assert project.run("-c", code).splitlines()[-1] == "200"
