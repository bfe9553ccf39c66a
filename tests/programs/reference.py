"""What the pages say of the code: ``python tests/programs/reference.py`` writes it into them.

A page has a pair of comments, ``<!-- made: NAME -->`` and ``<!-- end of NAME -->``, for each of
`MADE`; this program writes what is between them. The pages are plain Markdown, so that they can be
read in the repository as on the site, and a test compares them with the code.

What a feature guarantees, what it waits for and its alerts stand on its own how-to page. The pages
that list those of all are made of them, as is the list of the how-to pages.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import foreign

import celery_dlq
from celery_dlq import errors, registry
from celery_dlq.config import PREFIX, Settings
from celery_dlq.events import Action
from celery_dlq.export.table import schema
from celery_dlq.letters import headers
from celery_dlq.letters.record import Delivery, Kind, Outcome, Reason, record_fields
from celery_dlq.policies.overrides import overridable_keys as overridable
from celery_dlq.policies.policy import Policy
from celery_dlq.policies.policy import policy_keys as all_policy_keys
from celery_dlq.spark.options import ReadOptions
from celery_dlq.store.keys import AppKey, Keys, QueueKey
from celery_dlq.store.metrics import METRICS
from celery_dlq.store.worker_records import MessageKey

_WIDTH = 125
ROOT = Path(__file__).parents[2]
_DOCS = ROOT / "docs"
_FILES = (
    ROOT / "examples" / "alerting" / "alerts.yml",
    ROOT / "celery_dlq" / "policies" / "keys.py",
)
"""Those beside the pages that have something made, between comments of their own language."""


def settings() -> str:
    """Every ``dlq_`` setting, as entries that can be linked to."""
    core = {f.name: f.metadata["doc"] for f in dataclasses.fields(Settings) if f.metadata}
    features = {name: found.doc for name, (_, found) in registry.settings().items()}
    return "\n".join(_setting(name, doc) for name, doc in {**core, **features}.items())


def policy_keys() -> str:
    """Every key of a policy."""
    features = {key: found for key, (_, found) in registry.policy_keys().items()}
    documented = attributes(Policy) | {key: found.doc for key, found in features.items()}
    types = {key: _as_users_write(each.kind) for key, each in all_policy_keys().items()}
    notes = dict.fromkeys(overridable(), "Can be overridden while workers run.")
    return "\n".join(
        _entry(
            name,
            f"{text.partition(' Unset: ')[0]} {notes.get(name, '')}",
            kind=types[name],
            default=text.partition(" Unset: ")[2].rstrip("."),
        )
        for name, text in documented.items()
    )


def record() -> str:
    """Every field of a letter, with its column in Parquet."""
    arrow = schema()
    rows = [
        (f"`{name}`", f"`{arrow.field(name).type}`", field.doc)
        for name, field in record_fields().items()
    ]
    return table(("field", "Parquet (Arrow) type", "meaning"), rows)


def kinds() -> str:
    """Each kind of field that the record has: its spelling in Redis and in Parquet."""
    arrow, first = schema(), {}
    for name, field in record_fields().items():
        first.setdefault(field.kind, f"`{arrow.field(name).type}`")
    rows = [
        (kind.name.lower(), kind.in_redis, kind.in_json, first[kind])
        for kind in Kind
        if kind in first
    ]
    return table(("kind", "in Redis", "in `--json`", "in Parquet"), rows)


def delivery() -> str:
    """Every field of one delivery in ``history``."""
    rows = [(f"`{name}`", text) for name, text in attributes(Delivery).items()]
    return table(("field", "meaning"), rows)


def reasons() -> str:
    """The closed lists of reasons and outcomes."""
    said = ", ".join(f"`{reason.value}`" for reason in Reason)
    ended = ", ".join(f"`{outcome.value}`" for outcome in Outcome)
    return f"Reasons: {said}.\n\nOutcomes of a delivery: {ended}.\n"


def message_headers() -> str:
    """Every message header: constants of the module with the text under each."""
    rows = [
        (f"`{getattr(headers, name)}`", f"`{name}`", text)
        for name, text in documented_constants(headers)
        if re.fullmatch(r"\w+", str(getattr(headers, name))) and not name.startswith("MOST")
    ]
    return table(("header", "in `celery_dlq.letters.headers`", "meaning"), rows)


def redis_keys() -> str:
    """Every Redis key, with its type."""
    keys = Keys()
    rows = []
    for name, method in vars(Keys).items():
        is_key = isinstance(method, AppKey) or inspect.isfunction(method)
        if name.startswith("_") or not is_key or ": " not in (method.__doc__ or ""):
            continue
        kind, _, text = method.__doc__.strip().partition(": ")
        rows.append((f"`{_sample(keys, name, method)}`", kind, _one_line(text)))
    return table(("key", "type", "content"), rows)


def error_tree() -> str:
    """Every error, by its place in the tree."""
    return table(("error", "meaning"), list(_errors(errors.DLQError, 0)))


def spark_options() -> str:
    """Options of the Spark data source."""
    rows = [(f"`{name}`", text) for name, text in attributes(ReadOptions).items()]
    return table(("option", "meaning"), rows)


def metrics() -> str:
    """Every metric, of the core and of the features."""
    rows = [
        (
            f"`{metric.name}`",
            metric.measure.value,
            ", ".join(f"`{label}`" for label in metric.labels),
            f"{metric.help[0].lower()}{metric.help[1:]}".removesuffix("."),
        )
        for metric in METRICS.values()
    ]
    return table(("metric", "type", "labels", "meaning"), rows)


def doctor() -> str:
    """Every kind of finding of ``dlq doctor``."""
    from celery_dlq.features.doctor.finding import KINDS

    rows = [(f"`{name}`", symptom, mend) for name, (symptom, mend) in KINDS.items()]
    return table(("finding", "what you see", "what to do"), rows)


def actions() -> str:
    """Every kind of change, in the order of its list."""
    return f"Actions of a `Change`: {', '.join(f'`{action}`' for action in Action)}."


def how_to_pages() -> dict[str, str]:
    """The texts of the how-to pages by their names, in the order of their titles."""
    found = {page.name: page.read_text("utf-8") for page in (_DOCS / "how-to").glob("*.md")}
    return dict(sorted(found.items(), key=lambda each: _title(each[1]).strip('"').casefold()))


def links_to_how_to() -> str:
    """A link to each how-to page, by its title."""
    links = (f"- [{_title(text)}](how-to/{name})" for name, text in how_to_pages().items())
    return "\n".join(links)


def _title(page: str) -> str:
    return page.partition("\n")[0].removeprefix("# ")


def rows_of_features(*head: str) -> str:
    """The rows of all tables with this head that the how-to pages have."""
    first = f"| {' | '.join(head)} |\n"
    tables = (text.partition(first)[2] for text in how_to_pages().values())
    rows = (row for each in tables for row in each.partition("\n\n")[0].splitlines()[1:])
    return first + f"|{'---|' * len(head)}\n" + "\n".join(rows)


def alerts_of_features() -> str:
    """The alert rules that the how-to pages have."""
    rule = re.compile(r"^```yaml\n(- alert:.*?)^```", re.DOTALL | re.MULTILINE)
    rules = (found for text in how_to_pages().values() for found in rule.findall(text))
    return textwrap.indent("\n".join(rules), " " * 6)


def types_of_policy_keys() -> str:
    """The keys of a policy as users write them, for type checkers."""
    keys = all_policy_keys().items()
    return "\n".join(f"    {key}: {each.kind} | Literal[False] | None" for key, each in keys)


def foreign_names() -> str:
    """What we wrap, replace or rely on of other packages, a table for each subject."""
    names = foreign.names()
    said = [f"{len(names)} names, {sum(map(foreign.is_private, names))} of them private.\n"]
    for subject, rows in foreign.TABLES.items():
        cells = [
            (_codes(row.names), _codes(row.files), row.why, row.price, _codes(row.tests))
            for row in rows
        ]
        said += [f"### {subject}\n", table(("names", "in", "why", "price", "test"), cells)]
    documented = [
        (_codes(row.names), _codes(row.files), f"[page]({row.where})", _codes(row.tests))
        for row in foreign.DOCUMENTED
    ]
    said += [
        "### Documented names\n",
        "Not counted: their packages document what we do with them. Tests pin them too.\n",
        table(("names", "in", "documented", "test"), documented),
    ]
    return "\n".join(said)


def _codes(texts: str) -> str:
    return ", ".join(f"`{text}`" for text in texts.split())


def commands(command: click.Command, path: str) -> str:
    """A command and all below it: what each does, how it is called, its options."""
    context = click.Context(command, info_name=path, max_content_width=_WIDTH)
    said = [f"### {path.removeprefix(_APP)}\n"]
    said += [_help(text) for text in inspect.cleandoc(command.help or "").split("\n\n")]
    usage = command.get_usage(context).partition(" ")[2]
    said.append(f"`{usage.replace('[COMMAND]', 'COMMAND')}`\n")  # as click 8.1 has it
    options = [each for each in command.params if isinstance(each, click.Option)]
    records = [found for each in options if (found := each.get_help_record(context))]
    if records:
        said.append(table(("option", "meaning"), [(f"`{call}`", doc) for call, doc in records]))
    if isinstance(command, click.Group):
        below = (
            (name, command.get_command(context, name)) for name in command.list_commands(context)
        )
        said += [commands(each, f"{path} {name}") for name, each in below if each is not None]
    return "\n".join(said)


def _help(paragraph: str) -> str:
    if paragraph.startswith("\b"):  # click's mark of lines that stay as they are
        lines = paragraph.removeprefix("\b").strip("\n")
        return f"```text\n{lines}\n```\n"
    return f"{_filled(paragraph)}\n"


def operations() -> str:
    """`DeadLetters`, its properties and methods."""
    return described(celery_dlq.DeadLetters, members=True)


def for_tasks() -> str:
    """What authors of tasks import, and the filter and record of letters."""
    return "\n".join(
        (
            described(celery_dlq.Loader),
            described(celery_dlq.dead_letter_policy),
            described(celery_dlq.RejectToDLQ),
            described(celery_dlq.LetterFilter),
            "### Conditions\n",
            markdown(inspect.getdoc(import_module("celery_dlq.letters.conditions")) or ""),
            described(celery_dlq.DeadLetter, members=True),
            described(celery_dlq.Delivery),
        )
    )


def results(*places: str) -> str:
    """The classes of what operations return."""
    return "\n".join(described(_of(place), place=place.replace(":", ".")) for place in places)


def for_tests() -> str:
    """The fixture of the users' tests."""
    return described(_of("testing:WatchedLetters"), members=True)


def spark() -> str:
    """The functions of Spark; imports PySpark."""
    triage = import_module("celery_dlq.spark.triage")
    functions = [getattr(triage, name) for name in triage.__all__]
    return "\n".join(
        (
            described(_of("spark.source:register")),
            "### celery_dlq.spark.triage\n",
            markdown(inspect.getdoc(triage) or ""),
            *(described(each) for each in functions if inspect.isfunction(each)),
        )
    )


def described(thing: Any, *, members: bool = False, place: str = "") -> str:
    """A class or function: its signature where people call it, its docstring, its members."""
    name = thing.__name__
    called = not place and (inspect.isfunction(thing) or not dataclasses.is_dataclass(thing))
    said = [f"### {name}\n", *([_call(name, thing)] if called else [])]
    if place:
        said.append(f"`celery_dlq.{place}`\n")
    doc = inspect.getdoc(thing) or ""
    said.append(markdown(doc))
    if place and "Attributes:" not in doc:
        said += ["**Attributes**\n", *_fields(thing), ""]
    if members:
        dir(thing)  # `DeadLetters` gets the methods of operators when somebody looks for one
        owned = {name: None for base in reversed(thing.__mro__) for name in vars(base)}
        fields = getattr(thing, "__dataclass_fields__", {})
        public = [each for each in owned if not each.startswith("_") and each not in fields]
        said += [text for each in public if (text := _member(thing, each))]
    return "\n".join(said)


def _fields(cls: type) -> Iterator[str]:
    """The fields of a dataclass whose comments, behind or above each, say what they are."""
    said: dict[str, str] = {}
    for base in filter(dataclasses.is_dataclass, reversed(cls.__mro__)):
        above: list[str] = []
        for line in inspect.getsource(base).splitlines():
            if found := re.match(r"    (\w+): .*?(?:  # (.*))?$", line):
                said[found[1]] = found[2] or " ".join(above)
            above = [*above, line[6:]] if line.startswith("    # ") else []
    for field in dataclasses.fields(cls):
        yield f"- `{field.name}: {field.type}` {said.get(field.name, '')}".rstrip()


def _member(owner: type, name: str) -> str:
    getattr(owner, name)  # a method that is imported when it is looked up is found then
    member = inspect.getattr_static(owner, name)
    doc = markdown(inspect.getdoc(member) or "")
    if isinstance(member, property):
        return f"#### {name}\n\n{doc}"
    if isinstance(member, (classmethod, staticmethod)) or inspect.isfunction(member):
        return f"#### {name}\n\n{_call(name, getattr(owner, name))}\n{doc}"
    return ""


class _Bare(str):
    """An annotation or default that a signature shows without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _call(name: str, thing: Any) -> str:
    """How something is called, in lines of one parameter if it is long."""
    found = inspect.signature(thing)
    parameters = [
        each.replace(annotation=_bare(each.annotation), default=_default(each.default))
        for each in found.parameters.values()
        if each.name != "self"
    ]
    shown = str(inspect.Signature(parameters, return_annotation=_bare(found.return_annotation)))
    if len(shown) > _WIDTH - len(name):
        inner, _, returned = shown.removeprefix("(").rpartition(")")
        lines = re.sub(r", (?=\**\w+:|\*,|/,)", ",\n    ", inner)
        shown = f"(\n    {lines},\n){returned}".replace("/,\n    ", "/, ")
    return f"```text\n{name}{shown}\n```\n"


def _bare(annotation: Any) -> Any:
    return _Bare(annotation) if isinstance(annotation, str) else annotation


def _default(value: Any) -> Any:
    return _Bare("…") if inspect.isfunction(value) else value


_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields|Example|Source):\s*(.*)")


def markdown(doc: str) -> str:
    """A docstring of Google's form as Markdown."""
    doc = re.sub(r"``(.+?)``", r"`\1`", doc)
    doc = re.sub(r"(?<![<(`/\w])(https://\S+[^\s.,;)])", r"<\1>", doc)
    made: list[str] = []
    lines = iter([*doc.splitlines(), ""])
    section = ""
    for line in lines:
        if begins := _SECTION.fullmatch(line):
            section = begins[1]
            made += [f"**{section}**: {begins[2]}".rstrip(": "), *([""] if not begins[2] else [])]
        elif section and line.startswith("    "):
            made.append(_of_section(section, line[4:]))
        else:
            section = "" if line else section
            made.append(line)
    return _fenced("\n".join(made).rstrip() + "\n")


def _of_section(section: str, line: str) -> str:
    """A line of a section: an entry begins without an indent."""
    named = re.match(r"(\*{0,2}\w+): (.*)", line)
    if section in {"Args", "Attributes", "Raises"}:
        return f"- `{named[1]}`: {named[2]}" if named else f"  {line.strip()}".rstrip()
    return line


def _fenced(text: str) -> str:
    """The text with its blocks of code, which are indented after ``::``, in fences."""

    def fence(found: re.Match[str]) -> str:
        code = textwrap.dedent(found[2]).strip("\n")
        before = f"{found[1]}:\n\n" if found[1] else ""
        return f"{before}```text\n{code}\n```\n\n"

    text = re.sub(r"(\S?)::\n\n((?: {4}.*\n|\n)+)", fence, text)
    return re.sub(r"((?:^>>> .*\n)+)", r"```text\n\1```\n", text, flags=re.MULTILINE)


def _of(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(f"celery_dlq.{module}"), name)


def shown_file(path: str) -> str:
    """A file of the examples."""
    return f"```python\n{(ROOT / 'examples' / path).read_text('utf-8')}```\n"


_RESULTS = {
    "letters": (
        "store.records:QueueSummary",
        "store.records:Group",
        "store.records:GroupStatus",
        "store.notes:Note",
        "operations.incidents:Incident",
        "operations.paging:LetterPage",
        "operations.paging:LetterCount",
        "features.differences.operations:Differences",
        "letters.explanation:Shared",
        "features.differences.findings:Finding",
    ),
    "operations": (
        "operations.redrive.checks:DryRun",
        "operations.redrive.work:RedriveReport",
        "operations.removal:DiscardReport",
        "operations.edit:Edit",
        "operations.job:Job",
        "export.exporter:ExportReport",
        "features.adopt.adopter:AdoptReport",
        "events:Change",
    ),
    "instructions": (
        "store.holds:Hold",
        "operations.release:HeldMessages",
        "features.dead_letter.operations:DemandReport",
        "store.instructions:Override",
        "operations.policies:PolicyReport",
        "features.doctor.finding:Finding",
        "features.doctor.finding:Guarantee",
    ),
}
_PYTEST_CELERY = ("conftest.py", "test_shop.py", "processes.py", "containers.py")

_APP = "celery -A PROJ "

MADE: Mapping[str, Callable[[], str]] = {
    "settings": settings,
    "policy keys": policy_keys,
    "record": record,
    "kinds": kinds,
    "delivery": delivery,
    "reasons": reasons,
    "spark options": spark_options,
    "headers": message_headers,
    "redis keys": redis_keys,
    "errors": error_tree,
    "findings": doctor,
    "metrics": metrics,
    "actions": actions,
    "foreign names": foreign_names,
    "how-to pages": links_to_how_to,
    "guarantees of features": partial(rows_of_features, "guarantee", "except", "proved by"),
    "waits of features": partial(
        rows_of_features,
        *("place", "lost reply", "ownership", "beats"),
        *("who else keeps this fact, and when do both agree", "test"),
    ),
    "alerts of features": alerts_of_features,
    "types of policy keys": types_of_policy_keys,
    "commands": lambda: commands(_of("cli.commands:dlq"), f"{_APP}dlq"),
    "console script": lambda: commands(_of("__main__:main"), "celery-dlq"),
    "DeadLetters": operations,
    "for tasks": for_tasks,
    **{f"results: {name}": partial(results, *places) for name, places in _RESULTS.items()},
    "for tests": for_tests,
    "spark": spark,
    **{name: partial(shown_file, f"pytest-celery/{name}") for name in _PYTEST_CELERY},
}
"""What is between the comments of each name."""

_BLOCK = re.compile(
    r"((?:<!--|#) made: ([^\n]+?)(?: -->)?\n).*?((?:<!--| *#) end of \2(?: -->)?\n)", re.DOTALL
)


def pages() -> list[Path]:
    """The pages that have something made."""
    found = (page for page in sorted(_DOCS.rglob("*.md")) if "_build" not in page.parts)
    return [page for page in (*found, *_FILES) if _BLOCK.search(page.read_text("utf-8"))]


def names_in(page: Path) -> list[str]:
    """The names of what is made in a page."""
    return [found[2] for found in _BLOCK.finditer(page.read_text("utf-8"))]


def rewritten(page: Path) -> str:
    """The text that a page should have."""

    def made(found: re.Match[str]) -> str:
        blank = "\n" if page.suffix == ".md" else ""
        return f"{found[1]}{blank}{MADE[found[2]]().rstrip()}\n{blank}{found[3]}"

    return _BLOCK.sub(made, page.read_text("utf-8"))


def main() -> None:
    """Write the pages that are different now; say which."""
    for page in pages():
        text = rewritten(page)
        if text != page.read_text("utf-8"):
            page.write_text(text, "utf-8")
            sys.stdout.write(f"changed: {page.relative_to(ROOT)}\n")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table; a row that does not fit the head is a mistake of the caller."""
    lines = [head, tuple("---" for _ in head), *rows]
    if any(len(row) != len(head) for row in lines):
        raise ValueError(f"expected rows of {len(head)} cells under {head}")
    return "".join(f"| {' | '.join(_cell(text) for text in row)} |\n" for row in lines)


def attributes(cls: type) -> dict[str, str]:
    """Name and text of each entry under ``Attributes:`` in a class's docstring."""
    doc = inspect.cleandoc(cls.__doc__ or "")
    found: dict[str, str] = {}
    name = ""
    for line in doc.partition("Attributes:\n")[2].splitlines():
        begins = re.match(r"    (\w+): (.*)", line)
        if begins:
            name, found[begins[1]] = begins[1], begins[2]
        elif line.startswith("      ") and name:
            found[name] += f" {line.strip()}"
        elif line.strip():
            break
    return found


def documented_constants(module: Any) -> Iterator[tuple[str, str]]:
    """Each constant of a module that has a text under it."""
    body = ast.parse(inspect.getsource(module)).body
    for one, after in pairwise(body):
        match one, after:
            case ast.Assign(targets=[ast.Name(id=name)]), ast.Expr(value=ast.Constant(value=text)):
                yield name, _one_line(str(text))


def _setting(name: str, doc: str) -> str:
    text, _, default = doc.rpartition("Defaults to ")
    text, _, special = text.partition("Special value: ")
    text, _, unit = text.partition("Unit: ")
    note = f"Special value: {special.strip()}" if special.strip(" .") not in {"", "none"} else ""
    return _entry(
        PREFIX + name, f"{text.strip()} {note}", kind=unit.strip(" ."), default=default.rstrip(".")
    )


def _entry(name: str, text: str, *, kind: str, default: str) -> str:
    facts = [*([f"Value: {kind}."] if kind else []), f"Default: {default}."]
    return f"### `{name}`\n\n{_filled(text)}\n\n{_filled(' '.join(facts))}\n"


def _filled(text: str, indent: str = "") -> str:
    """A paragraph in lines as long as those of the pages."""
    return textwrap.fill(
        _one_line(text),
        _WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _as_users_write(text: str) -> str:
    """``whole number or mapping`` of ``int | Mapping[str, Any]``."""
    for found, said in (
        (r"Collection\[.*?\]", "list of names"),
        (r"Mapping\[.*\]", "mapping"),
        ("float", "seconds"),
        (r"\bstr\b", "text"),
        (r"\bint\b", "whole number"),
        (r" \| ", " or "),
    ):
        text = re.sub(found, said, text)
    return text


def _sample(keys: Keys, name: str, method: Any) -> str:
    """A key with placeholders where names of queues and the like go."""
    if name == "run":
        key = MessageKey(dead_letter_queue="QUEUE", task_id="TASK-ID")
        return str(method(keys, key)).replace(":0:", ":REDRIVES:")
    if isinstance(method, AppKey):
        return str(getattr(keys, name)(*["QUEUE"] * isinstance(method, QueueKey)))
    wanted = list(inspect.signature(method).parameters)[1:]
    return str(method(keys, *("FINGERPRINT" if w == "fingerprint" else "QUEUE" for w in wanted)))


def _errors(cls: type[Exception], depth: int) -> Iterator[tuple[str, str]]:
    yield f"{'└ ' * depth}`{cls.__name__}`", _first(cls)
    for child in cls.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from _errors(child, depth + 1)


def _first(thing: Any) -> str:
    return _one_line(inspect.getdoc(thing).partition("\n\n")[0])  # type: ignore[union-attr]


def _one_line(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


def _cell(text: str) -> str:
    return _one_line(text).replace("|", "\\|")


if __name__ == "__main__":
    main()
