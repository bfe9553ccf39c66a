"""What the letters of a cause share, how they differ from others, and what is left open.

`celery_dlq.letters.causes` makes it, for ``dlq differences``, its page, `DeadLetters.differences`
and the triage, so all of them say the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from math import floor, log10, sqrt
from typing import Any, NamedTuple

from celery_dlq.letters.comparison import (
    GIVEN,
    LEAST,
    MIN_OTHERS,
    PAIR,
    RANGE,
    SAME_QUEUES,
    SAME_TASKS,
    SET,
    SIZE,
    SUCCESSES,
    TASK,
    Significant,
)
from celery_dlq.letters.course import CauseTiming, Onset, Release, Trend
from celery_dlq.letters.printable import shortened

_MAX_SHOWN_CHARS = 80
_MOST_NAMED = 5  # shared values in a sentence
_MOST_IN_HEADLINE = 3  # findings
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
_EACH_CAUSE = ", each cause alike"
_COMPARED = {
    SAME_TASKS: ("other letter of the task", "other letters of the task"),
    SUCCESSES: ("sampled success of the task", "sampled successes of the task"),
    SAME_QUEUES: ("other letter of the queue", "other letters of the queue"),
}
_NOTHING = (
    "Nothing stands out: no value, set of values, range of numbers or pair of values is more "
    "frequent here, by a tenth and beyond chance."
)
_NOTHING_SO_FAR = (
    "What was compared shows no difference of a tenth or more beyond chance; the rest may."
)
_SMALLEST_CHANCE = 6  # one in so many powers of ten
_NO_LETTERS, _NOT_EXPLAINED = "There are no letters to compare.", "not explained"
UNEXPLAINED = (_NO_LETTERS, f"{_NOT_EXPLAINED.capitalize()}.")
"""First sentences that explain nothing."""
_CUT = "Older letters are left out: the limit of time or number was reached."


class TaskLetters(NamedTuple):
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
        return named_value(self.feature, self.value) + others


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What the letters of a cause share, and how they differ from others."""

    letters: int
    shared: tuple[Shared, ...]  # What fewest of the others have comes first
    compared: Mapping[str, int]  # The number of messages of each side, 0 or more
    compared_letters: Mapping[str, int]  # The letters that each side was compared with
    tasks: Mapping[str, TaskLetters]  # By the name of each task
    findings: tuple[Significant, ...]  # The most telling first
    unread: int  # Messages that were compared without arguments
    cut: bool = False  # Older messages were not read, for the limit of time or number
    selected: int | None = None  # All letters that were to be explained; `None`: not known
    causes: int = 0  # Other causes of the same tasks
    not_compared: tuple[str, ...] = ()  # Features of which no side has enough messages
    timing: CauseTiming | None = None
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
        """The cause in one sentence.

        Since when and how often it comes, with which release it began, what its letters have and
        others lack, how sure that is, and how many of a redrive would likely die again.
        """
        parts = [*(self.timing.clauses if self.timing else ()), *self._contents()]
        if self.again and sum(self.again):
            parts.append(_redriven(*self.again))
        text = "; ".join(parts)
        return f"{text[0].upper()}{text[1:]}."

    def _contents(self) -> Iterator[str]:
        """What sets the letters apart, or that nothing does."""
        if self.findings:
            first = self.findings[0]
            looked = f" ({self._looked} looked at)" if self._sampled else ""
            yield f"{_lower(self.sentence_of(first)[:-1])}{looked}, {_certainty(first.q_value)}"
            for one in self.findings[1:_MOST_IN_HEADLINE]:
                yield _lower(self.sentence_of(one)[:-1])
        elif self.complete:
            yield "nothing sets its letters apart"
        elif self.shared:
            rarer = self.shared[:2]
            unknown = "" if any(one.of_others for one in rarer) else ", perhaps as others do"
            names = " and ".join(one.text for one in rarer)
            yield f"all {self._which} have {names}{unknown}"
        else:
            yield _NOT_EXPLAINED

    @property
    def _sampled(self) -> bool:
        return not self.cut and self.selected is not None and self.selected > self.letters

    @property
    def _looked(self) -> str:
        return f"{self.letters:,} of {self.selected:,} letters"

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
                "tasks": {name: TaskLetters(*one) for name, one in found["tasks"].items()},
                "findings": tuple(_significant(one) for one in found["findings"]),
                "timing": CauseTiming.from_json(time) if time else None,
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
            return (_NO_LETTERS, *[_CUT] * self.cut)
        found = [*self._shares(), self._sides_text(), *self._not_compared()]
        if self.timing:
            found.insert(0, self.headline)
        if not self.findings and any(self.compared.values()):
            found.append(_NOTHING if self.complete else _NOTHING_SO_FAR)
        return tuple(found)

    @property
    def complete(self) -> bool:
        """True if all values of all letters were compared, with enough others of each task."""
        enough = self.letters >= LEAST and self._fewest_messages >= MIN_OTHERS
        return enough and not (self.unread or self.cut or self.not_compared)

    def sentence_of(self, one: Significant) -> str:
        """A finding as a sentence."""
        return sentence(one, self.compared_letters[one.against], self.letters)

    @property
    def _fewest_messages(self) -> int:
        """The messages that arguments were compared with, of the task with the fewest."""
        return min((one.others for one in self.tasks.values()), default=0)

    @property
    def _which(self) -> str:
        """How many letters, and which if not all were looked at."""
        which = f"{self.letters:,} letters"
        if self._sampled:
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
            which = self._which.rstrip(",")
            yield f"No argument, release or host is the same in all {which} and not in all others."

    def _sides_text(self) -> str:
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

    def _not_compared(self) -> Iterator[str]:
        """What could not be compared, or not well."""
        if self.letters < LEAST:
            yield f"Fewer than {LEAST} letters hardly differ beyond chance."
        elif any(self.compared.values()):
            yield from self._few_others()
        if self.not_compared and self._fewest_messages >= MIN_OTHERS:
            some = self.not_compared[:_MOST_NAMED]
            names = ", ".join(shortened(one, _MAX_SHOWN_CHARS) for one in some)
            yield f"Too few others of the same time or with the same argument to compare: {names}."
        if self.unread:
            were = _counted(self.unread, "message was", "messages were")
            yield f"{were} compared without arguments that cannot be read or are too large."
        if self.cut:
            yield _CUT

    def _few_others(self) -> Iterator[str]:
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


def named_value(feature: str, value: str) -> str:
    """``kwargs.tenant = 42``; the name alone of an argument that was given."""
    return feature if value == GIVEN else f"{feature} = {shortened(value, _MAX_SHOWN_CHARS)}"


def name_of(one: Significant) -> str:
    """A finding in few words, as it is named beside another."""
    if one.kind == PAIR:
        return " and ".join(named_value(*part) for part in one.parts)
    if one.kind == SET:
        return f"{one.feature}: {one.value}"
    if one.kind == RANGE:
        return f"{one.feature} {_range_text(one)}"
    return named_value(one.feature, one.value)


def sentence(one: Significant, compared: int, letters: int | None = None) -> str:
    """A finding as a sentence: so many letters of all, if more, were compared."""
    # The shares of an argument's values are shares of the messages that have the argument.
    given = one.kind != PAIR and one.feature != SIZE and one.of_letters < compared
    having = [one.feature.removesuffix("[]")] if given else []
    if letters is not None and compared < letters:
        having.append(f"{'successes' if one.against == SUCCESSES else 'others'} of their task")
    start = f"Of those with {' and '.join(having)}, " if having else ""
    here = _share_text(one.share_here, all_=one.letters == one.of_letters)
    here = here if start else here.capitalize()
    there = _share_text(one.share_elsewhere, none=not one.others, all_=one.others == one.of_others)
    others = _OTHERS[one.against] + (_EACH_CAUSE if one.causes > 1 else "")
    if one.neighbour is not None:
        others = f"the letters of the only cause to compare with ({shortened(one.neighbour, 16)})"
    if one.feature == TASK:
        others = others.replace("the task", "their tasks")
    return f"{start}{here} of these letters {_phrase_of(one)}, against {there} of {others}."


def _phrase_of(one: Significant) -> str:
    """Say what the letters have that others lack."""
    value = shortened(one.value, _MAX_SHOWN_CHARS)
    feature = one.feature.removesuffix("[]")
    if one.kind == PAIR:
        return f"have {name_of(one)}"
    if one.kind == SET:
        shown = [shortened(each, _MAX_SHOWN_CHARS) for each in one.values[:_MOST_NAMED]]
        return f"have one of {one.value} of {feature} ({', '.join(shown)}, …)"
    if one.feature == SIZE:
        return f"have arguments of {_range_text(one)} characters of JSON"
    if one.kind == RANGE:
        return f"have {feature} {_range_text(one)}"
    if one.value != GIVEN and one.feature.endswith("[]"):
        return f"have {value} in {feature}"
    if one.feature in _PHRASES:
        return f"{_PHRASES[one.feature]} {value}"
    return f"have {named_value(one.feature, one.value)}"


def _range_text(one: Significant) -> str:
    if one.high is None:
        return f"{one.low} or more"
    return f"{one.high} or less" if one.low is None else f"{one.low} to {one.high}"


def _share_text(share: float, *, none: bool = False, all_: bool = False) -> str:
    """A share in words; neither 0 % nor 100 % unless it is exact."""
    if none or all_:
        return "none" if none else "all"
    return f"{min(99, max(1, round(100 * share)))} %"


def _certainty(probability: float) -> str:
    """How sure a finding is."""
    power = floor(-log10(probability)) if probability > 0 else _SMALLEST_CHANCE
    return f"by chance in less than 1 of {10 ** min(power, _SMALLEST_CHANCE):,} such reports"


def _redriven(died: int, succeeded: int) -> str:
    """What became of redriven messages, and the interval of Wilson for the next ones, at 95 %."""
    number, z = died + succeeded, 1.96
    middle = (died + z * z / 2) / (number + z * z)
    wide = z * sqrt(died * succeeded / number + z * z / 4) / (number + z * z)
    low, high = (round(100 * min(max(middle + side * wide, 0), 1)) for side in (-1, 1))
    again = f"{died:,} of {number:,} redriven messages died again"
    return f"{again}, so {low} to {high} % of the next ones likely will"


def _lower(text: str) -> str:
    return f"{text[0].lower()}{text[1:]}"


def _counted(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"
