"""What goes wrong: workers end, stand still and are deployed; servers and connections fail."""

from __future__ import annotations

import math
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import redis
from chaos.facts import Spell
from chaos.stage import Slot
from rabbit import RabbitServer
from servers import RedisServer

WEIGHTS = {
    "kill": 5,
    "behead": 2,
    "pause": 3,
    "stop": 2,
    "cold": 3,
    "warm": 3,
    "group": 3,
    "descriptors": 3,
    "redis hangs": 3,
    "redis dies": 3,
    "redis drops": 3,
    "redis refuses": 3,
    "redis is impatient": 2,
    "store loses replies": 4,
    "store is slow": 2,
    "broker loses replies": 4,
    "broker is slow": 2,
    "broker is away": 3,
    "broker drops": 4,
    "broker blocks": 2,
}
OF_READY_WORKERS = frozenset({"group", "descriptors", "broker is away"})
REFUSES_SECONDS = 2.0
IMPATIENT_SECONDS, MOST_IDLE_SECONDS = 12.0, 5
SLOW_SECONDS = 0.25
AWAY_SECONDS = 10.0  # longer than a worker may give no sign of life
LONG_TASKS, LONG_BEFORE_SECONDS = 2, 1.0  # are published so long before
USED_UP_SECONDS = 6.0
KILL_GAP_SECONDS = 4.0  # between those of --kills
AGAIN_SECONDS = 0.2  # after a misfortune that had to be left out


def possible(broker: str, pool: str, only: Sequence[str] | None) -> list[str]:
    """The misfortunes that can befall workers of a broker; Redis is both broker and store."""
    impossible = {
        "redis": {"broker loses replies", "broker is slow", "broker drops", "broker blocks"},
        "sqs": {"broker blocks"},
    }.get(broker, set())
    if pool != "prefork":
        impossible |= {"behead", "group"}  # is a kill there, and a warm shutdown
    if not hasattr(resource, "prlimit"):
        impossible |= {"descriptors"}
    return [what for what in (WEIGHTS if only is None else only) if what not in impossible]


class Chaos:
    """Makes things go wrong, one after the other and sometimes at once.

    Args:
        rng: Decides what and when.
        kinds: Of `WEIGHTS`, those that can happen.
        server: The Redis.
        rabbit: The RabbitMQ, if that is the broker.
        slots: The workers.
        tell: Gets a line for everything that is done.
        want: Asks for so many long tasks.
        lease_seconds: How long a worker may stand still.
        gap_seconds: Between two misfortunes, on average.
        deploy_seconds: How often one of the workers is deployed; 0 for never.
        kills: How many workers are killed besides, one every 4 s.
        times: How often each kind happens at least.
    """

    def __init__(
        self,
        rng: random.Random,
        kinds: list[str],
        server: RedisServer,
        rabbit: RabbitServer | None,
        slots: list[Slot],
        tell: Callable[[str], None],
        want: Callable[[int], None],
        *,
        lease_seconds: float,
        gap_seconds: float,
        deploy_seconds: float,
        kills: int,
        times: int,
    ) -> None:
        self._rng = rng
        self._server = server
        self._rabbit = rabbit
        self._slots = slots
        self._tell = tell
        self._want = want
        self._lease_seconds = lease_seconds
        self._gap_seconds = gap_seconds
        self._next_at = time.monotonic() + 4.0  # after the workers' start
        self._deploy_seconds = deploy_seconds
        self._deploy_at = self._next_at if deploy_seconds else math.inf
        self._kills = kills
        self._kill_at = self._next_at if kills else math.inf
        self._weights = [WEIGHTS[what] for what in kinds]
        self._must = kinds * times
        self.owed = rng.sample(self._must, len(self._must))  # each happens so often, at first
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._coming: list[tuple[float, Callable[[], None]]] = []
        self._busy: set[str] = set()  # what a misfortune has befallen that is not over
        self._controls: list[threading.Thread] = []
        self.spells: list[Spell] = []
        self.done: dict[str, int] = dict.fromkeys(kinds, 0)
        self.deploys = 0
        self.kills = 0

    @property
    def goes_on(self) -> bool:
        """True until all has happened that must."""
        return bool(self.owed) or self.kills < self._kills

    def share(self) -> float:
        """How much of what must happen has happened, or is next."""
        return 1.0 - max(0, len(self.owed) - 1) / max(1, len(self._must))

    def tick(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        for due in (self._later, self._coming):
            for item in [item for item in due if item[0] <= now]:
                due.remove(item)
                item[1]()
        if now >= self._deploy_at:
            self._deploy_at = now + (self._deploy_seconds if self._deploy() else AGAIN_SECONDS)
        if now >= self._kill_at and self.kills < self._kills:
            self._kill_at = now + (KILL_GAP_SECONDS if self._kill() else AGAIN_SECONDS)
        if now >= self._next_at and self.done:
            gap = self._rng.expovariate(1 / self._gap_seconds)
            self._next_at = now + (gap if self._strike() else AGAIN_SECONDS)

    def end(self) -> None:
        """Let everything go on; what was to begin does not."""
        self._coming.clear()
        for _, undo in sorted(self._later, key=lambda item: item[0]):
            undo()
        self._later.clear()
        for thread in self._controls:
            thread.join()

    def _strike(self) -> bool:
        """Do something bad, unless the one it would befall is down already."""
        rng = self._rng
        anything = rng.choices(list(self.done), self._weights)[0]
        what = self.owed[-1] if self.owed else anything
        slot, luck = rng.choice(self._slots), rng.random()
        if what in OF_READY_WORKERS and not slot.is_ready:
            return False
        whom, _, how = what.partition(" ")
        if whom == "redis":
            struck = self._redis(what, how, luck)
        elif how in ("loses replies", "is slow", "is away"):
            struck = self._line(what, slot, whom, how, luck)
        elif whom == "broker":
            struck = self._broker(what, how, luck)
        else:
            struck = self._worker(what, slot, luck)
        if struck:
            self.done[what] += 1
            del self.owed[-1:]
        return struck

    def _redis(self, what: str, how: str, luck: float) -> bool:
        if "redis" in self._busy:
            return False
        server = self._server
        if how == "drops":
            server.close_connections()
            self._note(what, "", 0.0)
        elif how == "hangs":
            server.pause()
            self._spell(what, "redis", 0.3 + 3.0 * luck, server.resume)
        elif how == "dies":
            server.kill()
            self._spell(what, "redis", 0.1 + 4.0 * luck, server.start)
        elif how == "refuses":  # a replica whose master never answers
            server.client().replicaof("127.0.0.1", "1")
            undo = server.client().replicaof
            self._spell(what, "redis", REFUSES_SECONDS, lambda: undo("NO", "ONE"))
        else:
            server.client().config_set("timeout", MOST_IDLE_SECONDS)
            self._note(what, "", IMPATIENT_SECONDS)
            self._after(IMPATIENT_SECONDS, self._patient)
        return True

    def _patient(self) -> None:
        if "redis" in self._busy:
            self._after(1.0, self._patient)
            return
        with suppress(redis.RedisError):
            self._server.client().config_set("timeout", 0)

    def _line(self, what: str, slot: Slot, whom: str, how: str, luck: float) -> bool:
        line, name = slot.lines[whom], f"{whom} of {slot.name}"
        if name in self._busy:
            return False
        if how == "is slow":
            line.delay_seconds = SLOW_SECONDS
            undo = lambda: setattr(line, "delay_seconds", 0.0)  # noqa: E731
            self._spell(what, name, 2.0 + 3.0 * luck, undo, slot.name)
        elif how == "is away":
            self._want(LONG_TASKS)
            self._busy.add(name)
            self._soon(LONG_BEFORE_SECONDS, partial(self._shut, what, name, slot, luck))
        else:
            line.loses_replies = True
            self._spell(what, name, 0.1 + 1.5 * luck, line.cut, slot.name)
        return True

    def _shut(self, what: str, name: str, slot: Slot, luck: float) -> None:
        """On Redis and SQS for less than a lease: nobody could renew it."""
        line = slot.lines["broker"]
        most = AWAY_SECONDS if self._rabbit else 0.8 * self._lease_seconds
        line.shut()
        self._spell(what, name, 0.5 + most * luck, line.open, slot.name)

    def _broker(self, what: str, how: str, luck: float) -> bool:
        rabbit = self._rabbit
        if rabbit is None:
            for slot in self._slots:
                slot.lines["broker"].cut()
            self._note(what, "", 0.0)
            return True
        if any(thread.is_alive() for thread in self._controls):
            return False
        act = partial(rabbit.block_publishers, 2.0 + 3.0 * luck)
        if how == "drops":
            act = partial(rabbit.close_connections, wait=True)
        self._tell(what)
        # RabbitMQ's tools take seconds to start.
        self._controls.append(threading.Thread(target=self._control, args=(what, act), daemon=True))
        self._controls[-1].start()
        return True

    def _control(self, what: str, act: Callable[[], None]) -> None:
        begin = time.time()
        try:
            act()
        finally:
            self.spells.append(Spell(what, "", begin, time.time()))

    def _worker(self, what: str, slot: Slot, luck: float) -> bool:
        ends = slot.process is None or slot.asked_at is not None
        if ends or slot.paused or slot.name in self._busy:
            return False
        if what in ("pause", "stop"):
            slot.pause()
            seconds = 0.5 + 0.8 * self._lease_seconds * luck
            if what == "stop":
                seconds = self._lease_seconds + 2.0 + 2.0 * luck
            self._spell(what, slot.name, seconds, slot.resume, slot.name)
            return True
        {
            "kill": slot.kill,
            "behead": slot.behead,
            "cold": lambda: slot.ask(signal.SIGQUIT),
            "warm": lambda: slot.ask(signal.SIGTERM),
            "group": lambda: self._group(slot),
            "descriptors": lambda: self._descriptors(slot, luck),
        }[what]()
        self._tell(f"{what} {slot.name}")
        return True

    def _group(self, slot: Slot) -> None:
        """While long tasks run: a deploy must not charge them."""
        self._want(LONG_TASKS)
        self._busy.add(slot.name)

        def begin() -> None:
            self._busy.discard(slot.name)
            slot.ask(signal.SIGTERM, group=True)

        self._soon(LONG_BEFORE_SECONDS, begin)

    def _descriptors(self, slot: Slot, luck: float) -> None:
        """Of a worker that has done something, or of a new one that has not."""
        if luck > 0.5:
            slot.ask(signal.SIGTERM)
        self._soon(0.1, partial(self._use_up, slot, slot.process, luck))

    def _use_up(self, slot: Slot, before: object, luck: float) -> None:
        new = slot.process is not before
        if not slot.is_ready or slot.paused or (luck > 0.5 and not new):
            self._soon(0.1, partial(self._use_up, slot, before, luck))
            return
        slot.use_up_descriptors()
        undo = slot.free_descriptors
        self._spell("descriptors", f"descriptors of {slot.name}", USED_UP_SECONDS, undo, slot.name)

    def _deploy(self) -> bool:
        """End the worker whose turn it is in order; its slot starts it again."""
        slot = self._slots[self.deploys % len(self._slots)]
        if slot.process is None or slot.asked_at is not None or slot.paused:
            return False
        slot.ask(signal.SIGTERM)
        self.deploys += 1
        return True

    def _kill(self) -> bool:
        """Kill the whole worker whose turn it is, whatever else happens to it."""
        slot = self._slots[self.kills % len(self._slots)]
        if slot.process is None or slot.process.poll() is not None:
            return False
        slot.kill()
        self.kills += 1
        return True

    def _spell(
        self, what: str, whom: str, seconds: float, undo: Callable[[], object], slot: str = ""
    ) -> None:
        """Note one that lasts, and end it later."""
        begin = time.time()
        self._busy.add(whom)
        self._tell(f"{what} {slot} {seconds:.1f} s")

        def over() -> None:
            undo()
            self._busy.discard(whom)
            self.spells.append(Spell(what, slot, begin, time.time()))

        self._after(seconds, over)

    def _note(self, what: str, slot: str, seconds: float) -> None:
        self._tell(f"{what} {slot}")
        self.spells.append(Spell(what, slot, time.time(), time.time() + seconds))

    def _after(self, seconds: float, undo: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, undo))

    def _soon(self, seconds: float, begin: Callable[[], None]) -> None:
        self._coming.append((time.monotonic() + seconds, begin))
