"""Distributions of times to the first token, and what their difference says. Randomness is an argument."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

RESAMPLES: Final = 5000
CONFIDENCE: Final = 0.95
NARROW_SHARE: Final = 0.05
"""An interval is narrow when it is below this share of the median time to the first token."""
CLOSE_SHARE: Final = 0.9


class Arm(StrEnum):
    """Who tries what."""

    UNSALTED = "without salts"
    OTHER = "other tenant"
    COLLEAGUE = "colleague"
    OTHER_RESTARTED = "other tenant, after a restart"
    COLLEAGUE_RESTARTED = "colleague, after a restart"


SHARES: Final = frozenset({Arm.UNSALTED, Arm.COLLEAGUE, Arm.COLLEAGUE_RESTARTED})
"""Arms in which the victim's prompt is meant to be found."""


class Finding(StrEnum):
    """What an arm shows."""

    SIGNAL = "signal"
    NO_SIGNAL = "no signal"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True)
class Samples:
    """Times to the first token, in milliseconds, and cached tokens: on the victim's prompt and on a fresh one."""

    known_ms: tuple[float, ...]
    fresh_ms: tuple[float, ...]
    known_cached: tuple[int | None, ...]
    prompt_tokens: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Estimate:
    """The difference of medians, fresh minus known: positive where the victim's prompt is faster. All in milliseconds."""

    known_ms: float
    fresh_ms: float
    difference_ms: float
    low_ms: float
    high_ms: float
    cached_share: float | None
    """Median share of the victim's prompt that was cached; None where the server did not say."""
    found_cached: bool = False
    """Whether any probe of the victim's prompt found a cached token."""

    @property
    def narrow(self) -> bool:
        """Whether the interval is narrow enough to say that there is no difference."""
        return self.high_ms - self.low_ms <= NARROW_SHARE * self.fresh_ms

    @property
    def finding(self) -> Finding:
        """What the 95 % interval shows."""
        if self.low_ms > 0 or self.high_ms < 0:
            return Finding.SIGNAL
        return Finding.NO_SIGNAL if self.narrow else Finding.UNCLEAR


def estimate(samples: Samples, random: np.random.Generator) -> Estimate:
    """Return the difference of medians with its bootstrap interval.

    Pairs are drawn, since the two times of a probe were taken one behind the other: what slows the machine for a while
    slows both.
    """
    known, fresh = np.asarray(samples.known_ms), np.asarray(samples.fresh_ms)
    drawn = random.integers(known.size, size=(RESAMPLES, known.size))
    tail = (1 - CONFIDENCE) / 2
    differences = np.median(fresh[drawn], axis=1) - np.median(known[drawn], axis=1)
    low, high = np.quantile(differences, [tail, 1 - tail])
    counts = zip(samples.known_cached, samples.prompt_tokens, strict=True)
    shares = [cached / tokens if cached is not None and tokens else None for cached, tokens in counts]
    told = [share for share in shares if share is not None]
    return Estimate(
        float(np.median(known)),
        float(np.median(fresh)),
        float(np.median(fresh) - np.median(known)),
        float(low),
        float(high),
        float(np.median(told)) if len(told) == len(shares) else None,
        any(share > 0 for share in told),
    )


class Conclusion(StrEnum):
    """Of the whole study."""

    HIDDEN = "hidden"
    VISIBLE = "visible"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Report:
    """The conclusion in words."""

    conclusion: Conclusion
    sentences: tuple[str, ...]


def conclude(estimates: Mapping[Arm, Estimate]) -> Report:
    """Return what the study shows. Without a positive control it shows nothing."""
    sentences = [_sentence(arm, found) for arm, found in estimates.items()]
    others = [found for arm, found in estimates.items() if arm not in SHARES]
    if any(found.finding is Finding.SIGNAL or found.found_cached for found in others):
        sentences.append(
            "Another tenant can tell what has been asked before: the salts do not keep the tenants apart."
        )
        return Report(Conclusion.VISIBLE, tuple(sentences))
    controls = [estimates[arm] for arm in (Arm.UNSALTED, Arm.COLLEAGUE) if arm in estimates]
    if not any(found.finding is Finding.SIGNAL and found.difference_ms > 0 for found in controls):
        sentences.append(
            "Nobody can tell, not even those who share a cache: the study cannot see what it looks for."
        )
        return Report(Conclusion.INCONCLUSIVE, tuple(sentences))
    if any(found.finding is Finding.UNCLEAR for found in others):
        sentences.append("The times scatter too much for a statement about other tenants: take more probes.")
        return Report(Conclusion.INCONCLUSIVE, tuple(sentences))
    colleagues = [
        found for arm, found in estimates.items() if arm in (Arm.COLLEAGUE, Arm.COLLEAGUE_RESTARTED)
    ]
    if any(found.cached_share is not None and found.cached_share < CLOSE_SHARE for found in colleagues):
        sentences.append(
            "Other tenants cannot tell, but colleagues do not find what their tenant has cached."
        )
        return Report(Conclusion.INCONCLUSIVE, tuple(sentences))
    sentences.append(
        "With salts another tenant cannot tell whether a prompt was asked before, and colleagues keep their cache."
    )
    return Report(Conclusion.HIDDEN, tuple(sentences))


def _sentence(arm: Arm, found: Estimate) -> str:
    share = "" if found.cached_share is None else f", {found.cached_share:.0%} of the tokens cached"
    return (
        f"{arm.value}: {found.known_ms:.0f} ms on the victim's prompt, {found.fresh_ms:.0f} ms on a fresh one; "
        f"difference {found.difference_ms:.1f} ms, 95 % between {found.low_ms:.1f} and {found.high_ms:.1f}{share}: "
        f"{found.finding.value}"
    )
