"""How Sphinx builds these pages: ``tox -e docs``."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

from celery_dlq import __version__  # noqa: E402 - the path comes first

project = "celery_dlq"
author = "The celery_dlq developers"
copyright = author  # noqa: A001 - Sphinx's own name
version = release = __version__

extensions = [
    "myst_parser",
    "celery_dlq_pages",
]
exclude_patterns = ["_build"]

# Pages are plain Markdown; tests/programs/reference.py writes what they say of the code.
myst_heading_anchors = 3

smartquotes = False  # else --all becomes –all

html_theme = "furo"
html_title = f"celery_dlq {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_copy_source = False
html_show_sphinx = False
