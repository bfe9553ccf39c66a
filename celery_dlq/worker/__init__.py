"""The worker's side of the plugin: the only package that touches Celery's internals."""
