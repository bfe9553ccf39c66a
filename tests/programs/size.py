"""The size of the package, against a budget that only falls: ``python tests/programs/size.py``.

Counted are the Python files of celery_dlq: files, lines, lines of code (no comment, no docstring,
not blank), and the lines of code of the longest function. Exit code 1 above the budget.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2] / "celery_dlq"
BUDGET = {"files": 222, "lines": 41_190, "code": 29_340, "function": 43}
"""Lowered with each step; the goal is 190 files, 36,000 lines, 25,000 of code, 50 a function."""

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
    size = dict.fromkeys(BUDGET, 0)
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
    size["function"] = functions[0][0]
    return size, functions[:5]


def main() -> int:
    """Print the figures beside the budget."""
    size, longest = measure(ROOT)
    for name, most in BUDGET.items():
        mark = "" if size[name] <= most else "  above the budget"
        print(f"{name:9} {size[name]:7,} of {most:7,}{mark}")
    for lines, place in longest:
        print(f"  {lines:4} {place}")
    return int(any(size[name] > most for name, most in BUDGET.items()))


if __name__ == "__main__":
    sys.exit(main())
