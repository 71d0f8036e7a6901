"""What the counts of cached tokens say about isolation. Pure: from observations to a verdict in words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

CLOSE_SHARE: Final = 0.9
"""Cached tokens from this share of the prompt on are nearly all of it; the rest is the part of a block at the end."""


class Step(StrEnum):
    """Who asks, in the order of asking."""

    FIRST = "A, first time"
    AGAIN = "A, again"
    COLLEAGUE = "A, second key"
    OTHER = "B"
    AGAIN_RESTARTED = "A, after the restart"
    OTHER_RESTARTED = "B, after the restart"


class Expected(StrEnum):
    """What a step should find."""

    NOTHING = "0"
    NEARLY_ALL = "nearly all"


EXPECTED: Final[dict[Step, Expected]] = {
    Step.FIRST: Expected.NOTHING,
    Step.AGAIN: Expected.NEARLY_ALL,
    Step.COLLEAGUE: Expected.NEARLY_ALL,
    Step.OTHER: Expected.NOTHING,
    Step.AGAIN_RESTARTED: Expected.NEARLY_ALL,
    Step.OTHER_RESTARTED: Expected.NOTHING,
}

OTHERS: Final = (Step.OTHER, Step.OTHER_RESTARTED)
BROKEN: Final = "B found cached tokens of A's prompt: a request got around the front end's salt, or the two tenants share one"
MISSES: Final[dict[Step, str]] = {
    Step.AGAIN: "A does not find its own prompt again: prefix caching is off, or A's salt changes from request to request",
    Step.COLLEAGUE: "A's second key does not find A's prompt: the two keys are not one tenant, or its scope is narrower",
    Step.AGAIN_RESTARTED: "A finds nothing after the restart: the card was not written, not asked, or A's salt has changed",
}


class Verdict(StrEnum):
    """What was shown."""

    ISOLATED = "isolated"
    BROKEN = "broken"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Observation:
    """One answer; None where the server did not say."""

    step: Step
    prompt_tokens: int | None
    cached_tokens: int | None

    @property
    def as_expected(self) -> bool | None:
        """Whether the count is what it should be; None where there is none."""
        if self.cached_tokens is None or not self.prompt_tokens:
            return None
        if EXPECTED[self.step] is Expected.NOTHING:
            return self.cached_tokens == 0
        return self.cached_tokens >= CLOSE_SHARE * self.prompt_tokens


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict and its reasons."""

    verdict: Verdict
    sentences: tuple[str, ...]


def judge(observations: Sequence[Observation]) -> Judgement:
    """Return what the observations show. A count that is missing never lets the verdict be `isolated`."""
    by_step = {seen.step: seen for seen in observations}
    if Step.FIRST in by_step and by_step[Step.FIRST].as_expected is False:
        text = "A's first request found cached tokens: the prompt is not new, so that nothing follows from the others"
        return Judgement(Verdict.INCONCLUSIVE, (text,))
    broken = [BROKEN] if any(by_step[step].as_expected is False for step in OTHERS if step in by_step) else []
    broken += [
        text for step, text in MISSES.items() if step in by_step and by_step[step].as_expected is False
    ]
    if broken:
        return Judgement(Verdict.BROKEN, tuple(broken))
    missing = [step for step in Step if step in by_step and by_step[step].as_expected is None]
    missing += [step for step in (Step.FIRST, Step.AGAIN, Step.COLLEAGUE, Step.OTHER) if step not in by_step]
    if missing:
        names = ", ".join(missing)
        text = f"no count of cached tokens for: {names}. Run vLLM with --enable-prompt-tokens-details"
        return Judgement(Verdict.INCONCLUSIVE, (text,))
    sentences = ["A and A's second key share A's cache, and B finds nothing of it"]
    if Step.AGAIN_RESTARTED in by_step and Step.OTHER_RESTARTED in by_step:
        sentences.append(
            "after the restart of vLLM the card gives A its tokens back, and B still finds nothing"
        )
    else:
        sentences.append(
            "vLLM was not restarted, so that this says nothing about the card (--restart-command)"
        )
    return Judgement(Verdict.ISOLATED, tuple(sentences))
