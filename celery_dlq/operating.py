"""The operator's methods of `DeadLetters`; no worker loads them.

Each is a method of another class, which is imported when the method is first looked up: importing
all of them takes as long as a command. Type checkers see the real classes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import cached_property, wraps
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

from celery_dlq.assembly import Assembly
from celery_dlq.errors import MissingExtra
from celery_dlq.policies.checks import check_names
from celery_dlq.registry import features

if TYPE_CHECKING:
    from celery_dlq.features.adopt.operations import AdoptRun
    from celery_dlq.features.circuit_breaker.operations import Breakers
    from celery_dlq.features.dead_letter.operations import DemandRun
    from celery_dlq.features.differences.operations import Comparison
    from celery_dlq.features.doctor.examination import Examination
    from celery_dlq.features.groups.operations import Notes
    from celery_dlq.features.held.operations import HeldWindow
    from celery_dlq.features.hold.operations import Holds
    from celery_dlq.features.phases.steps import Steps
    from celery_dlq.features.prometheus.exporter import Exporter
    from celery_dlq.operations.api import Operations
    from celery_dlq.operations.exports import Exports
    from celery_dlq.operations.incidents import Incidents
    from celery_dlq.operations.jobs import Jobs, Runner
    from celery_dlq.operations.memory_check import MemoryCheck
    from celery_dlq.operations.policies import PolicyAdmin
    from celery_dlq.operations.reading import Reading
    from celery_dlq.operations.removal import Removal
    from celery_dlq.plugin import DeadLetters
    from celery_dlq.store.jobs import JobStore
    from celery_dlq.store.letters import Letters
    from celery_dlq.store.workers import WorkerRegistry
    from celery_dlq.web.asgi import Access, DeadLettersApp

    _Typed = Notes  # Its methods have the names of the operations
else:
    _Typed = object

_Part = TypeVar("_Part")
_Result = TypeVar("_Result")
_Params = ParamSpec("_Params")


class _Operation:
    """A method that delegates to a part of the assembly, imported when it is first looked up."""

    part: Callable[[Assembly], Any]

    def __init__(self, find: Callable[[], Callable[..., Any]]) -> None:
        self._find = find

    @cached_property
    def function(self) -> Callable[..., Any]:
        """The function in `DeadLetters`: with the signature and the docstring of its method."""
        part, method = self.part, self._find()
        known = _keywords(method)

        @wraps(method)
        def call(self: DeadLetters, /, *args: Any, **kwargs: Any) -> Any:
            if known is not None:
                check_names(f"arguments of {method.__name__}()", kwargs, known)
            return method(part(self.assembly), *args, **kwargs)

        return call

    def __get__(self, instance: DeadLetters | None, owner: type) -> Any:
        return self.function.__get__(instance, owner)


class _Later:
    """Stands for a class that is made of an assembly, or of what that has: its methods."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def __call__(self, assembly: Assembly) -> Any:
        return getattr(import_module(self._module), self._name)(assembly)

    def __getattr__(self, method: str) -> _Operation:
        return _Operation(lambda: getattr(getattr(import_module(self._module), self._name), method))


_LATER = {
    "Operations": "api",
    "Exports": "exports",
    "Incidents": "incidents",
    "Jobs": "jobs",
    "MemoryCheck": "memory_check",
    "PolicyAdmin": "policies",
    "Reading": "reading",
    "Removal": "removal",
}
if not TYPE_CHECKING:
    globals().update(
        {name: _Later(f"celery_dlq.operations.{module}", name) for name, module in _LATER.items()}
    )


def _typed_method(
    part: Callable[[Assembly], _Part], method: Callable[Concatenate[_Part, _Params], _Result]
) -> Callable[Concatenate[DeadLetters, _Params], _Result]:
    """What type checkers see of `_delegated`: the method's signature, and that of its part."""
    raise NotImplementedError


def _delegated(part: Any, method: Any) -> Any:
    """A method that delegates to a part of the assembly, with its signature and docstring.

    Editors that only infer (jedi) do not know `Concatenate`; they show what is returned here.
    """
    method.part = part  # of the `_Operation` that `method` is, when this runs
    return method


_of = _typed_method if TYPE_CHECKING else _delegated


def _keywords(method: Callable[..., Any]) -> Collection[str] | None:
    """The keywords that a method takes; ``None`` if it checks them itself."""
    found = dict(signature(method).parameters)
    if "fields" in found:
        from celery_dlq.letters.filters import FilterFields

        return {*found, *FilterFields.__annotations__}
    return None if any(one.kind is one.VAR_KEYWORD for one in found.values()) else found


class OperatorMethods(_Typed):
    """What operators may do; each method is one of a part of the assembly."""

    assembly: Assembly

    @property
    def store(self) -> Letters:
        """The store of the letters."""
        return self.assembly.backend.letters

    @property
    def registry(self) -> WorkerRegistry:
        """Live workers, overrides and the audit."""
        return self.assembly.backend.workers

    @property
    def job_store(self) -> JobStore:
        """The store of the jobs."""
        return self.assembly.backend.jobs

    queues = _of(Assembly.reading, Reading.queues)
    letters = _of(Assembly.reading, Reading.letters)
    entries = _of(Assembly.reading, Reading.entries)
    page = _of(Assembly.reading, Reading.page)
    count = _of(Assembly.reading, Reading.count)
    tail = _of(Assembly.reading, Reading.tail)
    get = _of(Assembly.reading, Reading.get)
    entry = _of(Assembly.reading, Reading.entry)
    groups = _of(Assembly.reading, Reading.groups)
    emptied = _of(Assembly.reading, Reading.emptied)
    group = _of(Assembly.reading, Reading.group)
    arguments = _of(Assembly.reading, Reading.arguments)
    incidents = _of(Incidents, Incidents.incidents)

    redrive = _of(Operations, Operations.redrive)
    edit = _of(Operations, Operations.edit)
    dry_run = _of(Operations, Operations.dry_run)
    discard = _of(Removal, Removal.discard)
    purge = _of(Removal, Removal.purge)
    restore = _of(Removal, Removal.restore)
    restore_all = _of(Removal, Removal.restore_all)
    plan_restore = _of(Removal, Removal.plan_restore)
    discarded = _of(Removal, Removal.discarded)
    trim = _of(Removal, Removal.trim)

    plan = _of(Operations, Operations.plan)
    start = _of(Operations, Operations.start)
    edited_arguments = _of(Operations, Operations.edited_arguments)
    jobs = _of(Assembly.jobs, Jobs.jobs)
    job = _of(Assembly.jobs, Jobs.job)
    cancel = _of(Assembly.jobs, Jobs.cancel)
    resume = _of(Assembly.jobs, Jobs.resume)
    resume_in_background = _of(Assembly.jobs, Jobs.resume_in_background)
    changes = _of(Assembly.jobs, Jobs.changes)

    policies = _of(PolicyAdmin, PolicyAdmin.policies)
    overrides = _of(PolicyAdmin, PolicyAdmin.overrides)
    policies_after = _of(PolicyAdmin, PolicyAdmin.after)
    policy_effect = _of(Removal, Removal.policy_effect_on)
    check_override = _of(PolicyAdmin, PolicyAdmin.check_override)
    override_policy = _of(PolicyAdmin, PolicyAdmin.override_policy)
    lift_policy = _of(PolicyAdmin, PolicyAdmin.lift_policy)

    export = _of(Exports, Exports.export)
    forget_export = _of(Exports, Exports.forget_export)
    files = _of(Exports, Exports.files)

    memory = _of(Assembly.memory_check, MemoryCheck.memory)
    warnings = _of(Assembly.memory_check, MemoryCheck.warnings)

    if TYPE_CHECKING:  # what features add, below
        differences = _of(Comparison, Comparison.differences)
        doctor = _of(Examination, Examination.findings)
        guarantees = _of(Examination, Examination.guarantees)
        check_hold = _of(Holds, Holds.preview)
        held_messages = _of(HeldWindow, HeldWindow.held_messages)
        edit_held = _of(HeldWindow, HeldWindow.edit_held)
        discard_held = _of(HeldWindow, HeldWindow.discard_held)
        hold = _of(Holds, Holds.hold)
        end_hold = _of(Holds, Holds.end)
        holds = _of(Holds, Holds.holds)
        release = _of(Holds, Holds.release)
        breakers = _of(Breakers, Breakers.breakers)
        open_breaker = _of(Breakers, Breakers.open_breaker)
        close_breaker = _of(Breakers, Breakers.close_breaker)
        dead_letter = _of(DemandRun, DemandRun.dead_letter)
        withdraw = _of(DemandRun, DemandRun.withdraw)
        adopt = _of(AdoptRun, AdoptRun.adopt)
        next_steps = _of(Steps, Steps.next_steps)
        serve_metrics = _of(Exporter, Exporter.serve_metrics)

    def asgi(
        self,
        *,
        access: Access | None = None,
        title: str = "",
        home: str = "",
        url: str | None = None,
        secret: str | None = None,
        hosts: Iterable[str] | None = (),
    ) -> DeadLettersApp:
        """The pages as an ASGI app, to mount in another app under any path.

        Args:
            access: Decides who may do what: gets Starlette's ``Request``, and returns a
                `celery_dlq.web.User`, or ``None`` for somebody unknown (401). May be a coroutine
                function. By default everybody whom your app lets through may look, and nobody
                may change anything.
            title: Name of the environment, e.g. ``production``, on each page.
            home: Link back to your app.
            url: Address of the pages as browsers see it, e.g. behind a proxy: forms are taken from
                there only. Defaults to the address of each request.
            secret: Signs forms; the same in all processes. Text of at least 16 characters. Defaults
                to a random one, with which forms only work in the process that made them.
            hosts: Names under which browsers may ask, beside ``localhost``, IP addresses and the
                name in ``url``. Under others, any web site could read the pages in the browser of
                who visits it (DNS rebinding). ``None`` if your app checks the header ``Host``
                itself.

        Raises:
            MissingExtra: Starlette or another package of the extra ``web`` is not installed.
            SettingsError: An argument is wrong.
        """
        try:
            from celery_dlq.web.asgi import DeadLettersApp
        except ModuleNotFoundError as exc:
            raise MissingExtra("dlq.asgi()", exc.name or "starlette", "web") from exc
        return DeadLettersApp(
            cast("DeadLetters", self),
            access=access,
            url=url,
            secret=secret,
            hosts=hosts,
            title=title,
            home=home,
            runs_jobs=access is not None,
        )

    def runner(self) -> Runner:
        """A runner of the jobs that wait, for this process; call its ``start`` and ``close``."""
        from celery_dlq.operations.jobs import Runner

        return Runner(self.assembly)


for _feature in features():
    for _name, _place in _feature.operations.items():
        _module, _, _method = _place.partition(":")
        _class, _, _method = _method.partition(".")
        _later = _Later(f"celery_dlq.features.{_feature.name}.{_module}", _class)
        setattr(OperatorMethods, _name, _of(_later, getattr(_later, _method)))
