"""The examples for docker compose and Kubernetes: valid, and of one piece with our own commands."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from containers import (
    COMPOSE,
    MANIFESTS,
    Container,
    commands_of_readmes,
    composed,
    containers,
    documents,
)
from readme import EXAMPLES
from waiting import poll

from celery_dlq.config import Settings

APP = EXAMPLES / "docker-compose"
DOCKERFILE = APP / "Dockerfile"
CONTAINERS = containers()
WORKERS = [found for found in CONTAINERS if "worker" in found.command]
# What Celery itself reads.
# Source: https://github.com/celery/celery, celery/app/utils.py and celery/apps/worker.py
OF_CELERY = {"CELERY_BROKER_URL", "REMAP_SIGTERM"}

PARSE = """
import json, sys, click
from celery.bin.celery import celery
whole = click.Command.invoke
def invoke(self, ctx):
    return whole(self, ctx) if isinstance(self, click.Group) else ctx.command_path
click.Command.invoke = invoke
print(json.dumps([
    celery.main(command[1:], "celery", standalone_mode=False)
    for command in json.load(sys.stdin)
]))
"""
"""Parses commands as `celery` does, and does not carry them out."""


def each(found: list[Container]) -> pytest.MarkDecorator:
    """Run a test for each container."""
    return pytest.mark.parametrize("container", found, ids=lambda container: container.place)


def test_kubernetes_takes_the_manifests() -> None:
    """No misspelt field, by the schemas of an old and of a new Kubernetes."""
    schemas = pytest.importorskip("kubernetes_validate", reason="it has the schemas")
    assert len(list(documents())) > len(MANIFESTS) > 2
    for _, document in documents():
        for version in ("1.29", schemas.latest_version()):
            schemas.validate(document, version, strict=True)


def test_compose_takes_its_file() -> None:
    """No misspelt field, by the schema of the Compose Specification."""
    pytest.importorskip("check_jsonschema", reason="it has the schema")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "check_jsonschema",
            "--builtin-schema",
            "vendor.compose-spec",
            COMPOSE,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_command_is_one_of_ours() -> None:
    """Commands of containers, of the image and of the READMEs are parsed as they stand."""
    image = json.loads(re.findall(r"^CMD (.*)", DOCKERFILE.read_text("utf-8"), re.MULTILINE)[-1])
    typed = [container.command for container in CONTAINERS] + commands_of_readmes() + [image]
    done = subprocess.run(
        [sys.executable, "-c", PARSE],
        input=json.dumps(typed),
        cwd=APP,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {command[0] for command in typed} == {"celery"}
    assert {"celery worker", "celery dlq exporter", "celery dlq export", "celery dlq queues"} < set(
        json.loads(done.stdout)
    )
    assert image == WORKERS[0].command


@each(CONTAINERS)
def test_every_variable_is_read_by_somebody(
    container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Celery, by the app or by us; and our settings are taken."""
    app = (APP / "shop.py").read_text("utf-8")
    for name, value in container.env.items():
        assert name in OF_CELERY | {"CELERY_DLQ_SETTINGS"} or f'"{name}"' in app, name
        monkeypatch.setenv(name, value)
    Settings.from_conf({})


@each(CONTAINERS)
def test_what_must_outlive_a_container_is_on_a_volume(container: Container) -> None:
    """The spool and the Parquet files; the image's user may write there."""
    kept = [container.settings["dlq_spool_dir"]] if container in WORKERS else []
    kept += container.command[-1:] if "export" in container.command else []
    assert container.mounts == kept
    [made] = re.findall(r"install --directory .*", DOCKERFILE.read_text("utf-8"))
    assert set(container.mounts) <= set(made.split())


@each(WORKERS)
def test_a_worker_has_time_to_end_and_is_looked_after(container: Container) -> None:
    """The grace period is longer than the soft shutdown and the cold one after it."""
    assert container.env["REMAP_SIGTERM"] == "SIGQUIT"
    assert container.grace_seconds is not None
    assert container.grace_seconds >= float(container.env["SOFT_SHUTDOWN_SECONDS"]) + 20
    assert container.probes


def test_the_image_is_of_known_instructions_and_not_root() -> None:
    """As far as that can be seen without building it."""
    text = re.sub(r"#.*\n|\\\n", "", DOCKERFILE.read_text("utf-8"))
    instructions = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    assert instructions[0][0] == "FROM"
    assert {name for name, _ in instructions} <= {"FROM", "RUN", "WORKDIR", "COPY", "USER", "CMD"}
    builds = {one["build"]["context"] for one in composed().values() if "build" in one}
    assert builds == {"../.."}, "it is built from the repository, which has the package"
    context = APP / "../.."
    for name, rest in instructions:
        if name == "COPY":
            assert all((context / source).exists() for source in rest.split()[:-1]), rest
    [user] = [rest for name, rest in instructions if name == "USER"]
    assert f"--uid {user} " in text
    pods = [path.read_text("utf-8") for path in MANIFESTS]
    assert all(f"runAsUser: {user}" in pod for pod in pods)


@each(WORKERS)
def test_a_worker_runs_as_it_is_described(
    container: Container, redis_url: str, tmp_path: Path
) -> None:
    """Probes fail before it consumes and pass then; SIGTERM gives its task back, uncharged."""
    env = {
        **{name: value for name, value in container.env.items() if name != "CELERY_DLQ_SETTINGS"},
        "PATH": "/usr/bin:/bin",
        "CELERY_BROKER_URL": redis_url,
        "ALIVE_FILE": str(tmp_path / "alive"),
        "SOFT_SHUTDOWN_SECONDS": "1",
    }

    def healthy() -> bool:
        return all(
            subprocess.run(probe, env=env, check=False).returncode == 0
            for probe in container.probes
        )

    assert not healthy()
    log = tmp_path / "log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [sys.executable, "-m", *container.command],
            cwd=APP,
            env=env,
            stdout=output,
            stderr=output,
        ) as worker,
    ):
        try:
            poll(healthy, timeout_seconds=30, every_seconds=0.2)
            publish = "import shop; shop.render.delay(600)"
            subprocess.run([sys.executable, "-c", publish], cwd=APP, env=env, check=True)
            with redis.Redis.from_url(redis_url) as client:
                poll(lambda: b"received" in log.read_bytes())
                poll(lambda: client.keys("dlq:{orders-DLQ}:run:*"))
                worker.send_signal(signal.SIGTERM)
                worker.wait(20)
                assert client.llen("orders") == 1, log.read_text("utf-8")
                [run] = client.keys("dlq:{orders-DLQ}:run:*")
                assert b"shutdown" in b"".join(client.hvals(run)), client.hgetall(run)
        finally:
            worker.kill()
