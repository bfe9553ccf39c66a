"""The size of the package, printed: ``python tests/programs/size.py``.

Counted are the Python files of celery_dlq: files, lines, lines of code (no comment, no docstring,
not blank), and the lines of code of the longest functions. Exit code 1 for a function that is too
long to be read at once; nothing else is held down.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2] / "celery_dlq"
LONGEST_FUNCTION = 45
"""Lines of code."""

_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_of(source: str, tree: ast.Module) -> set[int]:
    """The numbers of the lines that have code."""
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - docstrings


def measure(root: Path) -> tuple[dict[str, int], list[tuple[int, str]]]:
    """The figures, and the longest functions with their places."""
    size = dict.fromkeys(("files", "lines", "code"), 0)
    functions: list[tuple[int, str]] = []
    for path in sorted(root.rglob("*.py")):
        source = path.read_text("utf-8")
        tree = ast.parse(source)
        code = code_of(source, tree)
        size["files"] += 1
        size["lines"] += source.count("\n")
        size["code"] += len(code)
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                inside = code.intersection(range(node.lineno, (node.end_lineno or 0) + 1))
                functions.append((len(inside), f"{path.relative_to(root.parent)}:{node.name}"))
    functions.sort(reverse=True)
    return size, functions


def main() -> int:
    """Print the figures, and the functions that are too long."""
    size, functions = measure(ROOT)
    print(", ".join(f"{number:,} {name}" for name, number in size.items()))
    too_long = [one for one in functions if one[0] > LONGEST_FUNCTION]
    for lines, place in too_long or functions[:5]:
        print(f"  {lines:4} {place}")
    if too_long:
        print(f"expected functions of at most {LONGEST_FUNCTION} lines of code: split the above")
    return int(bool(too_long))


if __name__ == "__main__":
    sys.exit(main())
