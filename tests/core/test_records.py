"""The records tell all that a journal must hold."""

from __future__ import annotations

import itertools

from xkv_gateway.core.records import (
    RECORD_OBJECTS_MAX,
    DeleteBatch,
    FreedBatch,
    NamespaceNamed,
    PutBatch,
    ScopeNamed,
    WipeRecord,
)
from xkv_gateway.core.types import WritePlan

from .helpers import World, keys


def puts(world: World) -> list[PutBatch]:
    return [record for record in world.records if isinstance(record, PutBatch)]


def test_a_put_lists_the_extents_of_each_object_also_of_split_and_of_empty_ones() -> None:
    world = World(capacity_au=28)
    world.store(keys(28))
    world.delete(keys(28)[::2])
    world.persist()
    world.records.clear()
    plans = world.plans([b"empty", b"split", b"one"], [0, 4 * 1024, 5])
    assert [len(plan.extents) for plan in plans] == [0, 4, 1]
    world.commit(plans)
    (put,) = puts(world)
    assert put.extent_counts.tolist() == [0, 4, 1]
    runs = list(zip(put.extent_starts_au.tolist(), put.extent_counts_au.tolist(), strict=True))
    assert runs == [tuple(extent) for plan in plans for extent in plan.extents]
    assert put.slots.tolist() == [plan.slot for plan in plans]
    assert put.generations.tolist() == [plan.generation for plan in plans]
    assert put.sizes_bytes.tolist() == [0, 4096, 5]
    assert put.checksums.tolist() == [7 + plan.slot for plan in plans]
    low, high = world.engine._state.digester.digest("n", b"s", [b"empty", b"split", b"one"])
    assert (put.digests_low.tolist(), put.digests_high.tolist()) == (low.tolist(), high.tolist())


def test_lsns_have_no_gaps_and_names_come_before_the_objects_that_use_them() -> None:
    world = World(capacity_au=2)
    for i in range(6):
        world.store([b"k"], ns=f"n{i}", scope=b"s%d" % i)
    assert [record.lsn for record in world.records] == list(range(1, world.engine.last_lsn + 1))
    namespaces: dict[int, str] = {}
    scopes: dict[int, bytes] = {}
    seen = []
    for record in world.records:
        match record:
            case NamespaceNamed():
                namespaces[record.namespace_id] = record.name
            case ScopeNamed():
                scopes[record.scope_id] = record.name
            case PutBatch():
                seen.append((namespaces[int(record.namespace_ids[0])], scopes[int(record.scope_ids[0])]))
            case _:
                pass
    assert seen == [(f"n{i}", b"s%d" % i) for i in range(6)]


def test_an_aborted_store_records_nothing() -> None:
    world = World()
    world.engine.abort_store(world.plans(keys(3)), world.now_ns, None)
    assert world.engine.take_records() == []


def test_large_batches_are_cut_into_records_of_bounded_size() -> None:
    count = RECORD_OBJECTS_MAX + 10
    world = World(capacity_au=count, max_objects=count)
    world.store(keys(count))
    world.delete(keys(count))
    world.persist()
    for kind in (PutBatch, DeleteBatch, FreedBatch):
        sizes = [len(record.slots) for record in world.records if isinstance(record, kind)]
        assert sizes == [RECORD_OBJECTS_MAX, 10]


def test_a_wipe_is_one_record_by_name_before_those_of_its_objects() -> None:
    world = World()
    world.store(keys(3))
    world.engine.wipe("n", None, world.now_ns)
    world.persist()
    kinds = [type(record) for record in world.records]
    assert kinds.index(WipeRecord) < kinds.index(DeleteBatch)
    (wipe,) = (record for record in world.records if isinstance(record, WipeRecord))
    assert (wipe.namespace, wipe.scope) == ("n", None)


def test_the_records_alone_give_the_state_at_the_end() -> None:
    world = World(capacity_au=10, max_objects=12)
    for i in range(8):
        world.store(keys(3, f"{i}-"), 1500, scope=b"%d" % (i % 3))
        world.delete(keys(1, f"{i}-"), scope=b"%d" % (i % 3))
    world.engine.wipe("n", b"1", world.now_ns)
    world.persist()
    rebuilt: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for record in world.records:
        match record:
            case PutBatch():
                runs = zip(record.extent_starts_au.tolist(), record.extent_counts_au.tolist(), strict=True)
                for name, count in zip(_names(record), record.extent_counts.tolist(), strict=True):
                    rebuilt[name] = list(itertools.islice(runs, count))
            case FreedBatch():
                for name in _names(record):
                    del rebuilt[name]
            case _:
                pass
    assert len(rebuilt) == world.engine.usage().live_objects
    units = [
        unit for runs in rebuilt.values() for start, count in runs for unit in range(start, start + count)
    ]
    assert len(set(units)) == len(units) == world.engine.usage().live_au
    assert isinstance(world.begin([b"new"])[0], WritePlan)


def _names(record: PutBatch | FreedBatch) -> list[tuple[int, int]]:
    return list(zip(record.slots.tolist(), record.generations.tolist(), strict=True))
