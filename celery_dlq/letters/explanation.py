"""What the letters of a cause share, how they differ from others, and what is left open.

``dlq differences``, its page, `DeadLetters.differences` and the triage's `why` count messages in
their own ways. `explain` makes the answer of the counts, so all of them say the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from celery_dlq.letters.comparison import (
    ALPHA,
    FIELDS,
    GIVEN,
    LEAST,
    MIN_OTHERS,
    OF_ANY_TASK,
    SAME_QUEUES,
    SAME_TASKS,
    SUCCESSES,
    TASK,
    UNREAD,
    WHOLE,
    Pair,
    Significant,
    candidates,
    comparable,
    ranked,
    significant,
)
from celery_dlq.letters.course import Onset, Release, Timing, Trend
from celery_dlq.letters.printable import shortened

_MAX_SHOWN_CHARS = 80
_MOST_NAMED = 5  # shared values in a sentence
_PHRASES = {
    "host": "ran on",
    "release": "ran on release",
    "queue": "came from the queue",
    "origin": "were published by",
    TASK: "are of the task",
}
_OTHERS = {
    SAME_TASKS: "the other letters of the task",
    SAME_QUEUES: "the other letters of the queue",
    SUCCESSES: "the sampled successes of the task",
}
_COMPARED = {
    SAME_TASKS: ("other letter of the task", "other letters of the task"),
    SUCCESSES: ("sampled success of the task", "sampled successes of the task"),
    SAME_QUEUES: ("other letter of the queue", "other letters of the queue"),
}
_NOTHING = (
    f"Nothing stands out: no value that {LEAST} messages or more have is more frequent here, by a "
    "tenth and beyond chance. Ranges, pairs of values and times are not compared."
)
_NO_HEADLINE = "nothing stands out"
_NOTHING_SO_FAR = (
    "What was compared shows no difference of a tenth or more beyond chance; the rest may."
)
_CUT = "Older letters are left out: the limit of time or number was reached."


class Side(NamedTuple):
    """Messages that letters are compared with: how many, and how many of them have each value.

    ``letters`` and ``here`` are the same of the letters that are compared with them, if these are
    not all: the others are of tasks of which this side has no message.
    """

    against: str
    messages: int
    pairs: Counter[Pair]
    letters: int | None = None
    here: Counter[Pair] | None = None


class OfTask(NamedTuple):
    """Letters of a task, and the messages that their arguments were compared with."""

    letters: int
    others: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A value that all letters have.

    Attributes:
        feature: The property, as in `Finding`.
        value: Its value as text, at most 200 characters.
        others: Messages that have it, of those with which it was compared.
        of_others: Those that could; 0: there is none, or not of the task of each letter.
    """

    feature: str
    value: str
    others: int
    of_others: int

    @property
    def portion(self) -> float:
        """The share of the others that have it; 0: there are none."""
        return self.others / self.of_others if self.of_others else 0.0

    @property
    def text(self) -> str:
        """The value, and how many others have it."""
        others = f" (others: {self.others:,} of {self.of_others:,})" if self.of_others else ""
        return named(self.feature, self.value) + others


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What the letters of a cause share, and how they differ from others."""

    letters: int
    shared: tuple[Shared, ...]  # What fewest of the others have comes first
    compared: Mapping[str, int]  # The number of messages of each side, 0 or more
    compared_letters: Mapping[str, int]  # The letters that each side was compared with
    tasks: Mapping[str, OfTask]  # By the name of each task
    findings: tuple[Significant, ...]  # The most telling first
    unread: int  # Messages that were compared without arguments
    cut: bool = False  # Older messages were not read, for the limit of time or number
    selected: int | None = None  # All letters that were to be explained; `None`: not known
    causes: int = 0  # Other causes of the same tasks
    not_compared: tuple[str, ...] = ()  # Features of which no side has enough messages
    timing: Timing | None = None
    # Of the cause's redriven messages, those that died again and those that succeeded
    again: tuple[int, int] | None = None

    @property
    def onset(self) -> Onset | None:
        """Since when the cause is there."""
        return self.timing.onset if self.timing else None

    @property
    def trend(self) -> Trend | None:
        """Whether it grows, is steady, over or back."""
        return self.timing.trend if self.timing else None

    @property
    def release(self) -> Release | None:
        """The release that it began with."""
        return self.timing.began_with if self.timing else None

    @property
    def headline(self) -> str:
        """The cause in one sentence: since when, on which release, for which letters."""
        parts = [*(self.timing.clauses if self.timing else ())]
        parts += [self.text(one).rstrip(".") for one in self.findings[:2]]
        if self.again and sum(self.again):
            parts.append(f"{self.again[0]:,} of {sum(self.again):,} redriven ones died again")
        text = "; ".join(parts) or _NO_HEADLINE
        return f"{text[0].upper()}{text[1:]}."

    def to_json(self) -> dict[str, Any]:
        """Values that JSON has; `from_json` reads them."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return {
            **found,
            "shared": [asdict(one) for one in self.shared],
            "findings": [asdict(one) for one in self.findings],
            "timing": self.timing.to_json() if self.timing else None,
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Explanation:
        """The explanation that `to_json` wrote, also after a round through JSON's text."""
        again, time = found["again"], found["timing"]
        return cls(
            **{
                **found,
                "shared": tuple(Shared(**one) for one in found["shared"]),
                "tasks": {name: OfTask(*one) for name, one in found["tasks"].items()},
                "findings": tuple(_significant(one) for one in found["findings"]),
                "timing": Timing.from_json(time) if time else None,
                "not_compared": tuple(found["not_compared"]),
                "again": tuple(again) if again else None,
            }
        )

    @property
    def sentences(self) -> tuple[str, ...]:
        """What all letters share, what they were compared with, and what that leaves open.

        Only where everything was compared is it said that nothing stands out.
        """
        if not self.letters:
            return ("There are no letters to compare.", *[_CUT] * self.cut)
        found = [*self._shares(), self._sides(), *self._open()]
        if self.timing:
            found.insert(0, self.headline)
        if not self.findings and any(self.compared.values()):
            found.append(_NOTHING if self.complete else _NOTHING_SO_FAR)
        return tuple(found)

    @property
    def complete(self) -> bool:
        """True if all values of all letters were compared, with enough others of each task."""
        enough = self.letters >= LEAST and self._fewest >= MIN_OTHERS
        return enough and not self.unread and not self.cut

    def text(self, one: Significant) -> str:
        """A finding as a sentence."""
        return sentence(one, self.compared_letters[one.against], self.letters)

    @property
    def _fewest(self) -> int:
        """The messages that arguments were compared with, of the task with the fewest."""
        return min((one.others for one in self.tasks.values()), default=0)

    @property
    def _which(self) -> str:
        """How many letters, and which if not all were looked at."""
        which = f"{self.letters:,} letters"
        if not self.cut and self.selected is not None and self.selected > self.letters:
            which += f" looked at, of {self.selected:,},"
        if self.cut and self.selected != self.letters:
            of = "" if self.selected is None else f" of {self.selected:,}"
            which += f" that were looked at, the newest{of},"
        return which

    def _shares(self) -> Iterator[str]:
        if self.shared:
            more = len(self.shared) - _MOST_NAMED
            yield (
                f"All {self._which} have "
                + ", ".join(one.text for one in self.shared[:_MOST_NAMED])
                + (f" and {_counted(more, 'more value', 'more values')}." if more > 0 else ".")
            )
        elif self.letters > 1 and not self.unread:
            yield f"No argument, release or host is the same in all {self._which.rstrip(',')}."

    def _sides(self) -> str:
        """What the letters were compared with."""
        sides = [
            _counted(messages, *_COMPARED[against]) + self._restriction(against)
            for against, messages in self.compared.items()
            if messages
        ]
        if not sides:
            return (
                f"There is nothing to compare {_counted(self.letters, 'letter', 'letters')} with: "
                "neither other letters of the queue nor sampled successes of the task "
                "(dlq_sample_successes) were read."
            )
        return f"Compared with {' and '.join(sides)}."

    def _restriction(self, against: str) -> str:
        """What, or which letters, were not compared with a side."""
        if against == SAME_QUEUES:
            return " (without their arguments)"
        letters = self.compared_letters[against]
        return "" if letters == self.letters else f" (only {letters:,} of these letters)"

    def _open(self) -> Iterator[str]:
        """What could not be compared, or not well."""
        if self.letters < LEAST:
            yield f"Fewer than {LEAST} letters hardly differ beyond chance."
        elif any(self.compared.values()):
            yield from self._few()
        if self.unread:
            were = _counted(self.unread, "message was", "messages were")
            yield f"{were} compared without arguments that cannot be read or are too large."
        if self.cut:
            yield _CUT

    def _few(self) -> Iterator[str]:
        """Tasks whose letters were compared with no or few others of the task."""
        alone = {name: one.letters for name, one in self.tasks.items() if not one.others}
        if alone:
            whose = "Arguments"
            if len(alone) < len(self.tasks):
                names = ", ".join(
                    shortened(one, _MAX_SHOWN_CHARS) for one in [*alone][:_MOST_NAMED]
                )
                more = len(alone) - _MOST_NAMED
                names += f" and {_counted(more, 'more task', 'more tasks')}" if more > 0 else ""
                letters = _counted(sum(alone.values()), "letter", "letters")
                whose = f"Arguments of {letters} ({names})"
            yield (
                f"{whose} were compared with nothing: neither other letters of the task nor "
                "sampled successes of it (dlq_sample_successes) were read."
            )
        if any(0 < one.others < MIN_OTHERS for one in self.tasks.values()):
            task = "the task" if len(self.tasks) == 1 else "a task"
            yield (
                f"With fewer than {MIN_OTHERS} others of {task} only large differences show; "
                "sampled successes (dlq_sample_successes) show more."
            )


def _significant(found: Mapping[str, Any]) -> Significant:
    parts = tuple((str(feature), str(value)) for feature, value in found["parts"])
    lists = {name: tuple(found[name]) for name in ("values", "also")}
    return Significant(**{**found, **lists, "parts": parts})


def explain(
    here: Counter[Pair],
    letters: int,
    sides: Sequence[Side],
    *,
    alpha: float = ALPHA,
    tasks: Mapping[str, OfTask] | None = None,
    cut: bool = False,
    selected: int | None = None,
) -> Explanation:
    """Explain letters by counts: how many of them, and of each side's messages, have each value.

    Without ``tasks`` the letters are of one.
    """
    found: list[Significant] = []
    compared_letters = {}
    for side in sides:
        inside = letters if side.letters is None else side.letters
        own = here if side.here is None else side.here
        compared_letters[side.against] = inside
        tested, tests = candidates(own, side.pairs, inside, side.messages, side.against)
        found += significant(tested, tests, side.against, alpha)
    if tasks is None:
        alike = [side.messages for side in sides if side.against != SAME_QUEUES]
        tasks = {"": OfTask(letters, max(alike, default=0))}
    return Explanation(
        letters=letters,
        shared=_shared(here, letters, sides),
        compared={side.against: side.messages for side in sides},
        compared_letters=compared_letters,
        tasks=tasks,
        findings=tuple(ranked(found)),
        unread=here[UNREAD]
        + sum(side.pairs[UNREAD] for side in sides if side.against != SAME_QUEUES),
        cut=cut,
        selected=selected,
    )


def _shared(here: Counter[Pair], letters: int, sides: Sequence[Side]) -> tuple[Shared, ...]:
    """The values that all letters have; of fields, those that can explain a death of any task."""
    if letters < 2:  # noqa: PLR2004 - one letter shares nothing
        return ()
    found = []
    for pair, count in here.items():
        feature, value = pair
        if value is None or count < letters or feature in WHOLE - OF_ANY_TASK:
            continue
        of_others, others = max(
            (
                (side.messages if feature in WHOLE else side.pairs[feature, None], side.pairs[pair])
                for side in sides
                if comparable(feature, side.against) and side.letters in {None, letters}
            ),
            default=(0, 0),
        )
        found.append(Shared(feature=feature, value=value, others=others, of_others=of_others))
    kinds = {feature: place for place, feature in enumerate(FIELDS)}
    found.sort(key=lambda one: (one.portion, kinds.get(one.feature, -1), one.feature, one.value))
    return tuple(found)


def named(feature: str, value: str) -> str:
    """``kwargs.tenant = 42``; the name alone of an argument that was given."""
    return feature if value == GIVEN else f"{feature} = {shortened(value, _MAX_SHOWN_CHARS)}"


def sentence(one: Significant, compared: int, letters: int | None = None) -> str:
    """A finding as a sentence: so many letters of all, if more, were compared."""
    value = shortened(one.value, _MAX_SHOWN_CHARS)
    if one.value != GIVEN and one.feature.endswith("[]"):
        phrase = f"have {value} in {one.feature[:-2]}"
    elif one.feature in _PHRASES:
        phrase = f"{_PHRASES[one.feature]} {value}"
    else:
        phrase = f"have {named(one.feature, one.value)}"
    # The shares of an argument's values are shares of the messages that have the argument.
    having = [one.feature.removesuffix("[]")] if one.of_letters < compared else []
    if letters is not None and compared < letters:
        having.append(f"{'successes' if one.against == SUCCESSES else 'others'} of their task")
    start = f"Of those with {' and '.join(having)}, " if having else ""
    here, there = _share(one.letters, one.of_letters), _share(one.others, one.of_others)
    here = here if start else here.capitalize()
    others = _OTHERS[one.against]
    if one.feature == TASK:
        others = others.replace("the task", "their tasks")
    return f"{start}{here} of these letters {phrase}, against {there} of {others}."


def _share(part: int, whole: int) -> str:
    """A share in words; neither 0 % nor 100 % unless it is exact."""
    if part in {0, whole}:
        return "all" if part else "none"
    return f"{min(99, max(1, round(100 * part / whole)))} %"


def _counted(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"
