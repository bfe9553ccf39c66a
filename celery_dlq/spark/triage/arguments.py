"""The arguments of a task as typed columns, for people of SQL.

A value is first read as text, whatever it is, and then cast: a value of another type costs itself
alone, and is kept as text. Plain Spark SQL, without Python on the executors.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import DLQError
from celery_dlq.spark.triage.trends import run_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LETTER_COLUMNS = ("id", "fingerprint", "reason", "dead_lettered_at", "worker_hostname", "release")
"""The columns of a letter that stand before its arguments."""

UNFIT = "unfit"
"""The column of the values that do not fit, a line each: ``name=text``."""

SAMPLE = 1_000
"""Letters whose arguments are looked at."""

_MOST_COLUMNS = 100
_MOST_CHARS = 16 * 1024  # of JSON; longer arguments are not looked at, but read
_LEAST_SHARE = 0.95  # of values, for a type that not all have
_MOST_DIGITS = 38
_BIGINT = range(-(2**63), 2**63)
_TEXT, _BOOLEAN, _WHOLE, _NUMBER, _LONG = "STRING", "BOOLEAN", "BIGINT", "DOUBLE", "DECIMAL(38,0)"
_JSON_NUMBER = "^-?[0-9]+([.][0-9]+)?([eE][-+]?[0-9]+)?$"
# What kombu writes for values that JSON lacks; of others, such as UUIDs, the text.
_TAGGED = {"datetime": "TIMESTAMP", "date": "DATE", "decimal": "DECIMAL(38,9)"}
_SAMPLED = """
    SELECT args_json, kwargs_json FROM {letters}
    WHERE task_name = {task} AND coalesce(length(args_json), 0) <= {most}
      AND coalesce(length(kwargs_json), 0) <= {most}
    ORDER BY crc32(coalesce(id, '')), id LIMIT {sample}
"""
_READ = """
    SELECT COLUMNS, from_json(args_json, 'ARRAY<STRING>') AS `~args`,
           from_json(kwargs_json, 'MAP<STRING,STRING>') AS `~kwargs`,
           args_json AS `~args_json`, kwargs_json AS `~kwargs_json`
    FROM {letters} WHERE task_name = {task}
"""


@dataclass(slots=True)
class _Argument:
    """An argument by its position, its name, or both; and the types of the values seen."""

    position: int | None = None
    name: str | None = None
    types: Counter[str] = field(default_factory=Counter)

    @property
    def title(self) -> str:
        return self.name if self.name is not None else f"arg_{self.position}"

    @property
    def type(self) -> str:
        """The type of all values, or of nearly all; else text, which fits every value."""
        seen = self.types
        if not seen:
            return _TEXT
        if seen.keys() <= {_WHOLE, _NUMBER}:
            return _NUMBER if _NUMBER in seen else _WHOLE
        if seen.keys() <= {_WHOLE, _LONG}:
            return _LONG
        kind, count = seen.most_common(1)[0]
        return kind if count >= _LEAST_SHARE * seen.total() else _TEXT

    @property
    def text(self) -> str:
        """Spark SQL for its value as text."""
        parts = []
        if self.position is not None:
            parts.append(f"get(`~args`, {self.position})")
        if self.name is not None:
            parts.append(f"`~kwargs`[{_literal(self.name)}]")
        return f"coalesce({', '.join(parts)})" if len(parts) > 1 else parts[0]


def arguments(
    df: DataFrame,
    task: str,
    names: Sequence[str] | Callable[..., Any] | None = None,
    *,
    types: Mapping[str, str] | None = None,
) -> DataFrame:
    """Show the arguments of a task's letters as typed columns, one row per letter.

    Types are inferred from 1,000 letters, drawn by a hash of their ids: whole numbers are bigint,
    others double, and so on; what kombu tags as a datetime, a date or a decimal is one. Lists and
    objects are text. If 95 % of an argument's values have a type, the column has it. A value that
    does not fit is null, and kept as text; a text that spells such a value, such as "12", fits.
    The comment in each field's metadata says what was seen.

    Args:
        df: Letters, as `letters` returns them.
        task: The name of the task.
        names: The names of the positional arguments: a list, or the task or function itself,
            whose signature has them. An argument is then one column, however it was passed.
            ``None``: positional arguments are ``arg_0``, ``arg_1`` and so on.
        types: Spark's types by the name of the column, e.g. ``{"amount": "DECIMAL(18,2)"}``, in
            place of what was seen.

    Returns:
        `LETTER_COLUMNS`, a column for each argument (at most 100; a name that is taken ends in
        ``_2``), and ``unfit`` string: the values that do not fit and the arguments that have no
        column, a line ``name=text`` each; null if all fit. It is lazy but for the letters that
        are looked at.

    Raises:
        DLQError: There are no letters of the task, ``names`` has no signature, or ``types`` names
            a column that there is not.
    """
    found = _seen_arguments(df, task, _names_of(names))
    columns = _by_title(found)
    if unknown := sorted((types or {}).keys() - columns.keys()):
        raise DLQError(
            f"expected types to name arguments of {task}: {', '.join(columns)}; "
            f"got {', '.join(unknown)}"
        )
    given = {title: one.type for title, one in columns.items()}
    given |= {title: kind.strip().upper() for title, kind in (types or {}).items()}
    read = run_sql(_READ.replace("COLUMNS", ", ".join(LETTER_COLUMNS)), df, task=task)
    read = read.selectExpr(
        "*",
        *(f"{one.text} AS `~{number}`" for number, one in enumerate(columns.values())),
    )
    typed = [
        _typed_column(f"`~{number}`", given[title], title, one)
        for number, (title, one) in enumerate(columns.items())
    ]
    texts = [(f"`~{number}`", title, given[title]) for number, title in enumerate(columns)]
    return read.select(*LETTER_COLUMNS, *typed, _expression(_unfit_sql(texts, found)).alias(UNFIT))


def _names_of(names: Sequence[str] | Callable[..., Any] | None) -> list[str]:
    """The names of positional arguments."""
    if names is None or not callable(names):
        return list(names or ())
    try:
        # Of a task the function; its own signature takes anything.
        signature = inspect.signature(getattr(names, "run", names))
    except (TypeError, ValueError) as exc:
        raise DLQError(f"expected names or a task with a signature, got {names!r}") from exc
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [one.name for one in signature.parameters.values() if one.kind in kinds]


def _seen_arguments(df: DataFrame, task: str, names: list[str]) -> list[_Argument]:
    """The arguments of some letters, the positional ones first."""
    rows = run_sql(_SAMPLED, df, task=task, most=_MOST_CHARS, sample=SAMPLE).collect()
    if not rows and df.where(_expression(f"task_name = {_literal(task)}")).isEmpty():
        raise DLQError(f"expected a task that has letters, got {task!r}")
    by_name = {name: _Argument(at, name) for at, name in enumerate(names[:_MOST_COLUMNS])}
    positions = list(by_name.values())
    for args_json, kwargs_json in rows:
        for at, value in enumerate(_parsed_arguments(args_json, list)[:_MOST_COLUMNS]):
            if at == len(positions):
                positions.append(_Argument(at))
            positions[at].types.update(_value_kinds(value))
        for name, value in _parsed_arguments(kwargs_json, dict).items():
            by_name.setdefault(name, _Argument(name=name)).types.update(_value_kinds(value))
    others = [one for one in by_name.values() if one.position is None]
    others.sort(key=lambda one: (-one.types.total(), one.title))
    return [*positions, *others][:_MOST_COLUMNS]


def _parsed_arguments(text: str | None, kind: Callable[[], Any]) -> Any:
    try:
        found = json.loads(text or "null")
    except (ValueError, RecursionError):
        return kind()
    return found if isinstance(found, type(kind())) else kind()


def _value_kinds(value: Any) -> Iterable[str]:
    """The type of a value; nothing for null, which is of any."""
    if value is None:
        return []
    if isinstance(value, bool):
        return [_BOOLEAN]
    if isinstance(value, int):
        long = _LONG if len(str(abs(value))) <= _MOST_DIGITS else _TEXT
        return [_WHOLE if value in _BIGINT else long]
    if isinstance(value, float):
        return [_NUMBER]
    if isinstance(value, dict) and value.keys() == {"__type__", "__value__"}:
        return [_TAGGED.get(str(value["__type__"]), _TEXT)]
    return [_TEXT]


def _by_title(found: Sequence[_Argument]) -> dict[str, _Argument]:
    """The arguments by the names of their columns, which Spark compares without case."""
    taken, titled = {name.lower() for name in (*LETTER_COLUMNS, UNFIT)}, {}
    for one in found:
        title, number = one.title, 2
        while title.lower() in taken:
            title, number = f"{one.title}_{number}", number + 1
        taken.add(title.lower())
        titled[title] = one
    return titled


def _typed_column(text: str, kind: str, title: str, one: _Argument) -> Any:
    """The column of an argument."""
    seen, fit = one.types.total(), one.types[kind]
    if kind == _NUMBER:
        fit += one.types[_WHOLE]
    comment = f"{kind}; so were {fit:,} of {seen:,} values looked at"
    if kind == _TEXT:
        comment = f"{kind}; {seen:,} values looked at"
    elif kind != one.type:
        comment = f"{kind}, as asked for; {seen:,} values looked at"
    return _expression(_cast_sql(text, kind)).alias(title, metadata={"comment": comment})


def _cast_sql(text: str, kind: str) -> str:
    """Spark SQL for a text as a value of a type; null if it is none."""
    tagged = f"coalesce(get_json_object({text}, '$.__value__'), {text})"
    if kind == _TEXT:
        return f"IF({text} LIKE '{{%\"__type__\"%', {tagged}, {text})"
    if kind == _BOOLEAN:  # Spark takes "yes" for true
        return f"CASE {text} WHEN 'true' THEN true WHEN 'false' THEN false END"
    if kind == "TIMESTAMP":  # without an offset: UTC, whatever the session has
        offset = "T.*(Z|[+-][0-9]{2}:?[0-9]{2})$"
        return f"try_cast(IF({tagged} RLIKE '{offset}', {tagged}, concat({tagged}, 'Z')) AS {kind})"
    if kind in {_WHOLE, _NUMBER, _LONG}:  # and "5d" for 5
        return f"IF({text} RLIKE '{_JSON_NUMBER}', try_cast({text} AS {kind}), NULL)"
    return f"try_cast({tagged} AS {kind})"


def _unfit_sql(texts: Iterable[tuple[str, str, str]], found: Sequence[_Argument]) -> str:
    """Spark SQL for the lines of what has no place in a column."""
    lines = [
        f"IF({text} IS NOT NULL AND {_cast_sql(text, kind)} IS NULL, "
        f"concat({_literal(title + '=')}, {text}), NULL)"
        for text, title, kind in texts
        if kind != _TEXT
    ]
    names = ", ".join(_literal(one.name) for one in found if one.name is not None)
    others = f"map_filter(`~kwargs`, (k, v) -> k NOT IN ({names or _literal('')}))"
    width = sum(one.position is not None for one in found)
    # More positional arguments than the letters looked at have; and what is no JSON.
    more = f"concat('args=', to_json(slice(`~args`, {width + 1}, size(`~args`))))"
    lines.append(f"IF(size(`~args`) > {width}, {more}, NULL)")
    lines += [
        f"IF(`~{name}` IS NULL, concat('{name}=', `~{name}_json`), NULL)"
        for name in ("args", "kwargs")
    ]
    rest = f"transform(map_entries({others}), e -> concat(e.key, '=', coalesce(e.value, 'null')))"
    every = f"concat(array({', '.join(lines)}), coalesce({rest}, array()))"
    return f"nullif(array_join({every}, '\\n'), '')"


def _literal(text: str) -> str:
    """A text in Spark SQL, whatever it holds."""
    return "'" + "".join(f"\\u{ord(c):04x}" if c in "'\\\n\r" else c for c in text) + "'"


def _expression(text: str) -> Any:
    from pyspark.sql.functions import expr  # noqa: PLC0415 - imported when used

    return expr(text)
