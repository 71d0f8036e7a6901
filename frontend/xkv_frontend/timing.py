"""`xkv-frontend timing`: can somebody tell from the time to the first token what others have asked?

The server's own prefix cache is emptied before every probe, so that what is found comes from the card. Each probe has a new
prompt of the victim's: whoever probes a prompt caches it, under their own salt.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import httpx

from xkv_frontend.core.stats import Arm, Samples
from xkv_frontend.errors import UnreachableError
from xkv_frontend.probing import Answer, Prober, first_model, new_client, restart

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xkv_frontend.clock import Clock, Entropy

PROBES_DEFAULT: Final = 40
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
        on_probe: Callable[[], None],
    ) -> None:
        self._options = options
        self._client = client
        self._prober = prober
        self._entropy = entropy
        self._on_probe = on_probe
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
        self._on_probe()

    async def live(self, arms: Sequence[Arm]) -> None:
        """The victim asks, then the arm's prober; again and again."""
        for number in range(-WARM_UP, self._options.probes):
            for arm in arms:
                prompt = self._prompt()
                await self._victim(arm, prompt)
                await asyncio.sleep(self._options.settle_s)
                await self._probe(arm, prompt, keep=number >= 0)

    async def restarted(self, command: str) -> None:
        """The victim asks everything first; then vLLM is restarted; then the others probe."""
        arms = (Arm.OTHER_RESTARTED, Arm.COLLEAGUE_RESTARTED)
        prompts = {arm: [self._prompt() for _ in range(self._options.probes)] for arm in arms}
        for arm in arms:
            for prompt in prompts[arm]:
                await self._victim(arm, prompt)
        await asyncio.sleep(self._options.settle_s)
        await restart(self._client, command, f"{self._options.vllm}/health", None, self._options.restart_s)
        for _ in range(WARM_UP):
            await self._timed(arms[0], self._prompt())
        for number in range(self._options.probes):
            for arm in arms:
                await self._probe(arm, prompts[arm][number])

    def samples(self) -> dict[Arm, Samples]:
        """Return what was collected, in the order of the arms."""
        return {arm: self._collected[arm].samples() for arm in Arm if arm in self._collected}


async def study(
    options: TimingOptions, clock: Clock, entropy: Entropy, on_probe: Callable[[], None]
) -> dict[Arm, Samples]:
    """Run all arms; `on_probe` is called after each probe.

    Raises:
        FrontendError: Somebody does not answer, or the restart fails.
    """
    async with new_client() as client:
        model = options.model or await first_model(client, options.front, options.key_a)
        run = Study(options, client, Prober(client, clock, model, MAX_TOKENS), entropy, on_probe)
        await run.live((Arm.UNSALTED, Arm.OTHER, Arm.COLLEAGUE))
        if options.restart_command is not None:
            await run.restarted(options.restart_command)
    return run.samples()


def probes_in_all(options: TimingOptions) -> int:
    """Return how often `on_probe` will be called."""
    live = 3 * (options.probes + WARM_UP)
    return live + (2 * options.probes if options.restart_command is not None else 0)
