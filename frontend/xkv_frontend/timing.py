"""`xkv-frontend timing`: can somebody tell from the time to the first token what others have asked?

The server's own prefix cache is emptied before every probe, so that what is found comes from the card. Each probe has a new
prompt of the victim's: whoever probes a prompt caches it, under their own salt.

That another tenant sees nothing can be said only when times scatter little or probes are many. So the arms of another tenant
go on until their interval is narrow, up to a bound. They are not stopped by where the interval lies: who looks again and again, and
stops at the first interval without 0, finds one in the end.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import httpx
import numpy as np

from xkv_frontend.core.stats import Arm, Samples, estimate
from xkv_frontend.errors import UnreachableError
from xkv_frontend.probing import Answer, Prober, first_model, new_client, restart

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xkv_frontend.clock import Clock, Entropy

PROBES_DEFAULT: Final = 40
PROBES_MAX_DEFAULT: Final = 400
_LOOK_EVERY: Final = 10
"""So many more probes are taken before the interval is looked at again."""
WARM_UP: Final = 2
MAX_TOKENS: Final = 1
EMPTY_S: Final = 60.0
EMPTY_PAUSE_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class TimingOptions:
    """Whom to ask, and how often."""

    front: str
    vllm: str
    """vLLM itself: for the arm without salts, and for emptying its prefix cache."""
    key_a: str
    key_b: str
    key_a2: str
    model: str | None = None
    probes: int = PROBES_DEFAULT
    probes_max: int = PROBES_MAX_DEFAULT
    """For the arms of another tenant, while their interval is wide."""
    lines: int = 300
    settle_s: float = 0.5
    """How long the connector gets to write the victim's prompt to the card."""
    restart_command: str | None = None
    restart_s: float = 600.0

    def __repr__(self) -> str:
        return f"TimingOptions({self.front!r}, {self.vllm!r})"


@dataclass(slots=True)
class _Collected:
    known: list[Answer] = field(default_factory=list)
    fresh: list[Answer] = field(default_factory=list)

    def samples(self) -> Samples:
        return Samples(
            tuple(answer.first_ns / 1e6 for answer in self.known),
            tuple(answer.first_ns / 1e6 for answer in self.fresh),
            tuple(answer.cached_tokens for answer in self.known),
            tuple(answer.prompt_tokens for answer in self.known),
        )


class Study:
    """One run over all arms, which take turns so that what drifts hits all of them."""

    def __init__(
        self,
        options: TimingOptions,
        client: httpx.AsyncClient,
        prober: Prober,
        entropy: Entropy,
        on_probe: Callable[[int], None],
    ) -> None:
        self._options = options
        self._client = client
        self._prober = prober
        self._entropy = entropy
        self._on_probe = on_probe
        self._planned = probes_in_all(options)
        self._done = 0
        self._collected: dict[Arm, _Collected] = {}

    def _prompt(self) -> str:
        name = self._entropy(8).hex()
        lines = range(1, self._options.lines + 1)
        return f"Document {name}.\n" + "\n".join(
            f"Line {n}: a private document, number {name}." for n in lines
        )

    async def _victim(self, arm: Arm, prompt: str) -> None:
        options = self._options
        if arm is Arm.UNSALTED:
            await self._prober.ask(options.vllm, None, prompt)
        else:
            await self._prober.ask(options.front, options.key_a, prompt)

    async def _timed(self, arm: Arm, prompt: str) -> Answer:
        await self._empty_prefix_cache()
        options = self._options
        match arm:
            case Arm.UNSALTED:
                return await self._prober.time_first(options.vllm, None, prompt)
            case Arm.OTHER | Arm.OTHER_RESTARTED:
                return await self._prober.time_first(options.front, options.key_b, prompt)
            case Arm.COLLEAGUE | Arm.COLLEAGUE_RESTARTED:
                return await self._prober.time_first(options.front, options.key_a2, prompt)

    async def _empty_prefix_cache(self) -> None:
        """Blocks that are still being written to the card cannot be emptied: vLLM says so, and is asked again."""
        url = f"{self._options.vllm}/reset_prefix_cache"
        try:
            async with asyncio.timeout(EMPTY_S):
                while not await self._is_emptied(url):  # noqa: ASYNC110 - another process
                    await asyncio.sleep(EMPTY_PAUSE_S)
        except TimeoutError:
            raise UnreachableError(
                f"{url}: the prefix cache could not be emptied within {EMPTY_S:.0f} s",
                advice="Nobody else may use this vLLM during the study.",
            ) from None

    async def _is_emptied(self, url: str) -> bool:
        try:
            response = await self._client.post(url)
        except httpx.HTTPError as error:
            raise UnreachableError(f"{self._options.vllm}: {type(error).__name__}") from None
        if response.status_code != httpx.codes.OK:
            raise UnreachableError(
                f"{url} answered {response.status_code}",
                advice="vLLM has this route with VLLM_SERVER_DEV_MODE=1; use that for the study only.",
            )
        try:
            document = response.json()
        except ValueError:  # vLLM before 0.32 says nothing
            return True
        return not isinstance(document, dict) or document.get("success") is not False

    async def _probe(self, arm: Arm, known: str, *, keep: bool = True) -> None:
        """Time the victim's prompt and a fresh one, in an order drawn by lot."""
        known_first = self._entropy(1)[0] % 2 == 0
        prompts = (known, self._prompt())
        answers = [await self._timed(arm, prompt) for prompt in (prompts if known_first else prompts[::-1])]
        if not known_first:
            answers.reverse()
        if keep:
            collected = self._collected.setdefault(arm, _Collected())
            collected.known.append(answers[0])
            collected.fresh.append(answers[1])
        self._done += 1
        self._on_probe(max(self._planned, self._done))

    def _taken(self, arm: Arm) -> int:
        return len(self._collected[arm].known) if arm in self._collected else 0

    def _is_told(self, arm: Arm) -> bool:
        """Whether more probes would say nothing new: the interval is narrow, or a cached token has said it all."""
        random = np.random.default_rng(int.from_bytes(self._entropy(8)))
        found = estimate(self._collected[arm].samples(), random)
        return found.narrow or found.found_cached

    async def live(self, arms: Sequence[Arm]) -> None:
        """The victim asks, then the arm's prober; again and again."""
        for number in range(-WARM_UP, self._options.probes):
            for arm in arms:
                await self._ask_and_probe(arm, keep=number >= 0)

    async def live_until_told(self, arm: Arm) -> None:
        """Go on with one arm."""
        while self._taken(arm) < self._options.probes_max and not self._is_told(arm):
            for _ in range(min(_LOOK_EVERY, self._options.probes_max - self._taken(arm))):
                await self._ask_and_probe(arm)

    async def _ask_and_probe(self, arm: Arm, *, keep: bool = True) -> None:
        prompt = self._prompt()
        await self._victim(arm, prompt)
        await asyncio.sleep(self._options.settle_s)
        await self._probe(arm, prompt, keep=keep)

    async def restarted(self, command: str) -> None:
        """The victim asks everything first; then vLLM is restarted; then the others probe.

        Of prompts for the other tenant there are as many as it took before the restart, and a few more.
        """
        options, other, colleague = self._options, Arm.OTHER_RESTARTED, Arm.COLLEAGUE_RESTARTED
        likely = self._taken(Arm.OTHER) * 5 // 4
        count = max(options.probes, min(options.probes_max, likely))
        prompts = {other: [self._prompt() for _ in range(count)]}
        prompts[colleague] = [self._prompt() for _ in range(options.probes)]
        for arm, asked in prompts.items():
            for prompt in asked:
                await self._victim(arm, prompt)
        await asyncio.sleep(options.settle_s)
        await restart(self._client, command, f"{options.vllm}/health", None, options.restart_s)
        for _ in range(WARM_UP):
            await self._timed(other, self._prompt())
        for prompt, of_colleague in zip(prompts[other], prompts[colleague], strict=False):
            await self._probe(other, prompt)
            await self._probe(colleague, of_colleague)
        for number, prompt in enumerate(prompts[other][options.probes :]):
            if number % _LOOK_EVERY == 0 and self._is_told(other):
                break
            await self._probe(other, prompt)

    def samples(self) -> dict[Arm, Samples]:
        """Return what was collected, in the order of the arms."""
        return {arm: self._collected[arm].samples() for arm in Arm if arm in self._collected}


async def study(
    options: TimingOptions, clock: Clock, entropy: Entropy, on_probe: Callable[[int], None]
) -> dict[Arm, Samples]:
    """Run all arms; `on_probe` is called after each probe, with how many there will be as far as is known.

    Raises:
        FrontendError: Somebody does not answer, or the restart fails.
    """
    async with new_client() as client:
        model = options.model or await first_model(client, options.front, options.key_a)
        run = Study(options, client, Prober(client, clock, model, MAX_TOKENS), entropy, on_probe)
        await run.live((Arm.UNSALTED, Arm.OTHER, Arm.COLLEAGUE))
        await run.live_until_told(Arm.OTHER)
        if options.restart_command is not None:
            await run.restarted(options.restart_command)
    return run.samples()


def probes_in_all(options: TimingOptions) -> int:
    """Return how many probes there are, if no arm needs more."""
    live = 3 * (options.probes + WARM_UP)
    return live + (2 * options.probes if options.restart_command is not None else 0)
