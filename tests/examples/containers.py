"""The containers that the examples for docker compose and Kubernetes describe."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml
from readme import EXAMPLES, commands

COMPOSE = EXAMPLES / "docker-compose" / "compose.yaml"
MANIFESTS = sorted((EXAMPLES / "kubernetes").glob("*.yaml"))


@dataclass(frozen=True)
class Container:
    """One container of our image.

    Attributes:
        place: File and name.
        command: What it runs.
        env: Its environment; a value from a Secret is the name of the Secret.
        mounts: Folders of volumes.
        probes: Commands of its health checks.
        grace_seconds: From SIGTERM to SIGKILL; ``None`` for the default.
    """

    place: str
    command: list[str]
    env: dict[str, str]
    mounts: list[str]
    probes: list[list[str]] = field(default_factory=list)
    grace_seconds: float | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Its settings of the environment."""
        found: dict[str, Any] = json.loads(self.env.get("CELERY_DLQ_SETTINGS", "{}"))
        return found


def containers() -> list[Container]:
    """All of both examples."""
    return [*_composed(), *_in_pods()]


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each object of the Kubernetes example, with its file's name."""
    for path in MANIFESTS:
        for document in yaml.safe_load_all(path.read_text("utf-8")):
            yield path.name, document


def commands_of_readmes() -> list[list[str]]:
    """The ``celery`` commands that the READMEs type inside of containers."""
    lines = [line for name in ("docker-compose", "kubernetes") for line in commands(name)]
    found = (re.search(r"(?<= )celery -A .*", line) for line in lines)
    return [shlex.split(match[0]) for match in found if match is not None]


def composed() -> dict[str, Any]:
    """The services of the compose file."""
    services: dict[str, Any] = yaml.safe_load(COMPOSE.read_text("utf-8"))["services"]
    return services


def _composed() -> Iterator[Container]:
    for name, service in composed().items():
        if "build" not in service:
            continue
        kind, *probe = service.get("healthcheck", {}).get("test", ["NONE"])
        probe = [part.replace("$$", "$") for part in probe]
        yield Container(
            f"compose.yaml {name}",
            service["command"],
            service["environment"],
            [volume.split(":")[1] for volume in service.get("volumes", [])],
            [["sh", "-c", *probe] if kind == "CMD-SHELL" else probe] if probe else [],
            _seconds(service.get("stop_grace_period")),
        )


def _seconds(text: str | None) -> float | None:
    return None if text is None else float(text.removesuffix("s"))


def _in_pods() -> Iterator[Container]:
    for file, document in documents():
        template = document["spec"].get("jobTemplate", document)["spec"].get("template")
        if template is None:
            continue
        pod = template["spec"]
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        claims = document["spec"].get("volumeClaimTemplates", [])
        volumes |= {claim["metadata"]["name"] for claim in claims}
        for container in pod["containers"]:
            mounts = container.get("volumeMounts", [])
            assert {mount["name"] for mount in mounts} == volumes, file
            probes = [container.get(f"{kind}Probe", {}) for kind in ("readiness", "liveness")]
            yield Container(
                f"{file} {container['name']}",
                container["command"],
                {item["name"]: _value(item) for item in container["env"]},
                [mount["mountPath"] for mount in mounts],
                [probe["exec"]["command"] for probe in probes if "exec" in probe],
                pod.get("terminationGracePeriodSeconds"),
            )


def _value(item: dict[str, Any]) -> str:
    return str(item.get("value") or item["valueFrom"]["secretKeyRef"]["name"])
