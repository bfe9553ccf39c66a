"""The example's Django project with users and servers of its own, and browsers that visit it."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from builders import a_letter, a_request, an_app, key_of
from servers import _free_port
from waiting import poll

from celery_dlq import DeadLetters

EXAMPLE = Path(__file__).parents[1] / "examples/django"
PAGES = "/admin/celery_dlq/deadletters"
VIEW, REDRIVE, DISCARD, HOLD = "view", "redrive", "discard", "hold"
EDIT_POLICIES = "edit_policies"
USERS: dict[str, set[str]] = {
    "staff": set(),
    "viewer": {VIEW},
    "operator": {VIEW, REDRIVE},
    "remover": {VIEW, DISCARD},
    "holder": {VIEW, HOLD},
    "lawgiver": {VIEW, EDIT_POLICIES},
    "root": {VIEW, REDRIVE, DISCARD, HOLD, EDIT_POLICIES},
}
"""Names of users of staff, and what they may do; ``root`` is a superuser."""

_SETTINGS = """
import json, os
from proj.settings import *
from proj.settings import MIDDLEWARE, REDIS

PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
ALLOWED_HOSTS = ["127.0.0.1", "shop.example"]
ROOT_URLCONF = "proj.tested_urls"
_changed = json.loads(os.environ.get("SHOP_SETTINGS", "{}"))
MIDDLEWARE = _changed.pop("MORE_MIDDLEWARE", []) + MIDDLEWARE
globals().update(_changed)
"""

# A second admin beside the usual one, as some projects have for another kind of staff.
_URLS = """
from django.contrib import admin
from django.urls import path

from celery_dlq.web.django.admin import DeadLettersAdmin
from celery_dlq.web.django.models import DeadLetters

second = admin.AdminSite(name="second")
second.register(DeadLetters, DeadLettersAdmin)
urlpatterns = [path("admin/", admin.site.urls), path("second/", second.urls)]
"""

_MAKE_USERS = """
import json, os, django
django.setup()
from django.contrib.auth.models import Permission, User
for name, may in json.loads(os.environ["SHOP_USERS"]).items():
    make = User.objects.create_superuser if name == "root" else User.objects.create_user
    user = make(name, password=name, **({} if name == "root" else {"is_staff": True}))
    if name != "root":
        codes = [f"{one}_deadletters" for one in may]
        found = Permission.objects.filter(content_type__app_label="celery_dlq", codename__in=codes)
        assert len(found) == len(codes), codes
        user.user_permissions.set(found)
"""

# Threads, and an orderly end at SIGTERM: as gunicorn's workers and mod_wsgi have it.
_WSGI = """
import signal, socketserver, sys
from wsgiref.simple_server import WSGIServer, make_server

class Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
from proj.wsgi import application
make_server("127.0.0.1", int(sys.argv[1]), application, Server).serve_forever()
"""

_COMMANDS: dict[str, tuple[str, ...]] = {
    "wsgi": ("-c", _WSGI),
    "asgi": ("-m", "uvicorn", "proj.asgi:application", "--log-level", "warning", "--port"),
    "runserver": ("manage.py", "runserver"),
}


class Project:
    """A copy of the example with a database and users.

    Args:
        folder: Gets the copy.
        redis_url: Broker and letters.
    """

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.folder = folder / "project"
        self.redis_url = redis_url
        shutil.copytree(EXAMPLE, self.folder, ignore=shutil.ignore_patterns("__pycache__"))
        (self.folder / "proj/tested.py").write_text(_SETTINGS)
        (self.folder / "proj/tested_urls.py").write_text(_URLS)
        self.run("manage.py", "migrate", "--verbosity", "0")
        users = {name: sorted(may) for name, may in USERS.items()}
        self.run("-c", _MAKE_USERS, SHOP_USERS=json.dumps(users))

    def environment(self, **more: str) -> dict[str, str]:
        """The environment in which the project runs."""
        return {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "proj.tested",
            "SHOP_REDIS": self.redis_url,
            "PYTHONUNBUFFERED": "1",
            **more,
        }

    def run(self, *arguments: str, code: int = 0, **env: str) -> str:
        """Run Python in the project; what it printed."""
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=self.environment(**env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    def served(self, kind: str, redis_url: str = "", **settings: Any) -> Served:
        """A server of the project; a context manager.

        Args:
            kind: ``wsgi``, ``asgi`` or ``runserver``, which reloads changed files.
            redis_url: Broker and letters, if not those of the project.
            **settings: Settings of Django that differ.
        """
        more = {"SHOP_REDIS": redis_url or self.redis_url}
        return Served(self, kind, self.environment(SHOP_SETTINGS=json.dumps(settings), **more))


class Served:
    """A process that serves the project."""

    def __init__(self, project: Project, kind: str, env: dict[str, str]) -> None:
        self.port = _free_port()
        self.log = project.folder.parent / f"{kind}-{self.port}.log"
        self._project, self._kind, self._env = project, kind, env
        self.process: subprocess.Popen[bytes]

    def __enter__(self) -> Served:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it and wait until it serves."""
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, *_COMMANDS[self._kind], str(self.port)],
                cwd=self._project.folder,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            poll(self.answers, timeout_seconds=60, every_seconds=0.05)
        except BaseException:
            self.stop()
            raise

    def answers(self) -> bool:
        """True if it serves."""
        assert self.process.poll() is None, self.output
        try:
            return Visitor(self.port).get("/admin/login/").status > 0
        except OSError:
            return False

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.kill()
        if self._kind == "runserver":
            self.kill()  # it leaves the process that serves
        return self.process.wait(10)

    def kill(self) -> None:
        """SIGKILL, its children too."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    @property
    def output(self) -> str:
        """All it printed so far."""
        return self.log.read_text("utf-8", "replace")


@dataclass(frozen=True)
class Answer:
    """A response; headers by lower-case name."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """The page."""
        return self.body.decode()

    @property
    def token(self) -> str:
        """The token of its first form."""
        found = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', self.text)
        assert found is not None, self.text[:2000]
        return found[1]


@dataclass
class Visitor:
    """A browser without a screen.

    Attributes:
        port: The server's.
        headers: Sent with each request.
        cookies: As the server has set them.
    """

    port: int
    headers: dict[str, str] = field(default_factory=dict)
    cookies: dict[str, str] = field(default_factory=dict)

    def get(self, path: str, method: str = "GET", **headers: str) -> Answer:
        """Ask for a page; redirects are not followed."""
        return self._ask(method, path, None, headers)

    def post(self, path: str, fields: Mapping[str, Any] | None = None, **headers: str) -> Answer:
        """Send a form as it is given."""
        headers = {"Content-Type": "application/x-www-form-urlencoded", **headers}
        body = urlencode(dict(fields or {}), doseq=True).encode()
        return self._ask("POST", path, body, headers)

    def send(self, path: str, fields: Mapping[str, Any] | None = None, **headers: str) -> Answer:
        """Send a form with the token of the admin's first page."""
        page = self.get("/admin/" if "sessionid" in self.cookies else "/admin/login/")
        return self.post(path, {"csrfmiddlewaretoken": page.token, **(fields or {})}, **headers)

    def log_in(self, name: str) -> Visitor:
        """Log in at the admin; the password is the name."""
        if name != "anonymous":
            answer = self.send("/admin/login/", {"username": name, "password": name})
            assert answer.status == 302, answer.text
        return self

    def _ask(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        cookie = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        sent = {"Cookie": cookie, **self.headers, **headers}
        try:
            connection.request(method, path, body, sent)
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        for header in answer.headers.get_all("set-cookie") or ():
            name, _, value = header.partition(";")[0].partition("=")
            self.cookies[name] = value
        found = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, found, text)


def letters_in(url: str) -> Iterator[DeadLetters]:
    """Those of a database."""
    app = an_app(broker_url=url, task_default_queue="orders")
    app.conf.dlq_queues = {"orders": {"max_deliveries": 5}}
    dlq = DeadLetters(app)
    yield dlq
    dlq.close()
    app.close()


def put(dlq: DeadLetters, number: int = 1, **changes: Any) -> list[str]:
    """Store letters; their ids."""
    found = []
    for _ in range(number):
        values = {"task_name": "orders.tasks.charge", "properties": '{"priority": 0}', **changes}
        letter = a_letter(**values)
        headers = a_request(id=letter.task_id, root_id=letter.task_id, task=letter.task_name)
        letter = replace(letter, headers=json.dumps(headers))
        dlq.store.dead_letter(letter, key_of(letter))
        found.append(letter.id)
    return found
