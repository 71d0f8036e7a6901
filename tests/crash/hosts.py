"""Several gateways on one card, one after the other and at once: dying, cut off, or having the card taken from them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tests.crash.bench import FAULTS, KEEP_ALIVE_MS, NAMESPACE, SCOPE, CrashBench
from tests.crash.device import Fuse
from tests.crash.explore import REFUSALS, SETTLED_S, sound
from xkv_gateway.card.fence import CardLost
from xkv_gateway.card.session import Phase
from xkv_gateway.card.store import CardOffline, CardRecovering, JournalFull
from xkv_gateway.core.types import LoadStatus
from xkv_gateway.errors import CardUnavailableError

if TYPE_CHECKING:
    from tests.crash.bench import Base, Life

CLIENTS: Final = 3
KEYS: Final = 4
CHANGES: Final = 3
"""Times that the card changes hands."""
NOTICED_S: Final = 3.0
"""A loser has looked at the superblock by then."""
ENDS: Final = ("takeover", "takeover", "death", "cut off")


class Hosts:
    """Plays one seed."""

    def __init__(self, base: Base, seed: int) -> None:
        self._rng = random.Random(seed)
        fuse = Fuse(lands=True)
        self.bench: CrashBench = replace(base, lives=base.lives + 100 + seed).bench(fuse)
        self.acknowledged = 0

    def play(self) -> None:
        assert self.bench.run(self._play)

    async def _play(self, bench: CrashBench) -> None:
        life = await bench.open_owned("host 0")
        for number in range(1, CHANGES + 1):
            clients = [asyncio.create_task(self._client(life, client)) for client in range(CLIENTS)]
            await asyncio.sleep(self._rng.random() * 2)
            life.device.faults = replace(FAULTS, break_probability=self._rng.choice((0, 0.002)))
            await asyncio.sleep(self._rng.random())
            life = await self._change_hands(life, f"host {number}", self._rng.choice(ENDS))
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            sound(life)
            await bench.told.judge(life)
        assert await life.stop()
        last = await bench.open_owned("last")
        await bench.told.judge(last)
        await last.kill()

    async def _change_hands(self, old: Life, name: str, how: str) -> Life:
        if how == "death":
            await old.kill()
        if how == "cut off":
            old.device.faults = FAULTS
            await old.session._blocks.online()
            old.device.break_connection(int((KEEP_ALIVE_MS / 1000 + 10 + self._rng.random() * 5) * 1e9))
        new = await self._open(name, takeover=how == "takeover")
        if how == "death":
            await self._recovering(new)
        await new.owned()
        if how == "takeover":
            await asyncio.sleep(NOTICED_S)
            self._lost(old)
        if how == "cut off":
            await asyncio.sleep(20)
            self._lost(old)
        if how != "death":
            # Ended for good: nothing of it may change the card any more.
            writes = old.device.counters.write_commands
            await asyncio.sleep(1)
            assert old.device.counters.write_commands == writes
            await old.kill()
        return new

    @staticmethod
    def _lost(old: Life) -> None:
        assert old.task.done(), "the loser goes on"
        assert isinstance(old.task.exception(), CardLost)
        assert old.session.phase is Phase.CLOSED
        assert not old.store.online

    async def _open(self, name: str, *, takeover: bool) -> Life:
        for _ in range(3):
            try:
                return await self.bench.open(name, takeover=takeover)
            except (CardUnavailableError, CardLost) as refused:
                if not any(text in str(refused) for text in REFUSALS):
                    raise
                await asyncio.sleep(SETTLED_S)
        raise AssertionError("the card is refused again and again")

    async def _recovering(self, new: Life) -> None:
        """Until it is settled, what is there is served, and nothing is written."""
        if new.store.writable:
            return
        told = self.bench.told
        names = [
            name for (namespace, scope, name), may in told.may.items() if scope == SCOPE and None not in may
        ]
        for status, _ in await new.load_all(NAMESPACE, SCOPE, names):
            assert status is LoadStatus.OK
        for work in (new.save(b"too early"), new.delete(b"too early")):
            with contextlib.suppress(CardRecovering):
                await work
                raise AssertionError("written while the run before may still write")
        told.may.pop((NAMESPACE, SCOPE, b"too early"), None)

    async def _client(self, life: Life, client: int) -> None:
        rng = random.Random(self._rng.random())
        while not life.task.done():
            name = b"%d/%d" % (client, rng.randrange(KEYS))
            try:
                if rng.random() < 0.4:
                    await life.delete(name)
                else:
                    self.acknowledged += await life.save(name, size_bytes=rng.randrange(9000)) == ["stored"]
            except (CardOffline, CardRecovering, JournalFull):
                await asyncio.sleep(0.01)
            await asyncio.sleep(rng.random() * 0.02)
