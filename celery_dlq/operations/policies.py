"""Show and change policies: values, their sources, overrides, and workers that differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from itertools import chain, combinations, islice
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import NotFound, SettingsError
from celery_dlq.events import Action, whoami
from celery_dlq.letters.record import iso
from celery_dlq.operations.broker_limits import low_limits
from celery_dlq.operations.instructions import Audit
from celery_dlq.operations.retention import KEPT_IN_BIN
from celery_dlq.policies.overrides import MAX_OVERRIDE, applied, begins_at, checked
from celery_dlq.policies.policy import DLQ_SUFFIX, KeyValue, Policy, plain_value
from celery_dlq.policies.queue_names import KnownQueues, did_you_mean
from celery_dlq.policies.registered import differences
from celery_dlq.policies.table import PolicyTable, SourcedValue
from celery_dlq.store.holds import matches_pattern
from celery_dlq.store.instructions import Override
from celery_dlq.store.worker_records import MAX_TASKS, TASK_PREFIX, WorkerInfo
from celery_dlq.transport.default_delay import task_queues

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from celery_dlq.assembly import Assembly
    from celery_dlq.policies.keys import PolicyKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyView:
    """The policy of one queue, or of one task in its queue, with every key."""

    queue: str  # The queue, or the pattern
    task: str | None  # The task; `None` for the queue itself
    dead_letter_queue: str  # The queue of its letters
    fields: Mapping[str, SourcedValue]  # Value and source by policy key

    @property
    def dead_letter_queues(self) -> tuple[str, ...]:
        """The queue of its letters, then those that its ``exceptions`` name."""
        values = (sourced.value for sourced in self.fields.values())
        named = (value.dead_letter_queues for value in values if isinstance(value, KeyValue))
        return (self.dead_letter_queue, *(name for names in named for name in sorted({*names})))

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return {
            "queue": self.queue,
            "task": self.task,
            "dead_letter_queue": self.dead_letter_queue,
            "policy": {
                name: {"value": plain_value(sourced.value), "source": sourced.source}
                for name, sourced in self.fields.items()
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyReport:
    """All policies of an app, with warnings."""

    views: tuple[PolicyView, ...]  # Queues, then tasks
    # Unknown queues, limits of RabbitMQ that are too low, and live workers that differ
    warnings: tuple[str, ...]

    def to_json(self) -> Iterator[dict[str, Any]]:
        """One JSON-ready mapping per view, then one per warning."""
        yield from (view.to_json() for view in self.views)
        yield from ({"warning": warning} for warning in self.warnings)


MAX_COMPARED_WORKERS = 10
MAX_TIME = datetime.max.replace(tzinfo=timezone.utc)
_PATTERN = re.compile(r"[*?\[{}]")


class PolicyAdmin:
    """Shows and changes the policies in force."""

    def __init__(self, assembly: Assembly) -> None:
        backend = assembly.backend
        self._assembly = assembly
        self._table = assembly.policy_table()
        self._registry = backend.workers
        self._instructions = backend.instructions
        self._audit = Audit(backend.workers, assembly.events)
        self._dead_letter_queues = backend.letters.names

    def policies(self, queue: str | None = None) -> PolicyReport:
        """The policy in force of every queue and task, with the source of each value."""
        report = self._report_of(queue)
        if queue is None:
            return report
        views = tuple(view for view in report.views if view.queue == queue)
        if not views:
            raise NotFound(f"no policy applies to queue {queue!r}")
        return PolicyReport(views=views, warnings=report.warnings)

    def _report_of(self, queue: str | None) -> PolicyReport:
        table, places, known = (
            self.in_force(),
            task_queues(self._assembly.app),
            self.known_queues(),
        )
        workers = self._registry.workers()
        names = known.names.union(*(info.queues for info in workers), [queue] if queue else [])
        known = replace(known, names=names)
        queues = sorted({*table.queues, *table.overrides, *names})
        views = [
            _view_of(table, queue, None) for queue in queues if table.resolve(queue) is not None
        ]
        views += [_view_of(table, places[task], task) for task in sorted(table.tasks)]
        unknown = [
            f"dlq_queues[{name!r}] is a policy for a queue that this app does not know; {hint}"
            for name, hint in table.unknown_queues(known).items()
        ]
        low = (found.text for found in low_limits(self._assembly, table, places))
        now = self._registry.now()
        soon = [_to_come(each) for each in self.overrides() if each.since > now]
        warnings = (*unknown, *low, *soon, *self.drift(workers))
        return PolicyReport(views=tuple(views), warnings=warnings)

    def drift(self, workers: list[WorkerInfo], tasks: Iterable[str] = ()) -> list[str]:
        """How live workers differ from this app, whose settings commands show, or else each other.

        ``tasks`` are those of the app that have no policy of their own.
        """
        of_task = {f"{TASK_PREFIX}{name}": policy for name, policy in self._table.tasks.items()}
        policies = {**self._table.queues, **of_task}
        places = task_queues(self._assembly.app)
        mine = WorkerInfo(
            hostname="this app",
            pid=0,
            version="",
            started_at=MAX_TIME,
            queues=tuple({*self.known_queues().names, *places.values()}),
            tasks=(*places, *tasks),
            policies={name: policy.to_json() for name, policy in policies.items()},
        )
        return [*_against(mine, workers)] or differences_of(workers)

    def in_force(self) -> PolicyTable:
        """The configured policies with the overrides applied."""
        return applied(self._table, self.overrides(), self._registry.now())

    def after(
        self, made: Iterable[Override] = (), lifted: Iterable[tuple[str, str]] = ()
    ) -> PolicyTable:
        """The policies that would be in force after changes, once these have begun."""
        gone = set(lifted)
        left = [o for o in self.overrides() if (o.queue, o.key) not in gone]
        return applied(self._table, [*left, *made], MAX_TIME)

    def overrides(self) -> list[Override]:
        """The overrides that are in force or will be; of an end that is to come without a value."""
        return self._instructions.in_force(Override)

    def known_queues(self) -> KnownQueues:
        """The queues in the app's configuration."""
        return KnownQueues.from_app(self._assembly.app)

    def guarded_queues(self) -> frozenset[str]:
        """The queues that have a policy of their own, or letters."""
        exact = (name for name in self._table.queues if not _PATTERN.search(name))
        found = set(self._dead_letter_queues()) - self._table.by_exception
        letters = (name for name in found if name.endswith(DLQ_SUFFIX))
        return frozenset([*exact, *(name.removesuffix(DLQ_SUFFIX) for name in letters)])

    def is_dead_letter_queue(self, queue: str) -> bool:
        """True if a queue is for letters, by a policy, by its name, or because it has some."""
        if queue in self._table.queues:
            return False
        return self._table.is_dead_letter_queue(queue) or queue in self._dead_letter_queues()

    def counted_in(self, letter_queue: str | None, queue: str, task_name: str) -> str:
        """See `celery_dlq.policies.table.PolicyTable.counted_in`."""
        return self._table.counted_in(letter_queue, queue, task_name)

    def override_policy(
        self, /, queue: str, span: timedelta, **values: Unpack[PolicyKeys]
    ) -> list[Override]:
        """Override policy keys of a queue for a limited time, without a deploy.

        Workers apply it within seconds, and return to the configured values at its end. An
        override also beats task decorators. Only the keys in
        `celery_dlq.policies.overrides.overridable_keys` can be overridden.

        Keys that remove or redrive letters begin one minute later. Until then the queue's letters
        are neither trimmed nor redriven by policy, and `lift_policy` undoes the change.
        """
        made = self.check_override(queue, span, **values)
        detail = {"values": {o.key: o.value for o in made}, "until": iso(made[0].until)}
        self._audit.record(Action.POLICY_SET, queue, detail)
        for override in made:
            self._instructions.give(override)
        return made

    def check_override(
        self, /, queue: str, span: timedelta, **values: Unpack[PolicyKeys]
    ) -> list[Override]:
        """The overrides that `override_policy` would set; changes nothing, raises the same."""
        _check_span(queue, span)
        if not values:
            raise SettingsError(f"expected policy keys to override for {queue!r}, got none")
        now, actor = self._registry.now(), whoami()
        made = [checked(queue, key, value, span, actor, now) for key, value in values.items()]
        self._check_queue(queue)
        self.after(made).check()
        return made

    def lift_policy(self, queue: str, *keys: str) -> list[str]:
        """Remove the overrides of a queue before they end.

        The keys that begin one minute late end at once, and their configured values count one
        minute later.
        """
        wanted = self.check_lift(queue, *keys)
        self._audit.record(Action.POLICY_UNSET, queue, {"keys": wanted})
        now, actor = self._registry.now(), whoami()
        mine = {o.key: o for o in self.overrides() if o.queue == queue}
        for key in wanted:
            since = begins_at(key, now)
            if since > now:  # it ends as it begins: in between, the letters are left alone
                until = since + KEPT_IN_BIN
                self._instructions.give(
                    replace(mine[key], value=None, until=until, actor=actor, since=since)
                )
            else:
                self._instructions.remove(mine[key])
        return wanted

    def check_lift(self, queue: str, *keys: str) -> list[str]:
        """The keys that `lift_policy` would lift; changes nothing, raises the same."""
        mine = [o for o in self.overrides() if o.queue == queue]
        present = [o.key for o in mine if o.value is not None]
        wanted = list(dict.fromkeys(keys)) or present
        missing = [key for key in wanted if key not in present]
        if missing or not wanted:
            what = ", ".join(missing) or "any key"
            raise NotFound(
                f"expected an override of {what} for queue {queue!r}, found "
                f"{', '.join(present) or 'none'}"
            )
        return wanted

    def _check_queue(self, queue: str) -> None:
        if self.is_dead_letter_queue(queue):
            raise SettingsError(
                f"expected a queue of tasks to override, got {queue!r}, a dead-letter queue; "
                f"override the policy of the queue whose letters it has"
            )
        workers = self._registry.workers(with_tasks=False)
        known = self.known_queues().names.union(
            self.guarded_queues(), self._table.queues, *(info.queues for info in workers)
        )
        if queue not in known.union(o.queue for o in self.overrides()):
            raise NotFound(
                f"expected a queue that the app, a live worker or a letter knows, got {queue!r}"
                f"{did_you_mean(queue, known) or '; `dlq policies` lists them'}"
            )


def _view_of(table: PolicyTable, queue: str, task: str | None) -> PolicyView:
    fields = table.explain(queue, task)
    named = fields["dead_letter_queue"].value
    return PolicyView(
        queue=queue,
        task=task,
        dead_letter_queue=Policy(dead_letter_queue=named).dead_letter_queue_of(queue),
        fields=fields,
    )


def _to_come(override: Override) -> str:
    """What an override that has not begun will change."""
    then = "off" if override.value is False else override.value
    if override.value is None:
        then = "as configured"
    return (
        f"The policy of queue {override.queue!r} changes at {override.since:%Y-%m-%d %H:%M:%S} "
        f"UTC: {override.key} is then {then}; until then its letters are neither trimmed nor "
        f"redriven by policy"
    )


def _against(mine: WorkerInfo, workers: Iterable[WorkerInfo]) -> Iterator[str]:
    """Compare one with a worker of each set of other policies and of queues, up to a bound."""
    own = _policies_key(mine)
    kinds = {(kind, info.queues): info for info in workers if (kind := _policies_key(info)) != own}
    found = filter(None, (differences(mine, info) for info in kinds.values()))
    return chain.from_iterable(islice(found, MAX_COMPARED_WORKERS))


def differences_of(workers: list[WorkerInfo]) -> list[str]:
    """Compare one worker of each distinct set of policies with the others, up to a bound."""
    kinds: dict[str, WorkerInfo] = {}
    for info in workers:
        kinds.setdefault(_policies_key(info), info)
    some = list(kinds.values())[:MAX_COMPARED_WORKERS]
    return [text for one, other in combinations(some, 2) for text in differences(one, other)]


def _policies_key(info: WorkerInfo) -> str:
    """The same for all that have the same policies."""
    return repr(sorted(info.policies.items(), key=lambda item: item[0]))


def _check_span(queue: str, span: timedelta) -> None:
    if _PATTERN.search(queue) or not queue.strip():
        raise SettingsError(f"expected the exact name of a queue to override, got {queue!r}")
    if not timedelta(0) < span <= MAX_OVERRIDE:
        raise SettingsError(
            f"expected an override to last more than 0 s and at most {MAX_OVERRIDE.days} days, got "
            f"{span.total_seconds():,.10g} s"
        )


class KnownNames:
    """The tasks and queues that the app, a policy, a letter or a live worker names."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._registry = assembly.backend.workers

    def is_task(self, name: str) -> bool:
        """True if the app or a live worker has a task of this name."""
        live = (task for info in self._registry.workers() for task in info.tasks)
        return name in {*self._assembly.app.tasks, *live}

    def matching(self, task: str | None, queue: str | None) -> tuple[list[str], list[str]]:
        """The tasks and queues that patterns match; refuses a pattern that matches none."""
        workers = self._registry.workers()
        # Else not all tasks of such a worker are listed.
        listed = all(len(info.tasks) < MAX_TASKS for info in workers)
        app, policies = self._assembly.app, PolicyAdmin(self._assembly)
        tasks = {*app.tasks}.union(*(info.tasks for info in workers))
        queues = KnownQueues.from_app(app).names.union(
            policies.guarded_queues(), *(info.queues for info in workers)
        )
        found = []
        for kind, name, known in (("task", task, tasks), ("queue", queue, queues)):
            fit = sorted(one for one in known if matches_pattern(name or "*", one))
            if name is not None and not fit and (listed or kind != "task"):
                raise NotFound(
                    f"expected a {kind} that the app or a live worker knows, got {name!r}"
                    f"{did_you_mean(name, known)}"
                )
            found.append(fit)
        return found[0], found[1]

    def doubt_of_task(self, task: str | None) -> str:
        """Why a pattern may match no task; empty if a live worker has one, or that is unknown."""
        workers = self._registry.workers()
        listed = all(len(info.tasks) < MAX_TASKS for info in workers)
        tasks = {one for info in workers for one in info.tasks}
        if task is None or not workers or not listed:
            return ""
        if any(matches_pattern(task, one) for one in tasks):
            return ""
        return f"No live worker has registered a task {task!r}; only the app knows it."
