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
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "celery_dlq_reference",
]
exclude_patterns = ["_build"]

# Pages are Markdown that GitHub shows as well; generated parts are in fences `{dlq-…}`.
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

smartquotes = False  # else --all becomes –all
default_role = "py:obj"  # one back quote in a docstring names a thing of this package
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_mock_imports = ["pyspark"]  # signatures and docstrings need no Java
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_attr_annotations = True

html_theme = "furo"
html_title = f"celery_dlq {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_copy_source = False
html_show_sphinx = False
