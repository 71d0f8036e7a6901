"""A soft card whose namespace grows, shrinks, goes and returns while hosts use it."""

from __future__ import annotations

import os
from random import Random
from typing import TYPE_CHECKING

import pytest

from tests.nvmeof.card_bench import BLOCKS, CardBench
from tests.nvmeof.card_process import DEADLINE_S, attach, running_card
from tests.nvmeof.hosts import States
from xkv_nvmeof import builders
from xkv_nvmeof.blockdev import CommandFailed, DeviceOffline, DeviceState
from xkv_nvmeof.identify import IdentifyNamespace
from xkv_nvmeof.softcard.store import TRAILER_BYTES, Store, StoreError
from xkv_nvmeof.spec import Cns, LogPageId, Status

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


@pytest.mark.parametrize("where", ["file", "memory"])
async def test_growth_shrink_removal_and_return_reach_the_host(tmp_path: Path, where: str) -> None:
    place = ["--file", tmp_path / "card.img"] if where == "file" else ["--memory"]
    with running_card(*place, "--size", "64MiB", "--exit-with-stdin") as card:
        device = await attach(card)
        states = States(device)
        sizes: list[int] = []
        device.add_geometry_listener(lambda _before, now: sizes.append(now.size_bytes // MIB))
        for size in (80, 96, 64, 32, 48):
            card.tell(f"resize {size}MiB")
            await states.until(lambda size=size: size in sizes)  # type: ignore[misc]
        assert sizes == [80, 96, 64, 32, 48]
        assert states.seen == []
        with pytest.raises(CommandFailed):
            await device.write_from(48 * MIB, [memoryview(bytes(4096))])
        card.tell("detach")
        await states.until(lambda: device.state is DeviceState.OFFLINE)
        with pytest.raises(DeviceOffline, match="does not exist"):
            await device.flush()
        card.tell("attach")
        await states.until(lambda: device.state is DeviceState.ONLINE)
        await device.write_from(0, [memoryview(bytes(4096))])
        assert device.counters.reconnects == 0
        await device.aclose()


def test_what_the_console_does_not_understand_changes_nothing() -> None:
    with running_card("--memory", "--size", "64MiB", "--exit-with-stdin") as card:
        for line in ("resize", "resize much", "resize 5", "resize 0", "explode", "x" * 5000, ""):
            card.tell(line)
        _out, log = card.process.communicate(timeout=DEADLINE_S)
        assert card.process.returncode == 0
        assert b"explode is no command" in log
        assert b": done" not in log


def test_a_resized_file_is_a_card_of_the_new_size_with_the_old_blocks(tmp_path: Path) -> None:
    path = tmp_path / "card.img"
    store = Store.open_file(path, MIB, 4096, os.urandom)
    data = Random(1).randbytes(MIB)
    store.write(0, memoryview(data), durable=True)
    ids = store.identity.nguid, store.identity.uuid
    for size in (2 * MIB, MIB + 4096, MIB, MIB // 2):
        store.resize(size)
        store.close()
        assert path.stat().st_size == size + TRAILER_BYTES
        store = Store.open_file(path, None, None, os.urandom)
        assert (store.identity.nguid, store.identity.uuid) == ids
        found = bytearray(size)
        store.read(0, memoryview(found))
        assert found[:MIB] == data[:size]
        assert not any(found[MIB:])
    for size in (0, -4096, 4097):
        with pytest.raises(StoreError):
            store.resize(size)
    store.close()


def test_a_namespace_that_is_away_is_refused_and_not_listed() -> None:
    bench = CardBench()
    admin = bench.admin()
    queue = bench.queue(admin)
    bench.card.change_namespace(attached=False)
    assert queue.status(builders.read(4, 1, 0, 1, builders.Sgl.transport(4096))) is Status.INVALID_NAMESPACE
    assert queue.status(builders.flush(4, 1)) is Status.INVALID_NAMESPACE
    assert not any(admin.command(builders.identify(5, Cns.ACTIVE_NAMESPACES)).data[5])
    assert not any(admin.command(builders.identify(6, Cns.NAMESPACE, nsid=1)).data[6])
    assert (
        admin.status_of_data(builders.identify(7, Cns.NAMESPACE_DESCRIPTORS, nsid=1))
        is Status.INVALID_NAMESPACE
    )
    bench.card.change_namespace(attached=True, block_count=BLOCKS + 8)
    found = IdentifyNamespace.from_bytes(admin.command(builders.identify(8, Cns.NAMESPACE, nsid=1)).data[8])
    assert found.size_blocks == BLOCKS + 8


def test_changes_in_a_row_are_one_event_until_the_list_is_read() -> None:
    bench = CardBench()
    admin = bench.admin()
    assert admin.status(builders.set_features(4, 0x0B, 1 << 8)) is Status.SUCCESS
    for cid in (5, 6):
        admin.command(builders.async_event_request(cid))
    bench.card.change_namespace(block_count=BLOCKS + 1)
    bench.card.change_namespace(block_count=BLOCKS + 2)
    assert [one.cid for one in admin.answer().completions] == [5]
    listed = admin.command(builders.get_log_page(7, LogPageId.CHANGED_NAMESPACES, 4096)).data[7]
    assert listed[:8] == (1).to_bytes(8, "little")
    bench.card.change_namespace(block_count=BLOCKS + 3)
    assert [one.cid for one in admin.answer().completions] == [6]
