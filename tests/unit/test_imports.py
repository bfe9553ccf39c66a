"""Import laziness: what a Spark executor and every ``celery`` command pay for."""

from __future__ import annotations

import subprocess
import sys

import house
import pytest

_REPORT = """
import sys
before = set(sys.modules)
import {modules}
roots = {{name.partition(".")[0] for name in set(sys.modules) - before}}
foreign = roots - set(sys.stdlib_module_names) - {{"celery_dlq"}}
print(",".join(sorted(foreign)))
"""


@pytest.mark.parametrize(
    "modules",
    [
        "celery_dlq",
        "celery_dlq.letters.record, celery_dlq.policies.policy, celery_dlq.letters.filters",
        "celery_dlq.policies.decisions, celery_dlq.store.records",
        "celery_dlq.events, celery_dlq.store.metrics, celery_dlq.letters.filters",
        "celery_dlq.errors, celery_dlq.letters.headers",
        "celery_dlq.letters.json_codec, celery_dlq.letters.fingerprint",
    ],
)
def test_nothing_of_others_is_imported(modules: str) -> None:
    """The package and its pure core import on machines without Celery, Redis and Arrow."""
    done = subprocess.run(
        [sys.executable, "-c", _REPORT.format(modules=modules)],
        capture_output=True,
        text=True,
        check=True,
        encoding="utf-8",
    )
    assert done.stdout.strip() == ""


def test_the_package_alone_imports_none_of_its_modules() -> None:
    """Every ``celery`` command imports the package; it must cost nothing."""
    code = "import sys, celery_dlq; print([m for m in sys.modules if m.startswith('celery_dlq.')])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, encoding="utf-8"
    )
    assert done.stdout.strip() == "[]"


def test_every_celery_command_imports_only_the_names_of_ours() -> None:
    """Celery imports the group for each of its own commands, also for a worker's start."""
    code = (
        "import sys, click; before = set(sys.modules); import celery_dlq.cli.commands\n"
        "print(sorted(n for n in set(sys.modules) - before if n.startswith('celery_dlq.')))\n"
        "print([n for n in ('celery', 'kombu', 'redis', 'rich') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, encoding="utf-8"
    )
    ours, others = done.stdout.splitlines()
    assert ours == str(
        [
            "celery_dlq.cli",
            "celery_dlq.cli.commands",
            "celery_dlq.errors",
            "celery_dlq.letters",
            "celery_dlq.letters.printable",
            "celery_dlq.registry",
        ]
    )
    assert others == "[]"


def test_publishers_load_nothing_that_only_workers_need() -> None:
    """Every web process imports the plugin and publishes; it redrives and adopts nothing."""
    code = (
        "import sys, celery_dlq.plugin\n"
        "from celery import Celery\n"
        "app = Celery('shop', broker='memory://', set_as_current=False)\n"
        "app.conf.dlq_url = 'redis://localhost:1/0'\n"
        "app.conf.dlq_queues = {'*': {'max_deliveries': 3}}\n"
        "celery_dlq.plugin.DeadLetters(app)\n"
        "app.send_task('shop.charge')\n"
        "rooms = ('celery_dlq.worker', 'celery_dlq.operations', 'celery_dlq.features.adopt.',\n"
        "    'celery_dlq.transport.redis', 'redis')\n"
        "print([m for m in sys.modules if m.startswith(rooms)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, encoding="utf-8"
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("features", [False, True], ids=["no feature", "every feature"])
def test_a_worker_loads_what_it_needs_and_the_rest_when_that_is_due(*, features: bool) -> None:
    """What can break a task is small: no operation, and nothing of another broker or pool."""
    names = [str(path) for path in house.loaded(features=features)[1]]
    late = (
        "celery_dlq/operating",
        "operations/job",
        "operations/edit",
        "operations/redrive",
        "operations/release",
        "store/jobs",
        "store/letters",
        "store/overviews",
        "store/claims",
        "store/giving",
        "operations/broker_limits",
        "transport/amqp",
        "worker/in_process",
        "circuit_breaker/circuits",
        "exchange/deliveries",
        "operations/retention.",
    )
    assert any(name.endswith("worker/guard.py") for name in names)
    assert [name for name in names if any(room in name for room in late)] == []


def test_a_worker_without_sentry_and_prometheus_loads_neither() -> None:
    """An app pays nothing for what it does not use: the reporter never imports."""
    code = (
        "import sys, celery_dlq.plugin, celery_dlq.features.prometheus.exporter\n"
        "from celery_dlq.features.sentry.observer import sentry_client\n"
        "assert sentry_client() is None\n"
        "print([m for m in ('sentry_sdk', 'prometheus_client') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, encoding="utf-8"
    )
    assert done.stdout.strip() == "[]"


def test_letters_in_redis_are_read_without_celery_and_kombu() -> None:
    """Spark executors have redis-py and pyarrow; nothing on their way may ask for more."""
    code = (
        "import sys\n"
        "for name in ('celery', 'kombu', 'click', 'billiard', 'vine'):\n"
        "    sys.modules[name] = None\n"
        "from celery_dlq.spark.live import LiveLetters\n"
        "from celery_dlq.spark.options import ReadOptions\n"
        "assert not {'redis', 'pyarrow'} & set(sys.modules)\n"
        "LiveLetters(ReadOptions(url='redis://127.0.0.1:1/0')).__exit__()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_workers_and_commands_need_only_the_core() -> None:
    """The packages of extras are missing in a worker's image; nothing may need them at import."""
    code = (
        "import sys\n"
        "for name in ('pyarrow', 'pyspark', 'sentry_sdk', 'prometheus_client'):\n"
        "    sys.modules[name] = None\n"
        "import celery_dlq.plugin, celery_dlq.worker.bootsteps\n"
        "import celery_dlq.operations\n"
        "from celery_dlq.cli.commands import dlq\n"
        "assert all(dlq.get_command(None, name) for name in dlq.list_commands(None))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_first_page_of_a_server_imports_nothing() -> None:
    """What the overview imports is imported before the server listens: 0.1 s of the first one."""
    code = (
        "import sys\n"
        "from celery import Celery\n"
        "from celery_dlq import DeadLetters\n"
        "from celery_dlq.store.embedded import embedded\n"
        "from celery_dlq.web.http import Call, Site, User\n"
        "from celery_dlq.web.site import all_routes\n"
        "site = Site(DeadLetters(Celery(broker=embedded())), all_routes())\n"
        "site.prepare()\n"
        "before = set(sys.modules)\n"
        "route = site.routes['overview']\n"
        "assert route.page(Call(site=site, user=User(), route=route)).status == 200\n"
        "print(sorted(set(sys.modules) - before))\n"
        "site.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, encoding="utf-8"
    )
    assert done.stdout.strip() == "[]"
