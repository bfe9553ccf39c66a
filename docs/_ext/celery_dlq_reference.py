"""Reference tables made from the code itself, at every build, so that they cannot drift.

A page names what it wants in a fence, e.g. ```` ```{dlq-reference} settings ````; each
function below that is in ``TABLES`` writes Markdown, which MyST then reads as part of the page.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

from celery_dlq import errors, registry
from celery_dlq.config import PREFIX, Settings
from celery_dlq.export.table import schema
from celery_dlq.features.doctor.finding import KINDS
from celery_dlq.letters import headers
from celery_dlq.letters.record import Delivery, Kind, Outcome, Reason, record_fields
from celery_dlq.policies.overrides import keys as overridable
from celery_dlq.policies.policy import Policy, PolicyKeys
from celery_dlq.spark.options import ReadOptions
from celery_dlq.store.keys import AppKey, Keys, QueueKey
from celery_dlq.store.records import MessageKey

if TYPE_CHECKING:
    from sphinx.application import Sphinx

REPOSITORY = Path(__file__).parents[2]

_KINDS: Mapping[Kind, tuple[str, str]] = {
    Kind.TEXT: ("UTF-8", "string"),
    Kind.INTEGER: ("decimal digits", "number"),
    Kind.TIME: ("microseconds since 1970, UTC", "ISO 8601 text, UTC, microseconds"),
    Kind.BYTES: ("the bytes", "base64 text"),
    Kind.JSON: ("JSON text", "nested value"),
    Kind.HISTORY: ("JSON text", "list of objects, see below"),
}


def settings() -> str:
    """Every ``dlq_`` setting, as entries that can be linked to."""
    core = {f.name: f.metadata["doc"] for f in dataclasses.fields(Settings) if f.metadata}
    features = {name: found.doc for name, (_, found) in registry.settings().items()}
    return "\n".join(_setting(name, doc) for name, doc in {**core, **features}.items())


def policy_keys() -> str:
    """Every key of a policy."""
    features = {key: found for key, (_, found) in registry.policy_keys().items()}
    documented = attributes(Policy) | {key: found.doc for key, found in features.items()}
    types = {key: _as_users_write(ref) for key, ref in PolicyKeys.__annotations__.items()}
    return "\n".join(
        _entry(
            name,
            text.partition(" Unset: ")[0],
            type=types[name],
            default=text.partition(" Unset: ")[2].rstrip("."),
            note="Can be overridden while workers run." if name in overridable() else "",
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
    """Each kind of field: its spelling in Redis and in Parquet."""
    arrow = schema()
    rows = []
    for kind, (stored, shown) in _KINDS.items():
        first = next(name for name, field in record_fields().items() if field.kind is kind)
        rows.append((kind.value, stored, shown, f"`{arrow.field(first).type}`"))
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


def doctor() -> str:
    """Every kind of finding of ``dlq doctor``."""
    rows = [(f"`{name}`", symptom, mend) for name, (symptom, mend) in KINDS.items()]
    return table(("finding", "what you see", "what to do"), rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "settings": settings,
    "policy-keys": policy_keys,
    "record": record,
    "kinds": kinds,
    "delivery": delivery,
    "reasons": reasons,
    "headers": message_headers,
    "redis-keys": redis_keys,
    "errors": error_tree,
    "doctor": doctor,
    "spark-options": spark_options,
}


class Reference(SphinxDirective):
    """``{dlq-reference} NAME``: one of `TABLES`, here."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Let MyST read what the function wrote."""
        made = TABLES.get(self.arguments[0])
        if made is None:
            raise self.error(f"expected one of {', '.join(TABLES)}, got {self.arguments[0]!r}")
        here = nodes.container()
        lines = StringList(made().splitlines(), source=str(inspect.getsourcefile(made)))
        self.state.nested_parse(lines, self.content_offset, here)
        return here.children


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
        PREFIX + name,
        text.strip(),
        type=unit.strip(" ."),
        default=default.rstrip("."),
        note=note,
    )


def _entry(name: str, text: str, *, type: str, default: str, note: str) -> str:  # noqa: A002 - as the option
    options = "".join(
        f":{key}: {value}\n" for key, value in (("type", type), ("default", default)) if value
    )
    return f":::{{confval}} {name}\n{options}\n{text}\n\n{note}\n:::\n"


def _as_users_write(annotation: Any) -> str:
    """``int or mapping`` of ``int | Mapping[str, Any] | Off | None``."""
    text = annotation.__forward_arg__
    for found, said in (
        (r"Collection\[.*?\]", "list of names"),
        (r"Mapping\[.*\]", "mapping"),
        (r" \| Off \| None", ""),
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
    yield f"{'└ ' if depth else ''}{'  ' * max(0, depth - 1)}`{cls.__name__}`", _first(cls)
    for child in cls.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from _errors(child, depth + 1)


def _first(thing: Any) -> str:
    return _one_line(inspect.getdoc(thing).partition("\n\n")[0])  # type: ignore[union-attr]


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return _one_line(text).replace("|", "\\|")


def link_out(app: Sphinx, docname: str, source: list[str]) -> None:
    """Let links to Markdown outside of docs/ lead to the file; MyST looks for a page there."""
    folder = Path(app.srcdir, docname).parent

    def linked(found: re.Match[str]) -> str:
        path = (folder / found[1]).resolve()
        is_page = path.is_relative_to(app.srcdir) or not path.is_file()
        return found[0] if is_page else f"](path:{found[1]})"

    source[0] = re.sub(r"\]\((\.\./[^)#\s]+\.md)\)", linked, source[0])


def inline_drawings(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Put drawings into the page itself, where they take its colours, light or dark."""
    if app.builder.format != "html":
        return
    folder = Path(app.srcdir, docname).parent
    for image in list(doctree.findall(nodes.image)):
        path = Path(app.srcdir, image["uri"])
        if not path.is_file():
            path = folder / image["uri"]
        if path.suffix == ".svg" and path.is_file():
            text = path.read_text("utf-8")
            drawing = f'<div class="drawing" role="img">{text}</div>'
            image.replace_self(nodes.raw("", drawing, format="html"))


def unlink_node_names(_: Sphinx, doctree: nodes.document) -> None:
    """Leave ``celery@web-1`` as it is: docutils takes the names of workers for addresses."""
    for link in list(doctree.findall(nodes.reference)):
        if link.get("refuri", "").startswith("mailto:"):
            link.replace_self(nodes.Text(link.astext()))


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension; Sphinx calls it."""
    app.add_directive("dlq-reference", Reference)
    app.connect("source-read", link_out)
    app.connect("doctree-read", unlink_node_names)
    app.connect("doctree-resolved", inline_drawings)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
