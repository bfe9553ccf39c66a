"""``DeadLetters(app)``: installs the plugin on an app; also the operator's API."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from datetime import datetime, timezone
from functools import partial, wraps
from inspect import signature
from types import MethodType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from celery import Celery
from celery.loaders.app import AppLoader

from celery_dlq.assembly import LATER, Assembly
from celery_dlq.config import Settings
from celery_dlq.errors import MissingExtra
from celery_dlq.policies.checks import check_names, expected
from celery_dlq.registry import Feature, features
from celery_dlq.store.worker_records import Clock

if TYPE_CHECKING:
    from celery_dlq.features.adopt.operations import AdoptRun
    from celery_dlq.features.circuit_breaker.operations import Breakers
    from celery_dlq.features.dead_letter.operations import DemandRun
    from celery_dlq.features.differences.operations import Comparison
    from celery_dlq.features.doctor.examination import Examination
    from celery_dlq.features.groups.operations import Notes
    from celery_dlq.features.held.operations import HeldWindow
    from celery_dlq.features.hold.operations import Holds
    from celery_dlq.features.prometheus.exporter import Exporter
    from celery_dlq.letters.redaction import Redaction
    from celery_dlq.operations.api import Operations
    from celery_dlq.operations.exports import Exports
    from celery_dlq.operations.incidents import Incidents
    from celery_dlq.operations.jobs import Jobs, Runner
    from celery_dlq.operations.memory_check import MemoryCheck
    from celery_dlq.operations.policies import PolicyAdmin
    from celery_dlq.operations.reading import Reading
    from celery_dlq.operations.removal import Removal
    from celery_dlq.store.jobs import JobStore
    from celery_dlq.store.letters import Letters
    from celery_dlq.store.workers import WorkerRegistry
    from celery_dlq.web.asgi import Access, DeadLettersApp

    _Typed = Notes  # Its methods have the names of the operations
else:
    _Typed = object

ATTRIBUTE = "_celery_dlq"
"""Attribute of an app that holds its first `DeadLetters`."""

_Part = TypeVar("_Part")
_Result = TypeVar("_Result")
_Params = ParamSpec("_Params")


def utc_now() -> datetime:
    """The present, aware UTC."""
    return datetime.now(timezone.utc)


def app_itself(app: Any) -> Any:
    """The app behind a proxy such as ``celery.current_app``: what its methods are bound to."""
    return getattr(getattr(app, "set_current", None), "__self__", app)


class _Operation:
    """A method that delegates to a part of the assembly; made when it is first looked up."""

    part: Callable[[Assembly], Any]

    def __init__(self, find: Callable[[], Callable[..., Any]]) -> None:
        self._find = find

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, instance: DeadLetters | None, owner: type) -> Any:
        part, method = self.part, self._find()
        known = _keywords(method)

        @wraps(method)
        def call(self: DeadLetters, /, *args: Any, **kwargs: Any) -> Any:
            if known is not None:
                check_names(f"arguments of {method.__name__}()", kwargs, known)
            return method(part(self.assembly), *args, **kwargs)

        setattr(self._owner, self._name, call)
        return call if instance is None else MethodType(call, instance)


class _Methods:
    """Stands for a class that is imported when one of its methods is first looked up."""

    def __init__(self, imported: Any) -> None:
        self._imported = imported

    def __getattr__(self, name: str) -> _Operation:
        return _Operation(getattr(self._imported, name))


if not TYPE_CHECKING:
    globals().update({name: _Methods(imported) for name, imported in LATER.items()})


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


class DeadLetters(_Typed):
    """Installs the plugin on a Celery app; also the operator's API.

    Making it reads neither the configuration nor Redis, so call it before or after you
    configure the app. Settings are checked when a worker starts, when a message is
    published, and at the first operation.

    Arguments that several methods share:

    - ``dead_letter_queue``: the queue's name, e.g. ``"orders-DLQ"``.
    - ``where``: the letters to work on, as a `LetterFilter`; or pass its fields as keywords,
      e.g. ``fingerprint="…"``. Without either, all letters.
    - ``limit``: at most this many letters; ``None`` for all.
    - ``progress``: called with the number of letters in every finished batch.
    - ``scanned``: called with the number of entries in every page read.

    Args:
        app: The Celery app. A second `DeadLetters` for one app shares the first one's
            installation, with its clock, its events and its connections.
        clock: Returns the present, aware UTC; only tests pass one.

    Raises:
        SettingsError: ``app`` is no Celery app.

    Example:
        ``dlq = DeadLetters(app)``
    """

    def __init__(self, app: Any, *, clock: Clock = utc_now) -> None:
        # The app itself: `celery.current_app` may be another app in another thread.
        self.app = app = app_itself(app)
        if not isinstance(app, Celery):
            raise expected("the argument of DeadLetters(app)", "a Celery app", app)
        first: DeadLetters | None = getattr(app, ATTRIBUTE, None)
        self.assembly: Assembly = Assembly(app, clock) if first is None else first.assembly
        self.events = self.assembly.events
        if first is None:
            setattr(app, ATTRIBUTE, self)
            self.assembly.install()

    @classmethod
    def of(cls, app: Any) -> DeadLetters:
        """Return the `DeadLetters` of an app; make it if the app has none."""
        found = getattr(app, ATTRIBUTE, None)
        return found if isinstance(found, cls) else cls(app)

    @property
    def settings(self) -> Settings:
        """The checked ``dlq_*`` settings.

        Raises:
            SettingsError: A setting is unknown or has an unusable value.
        """
        return self.assembly.settings

    @property
    def redaction(self) -> Redaction:
        """Masks what ``dlq_redact`` names; for whatever shows letters to people.

        Raises:
            SettingsError: A setting is unknown or has an unusable value.
        """
        return self.assembly.redaction

    def validate(self) -> None:
        """Check all settings and the policies of all registered tasks; for your CI.

        Raises:
            SettingsError: A setting or policy is wrong; the message names it.
        """
        self.assembly.validate()

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

    def close(self) -> None:
        """Close all connections; the next operation opens new ones."""
        self.assembly.close()

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
    incidents = _of(Assembly.incidents, Incidents.incidents)

    redrive = _of(Assembly.operations, Operations.redrive)
    edit = _of(Assembly.operations, Operations.edit)
    dry_run = _of(Assembly.operations, Operations.dry_run)
    discard = _of(Assembly.removal, Removal.discard)
    purge = _of(Assembly.removal, Removal.purge)
    restore = _of(Assembly.removal, Removal.restore)
    restore_all = _of(Assembly.removal, Removal.restore_all)
    plan_restore = _of(Assembly.removal, Removal.plan_restore)
    discarded = _of(Assembly.removal, Removal.discarded)
    trim = _of(Assembly.removal, Removal.trim)

    plan = _of(Assembly.operations, Operations.plan)
    start = _of(Assembly.operations, Operations.start)
    edited_arguments = _of(Assembly.operations, Operations.edited_arguments)
    jobs = _of(Assembly.jobs, Jobs.jobs)
    job = _of(Assembly.jobs, Jobs.job)
    cancel = _of(Assembly.jobs, Jobs.cancel)
    resume = _of(Assembly.jobs, Jobs.resume)
    resume_in_background = _of(Assembly.jobs, Jobs.resume_in_background)
    changes = _of(Assembly.jobs, Jobs.changes)

    policies = _of(Assembly.policy_admin, PolicyAdmin.policies)
    overrides = _of(Assembly.policy_admin, PolicyAdmin.overrides)
    policies_after = _of(Assembly.policy_admin, PolicyAdmin.after)
    policy_effect = _of(Assembly.removal, Removal.policy_effect_on)
    check_override = _of(Assembly.policy_admin, PolicyAdmin.check_override)
    override_policy = _of(Assembly.policy_admin, PolicyAdmin.override_policy)
    lift_policy = _of(Assembly.policy_admin, PolicyAdmin.lift_policy)

    export = _of(Assembly.exports, Exports.export)
    forget_export = _of(Assembly.exports, Exports.forget_export)
    files = _of(Assembly.exports, Exports.files)

    memory = _of(Assembly.memory_check, MemoryCheck.memory)
    warnings = _of(Assembly.memory_check, MemoryCheck.warnings)

    if TYPE_CHECKING:  # what features add, see `_add_operations`
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
            self,
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
        return self.assembly.runner()


def _add_operations(feature: Feature) -> None:
    """Add the methods of a feature to `DeadLetters`; see `Feature.operations`."""
    for name, place in feature.operations.items():
        operation = _Operation(partial(feature.load, place))
        operation.part = partial(_made_part, feature, place.rpartition(".")[0])
        operation.__set_name__(DeadLetters, name)
        setattr(DeadLetters, name, operation)


def _made_part(feature: Feature, place: str, assembly: Assembly) -> Any:
    return feature.load(place)(assembly)


for _feature in features():
    _add_operations(_feature)


class Loader(AppLoader):
    """Celery's loader of apps, which also makes their `DeadLetters`: for somebody else's code.

    ``CELERY_LOADER=celery_dlq.Loader`` in the environment of every process of such an app, or
    ``celery --loader celery_dlq.Loader …`` for one command, does what ``DeadLetters(app)`` does.

    Celery makes an app's loader when it first reads the app's configuration: before a worker
    builds its parts, before ``Task.apply_async`` publishes. Only a message that is sent by name
    (``app.send_task``) before anything else gets no default delay.

    An app that was made with a ``loader`` of its own ignores the variable. An app that is nothing
    but a ``celeryconfig.py`` needs ``CELERY_CONFIG_MODULE=celeryconfig`` too, because Celery
    looks for that module by itself only with its own default loader.

    Args:
        app: The Celery app.

    Source: ``Celery._get_default_loader`` in
    https://github.com/celery/celery/blob/main/celery/app/base.py
    """

    def __init__(self, app: Any, **kwargs: Any) -> None:
        super().__init__(app, **kwargs)
        DeadLetters(app)
