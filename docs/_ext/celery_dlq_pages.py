"""What Sphinx does beyond Markdown: the pages are plain, as a repository shows them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils import nodes

if TYPE_CHECKING:
    from sphinx.application import Sphinx


def add_contents(_: Sphinx, docname: str, source: list[str]) -> None:
    """Make the side bar of the lists of links in the pages named index: one part a heading."""
    if Path(docname).name != "index":
        return
    for part in source[0].split("\n## "):
        caption = part.partition("\n")[0].strip("# ")
        pages = re.findall(r"^- \[.*?\]\((?!\.\./)(.*?)\.md\)", part, re.MULTILINE)
        if pages:
            listed = "\n".join(pages)
            source[0] += f"\n```{{toctree}}\n:caption: {caption}\n:hidden:\n\n{listed}\n```\n"


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
    app.connect("source-read", add_contents)  # before links are changed
    app.connect("source-read", link_out)
    app.connect("doctree-read", unlink_node_names)
    app.connect("doctree-resolved", inline_drawings)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
