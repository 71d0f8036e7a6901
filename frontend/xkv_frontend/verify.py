"""`xkv-frontend verify`: whether tenants are kept apart, by the server's own counts of cached tokens."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from xkv_frontend.core.verdict import Observation, Step
from xkv_frontend.probing import Prober, first_model, new_client, restart

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_frontend.clock import Clock

LINES_DEFAULT: Final = 3000
MAX_TOKENS: Final = 4


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """Whom to ask."""

    front: str
    key_a: str
    key_b: str
    key_a2: str
    run_id: str
    """Stands before the prompt, so that every run has a new one; empty: the prompt alone."""
    lines: int = LINES_DEFAULT
    model: str | None = None
    restart_command: str | None = None
    health_url: str | None = None
    """Where vLLM says that it is back; None: its list of models, through the front end."""
    restart_s: float = 600.0
    settle_s: float = 3.0
    """How long the connector gets to write to the card before vLLM is restarted."""

    def __repr__(self) -> str:
        return f"VerifyOptions({self.front!r})"


def private_document(lines: int, run_id: str) -> str:
    """Return the prompt."""
    text = "\n".join(f"Line {number}: a private document of tenant A." for number in range(1, lines + 1))
    return f"Run {run_id}.\n{text}" if run_id else text


async def observe(
    options: VerifyOptions, clock: Clock, on_step: Callable[[Observation], None]
) -> list[Observation]:
    """Ask everybody in turn, and return what was seen.

    Raises:
        FrontendError: Somebody does not answer, or the restart fails.
    """
    prompt = private_document(options.lines, options.run_id)
    seen: list[Observation] = []
    async with new_client() as client:
        model = options.model or await first_model(client, options.front, options.key_a)
        prober = Prober(client, clock, model, MAX_TOKENS)

        async def step(step: Step, key: str) -> None:
            answer = await prober.ask(options.front, key, prompt)
            seen.append(Observation(step, answer.prompt_tokens, answer.cached_tokens))
            on_step(seen[-1])

        await step(Step.FIRST, options.key_a)
        await step(Step.AGAIN, options.key_a)
        await step(Step.COLLEAGUE, options.key_a2)
        await step(Step.OTHER, options.key_b)
        if options.restart_command is not None:
            # B has cached the first document under its own salt by now, and may find that after the restart.
            prompt = f"Second document.\n{prompt}"
            await prober.ask(options.front, options.key_a, prompt)
            await asyncio.sleep(options.settle_s)
            models = f"{options.front}/v1/models"
            key = options.key_a if options.health_url is None else None
            await restart(
                client, options.restart_command, options.health_url or models, key, options.restart_s
            )
            await step(Step.AGAIN_RESTARTED, options.key_a)
            await step(Step.OTHER_RESTARTED, options.key_b)
    return seen
