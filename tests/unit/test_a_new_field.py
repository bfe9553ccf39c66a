"""A field of a letter is one line of the record, and one where it is read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import celery_dlq

PACKAGE = Path(celery_dlq.__file__).parent
TESTS = Path(__file__).parents[1]

DEFINED = (
    "    extra: Mapping[str, bytes] =",
    """\
    came_before: bool | None = _boolean("True if the broker gave it before.")
    said: str | None = _text("What the broker said.")
    told: str | None = _json("The same, for programs.")
""",
)
READ = (
    '            "eta": parsed_time(',
    '            "came_before": delivery.get("redelivered"),\n',
)

MAIN = """
from io import StringIO

from builders import a_letter, a_message, a_request
from rich.console import Console

from celery_dlq.cli import letters
from celery_dlq.export.table import table
from celery_dlq.letters.dialects import DIALECTS, columns_of
from celery_dlq.letters.packed import fields_of
from celery_dlq.letters.packing import packed
from celery_dlq.letters.record import DeadLetter
from celery_dlq.letters.redaction import Redaction
from celery_dlq.writing.capture import Message

NAME = "came_before"
message = a_message()
message.delivery_info = {**(message.delivery_info or {}), "redelivered": True}
assert Message.of(message, a_request()).letter.came_before is True

known = {value: a_letter(came_before=value) for value in (True, False, None)}
for value, letter in known.items():
    fields = letter.to_fields()
    entry = packed(fields)
    parts = [part for name, each in entry.items() for part in (name.encode(), each)]
    unpacked = {name.decode(): each for name, each in fields_of(parts).items()}
    assert DeadLetter.from_fields(fields) == DeadLetter.from_fields(unpacked) == letter
    assert letter.to_json()[NAME] is value
    console = Console(file=StringIO(), width=80, highlight=False)
    letters.letter(console, letter)
    said = [line for line in console.file.getvalue().splitlines() if "came before" in line]
    assert [line.split()[-1] for line in said] == {True: ["yes"], False: ["no"], None: []}[value]

stored = [letter.to_fields() for letter in known.values()]
stored.append({**stored[0], NAME: b"perhaps"})  # a foreign writer's
entries = [{name.encode(): each for name, each in fields.items()} for fields in stored]
assert table(entries).column(NAME).to_pylist() == [True, False, None, None]
assert {columns_of(each)[NAME].lower() for each in DIALECTS} == {"boolean", "bool"}

redaction = Redaction.with_key(["re:[a-z]"], b"a key of sixteen")
assert redaction.exported(entries[0])[NAME.encode()] == b"true"
letter = a_letter(said="no 4242", told='{"no":"4242"}')
masked = Redaction.parse(["re:[0-9]{4}"])
assert masked.letter(letter).said == masked.captured(letter).said == "no [redacted]"
assert masked.letter(letter).decoded("told") == {"no": "[redacted]"}
assert Redaction.parse(["said"]).letter(letter).said == "[redacted]"
"""


def test_a_field_is_stored_shown_masked_and_exported_by_one_line(tmp_path: Path) -> None:
    """All its forms follow from its kind: a copy of the package has a few lines more."""
    shutil.copytree(PACKAGE, tmp_path / "celery_dlq", ignore=shutil.ignore_patterns("__pycache__"))
    for file, (before, added) in {"letters/record.py": DEFINED, "writing/capture.py": READ}.items():
        path = tmp_path / "celery_dlq" / file
        source = path.read_text("utf-8")
        assert source.count(before) == 1
        path.write_text(source.replace(before, added + before), "utf-8")
    done = subprocess.run(
        [sys.executable, "-c", MAIN],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{TESTS}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
