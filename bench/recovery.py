"""How long a start takes, and what it needs: the real daemon on a card with a checkpoint of N objects and a full journal.

The card is a soft card whose index is made and written by the gateway's own code; the objects' payloads are not: a start does
not read them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import uvloop

from bench.gateway import running_gateway
from bench.harness import MIB, BenchError, at_most, child, work_folder
from bench.softcard import running_softcard
from xkv_gateway.card import ownership
from xkv_gateway.card.blocks import CardBlocks
from xkv_gateway.card.layout import CAPACITY_AU_MIN, checkpoint_bytes, plan
from xkv_gateway.card.opening import OpenOptions, open_card
from xkv_gateway.card.ownership import Owner
from xkv_gateway.card.runs import DataArea
from xkv_gateway.card.store import CardStore
from xkv_gateway.clock import entropy, monotonic_ns, wall_ns
from xkv_gateway.config import load_config
from xkv_gateway.core.types import BeginStore, Delete, WritePlan
from xkv_gateway.daemon.card import engine_limits
from xkv_nvmeof.initiator import TcpInitiator
from xkv_nvmeof.initiator_options import InitiatorOptions, TargetAddress

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from bench.softcard import SoftCard
    from xkv_gateway.card.session import CardSession
    from xkv_gateway.core.engine import Engine

OBJECTS: Final = 10_000_000
AU_BYTES: Final = 4096
BATCH: Final = 4096
HOST_NQN: Final = "nqn.2026-01.org.example:bench-recovery"
HOST_ID: Final = bytes(range(3, 19))
BUILD_SECONDS_MAX: Final = 600
FULL_BYTES_LEFT: Final = 2 * MIB
"""The journal counts as full when no more than this is left."""
SERVING_SECONDS_MAX: Final = 20.0
RESIDENT_MB_MAX: Final = 1500.0


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m bench.recovery", description=__doc__)
    parser.add_argument("--objects", type=int, default=OBJECTS)
    parser.add_argument("--build", type=Path, help="only make the card, in this folder")
    arguments = parser.parse_args(list(argv))
    if arguments.build is not None:
        return _build(arguments.build, arguments.objects)
    with work_folder() as folder:
        command = [sys.executable, "-m", "bench.recovery", "--objects", str(arguments.objects)]
        with child("build", [*command, "--build", str(folder)], folder) as process:
            if process.process.wait(BUILD_SECONDS_MAX):
                raise BenchError(f"the card could not be made:\n{process.log_tail()}")
            built = json.loads(process.log.read_text(encoding="utf-8").splitlines()[-1])
        begin = time.monotonic()
        with running_gateway(folder, f"soft:{folder}/recovery.img", ready_seconds=120.0) as gateway:
            serving_s = time.monotonic() - begin
            memory = _memory_mb(gateway.process.process.pid)
            log = gateway.process.log.read_text(encoding="utf-8")
    found = re.search(r"read the index.*", log)
    return {
        "objects": arguments.objects,
        **built,
        "start_to_serving_s": round(serving_s, 2),
        "resident_mb": memory["VmRSS"],
        "peak_mb": memory["VmHWM"],
        "log": found[0] if found else "",
        "bars": [
            at_most(f"start to serving, s, {arguments.objects:,} objects", serving_s, SERVING_SECONDS_MAX),
            at_most("resident, MB", memory["VmRSS"], RESIDENT_MB_MAX),
        ],
    }


def _memory_mb(pid: int) -> dict[str, float]:
    """Return VmRSS and VmHWM."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    pairs = (line.split(":", 1) for line in lines if line.startswith(("VmRSS", "VmHWM")))
    return {name: int(value.split()[0]) * 1024 / 1e6 for name, value in pairs}


# --- making the card --------------------------------------------------------------------------------------


def _build(folder: Path, objects: int) -> dict[str, Any]:
    with running_softcard(folder, "recovery", card_bytes(objects)) as card:
        return uvloop.run(_fill(card, objects))


def card_bytes(objects: int) -> int:
    """The size of a card for so many objects of one unit, and an eighth more."""
    checkpoints = 2 * checkpoint_bytes(2 * objects, 2 * objects, 4 * MIB)
    size_bytes = (objects + CAPACITY_AU_MIN) * AU_BYTES * 9 // 8 + checkpoints + 1024 * MIB
    return size_bytes - size_bytes % AU_BYTES


async def _fill(card: SoftCard, objects: int) -> dict[str, Any]:
    async with new_card(card, objects, lambda engine: _store_all(engine, objects)) as (session, store, run):
        assert session.checkpointer is not None
        assert session.journal is not None
        session.checkpointer.look = lambda **_: None  # type: ignore[method-assign] # no more checkpoints: the journal is to be full
        filled = asyncio.create_task(_fill_journal(session, store, objects))
        await asyncio.wait((run, filled), return_when=asyncio.FIRST_COMPLETED)
        (run if run.done() else filled).result()
        # Not closed in order: the next start has all of the journal to read.
        return {
            "checkpoint_mb": session.checkpointer.last_bytes / 1e6,
            "journal_batches": session.journal.batches,
        }


@asynccontextmanager
async def new_card(
    card: SoftCard, objects: int, fill: Callable[[Engine], None]
) -> AsyncIterator[tuple[CardSession, CardStore, asyncio.Task[None]]]:
    """Format a card for so many objects, and an eighth more; what `fill` stores is in its first checkpoint. It is owned until the end."""
    options = InitiatorOptions(host_nqn=HOST_NQN, host_id=HOST_ID)
    address = TargetAddress(card.host, card.port, card.nqn, card.nsid)
    device = await TcpInitiator.connect(address, options, clock=monotonic_ns, entropy=entropy)
    blocks = CardBlocks(device, monotonic_ns)
    geometry = device.geometry
    await ownership.format_card(
        blocks,
        plan(geometry.size_bytes, geometry.block_bytes, AU_BYTES, objects * 9 // 8),
        ownership.facts_of(device),
        label="bench",
        sequence=1,
        wall_ns=wall_ns(),
        entropy=entropy,
    )
    # Nothing may be evicted while the card is made.
    config = load_config(file=None, environment={"XKV_EVICTION__POLICY": "noop"}, flags={}).config
    session = await open_card(
        device,
        blocks,
        OpenOptions(
            owner=Owner("bench", HOST_NQN, HOST_ID, bytes(16), 0, 10_000, 0),
            limits_of=lambda layout: engine_limits(config, layout),
            clock=monotonic_ns,
            wall_clock=wall_ns,
            entropy=entropy,
            exclusive=True,
        ),
    )
    fill(session.engine)
    layout = session.superblock.layout
    area = DataArea(layout.data.offset_bytes, AU_BYTES, layout.block_bytes)
    store = CardStore(session.engine, device, area, None, monotonic_ns, session)
    run = asyncio.create_task(session.run(store))
    owned = asyncio.create_task(session.owned_soon())
    await asyncio.wait((run, owned), return_when=asyncio.FIRST_COMPLETED)
    if run.done():
        run.result()
    assert session.checkpointer is not None
    await session.checkpointer.write()
    yield session, store, run
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    store.close()
    await device.aclose()


def _keys(first: int) -> list[bytes]:
    numbers = np.zeros((BATCH, 4), "<u8")
    numbers[:, 0] = np.arange(first, first + BATCH)
    raw = numbers.tobytes()
    return [raw[i * 32 : (i + 1) * 32] for i in range(BATCH)]


def _put(engine: Engine, keys: list[bytes], scope: bytes = b"") -> None:
    outcome = engine.begin_store(BeginStore("bench", scope, keys, [AU_BYTES] * len(keys)), monotonic_ns())
    plans = [plan for plan in outcome.entries if isinstance(plan, WritePlan)]
    engine.commit_store(plans, [7] * len(plans), monotonic_ns())


def _store_all(engine: Engine, objects: int) -> None:
    with durable_long_ago(engine):
        for first in range(0, objects, BATCH):
            _put(engine, _keys(first)[: objects - first])
            persist(engine)


@contextmanager
def durable_long_ago(engine: Engine) -> Iterator[None]:
    """What is recorded inside is in no journal: the checkpoint says it all."""
    log, begin_lsn = engine._state.log, engine.last_lsn  # noqa: SLF001
    yield
    log.last_lsn = log.persisted_lsn = begin_lsn


def persist(engine: Engine) -> None:
    """Let what was recorded be durable, as a journal would."""
    engine.take_records()
    engine.persisted(engine.last_lsn, monotonic_ns())


async def _fill_journal(session: CardSession, store: CardStore, objects: int) -> None:
    """Delete objects and store them again until the journal is full."""
    assert session.journal is not None
    first = 0
    while session.journal.free_bytes > FULL_BYTES_LEFT:
        keys = _keys(first)[: objects - first]
        store.engine.delete(Delete("bench", b"", keys), monotonic_ns())
        store.changed()
        await store.durable(store.engine.last_lsn, monotonic_ns() + 10**10)
        _put(store.engine, keys)
        store.changed()
        await store.durable(store.engine.last_lsn, monotonic_ns() + 10**10)
        first = first + BATCH if first + 2 * BATCH <= objects else 0


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
