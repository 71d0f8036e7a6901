"""Keeps the SPDK target right while the gateway serves.

A target keeps nothing: after a restart it is empty, and after a hand has been in it it is not what was declared. So it is asked
again and again who it is, and looked at as a whole now and then, at once when the process is another one or the card has gone
offline. What is missing is made anew; then the card's connection is hurried, which looks whose card it is before it is used.

Nothing here waits on anything but the target, and nothing of the gateway waits on this.
"""

from __future__ import annotations

import asyncio
import logging
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from xkv_gateway.errors import TargetAwayError, TargetError
from xkv_gateway.target import spdk
from xkv_nvmeof.blockdev import DeviceState
from xkv_nvmeof.initiator_retry import Backoff
from xkv_rpc.spdk import SpdkClient

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_gateway.target.attach import AttachedCard
    from xkv_gateway.target.desired import DesiredTarget

log = logging.getLogger(__name__)

CALL_TIMEOUT_MS: Final = 3_000
FIRST_TIMEOUT_S: Final = 8.0
"""At the start of the gateway: after that the card is tried all the same."""
LOOK_PERIOD_S: Final = 5.0
"""Between two looks at the whole of a target that is the same process still."""
AWAY_MS: Final = (100, 1_000)
"""First and longest pause between attempts to reach a target that is away."""
WRONG_MS: Final = (1_000, 30_000)
"""The same for one that cannot be made right, or that somebody else makes different again and again."""
UNDONE_MAX: Final = 3
"""So many looks in a row find undone what was made: then it is no slip of a hand."""


class TargetState(StrEnum):
    """What is known of the target."""

    UNKNOWN = "unknown"
    RIGHT = "right"
    AWAY = "away"
    """It cannot be reached, or does not answer."""
    WRONG = "wrong"
    """It could not be made right; the reason says why."""


class TargetKeeper:
    """Looks after one target. `first` once, then `run` in a task; `close` ends calls that hang.

    Args:
        desired: how it shall be.
        interval_s: how often it is asked who it is.
        clock: monotonic nanoseconds.
        entropy: gives random bytes, for the pauses.
    """

    def __init__(
        self,
        desired: DesiredTarget,
        *,
        interval_s: float,
        clock: Callable[[], int],
        entropy: Callable[[int], bytes],
    ) -> None:
        self.state = TargetState.UNKNOWN
        self.reason = "not looked at yet"
        self.pid: int | None = None
        self.remade = 0
        """How often something had to be made anew."""
        self.on_made: Callable[[], None] | None = None
        """Called when the target has been made right, or is another process that is."""
        self._desired = desired
        self._interval_s = interval_s
        self._clock = clock
        self._client = SpdkClient(desired.rpc, clock=clock, timeout_ms=CALL_TIMEOUT_MS)
        self._away, self._wrong = Backoff(*AWAY_MS, entropy), Backoff(*WRONG_MS, entropy)
        self._wake = asyncio.Event()
        self._looked_ns: int | None = None
        self._right_pid: int | None = None
        """The process that was last made right."""
        self._undone = 0
        """Looks in a row that found it different in the same process."""

    @property
    def _contested(self) -> bool:
        return self._undone >= UNDONE_MAX

    @property
    def rpc(self) -> str:
        """Where it takes orders."""
        return str(self._desired.rpc)

    def close(self) -> None:
        """End the calls that are under way. Does not wait."""
        self._client.close()

    def nudge(self) -> None:
        """Look at all of it now: the card has gone offline."""
        self._looked_ns = None
        self._wake.set()

    async def first(self) -> None:
        """Make it right before the card is attached, as far as that is possible in a short time; the log tells."""
        try:
            async with asyncio.timeout(FIRST_TIMEOUT_S):
                await self._once()
        except TimeoutError:
            self._now(TargetState.AWAY, f"it did not answer within {FIRST_TIMEOUT_S:.0f} s")

    async def run(self) -> None:
        """Look after it until cancelled."""
        while True:
            pause_s = await self._once()
            if self._contested:
                # Each of two that undo the other's work ends connections with it: not at the speed of the loss of a card.
                await asyncio.sleep(pause_s)
                continue
            try:
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    async def _once(self) -> float:
        """Look once, repair what is wrong; return the pause before the next time, in seconds."""
        try:
            looks = await self._needs_look()
            if looks:
                await self._repair()
        except TargetAwayError as error:
            self._looked_ns = None
            self._wrong.reset()
            self._now(TargetState.AWAY, str(error))
            return self._away.next_s()
        except TargetError as error:
            advice = f" ({error.advice})" if error.advice else ""
            self._now(TargetState.WRONG, f"{error}{advice}")
            return self._wrong.next_s()
        self._away.reset()
        if self._contested:
            return self._wrong.next_s() if looks else self._interval_s
        self._wrong.reset()
        return self._interval_s

    async def _needs_look(self) -> bool:
        """Ask who it is; return whether all of it is to be looked at."""
        pid = await spdk.pid_of(self._client)
        if pid != self.pid:
            if self.pid is not None:
                log.warning(
                    "the SPDK target was restarted: process %s, before %s",
                    pid,
                    self.pid,
                    extra=_event("restarted"),
                )
            self.pid, self._looked_ns = pid, None
        looked_ns = self._looked_ns
        return looked_ns is None or self._clock() - looked_ns >= LOOK_PERIOD_S * 1e9

    async def _repair(self) -> None:
        before, self._looked_ns = self.state, None
        steps = await spdk.apply(
            self._client,
            self._desired,
            on_step=lambda step: log.info("SPDK target: %s (%s)", step.why, step.method),
        )
        self._looked_ns = self._clock()
        self._undone = self._undone + 1 if steps and self.pid == self._right_pid else 0
        self._right_pid = self.pid
        if self._contested:
            reason = "somebody undoes what is made; does another gateway declare this target differently?"
            self._now(TargetState.WRONG, reason)
        else:
            self._now(
                TargetState.RIGHT,
                f"process {self.pid} is as it shall be" + (f", after {len(steps)} steps" if steps else ""),
                again=bool(steps),
            )
        self.remade += bool(steps)
        if (steps or before is not TargetState.RIGHT) and self.on_made is not None:
            self.on_made()

    def _now(self, state: TargetState, reason: str, *, again: bool = False) -> None:
        """Keep the state, and log it if it is news."""
        news = state is not self.state or (state is TargetState.WRONG and reason != self.reason) or again
        self.state, self.reason = state, reason
        if news:
            level = logging.INFO if state is TargetState.RIGHT else logging.WARNING
            log.log(level, "the SPDK target is %s: %s", state, reason, extra=_event(state))


def _event(kind: str) -> dict[str, str]:
    return {"event": f"target-{kind}"}


def follow(keeper: TargetKeeper, card: AttachedCard) -> None:
    """Join the two: a card that goes offline has its target looked at, a target that was made right its card connected."""

    def on_state(state: DeviceState, _: str) -> None:
        if state is DeviceState.OFFLINE:
            keeper.nudge()

    card.device.add_state_listener(on_state)
    keeper.on_made = card.hurry
