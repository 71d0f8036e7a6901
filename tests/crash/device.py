"""A simulated device on a fuse: at one command the power fails, or the process dies with that write on its way."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

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
    lands: bool = False
    """Whether writes that were left behind are executed by chance; else they are the caller's affair."""

    def next_is(self, what: str) -> bool:
        """Count a command; tell whether it is the one."""
        self.commands.append(what)
        return len(self.commands) == self.at and not self.blown

    def blow(self) -> None:
        """End it."""
        self.blown = True
        for device in self.devices:
            device.end(self.kind)
        self.on_blow()

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
            if fires and self.fuse.kind is Kind.POWER:
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
