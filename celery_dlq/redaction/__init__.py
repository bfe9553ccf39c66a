"""Redaction: what must not be seen is masked (``dlq_redact``) or replaced by tokens (exports).

`rules` is the grammar that both share, `replacing` finds the values in a letter, `masking` is what
``dlq_redact`` does.
"""
