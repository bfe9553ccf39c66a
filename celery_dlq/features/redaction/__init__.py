"""What dlq_redact hides."""

from __future__ import annotations

from celery_dlq.registry import Feature, Setting

FEATURE = Feature(
    name="redaction",
    observer="observer:observer",
    settings={
        "redact": Setting(
            check="rules:redact",
            default=(),
            doc="What nobody may see: paths of arguments and names of headers (kwargs.card.number, "
            "args[0].token, kwargs.*.password, **.password, headers.authorization), whole texts of "
            "a letter (description, exception_message, traceback), and patterns (re: and a regular "
            "expression). Shown as [redacted] by the commands, in the descriptive fields of "
            "letters, in logs and in Sentry; the message itself stays whole. "
            "Unit: list of at most 100 texts. Special value: an empty list masks nothing. "
            "Defaults to [].",
        )
    },
)
