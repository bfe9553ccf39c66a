"""What our screens are drawn with: rich if it is installed, else `celery_dlq.cli.plain`.

Either way a letter's text cannot steer the operator's terminal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery_dlq.letters.printable import one_line, printable

if TYPE_CHECKING:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text
else:
    try:
        from rich import box, table, text
        from rich.console import Console
        from rich.markup import escape
        from rich.padding import Padding
    except ImportError:  # only the core is installed
        from celery_dlq.cli.plain import Console, Padding, Table, Text, box, escape
    else:

        class Text(text.Text):
            """A text with a style; rich lets escape sequences through, this does not."""

            def __init__(self, text: str = "", style: str = "", **more: Any) -> None:
                super().__init__(printable(text), style, **more)

            def append(self, text: Any, style: Any = None) -> Any:
                """Add a text; a plain one is made printable."""
                return super().append(printable(text) if isinstance(text, str) else text, style)

        class Table(table.Table):
            """A table whose cells are texts: neither markup nor escape sequences."""

            def add_row(self, *cells: Any, **looks: Any) -> None:
                """Add a row; plain text is made printable."""
                super().add_row(*(Text(c) if isinstance(c, str) else c for c in cells), **looks)


def line(text: str, style: str = "") -> Text:
    """A text that has to stay on its line, e.g. a name: in a table it would forge a row."""
    return Text(one_line(text), style)


__all__ = ["Console", "Padding", "Table", "Text", "box", "escape", "line"]
