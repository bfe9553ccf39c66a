"""A later version of the plugin, simulated: a copy whose schema is one version on.

Its letters say ``schema_version`` 2 and have a field that today's version does not know, its
counters and registrations go to the same Redis, as in a rolling upgrade or in one taken back.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import celery_dlq

_REGION = "    region: str | None = _text('where the worker ran')\n"
_CHANGES = {
    "__init__.py": [('__version__ = "0.', '__version__ = "99.0.')],
    "letters/record.py": [
        ("SCHEMA_VERSION = 1\n", "SCHEMA_VERSION = 2\n"),
        (
            "    extra: Mapping[str, bytes] = field(default_factory=dict)\n",
            _REGION + "    extra: Mapping[str, bytes] = field(default_factory=dict)\n",
        ),
    ],
    "writing/letter.py": [
        (
            "            **message.values,\n",
            '            **message.values,\n            region="süd",\n',
        ),
    ],
}


def make_next_version(folder: Path) -> Path:
    """Copy the package as it is installed and change the copy.

    Returns:
        What to put on ``PYTHONPATH``, before everything else.
    """
    home = folder / "next"
    package = Path(celery_dlq.__file__).parent
    shutil.copytree(package, home / "celery_dlq", ignore=shutil.ignore_patterns("__pycache__"))
    for name, changes in _CHANGES.items():
        path = home / "celery_dlq" / name
        text = path.read_text("utf-8")
        for before, after in changes:
            assert text.count(before) == 1, f"expected one {before!r} in {name}"
            text = text.replace(before, after)
        path.write_text(text, "utf-8")
    return home
