"""``celery-dlq demo``: the whole main job on real parts, for somebody who just installed it."""
