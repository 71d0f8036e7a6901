"""A simulated device on a fuse: at one command the power fails, here and there or only there, or the process dies with that write on its way."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from tests.sim.device import SimDevice

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.medium import Written


class Kind(Enum):
    """How a life ends."""

    POWER = "power"
    """Host and card, before the command is sent: what was not flushed may be there or not."""
    DEATH = "death"
    """Of the process, once the command (a write) is sent: the card lives on, and executes it whenever it likes."""
    OUTAGE = "outage"
    """Of the card alone, before the command is sent: it comes back without what was not flushed, and the host goes on."""


OUTAGE_NS: Final = 50_000_000


@dataclass(eq=False)
class Fuse:
    """Counts the commands of all devices of a bench, and ends everything at one of them."""

    at: int | None = None
    kind: Kind = Kind.POWER
    commands: list[str] = field(default_factory=list)
    """What each was: read, write, flush or reserve."""
    blown: bool = False
    on_blow: Callable[[], None] = lambda: None
    devices: list[CrashDevice] = field(default_factory=list)
    survivor: int = 0
    """Which of the images that an outage may leave it does leave; the first one has nothing that was not flushed."""
    lands: bool = False
    """Whether writes that were left behind are executed by chance; else they are the caller's affair."""

    def next_is(self, what: str) -> bool:
        """Count a command; tell whether it is the one."""
        self.commands.append(what)
        return len(self.commands) == self.at and not self.blown

    def blow(self) -> None:
        """End it."""
        self.blown = True
        if self.kind is Kind.OUTAGE:
            self._lose_power_of_target()
            return
        for device in self.devices:
            device.end(self.kind)
        self.on_blow()

    def _lose_power_of_target(self) -> None:
        medium = self.devices[0].medium
        images = medium.survivors(self.survivor + 1, random.Random(self.at))
        *_, image = images
        for device in self.devices:
            device.lose_power_of_target(image, OUTAGE_NS)

    def points(self) -> list[int]:
        """Where to cut, by power: each command behind a write or a flush, and the moment after the last one."""
        numbered = itertools.pairwise(enumerate(["write", *self.commands], 1))
        cuts = [at for (at, before), _ in numbered if before != "read"]
        return [*cuts, len(self.commands) + 1]

    def writes(self) -> list[int]:
        """Where a write is on its way."""
        return [at for at, what in enumerate(self.commands, 1) if what == "write"]


class CrashDevice(SimDevice):
    """A device that hangs on a fuse. What its writes become after a death is the caller's choice alone."""

    fuse: Fuse
    _next = "read"

    @classmethod
    def on(cls, fuse: Fuse, *args: Any, **options: Any) -> CrashDevice:
        device = cls(*args, **options)
        device.fuse = fuse
        fuse.devices.append(device)
        return device

    async def flush(self) -> None:
        self._next = "flush"
        await super().flush()

    async def reserve(self, execute: Callable[[], None]) -> None:
        self._next = "reserve"
        await super().reserve(execute)

    async def _start(self, write: Written | None) -> None:
        what, self._next = self._next, "read"
        if not self._dead:
            fires = self.fuse.next_is("write" if write is not None else what)
            if fires and self.fuse.kind is not Kind.DEATH:
                self.fuse.blow()
            await super()._start(write)
            if fires and not self.fuse.blown:
                self.fuse.blow()
        else:
            await super()._start(write)

    def end(self, kind: Kind) -> None:
        """The end of this host, or of everything."""
        if kind is Kind.POWER:
            self.lose_power()
        else:
            self.die()

    def _leave_behind(self, write: Written) -> None:
        if self.fuse.lands:
            super()._leave_behind(write)
            return
        write.returned = True
        self._numbers.pop(id(write), None)
