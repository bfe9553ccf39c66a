"""The command line: ``celery -A proj dlq …`` and ``celery-dlq``."""
