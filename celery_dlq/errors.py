"""Every error that celery_dlq raises, in one tree.

::

    DLQError
    ├── SettingsError           a dlq_* setting or a policy is wrong
    ├── StoreError              the place where letters are kept
    │   ├── StoreUnavailable    it does not answer, or refuses to write
    │   ├── CorruptLetter       an entry there is not a letter
    ├── NotFound                no such letter or dead-letter queue
    ├── BrokerUnavailable       the broker does not answer, or refuses
    ├── RedriveError            a letter could not be published again
    ├── ExportError             letters could not be written to, or read from, files
    ├── MissingExtra            an optional dependency is not installed
    ├── MaxDeliveriesExceeded   the result of a task that was delivered too often
    └── DemoError               a step of ``celery-dlq demo`` failed

Messages say what was expected, what came, and what to do. They are meant to be
printed to a person as they are: one line, no traceback, no password.
"""

from __future__ import annotations


class DLQError(Exception):
    """Base of all errors of this package; catch it to catch them all."""


class SettingsError(DLQError):
    """A ``dlq_*`` setting or a policy key is unknown or has an unusable value."""


class StoreError(DLQError):
    """The store of a dead-letter queue failed."""


class StoreUnavailable(StoreError):  # noqa: N818 - a state of the store, named as operators say it
    """The store does not answer, or answers that it cannot write (read-only, full, loading)."""


class CorruptLetter(StoreError):  # noqa: N818 - names the thing found
    """An entry of the store is not a readable letter."""


class NotFound(DLQError):  # noqa: N818 - reads as the answer it is
    """The letter or the dead-letter queue that was named does not exist."""


class BrokerUnavailable(DLQError):  # noqa: N818 - a state of the broker, as `StoreUnavailable`
    """The broker does not answer, or does not do what it is asked."""


class RedriveError(DLQError):
    """A letter could not be published again; it stays in its dead-letter queue."""


class ExportError(DLQError):
    """Letters could not be written to files, or files could not be read as letters."""


class MissingExtra(DLQError):  # noqa: N818 - names the thing found
    """A feature needs a package that an extra of celery_dlq would have installed."""

    def __init__(self, feature: str, package: str, extra: str) -> None:
        """Say what to install.

        Args:
            feature: What the user asked for, e.g. ``"dlq export"``.
            package: The import that failed, e.g. ``"pyarrow"``.
            extra: The extra of celery_dlq that brings it, e.g. ``"parquet"``.
        """
        super().__init__(
            f"{feature} needs the extra {extra!r}, of which the package {package} is not "
            f"installed; run: pip install 'celery_dlq[{extra}]'"
        )
        self.feature, self.package, self.extra = feature, package, extra

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str, str, str]]:
        """Survive pickling although ``args`` holds the finished sentence."""
        return type(self), (self.feature, self.package, self.extra)


class DemoError(DLQError):
    """A step of the demo failed; the message names the step."""


class MaxDeliveriesExceeded(DLQError):  # noqa: N818 - shown to users beside Celery's MaxRetriesExceededError
    """The result of a task whose message was delivered too often and then dead-lettered.

    It is what ``AsyncResult.get()`` raises: the task itself never came to an end
    that could be its result.
    """
