"""``celery -A proj dlq web`` as a process: its token, proxies, live numbers, and its end."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from builders import DLQ, a_letter, key_of
from celery import Celery
from click.testing import CliRunner, Result
from fork_server import ForkedProcess
from servers import _free_port, require
from waiting import poll

from celery_dlq.cli.commands import dlq
from celery_dlq.store.store import Store

PROJECT = """
import os, resource
if files := int(os.environ.get("PROJ_FILES", 0)):
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
from celery import Celery
from celery_dlq import DeadLetters
app = Celery("proj", broker=os.environ["PROJ_REDIS"])
dlq = DeadLetters(app)
"""
SAME_SITE = {"sec-fetch-site": "same-origin"}
TOKEN = "correct-horse-battery"


class Server:
    """``dlq web`` on a free port."""

    def __init__(self, folder: Path, url: str, *options: str, **env: str) -> None:
        (folder / "proj.py").write_text(PROJECT)
        self._logs = (folder / "web.log", folder / "web.errors")
        for log in self._logs:
            log.write_text("")  # that of the server before
        self.process = ForkedProcess(
            ["-A", "proj", "dlq", "web", "--port", "0", *options],
            cwd=folder,
            env={**os.environ, "PROJ_REDIS": url, **env},
            log=self._logs[0],
            errors=self._logs[1],
        )

    def __enter__(self) -> Server:
        poll(
            lambda: "\n" in self._printed(0) or self.process.poll() is not None, timeout_seconds=60
        )
        self.said = self._printed(0).partition("\n")[0]
        found = re.search(r" at (\S+) ", self.said)
        assert found, self._printed(0) + self._printed(1)
        self.url = found[1]
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(30)

    def _printed(self, number: int) -> str:
        return self._logs[number].read_text("utf-8")

    def end(self, number: int) -> tuple[float, int, str]:
        """Send a signal; returns seconds until the end, exit code and all output."""
        began = time.monotonic()
        self.process.send_signal(number)
        code = self.process.wait(30)
        return time.monotonic() - began, code, self._printed(0) + self._printed(1)


def put_letter(url: str) -> None:
    """One more letter, as a worker stores it."""
    store = Store(url, timeout_seconds=2.0).letters
    letter = a_letter()
    store.dead_letter(letter, key_of(letter))
    store.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_numbers_are_live_until_the_server_ends_in_order(
    redis_url: str, tmp_path: Path, number: int
) -> None:
    """Each asking hears of a new letter; the end leaves no page of errors."""
    with Server(tmp_path, redis_url) as server:
        assert "read-only" in server.said

        def numbers() -> dict[str, Any]:
            found: dict[str, Any] = httpx.get(f"{server.url}events/poll").json()
            return found

        assert numbers()["letters"] == {}
        put_letter(redis_url)
        poll(lambda: numbers()["letters"].get(DLQ) == 1, timeout_seconds=20)
        assert numbers()["hour"] == {DLQ: 1}
        assert httpx.get(f"{server.url}healthz").text == "ok\n"
        assert httpx.get(server.url, headers={"host": "evil.example"}).status_code == 421
        seconds, code, said = server.end(number)
    assert code == 0, said
    assert seconds < 10
    assert "Ended." in said
    assert "Traceback" not in said


@pytest.mark.parametrize("how", ["option", "environment"])
def test_who_has_the_token_may_look(redis_url: str, tmp_path: Path, how: str) -> None:
    """Also at this machine, if a token was given; it is in no line of the log."""
    options = ("--token", TOKEN) if how == "option" else ()
    env = {"DLQ_WEB_TOKEN": TOKEN} if how == "environment" else {}
    more = ("--allow-changes", "--title", "staging")
    with (
        Server(tmp_path, redis_url, *options, *more, **env) as server,
        httpx.Client(base_url=server.url, headers=SAME_SITE) as browser,
    ):
        assert TOKEN not in server.said
        answer = browser.get("events/poll")
        assert answer.status_code == 401
        assert "staging" in answer.text
        assert browser.get("healthz").status_code == 200
        assert browser.get("jobs", params={"token": "wrong"}).status_code == 401
        entered = browser.get("jobs", params={"token": TOKEN})
        assert (entered.status_code, entered.headers["location"]) == (303, "/jobs")
        assert browser.get("jobs").status_code == 200
        token = token_of(browser.get("holds").text)
        assert browser.post("holds/end", data={"dlq_token": "x"}).status_code == 403
        assert browser.post("holds/end", data={"dlq_token": token}).status_code == 404
        _, code, said = server.end(signal.SIGTERM)
    assert code == 0
    assert "Refused POST /holds/end" in said
    assert TOKEN not in said


def test_others_get_in_with_the_address_that_is_printed(redis_url: str, tmp_path: Path) -> None:
    """Its token is a new one each time."""
    printed = set()
    for _ in range(2):
        with Server(tmp_path, redis_url, "--host", "0.0.0.0") as server:  # noqa: S104
            url = server.url.replace("0.0.0.0", "127.0.0.1")  # noqa: S104
            assert httpx.get(url.partition("?")[0]).status_code == 401
            with httpx.Client(follow_redirects=True) as browser:
                assert browser.get(url).status_code == 200
            printed.add(url.partition("?token=")[2])
    assert [len(token) > 40 for token in printed] == [True, True]


def test_a_proxy_names_the_user(redis_url: str, tmp_path: Path) -> None:
    """Below its path, over https, and only if it is the proxy that was named."""
    options = ("--trusted-header", "X-Forwarded-User", "--root-path", "/dlq")
    proxy = {"x-forwarded-user": "alice", "x-forwarded-proto": "https"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])  # what is said is the proxy's address
    with Server(
        tmp_path,
        redis_url,
        *options,
        "--allow-changes",
        "--trusted-proxy",
        "127.0.0.0/8",
        "--port",
        port,
        DLQ_WEB_URL="https://ops.example/dlq",
    ) as server:
        assert server.said.startswith("Serving dead letters at https://ops.example/dlq ")
        here = f"http://127.0.0.1:{port}"
        headers = {**proxy, "host": "ops.example"}
        for path in ("/dlq/events/poll", "/events/poll"):  # kept, removed
            assert httpx.get(here + path, headers=headers).status_code == 200
        assert httpx.get(f"{here}/events/poll").status_code == 401
        page = httpx.get(f"{here}/dlq/holds", headers=headers)
        assert 'data-root="/dlq"' in page.text
        assert "<span>alice</span>" in page.text
        assert "Path=/dlq;" in page.headers["set-cookie"]
        assert "; Secure" in page.headers["set-cookie"]
    with Server(tmp_path, redis_url, *options, "--trusted-proxy", "10.9.9.9") as server:
        refused = httpx.get(f"{server.url}events/poll", headers=proxy)
        assert refused.status_code == 403
        assert "trusted proxy" in refused.text


def test_nginx_with_the_lines_of_the_docs_serves_them_at_any_port(
    redis_url: str, tmp_path: Path
) -> None:
    """Over plain http, where browsers send the address of the page as Origin, with its port."""
    nginx = require(shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin"), "nginx")
    page = Path(__file__).parents[2] / "docs" / "how-to" / "web.md"
    lines = page.read_text().partition("```text\nlocation")[2].partition("```")[0]
    options = ("--root-path", "/dlq", "--token", TOKEN, "--trusted-proxy", "127.0.0.1")
    options = (*options, "--allow-changes")
    with Server(tmp_path, redis_url, *options) as server:
        port, upstream = _free_port(), f"127.0.0.1:{urlsplit(server.url).port}"
        conf = tmp_path / "nginx.conf"
        conf.write_text(
            f"daemon off; pid {tmp_path}/pid; error_log stderr; events {{}} http {{ access_log off;"
            f"server {{ listen 127.0.0.1:{port}; location"
            f"{lines.replace('127.0.0.1:9809', upstream)} }} }}"
        )
        proxy = subprocess.Popen([nginx, "-p", str(tmp_path), "-c", str(conf)])
        try:
            here = f"http://127.0.0.1:{port}"
            poll(lambda: _answers(f"{here}/dlq/healthz"), timeout_seconds=20)
            with httpx.Client(base_url=here, headers={"origin": here}) as browser:
                assert browser.get("/dlq/jobs").status_code == 401
                entered = browser.get(f"/dlq/jobs?token={TOKEN}")
                assert entered.headers["location"] == "/dlq/jobs"
                form = {"dlq_token": token_of(browser.get("/dlq/holds").text), "queue": "celery"}
                done = browser.post("/dlq/holds", data={**form, "confirmed": "yes"})
                assert done.status_code == 303, done.text
                assert done.headers["location"] == "/dlq/holds"
        finally:
            proxy.terminate()
            proxy.wait(10)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.ConnectError:
        return False


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--token", "short"], 1, "expected --token to be a text of at least 16 characters"),
        (["--secret", "short"], 1, "expected secret to be a text of at least 16 characters"),
        (["--url", "ops.example"], 1, "an address such as https://ops.example.com/dlq"),
        (["--host", "no.such.name.invalid"], 1, "expected --host to be an address"),
        (["--host", "localhost", "--port", "TAKEN"], 1, "to be free for the pages"),
        (["--trusted-header", "X-User"], 2, "--trusted-header needs --trusted-proxy"),
        (
            ["--trusted-header", "X-User", "--trusted-proxy", "proxy"],
            1,
            "expected addresses of proxies",
        ),
        (["--trusted-proxy", "proxy"], 1, "expected addresses of proxies"),
        (["--trusted-header", "X", "--token", "t"], 2, "not both"),
        (["--root-path", "dlq"], 2, "expected --root-path to begin with /"),
        (["--root-path", "/jobs/"], 2, "a name that no page has"),
        (["--root-path", "/queues/of/shop"], 2, "a name that no page has"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_served_is_one_clear_line(
    redis_url: str, options: list[str], code: int, said: str
) -> None:
    """At the start, not at the first request."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run(redis_url, "web", *[port if text == "TAKEN" else text for text in options])
    assert done.exit_code == code
    assert said in done.output
    assert "Traceback" not in done.output
    if code == 1:
        assert len(done.output.splitlines()) == 1


def run(url: str, *arguments: str) -> Result:
    """Run a command in this process."""
    context = SimpleNamespace(app=Celery("proj", broker=url), no_color=True)
    return CliRunner().invoke(dlq, arguments, obj=context)


def token_of(page: str) -> str:
    """The hidden token of a form."""
    found = re.search(r'name="dlq_token" value="([^"]+)"', page)
    assert found, page
    return found[1]


def test_idle_connections_neither_stop_the_server_nor_fill_its_log(
    redis_url: str, tmp_path: Path
) -> None:
    """More of them than the process may have files; whoever asks for a page gets it."""
    with Server(tmp_path, redis_url, PROJ_FILES="256") as server:
        address = urlsplit(server.url)
        idle = []
        try:
            for _ in range(600):
                idle.append(socket.create_connection((address.hostname, address.port), timeout=5))
                idle[-1].sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")  # and no more
            assert httpx.get(f"{server.url}healthz", timeout=10).text == "ok\n"
            assert httpx.get(server.url, timeout=10).status_code == 200
            files = Path(f"/proc/{server.process.pid}/fd")
            poll(lambda: len([*files.iterdir()]) < 60, timeout_seconds=40)  # all are closed
        finally:
            for one in idle:
                one.close()
        said = server.end(signal.SIGTERM)[2]
    assert len(said) < 10_000, said[:2000]


def test_a_page_does_not_wait_for_the_browser_to_acknowledge_its_head(
    redis_url: str, tmp_path: Path
) -> None:
    """With Nagle's algorithm, each small page over a kept connection took 40 ms more."""
    seconds = []
    with Server(tmp_path, redis_url) as server, httpx.Client(base_url=server.url) as browser:
        for _ in range(20):
            began = time.monotonic()
            assert browser.get("healthz").text == "ok\n"
            seconds.append(time.monotonic() - began)
    assert median(seconds) < 0.035
