"""The only place that knows Celery's internals."""
