"""Every code block of the README and of docs/ does what its page says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from importlib.util import find_spec
from pathlib import Path

import pytest
from builders import a_letter, a_request, key_of
from exempt import EXEMPT, why_exempt
from fenced import PAGES, ROOT, Block, blocks, page_name
from java import QUICK_JAVA
from page_runner import PageRunner, lend_shop, own_shop
from s3 import s3_server, url_of
from servers import require
from tiers import DEFAULT_TIER, in_default_tier

from celery_dlq import Reason
from celery_dlq.store.store import Store

SHOWN = {"text"}
"""Languages that nothing can be done with."""
IN_OWN_PROCESS = {"docs/how-to/triage.md"}
"""Pages whose Python starts Java, once for that and for their ``dlq triage``."""
WITH_WORKER = {"docs/how-to/outage.md"}
"""Pages that need a worker and do not say so."""
TRIAGE = " dlq triage "
OF_EXTRA_LAKE = {"deltalake", "pyiceberg"}
"""Packages that only CI has: elsewhere the blocks that import them are left out."""
WITH_RABBITMQ = {"docs/how-to/rabbitmq.md"}
WITH_SQS = {"docs/how-to/sqs.md"}
WITH_S3 = {"docs/how-to/after-a-month.md"}

CODE: dict[str, list[Block]] = {}
for _page in PAGES:
    if _found := [*blocks(_page)]:
        CODE[page_name(_page)] = _found


@pytest.fixture
def places(request: pytest.FixtureRequest, redis_url: str) -> dict[str, str]:
    """Replacements of the addresses that pages name."""
    redis = redis_url.rpartition("/")[0]
    found = {"redis://localhost:6379": redis, "DOCS_REDIS": redis}
    if request.node.callspec.params["page"] in WITH_RABBITMQ:
        server = request.getfixturevalue("rabbit_server")
        server.delete_queues("orders", "orders.dead", "mails")
        found["amqp://guest:guest@localhost:5672//"] = server.url
    if request.node.callspec.params["page"] in WITH_SQS:
        sqs = request.getfixturevalue("sqs_server")
        sqs.queue("orders-dead")
        found["sqs://"] = sqs.url
    if request.node.callspec.params["page"] in WITH_S3:
        found["s3://shop-lake/letters"] = url_of(request.getfixturevalue("s3"), "shop-lake/letters")
    return found


@pytest.fixture
def s3() -> Iterator[str]:
    """Give the address of an S3 server."""
    with s3_server() as address:
        yield address


@pytest.fixture
def run_page(tmp_path: Path, places: dict[str, str]) -> Iterator[Callable[[str], None]]:
    """Give a function that runs a page."""

    def exempt(page: str, command: str) -> str | None:
        later = page in IN_OWN_PROCESS and TRIAGE in command
        return "run_as_script has it" if later else why_exempt(page, command)

    runner = PageRunner(tmp_path, places, exempt)
    left_out: list[str] = []

    def run(page: str) -> None:
        if not own_shop(CODE[page]):
            leave_letters(places["DOCS_REDIS"])
            lend_shop(runner)
        if page in WITH_WORKER:
            runner.worker("celery -A shop worker --queues orders --loglevel INFO")
        for block in CODE[page]:
            if block.language not in SHOWN and not (
                page in IN_OWN_PROCESS and block.language == "python"
            ):
                if lacking := imported(block) & OF_EXTRA_LAKE - {*filter(find_spec, OF_EXTRA_LAKE)}:
                    left_out.append(f"{block.place} ({', '.join(sorted(lacking))})")
                else:
                    runner.run_block(block)
        if left_out:
            require(None, f"pip install -e '.[lake]' for {' and '.join(left_out)}")
        if page in IN_OWN_PROCESS:
            run_as_script(CODE[page], tmp_path, places)

    yield run
    runner.close()


def imported(block: Block) -> set[str]:
    """The packages that a block of Python imports."""
    return {*re.findall(r"^(?:from|import) (\w+)", block.text, re.MULTILINE)}


def leave_letters(redis: str) -> None:
    """Three orders that failed for one cause, one that was rejected, and one killer of workers.

    The third order is tenant 42's.
    """
    url = f"{redis}/0"
    store = Store(url, timeout_seconds=2.0).letters
    now = datetime.now(timezone.utc)
    one, other, third = "c6a56e9b25a57fc5", "0e4da6e8d1c9b370", "5a7d1c33f0e2b846"
    made = (
        ("1f0c9a40-0000-5000-8000-000000000001", "shop.charge", Reason.FAILED, one),
        ("1f0ceb41-0000-5000-8000-000000000002", "shop.charge", Reason.FAILED, one),
        ("7d3e1b20-0000-5000-8000-000000000003", "shop.charge", Reason.FAILED, one),
        ("9b2f0c11-0000-5000-8000-000000000004", "shop.charge", Reason.REJECTED, other),
        ("c44e7a90-0000-5000-8000-000000000005", "shop.render", Reason.WORKER_LOST, third),
    )
    for number, (letter_id, task, reason, fingerprint) in enumerate(made):
        task_id = f"order-{number + 1}"
        kwargs = {"tenant": 42} if number == 2 else {}
        letter = a_letter(
            id=letter_id,
            task_id=task_id,
            task_name=task,
            reason=reason,
            fingerprint=fingerprint,
            dead_lettered_at=now - timedelta(minutes=5 - number),
            deliveries=3,
            max_deliveries=3,
            headers=json.dumps(a_request(id=task_id, root_id=task_id, task=task)),
            body=json.dumps([[number + 1], kwargs, {"callbacks": None}]).encode(),
            args_json=json.dumps([number + 1]),
            kwargs_json=json.dumps(kwargs),
            release="2026.3",
        )
        store.dead_letter(letter, key_of(letter))
    store.close()


_TYPED = """
import shlex

from celery.bin.celery import celery
from click.testing import CliRunner
from celery_dlq.spark.session import local_session

kept = local_session()


def typed(command, shown):
    done = CliRunner().invoke(celery, shlex.split(command)[1:], auto_envvar_prefix="CELERY")
    assert done.exit_code == 0, done.output
    assert shown in done.output, done.output


"""


def run_as_script(page_blocks: list[Block], folder: Path, places: dict[str, str]) -> None:
    """All Python of a page, and its commands that start Spark, in a process of its own."""
    code = _TYPED
    for block in page_blocks:
        if block.language == "python":
            code += block.text
        elif block.language == "console":
            code += "".join(
                f"typed({command!r}, {shown[0]!r})\n"
                for command, shown in block.commands
                if TRIAGE in command
            )
    for here, there in places.items():
        code = code.replace(here, there)
    (folder / "page.py").write_text(code, "utf-8")
    done = subprocess.run(
        [sys.executable, "page.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **QUICK_JAVA, "DOCS_REDIS": places["DOCS_REDIS"]},
        check=False,
    )
    assert done.returncode == 0, f"{page_blocks[0].page}: {done.stderr[-3000:]}"


@pytest.mark.parametrize("page", CODE)
def test_every_block_of_a_page_does_what_the_page_says(
    page: str, run_page: Callable[[str], None], request: pytest.FixtureRequest
) -> None:
    """In the reader's order, in a folder of its own, against real servers."""
    if page in IN_OWN_PROCESS and sys.version_info < (3, 11):
        pytest.skip("PySpark needs Python 3.11 or later")
    run_page(page)


def test_exemptions_are_needed() -> None:
    """One that nothing uses any more hides what is written later."""
    commands = [
        (page, command)
        for page, found in CODE.items()
        for block in found
        if block.language == "console"
        for command, _ in block.commands
    ]
    for pages, beginning, reason in EXEMPT:
        used = [c for p, c in commands if re.fullmatch(pages, p) and re.match(beginning, c)]
        assert used, f"nothing is exempt by {beginning!r} of {pages!r}"
        assert reason


GUARANTEES = (ROOT / "docs/guarantees.md").read_text("utf-8")
WHICH = (ROOT / "docs/which-guarantee.md").read_text("utf-8")


def named_tests(text: str) -> list[str]:
    """Ids of the tests that a text names; a file alone stands for all of its tests."""
    ids = []
    for file, function in re.findall(r"(test_\w+\.py)(?:::(test_\w+))?", text):
        (path,) = ROOT.joinpath("tests").rglob(file)
        assert not function or f"def {function}(" in path.read_text("utf-8"), (file, function)
        ids.append("::".join(filter(None, (page_name(path), function))))
    return ids


def test_the_tests_that_are_named_exist() -> None:
    """A guarantee whose proof was renamed is a claim."""
    assert named_tests(GUARANTEES)
    assert named_tests((ROOT / "docs/explanation/waits.md").read_text("utf-8"))


def test_each_cell_of_which_guarantee_links_to_its_test() -> None:
    """The letter's row names a test of the file that the link leads to."""
    proofs = dict(re.findall(r"^\| ([A-Z]) \| (.*?) \|", WHICH, flags=re.MULTILINE))
    links = re.findall(r"\[([A-Z])\]\(\.\./([^)]*)\)", WHICH)
    assert {letter for letter, _ in links} == set(proofs)
    for letter, file in links:
        assert file in [name.partition("::")[0] for name in named_tests(proofs[letter])] or (
            file == "tests/programs/chaos/README.md" and "chaos.run" in proofs[letter]
        ), (letter, file)


@pytest.mark.parametrize("row", [x for x in GUARANTEES.splitlines() if x.startswith("| **")])
def test_each_guarantee_is_proven_in_the_default_tier(row: str) -> None:
    """By one of its tests at least, or by one of its parameters."""
    ids = named_tests(row)
    some = any(entry.startswith(name) for entry in DEFAULT_TIER for name in ids)
    assert some or any(map(in_default_tier, ids))


def test_links_between_files_lead_somewhere() -> None:
    """On GitHub as on the site."""
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            if "://" not in target:
                assert (page.parent / target).exists(), (page_name(page), target)


def test_files_that_pages_name_exist() -> None:
    """In backquotes, from the top, or from the package; others are of Celery and the like."""
    package = ROOT / "celery_dlq"
    rooms = {path.name for path in package.iterdir() if path.is_dir()}
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for name in re.findall(r"`([\w.]+/[\w./]+\.(?:py|lua))`", page.read_text("utf-8")):
            first = name.partition("/")[0]
            if first in {"celery_dlq", "tests", "examples"}:
                assert (ROOT / name).exists(), (page_name(page), name)
            elif first in rooms:
                assert (package / name).exists(), (page_name(page), name)
