"""``celery-dlq demo``: the main job from failure to redrive, on a real Redis and a real worker."""
