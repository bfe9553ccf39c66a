"""The public surface as text: it is compared with the files in ``snapshots``."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator
from enum import Enum
from importlib import import_module
from types import ModuleType
from typing import Any

import click

import celery_dlq
from celery_dlq import registry
from celery_dlq.config import Settings
from celery_dlq.letters import headers
from celery_dlq.policies.policy import policy_keys
from celery_dlq.store import metrics
from celery_dlq.store.keys import AppKey, Keys, QueueKey
from celery_dlq.store.worker_records import MessageKey

# Those that the README, the docs and the examples name; all others may change at any time.
PUBLIC = (
    "celery_dlq",
    "celery_dlq.errors",
    "celery_dlq.events",
    "celery_dlq.letters.headers",
    "celery_dlq.operations.edit",
    "celery_dlq.letters.record",
    "celery_dlq.signals",
    "celery_dlq.testing",
    "celery_dlq.web",
)
PUBLIC_SPARK = ("celery_dlq.spark.session", "celery_dlq.spark.source", "celery_dlq.spark.triage")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def names() -> str:
    """What public modules have; of classes and functions, how they are called."""
    return _lines(line for module in PUBLIC for line in _module(module))


def spark_names() -> str:
    """The same of the modules that need PySpark."""
    return _lines(line for module in PUBLIC_SPARK for line in _module(module))


def settings() -> str:
    """Settings and policy keys with their defaults."""
    return _lines(
        [
            *(f"dlq_{f.name} = {_default(f)}" for f in dataclasses.fields(Settings) if f.metadata),
            *(f"dlq_{name} = {s.default!r}" for name, (_, s) in registry.settings().items()),
            *(f"policy {key} = None" for key in policy_keys()),
        ]
    )


def redis_keys() -> str:
    """Every Redis key, its type and what it holds."""
    keys, values = (
        Keys(),
        {
            "dead_letter_queue": "orders-DLQ",
            "fingerprint": "c6a56e9b25a57fc5",
            "breaker": "breaker-0a1b2c3d4e5f",
            "job_id": "20260304-050607891-c6a56e",
            "token": "0f9f2b1e",
            "key": MessageKey(
                dead_letter_queue="orders-DLQ", task_id="task-id", retries=1, redrives=2
            ),
        },
    )
    found = []
    for name, method in vars(Keys).items():
        if isinstance(method, AppKey) or (
            inspect.isfunction(method) and name[0] != "_" and name not in ("app", "of", "places")
        ):
            parameters = inspect.signature(method).parameters if inspect.isfunction(method) else ()
            arguments = [values[p] for p in parameters if p != "self"]
            if isinstance(method, QueueKey):
                arguments = [values["dead_letter_queue"]]
            doc = " ".join((method.__doc__ or "").split())
            found.append(f"{getattr(keys, name)(*arguments)}\n    {doc}")
    return _lines(sorted(found))


def header_names() -> str:
    """Message headers."""
    found = {name: value for name, value in vars(headers).items() if name.endswith("_HEADER")}
    return _lines(f"{name} = {value!r}" for name, value in sorted(found.items()))


def metric_names() -> str:
    """Metrics with their labels, as Prometheus has them."""
    return _lines(
        f"{metric.name} {' '.join(metric.labels)}".rstrip() for metric in metrics.METRICS.values()
    )


def commands() -> str:
    """Every command with its arguments and options; their sentences may get better."""
    return _lines(line for path, command in every_command() for line in _command(path, command))


def every_command() -> Iterator[tuple[str, click.Command]]:
    """All commands, and how each is typed."""
    from celery_dlq.__main__ import main
    from celery_dlq.cli.commands import dlq

    yield from _below("celery dlq", dlq)
    yield from _below("celery-dlq", main)


def _below(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in sorted(command.list_commands(context)):
            sub = command.get_command(context, name)
            assert sub is not None
            yield from _below(f"{path} {name}", sub)


def _command(path: str, command: click.Command) -> Iterator[str]:
    options = [p for p in command.params if isinstance(p, click.Option)]
    arguments = [str(p.name).upper() for p in command.params if p not in options]
    yield " ".join([path, *arguments])
    yield from sorted(f"    {'/'.join([*p.opts, *p.secondary_opts])}" for p in options)


def _module(name: str) -> Iterator[str]:
    module = import_module(name)
    for public in sorted(_public_of(module)):
        value = getattr(module, public)
        yield f"{name}.{public}{_shape(value)}"
        if inspect.isclass(value) and value.__module__.startswith(celery_dlq.__name__):
            yield from _members(value)


def _public_of(module: ModuleType) -> Iterable[str]:
    """``__all__`` of a module; else the classes that it defines, and names of headers and types."""
    own = (
        name
        for name, value in vars(module).items()
        if (inspect.isclass(value) and value.__module__ == module.__name__)
        or name.endswith("_HEADER")
        or name.startswith("CONTENT_TYPE")
    )
    return getattr(module, "__all__", own)


def _shape(value: object) -> str:
    if inspect.isclass(value) and issubclass(value, Enum):
        return ""
    if inspect.isclass(value) and issubclass(value, BaseException):
        return f"({value.__mro__[1].__name__})"
    if inspect.isclass(value) or inspect.isfunction(value):
        return _signature(value)
    return ""


def _members(kind: type) -> Iterator[str]:
    if issubclass(kind, Enum):
        yield from (f"    {member.name} = {member.value!r}" for member in kind)
        return
    ours = {name for base in kind.__mro__ for name in vars(base) if "celery_dlq" in base.__module__}
    for name in sorted(name for name in ours if not name.startswith("_")):
        getattr(kind, name, None)  # imports a method that is imported when it is looked up
        member = inspect.getattr_static(kind, name)
        plain = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        if inspect.isfunction(plain):
            yield f"    .{name}{_signature(plain)}"
        elif isinstance(member, property):
            yield f"    .{name}"


def _signature(value: Any) -> str:
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return ""
    shown = inspect.Signature([p.replace(annotation=p.empty) for p in parameters])
    return _ADDRESS.sub("", str(shown))


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return repr(field.default_factory())
    return "required"


def _lines(lines: Any) -> str:
    return "\n".join(lines) + "\n"


SURFACES = {
    "names.txt": names,
    "spark_names.txt": spark_names,
    "settings.txt": settings,
    "redis_keys.txt": redis_keys,
    "headers.txt": header_names,
    "metrics.txt": metric_names,
    "commands.txt": commands,
}
