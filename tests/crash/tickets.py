"""Operations of clients that write to the card themselves: what is cut, at every command."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from tests.crash.bench import GRACE_NS, HELD_NS

if TYPE_CHECKING:
    from tests.crash.bench import CrashBench

TURN_S: Final = 0.000_15
"""Less than a command takes."""


async def reserve(bench: CrashBench) -> None:
    """Two tickets, in and before one batch with a store."""
    life = await bench.open_owned()
    await life.reserve(b"reserved", size_bytes=9000)
    await asyncio.gather(life.reserve(b"more", b"of them", size_bytes=0), life.save(b"beside"))


async def commit(bench: CrashBench) -> None:
    life = await bench.open_owned()
    first, second = await life.reserve(b"direct"), await life.reserve(b"a", b"b", size_bytes=4096)
    await asyncio.gather(life.write(first), life.write(second))
    assert await asyncio.gather(life.commit(first), life.commit(second, told=False), life.commit(first)) == [
        ["stored"],
        ["stored"] * 2,
        ["stored"],
    ]


async def commit_cancelled(bench: CrashBench) -> None:
    """Deleted and wiped before its client commits."""
    life = await bench.open_owned()
    deleted, wiped = await life.reserve(b"deleted"), await life.reserve(b"wiped")
    await life.write(wiped)
    await life.delete(b"deleted", b"two")
    wiping = asyncio.create_task(life.wipe(b"tenant"))
    await asyncio.sleep(TURN_S)
    assert await life.commit(deleted) == await life.commit(wiped) == ["cancelled"]
    await wiping
    await life.save(b"deleted")


async def abort(bench: CrashBench) -> None:
    """Space that was given back is used at once."""
    life = await bench.open_owned()
    held = await life.reserve(b"given back", size_bytes=9000)
    life.abort(held, settled=True)
    await life.fill()


async def expire(bench: CrashBench) -> None:
    """A client is late: nobody is where it writes, before its grace time is over."""
    life = await bench.open_owned()
    held = await life.reserve(b"late", size_bytes=9000, ttl_s=0.01)
    await asyncio.sleep(0.02)
    await life.save(b"late")
    await life.fill()
    await life.write(held)
    del bench.left[held.ticket]  # that was the last that its client does
    await asyncio.sleep(GRACE_NS / 1e9)
    await life.fill()


async def direct_checkpoint(bench: CrashBench) -> None:
    """Tickets in every state while it is written."""
    life = await bench.open_owned()
    held = [await life.reserve(b"held %d" % number, size_bytes=4096) for number in range(4)]
    await asyncio.gather(*map(life.write, held))
    assert life.session.checkpointer is not None

    async def work() -> None:
        await life.commit(held[0])
        life.abort(held[1], settled=True)
        await life.reserve(b"reserved meanwhile", size_bytes=4096)
        life.abort(held[2], settled=False)
        await life.commit(held[3], told=False)
        await life.delete(b"held 3")

    await asyncio.gather(life.session.checkpointer.write(), work())


async def tickets_of_a_dead_run(bench: CrashBench) -> None:
    """Ended by a kill, with a ticket, an object of a ticket, and one that was deleted."""
    bench.direct = True
    life = await bench.open_owned()
    first, _ = await life.reserve(b"direct"), await life.reserve(b"never committed", size_bytes=9000)
    await life.write(first)
    await life.commit(first)
    await life.delete(b"two")
    await life.kill()


async def after_tickets(bench: CrashBench) -> None:
    """The next run takes the space back when their time is over, and not before."""
    life = await bench.open_owned()
    await life.save(b"never committed")
    await life.fill()
    await asyncio.sleep(HELD_NS / 1e9)
    await life.fill()
    assert await life.stop()
