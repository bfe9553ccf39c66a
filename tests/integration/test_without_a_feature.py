"""The delete test: without the folder of a feature, and its name in the list, the rest works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import celery_dlq
from celery_dlq.registry import FEATURES

PACKAGE = Path(celery_dlq.__file__).parent

SHOP = """
import os

from celery import Celery
from celery_dlq import DeadLetters, RejectToDLQ

app = Celery("shop", broker=os.environ["SHOP_REDIS"])
app.conf.update(dlq_queues={"*": {"max_deliveries": 3}}, task_default_queue="orders")
dlq = DeadLetters(app)


@app.task(name="shop.charge")
def charge(order_id):
    raise RejectToDLQ(f"no order {order_id}")
"""

MAIN = """
import atexit, json, os, pkgutil, signal, sys, time
from importlib import import_module
from pathlib import Path

import celery_dlq
from celery.bin.celery import celery
from click.testing import CliRunner

# A worker that is forked here need not load Celery again, and starts meanwhile.
worker = os.fork()
if not worker:
    log = os.open("worker.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    celery(["-A", "shop", "worker", "-P", "solo", "-Q", "orders"])
atexit.register(os.waitpid, worker, 0)
atexit.register(os.kill, worker, signal.SIGTERM)

EXTRAS = ("pyspark", "pyarrow", "starlette", "uvicorn", "sentry_sdk", "pytest")
for module in pkgutil.walk_packages(celery_dlq.__path__, "celery_dlq."):
    if not module.name.startswith("celery_dlq.web.django") and "__main__" not in module.name:
        try:
            import_module(module.name)
        except ImportError as exc:
            assert str(exc.name or "").partition(".")[0] in EXTRAS, (module.name, exc)

from shop import app, charge, dlq


def poll(done, seconds=30):
    deadline = time.monotonic() + seconds
    while not (found := done()):
        assert time.monotonic() < deadline, "nothing came"
        time.sleep(0.1)
    return found


def stored():
    return list(dlq.letters("orders-DLQ")) if dlq.queues() else []


def command(*arguments):
    typed = ["-A", "shop", "dlq", *arguments, "--json"]
    done = CliRunner().invoke(celery, typed, auto_envvar_prefix="CELERY")
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


def opened(**names):
    # A link to a page that is gone is an error.
    from celery_dlq.web.http import Call, Permission, Site, User
    from celery_dlq.web.site import all_routes

    user = User(name="ann", permissions=frozenset(Permission))
    site, found = Site(dlq, all_routes()), set()
    for route in site.routes.values():
        if route.method == "GET" and "{" not in route.link("", names):
            call = Call(site=site, parts=names, user=user, token_field="token", route=route)
            page = route.page(call)
            assert page.status == 200, route
            found.add(route.name)
    site.close()
    return found


charge.delay(7)
(letter,) = poll(stored)
assert (letter.reason.value, letter.description) == ("rejected", "no order 7")
(row,) = command("list", "orders-DLQ")
assert row["id"] == letter.id
assert command("queues")[0]["letters"] == 1

assert dlq.redrive("orders-DLQ").published == 1
(again,) = poll(stored)
assert (again.task_id, again.redrives) == (letter.task_id, 1)

(group,) = dlq.groups("orders-DLQ", state="open")
assert group.fingerprint == command("groups", "orders-DLQ")[0]["fingerprint"]
pages = opened(queue="orders-DLQ", fingerprint=group.fingerprint, letter=again.id)
assert {"overview", "groups", "group", "letters", "letter", "policies", "audit"} <= pages

command("export", "files", "--queue", "orders-DLQ")
assert len(list(Path("files").rglob("*.parquet"))) == 1
"""


def without(name: str, folder: Path) -> dict[str, str]:
    """Copy the package without a feature; the environment in which the copy is imported."""
    shutil.copytree(PACKAGE, folder / "celery_dlq")  # with what Python has compiled
    shutil.rmtree(folder / "celery_dlq" / "features" / name)
    registry = folder / "celery_dlq" / "registry.py"
    registry.write_text(registry.read_text("utf-8").replace(f'    "{name}",\n', "", 1), "utf-8")
    return {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "120"}


def run(env: dict[str, str], folder: Path, *arguments: str) -> None:
    """Run Python; its output is in the error of a failure."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    log = folder / "worker.log"
    text = log.read_text("utf-8")[-5000:] if log.exists() else ""
    assert done.returncode == 0, f"{done.stdout[-5000:]}\n{done.stderr[-5000:]}\n{text}"


@pytest.mark.parametrize("name", FEATURES)
def test_without_a_feature_the_rest_works(name: str, redis_url: str, tmp_path: Path) -> None:
    """A message is dead-lettered, listed, redriven and exported; all pages open."""
    env = without(name, tmp_path)
    (tmp_path / "shop.py").write_text(SHOP, "utf-8")
    run({**env, "SHOP_REDIS": redis_url}, tmp_path, "-c", MAIN)
