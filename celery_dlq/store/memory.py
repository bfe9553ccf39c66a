"""The memory of Redis, from ``INFO memory``: managed Redis often forbids ``CONFIG``, not ``INFO``.

Source: https://redis.io/docs/latest/commands/info/
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery_dlq.errors import StoreUnavailable
from celery_dlq.logs import get_logger
from celery_dlq.store.connect import is_refusal
from celery_dlq.store.part import Part
from celery_dlq.store.records import ServerMemory

logger = get_logger("celery_dlq.store")


class MemoryReader(Part):
    """Reads the memory of Redis; in a cluster, that of the fullest master."""

    _refused = False

    def read(self) -> ServerMemory | None:
        """Return the memory; ``None`` where the user may not run ``INFO``, which is asked once."""
        if self._refused:
            return None
        try:
            masters = self._masters()
        except StoreUnavailable as exc:
            if not is_refusal(exc):
                raise
            self._refused = True
            logger.debug("The memory of Redis is unknown: INFO failed with %s", exc)
            return None
        return max(map(_memory, masters), key=lambda memory: memory.share or 0.0)

    def _masters(self) -> list[Mapping[str, Any]]:
        if hasattr(self._client, "get_primaries"):  # a cluster
            nodes = self._client.get_primaries()
            return [self._client.info("memory", target_nodes=node) for node in nodes]
        return [self._client.info("memory")]


def _memory(info: Mapping[str, Any]) -> ServerMemory:
    # Buffers for replicas and the append-only file do not count towards `maxmemory`.
    return ServerMemory(
        used=int(info.get("used_memory", 0)) - int(info.get("mem_not_counted_for_evict", 0)),
        maximum=int(info.get("maxmemory", 0)),
        policy=str(info.get("maxmemory_policy", "")),
    )
