"""Build the sdist and the wheel, look into them, and use each extra alone: ``tox -e package``.

``python tests/programs/packaging/check.py core parquet`` tries only these. It needs redis-server.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tests/examples"))

from readme import EXAMPLES, run_readme  # noqa: E402 - found by the line above

ENTRY_POINTS = (
    "celery_dlq = celery_dlq.testing.plugin",
    "celery-dlq = celery_dlq.__main__:main",
    "dlq = celery_dlq.cli.commands:dlq",
)
METADATA = (
    "License-Expression: Apache-2.0",
    "License-File: LICENSE",
    "Requires-Dist: celery<5.8,>=5.4",
    "Requires-Dist: kombu>=5.4",
    "Requires-Dist: packaging>=21",
    "Requires-Dist: redis[hiredis]",
)
# As GitHub names the repository to its runners; the links of the README lead there.
REPOSITORY = {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "owner/name"}
RELATIVE_LINK = re.compile(r"\]\((?!https?:|#)[^)]*\)")
# What an extra has to bring; everything else may be missing, and nothing but these.
BRINGS = {
    "core": set(),
    "parquet": {"pyarrow"},
    "sentry": {"sentry_sdk"},
    "prometheus": {"prometheus_client"},
    "spark": {"pyarrow", "pyspark", "matplotlib", "jinja2"},
    "demo": {
        *("pyarrow", "pyspark", "matplotlib", "jinja2"),
        *("starlette", "uvicorn", "itsdangerous"),
    },
    "web": {"starlette", "uvicorn", "jinja2", "itsdangerous"},
    "django": {"django", "jinja2", "itsdangerous"},
}
OPTIONAL = {"pyarrow", "sentry_sdk", "prometheus_client", "pyspark", "matplotlib", "pytest"}
OPTIONAL |= {"starlette", "uvicorn", "jinja2", "markupsafe", "itsdangerous", "anyio"}
OPTIONAL |= {"django"}
OPTIONAL |= {"botocore"}  # comes with kombu[sqs], without which no app has that broker

IMPORT_ALL = """
import importlib, pkgutil, celery_dlq
from celery_dlq.errors import MissingExtra
missing = set()
for module in pkgutil.walk_packages(celery_dlq.__path__, "celery_dlq.", onerror=lambda _: None):
    if module.name.endswith((".__main__", "django.models", "django.admin")):
        continue  # Django's need a project; USE has one
    try:
        importlib.import_module(module.name)
    except MissingExtra as exc:
        missing.add(exc.package)
    except ModuleNotFoundError as exc:
        missing.add(exc.name.partition(".")[0])
print(*sorted(missing))
"""

# pip's own parser: nothing is installed beside what is looked at.
MORE_THAN_NEEDED = """
from importlib.metadata import distributions, requires
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name
ours = ("celery", "kombu", "packaging", "redis[hiredis]", "hiredis", "rich")
needed, todo = set(), [Requirement(text) for text in ours]
while todo:
    requirement = todo.pop()
    needed.add(canonicalize_name(requirement.name))
    for text in requires(requirement.name) or ():
        found = Requirement(text)
        for extra in requirement.extras or {""}:
            wanted = found.marker is None or found.marker.evaluate({"extra": extra})
            if wanted and canonicalize_name(found.name) not in needed:
                todo.append(found)
installed = {canonicalize_name(found.metadata["Name"]) for found in distributions()}
print(*sorted(installed - needed - {"pip", "setuptools", "celery-dlq"}))
"""


DJANGO_PAGE = """
import os, re
os.environ["DJANGO_SETTINGS_MODULE"] = "proj.settings"
import django
django.setup()
from django.contrib.auth.models import User
from django.test import Client
client = Client(headers={"host": "localhost"})
client.force_login(User.objects.create_superuser("root"))
page = client.get("/admin/celery_dlq/deadletters/").content.decode()
for path in re.findall(r'(?:href|src)="(/[^"]+/static/[^"]+)"', page):
    assert client.get(path).status_code == 200, path
print(page)
"""


def main(chosen: list[str]) -> None:
    """Check what was chosen, or everything."""
    unknown = set(chosen) - set(BRINGS)
    if unknown:
        raise SystemExit(f"expected some of {', '.join(BRINGS)}, got {', '.join(unknown)}")
    with tempfile.TemporaryDirectory(prefix="celery-dlq-package-") as name:
        folder = Path(name)
        wheel = check_built(folder)
        with redis_server(folder) as url:
            for extra in chosen or BRINGS:
                began = time.monotonic()
                check_extra(extra, wheel, folder, url)
                print(f"{extra}: all is well ({time.monotonic() - began:.0f} s)", flush=True)


def check_built(folder: Path) -> Path:
    """Build from a clean copy, check both files; give the wheel."""
    source = folder / "source"
    ignored = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignored)
    dist = folder / "dist"
    run(sys.executable, "-m", "build", "--outdir", str(dist), str(source), **REPOSITORY)
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
    package = {
        path.relative_to(source).as_posix()
        for path in (source / "celery_dlq").rglob("*")
        if path.is_file()
    }
    expect(any(name.endswith(".lua") for name in package), "Lua files in the sources")
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if not name.endswith("/")}
        same("the wheel", package, {n for n in names if ".dist-info/" not in n})
        (points,) = (n for n in names if n.endswith(".dist-info/entry_points.txt"))
        written = opened.read(points).decode().splitlines()
        expect(set(ENTRY_POINTS) <= set(written), f"entry points {ENTRY_POINTS}, got {written}")
        expect(any("LICENSE" in n for n in names), "the LICENSE in the wheel")
        (metadata,) = (n for n in names if n.endswith(".dist-info/METADATA"))
        lines = opened.read(metadata).decode().splitlines()
        for line in METADATA:
            expect(any(got.startswith(line) for got in lines), f"{line!r} in the metadata")
        relative = [found for line in lines for found in RELATIVE_LINK.findall(line)]
        expect(not relative, f"links of a package page to have an address, got {relative}")
    with tarfile.open(sdist) as opened:
        inside = {
            member.name.partition("/")[2] for member in opened.getmembers() if member.isfile()
        }
    same("the sdist", package, {name for name in inside if name.startswith("celery_dlq/")})
    expect({"README.md", "LICENSE", "setup.py"} <= inside, "README, LICENSE and setup.py in sdist")
    tests = [name for name in inside if name.startswith("tests/")]
    expect(not tests, f"nothing from tests/ in the sdist, got {tests[:3]}")
    print(f"built: {wheel.name} and {sdist.name}, {len(package)} files of the package")
    return wheel


def check_extra(extra: str, wheel: Path, folder: Path, url: str) -> None:
    """Install it alone into an empty environment and use it."""
    place = folder / f"venv-{extra}"
    run(sys.executable, "-m", "venv", str(place))
    python = place / "bin/python"
    wanted = str(wheel) if extra == "core" else f"{wheel}[{extra}]"
    run(str(python), "-m", "pip", "install", "-q", wanted)
    missing = set(run(str(python), "-c", IMPORT_ALL, cwd=folder).split())
    expect(missing <= OPTIONAL, f"only optional packages to be missing, got {missing - OPTIONAL}")
    absent = missing & BRINGS[extra]
    expect(not absent, f"{extra} to bring {BRINGS[extra]}, got none of {absent}")
    USE[extra](python, folder, url)
    if extra != "core":
        shutil.rmtree(place)


def use_core(python: Path, folder: Path, url: str) -> None:
    """Nothing more than it needs; a worker, a death, tables, a redrive; one clear line."""
    more = run(str(python), "-c", MORE_THAN_NEEDED, cwd=folder).split()
    expect(not more, f"celery, kombu, redis, rich and what they need, got {more} too")
    said = run_readme("minimal", folder, bin_folder=python.parent, SHOP_REDIS=url)
    expect("7 tasks: 3 succeeded, 4 died" in said, f"four deaths, got {said}")
    expect("3 of 3" in said and "────" in said, f"tables, got {said}")
    failed = subprocess.run(
        [python.parent / "celery", "-A", "shop", "dlq", "export", "letters"],
        cwd=folder / "minimal",
        env={"SHOP_REDIS": url},
        capture_output=True,
        text=True,
        check=False,
    )
    clear = "pip install 'celery_dlq[parquet]'" in failed.stderr
    expect(failed.returncode == 1 and clear, f"one clear line, got {failed.stderr}")
    expect("Traceback" not in failed.stderr, f"no traceback, got {failed.stderr}")


def use_parquet(python: Path, folder: Path, url: str) -> None:
    """Letters become files."""
    said = dlq(python, folder, url, "export", str(folder / "letters"))
    expect("Exported 2 letters" in said, f"two letters to be exported, got {said}")


def use_spark(python: Path, folder: Path, url: str) -> None:
    """The triage of what was exported."""
    if not (folder / "letters").exists():
        use_parquet(python, folder, url)
    said = dlq(python, folder, url, "triage", str(folder / "letters"))
    expect("Causes: what fails" in said, f"a triage, got {said}")


def use_sentry(python: Path, folder: Path, url: str) -> None:
    """The reporter finds the client of an initialised Sentry."""
    code = (
        "import sentry_sdk; sentry_sdk.init('http://key@127.0.0.1:1/1'); "
        "from celery_dlq.features.sentry.observer import sentry_client; "
        "assert client() is not None"
    )
    run(str(python), "-c", code, cwd=folder)


def use_prometheus(python: Path, folder: Path, url: str) -> None:
    """The exporter answers a scrape."""
    port = free_port()
    process = subprocess.Popen(
        [python.parent / "celery", "-A", "shop", "dlq", "exporter", "--port", str(port)],
        cwd=EXAMPLES / "minimal",
        env={"SHOP_REDIS": url},
    )
    try:
        wait_for_port(port)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            expect(b"celery_dlq_up 1.0" in answer.read(), "celery_dlq_up 1.0")
    finally:
        process.terminate()
        process.wait(30)


def use_web(python: Path, folder: Path, url: str) -> None:
    """The pages have their templates and files."""
    port = free_port()
    process = subprocess.Popen(
        [python.parent / "celery", "-A", "shop", "dlq", "web", "--port", str(port)],
        cwd=EXAMPLES / "minimal",
        env={"SHOP_REDIS": url},
    )
    try:
        wait_for_port(port)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as answer:
            page = answer.read().decode()
        expect("Dead-letter queues" in page, f"the first page, got {page}")
        for path in re.findall(r'(?:href|src)="(/static/[^"]+)"', page):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
                expect(answer.read(), f"the file {path}")
    finally:
        process.terminate()
        process.wait(30)


def use_django(python: Path, folder: Path, url: str) -> None:
    """The example's project serves the pages' files below its admin, and makes the permissions."""
    place = folder / "django"
    shutil.copytree(EXAMPLES / "django", place, ignore=shutil.ignore_patterns("__pycache__"))
    run(str(python), "manage.py", "check", "--fail-level", "WARNING", cwd=place)
    said = run(str(python), "manage.py", "migrate", cwd=place)
    expect("Applying celery_dlq.0001_initial" in said, f"our migration, got {said}")
    said = run(str(python), "-c", DJANGO_PAGE, cwd=place, SHOP_REDIS=url)
    expect("Dead-letter queues" in said, f"the first page, got {said}")


def use_demo(python: Path, folder: Path, _url: str) -> None:
    """The README's first command."""
    run(str(python.parent / "celery-dlq"), "demo", "--folder", str(folder / "demo"), cwd=folder)


USE: dict[str, Callable[[Path, Path, str], None]] = {
    "core": use_core,
    "parquet": use_parquet,
    "sentry": use_sentry,
    "prometheus": use_prometheus,
    "web": use_web,
    "django": use_django,
    "spark": use_spark,
    "demo": use_demo,
}


def dlq(python: Path, folder: Path, url: str, *arguments: str) -> str:
    """Run ``celery -A shop dlq …`` with the minimal example's letters, making them if need be."""
    if not (folder / "minimal").exists():
        run_readme("minimal", folder, bin_folder=python.parent, SHOP_REDIS=url)
    celery = str(python.parent / "celery")
    return run(celery, "-A", "shop", "dlq", *arguments, cwd=folder / "minimal", SHOP_REDIS=url)


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """A server of our own."""
    port = free_port()
    process = subprocess.Popen(
        [
            "redis-server",
            "--port",
            str(port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--dir",
            str(folder),
        ],
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_for_port(port)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait(30)


def run(*command: str, cwd: Path | None = None, **env: str) -> str:
    """Run a command; its output, or an error with all that it printed."""
    env = {**os.environ, "COLUMNS": "80", "PYTHONIOENCODING": "utf-8", **env}
    env.pop("PYTHONPATH", None)
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, encoding="utf-8", check=False
    )
    expect(done.returncode == 0, f"{' '.join(command)} to succeed, got {done.stdout}{done.stderr}")
    return done.stdout


def same(where: str, expected: set[str], got: set[str]) -> None:
    """Two sets of names are equal."""
    absent, more = sorted(expected - got), sorted(got - expected)
    expect(not absent and not more, f"{where} to hold the package, got {absent=} {more=}")


def expect(condition: object, what: str) -> None:
    """It is so, or the check ends."""
    if not condition:
        raise SystemExit(f"expected {what}")


def free_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int) -> None:
    """Until somebody listens there."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise SystemExit(f"expected somebody to listen on port {port} within 30 s")


if __name__ == "__main__":
    main(sys.argv[1:])
