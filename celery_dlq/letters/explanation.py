"""What the letters of a cause share, how they differ from others, and what is left open.

``dlq differences``, its page, `DeadLetters.differences` and the triage's `why` count messages in
their own ways. `explain` makes the answer of the counts, so all of them say the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    ranked,
    significant,
)
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
_NOTHING_SO_FAR = "What was compared shows no difference; the rest may."
_CUT = "Older letters are left out: there was no time to read them."


class Side(NamedTuple):
    """Messages that letters are compared with: how many, and how many of them have each value."""

    against: str
    messages: int
    pairs: Counter[Pair]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A value that all letters have.

    Attributes:
        feature: The property, as in `Finding`.
        value: Its value as text, at most 200 characters.
        others: Messages that have it, of what the letters are compared with.
        of_others: Those that could; 0: there is none.
    """

    feature: str
    value: str
    others: int
    of_others: int

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
    findings: tuple[Significant, ...]  # The most telling first
    unread: int  # Messages that were compared without arguments
    cut: bool = False  # Older letters were not read

    @property
    def sentences(self) -> tuple[str, ...]:
        """What all letters share, what they were compared with, and what that leaves open.

        Only where everything was compared is it said that nothing stands out.
        """
        if not self.letters:
            return ("There are no letters to compare.", *[_CUT] * self.cut)
        found = [*self._shares(), self._sides(), *self._open()]
        if not self.findings and any(self.compared.values()):
            found.append(_NOTHING if self.complete else _NOTHING_SO_FAR)
        return tuple(found)

    @property
    def complete(self) -> bool:
        """True if all values of all letters were compared, with enough others."""
        enough = self.letters >= LEAST and self._alike >= MIN_OTHERS
        return enough and not self.unread and not self.cut

    @property
    def _alike(self) -> int:
        """The messages that arguments were compared with."""
        return max(self.compared.get(SAME_TASKS, 0), self.compared.get(SUCCESSES, 0))

    def _shares(self) -> Iterator[str]:
        if self.shared:
            more = len(self.shared) - _MOST_NAMED
            yield (
                f"All {self.letters:,} letters have "
                + ", ".join(one.text for one in self.shared[:_MOST_NAMED])
                + (f" and {_counted(more, 'more value', 'more values')}." if more > 0 else ".")
            )
        elif self.letters > 1 and not self.unread:
            yield f"No argument, release or host is the same in all {self.letters:,} letters."

    def _sides(self) -> str:
        """What the letters were compared with."""
        sides = [
            _counted(messages, *_COMPARED[against])
            + (" (without their arguments)" if against == SAME_QUEUES else "")
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

    def _open(self) -> Iterator[str]:
        """What could not be compared, or not well."""
        if self.letters < LEAST:
            yield f"Fewer than {LEAST} letters hardly differ beyond chance."
        elif not self._alike and any(self.compared.values()):
            yield (
                "Arguments were compared with nothing: neither other letters of the task nor "
                "sampled successes of it (dlq_sample_successes) were read."
            )
        elif 0 < self._alike < MIN_OTHERS:
            yield (
                f"With fewer than {MIN_OTHERS} others of the task only large differences show; "
                "sampled successes (dlq_sample_successes) show more."
            )
        if self.unread:
            were = _counted(self.unread, "message was", "messages were")
            yield f"{were} compared without arguments that cannot be read or are too large."
        if self.cut:
            yield _CUT


def explain(
    here: Counter[Pair],
    letters: int,
    sides: Sequence[Side],
    *,
    alpha: float = ALPHA,
    cut: bool = False,
) -> Explanation:
    """Explain letters by counts: how many of them, and of each side's messages, have each value."""
    found: list[Significant] = []
    for side in sides:
        tested, tests = candidates(here, side.pairs, letters, side.messages, side.against)
        found += significant(tested, tests, side.against, alpha)
    return Explanation(
        letters=letters,
        shared=_shared(here, letters, sides),
        compared={side.against: side.messages for side in sides},
        findings=tuple(ranked(found)),
        unread=here[UNREAD]
        + sum(side.pairs[UNREAD] for side in sides if side.against != SAME_QUEUES),
        cut=cut,
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
            (side.messages if feature in WHOLE else side.pairs[feature, None], side.pairs[pair])
            for side in sides
        )
        found.append(Shared(feature=feature, value=value, others=others, of_others=of_others))
    kinds = {feature: place for place, feature in enumerate(FIELDS)}
    found.sort(key=lambda one: (_portion(one), kinds.get(one.feature, -1), one.feature, one.value))
    return tuple(found)


def _portion(one: Shared) -> float:
    return one.others / one.of_others if one.of_others else 0.0


def named(feature: str, value: str) -> str:
    """``kwargs.tenant = 42``; the name alone of an argument that was given."""
    return feature if value == GIVEN else f"{feature} = {shortened(value, _MAX_SHOWN_CHARS)}"


def sentence(one: Significant, letters: int) -> str:
    """A finding of so many letters as a sentence."""
    value = shortened(one.value, _MAX_SHOWN_CHARS)
    if one.value != GIVEN and one.feature.endswith("[]"):
        phrase = f"have {value} in {one.feature[:-2]}"
    elif one.feature in _PHRASES:
        phrase = f"{_PHRASES[one.feature]} {value}"
    else:
        phrase = f"have {named(one.feature, one.value)}"
    # The shares of an argument's values are shares of the messages that have the argument.
    start = ""
    if one.of_letters < letters:
        start = f"Of those with {one.feature.removesuffix('[]')}, "
    here, there = _share(one.letters, one.of_letters), _share(one.others, one.of_others)
    here = here if start else here.capitalize()
    return f"{start}{here} of these letters {phrase}, against {there} of {_OTHERS[one.against]}."


def _share(part: int, whole: int) -> str:
    """A share in words; neither 0 % nor 100 % unless it is exact."""
    if part in {0, whole}:
        return "all" if part else "none"
    return f"{min(99, max(1, round(100 * part / whole)))} %"


def _counted(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"
