"""Wipes bit by bit: whatever happens between two steps, what was wiped is gone and what came later stays."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from xkv_gateway.core import wiping
from xkv_gateway.core.engine import Engine
from xkv_gateway.core.image import ROW_WIPED
from xkv_gateway.core.records import FreedBatch
from xkv_gateway.core.restore import Restored
from xkv_gateway.core.types import BeginStore, Lookup, LookupMode, StoreStatus, WritePlan

from .helpers import SECOND_NS, SECRET, Counter, World, keys

if TYPE_CHECKING:
    from xkv_gateway.core.types import ErasePlan

HOMES = [(ns, scope) for ns in ("", "n") for scope in (b"", b"s")]
NAMES = [b"%d" % i for i in range(12)]


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wiping, "SCAN_SLOTS", 5)
    monkeypatch.setattr(wiping, "DOOM_SLOTS", 2)


def inside(home: tuple[str, bytes], namespace: str, scope: bytes | None) -> bool:
    return home[0] == namespace and scope in {None, home[1]}


class Story:
    """Random stores, deletes, loads, leases and wipes, beside a dict of what is visible."""

    def __init__(self, seed: int, *, erase: bool) -> None:
        self.dice = random.Random(seed)
        self.world = World(capacity_au=60, max_objects=80)
        self.erase = erase
        self.visible: dict[tuple[tuple[str, bytes], bytes], int] = {}
        self.writing: dict[tuple[tuple[str, bytes], bytes], WritePlan] = {}
        self.cancelled: list[WritePlan] = []
        self.erasing: list[ErasePlan] = []

    def step(self) -> None:
        home = self.dice.choice(HOMES)
        names = self.dice.sample(NAMES, 3)
        match self.dice.randrange(9):
            case 0 | 1 | 2:
                self.begin(home, names)
            case 3 | 4 if self.writing:
                self.commit(self.dice.choice(list(self.writing)))
            case 5:
                self.world.delete(names, ns=home[0], scope=home[1])
                for name in names:
                    self.visible.pop((home, name), None)
                    self.cancel((home, name))
            case 6:
                self.world.lookup(names, self.dice.choice([0, SECOND_NS]), ns=home[0], scope=home[1])
            case 7 if self.dice.random() < 0.5:
                self.wipe(home[0], self.dice.choice([None, home[1]]))
            case _:
                self.world.wait(SECOND_NS // 10)
                self.world.persist()
                self.go_on_erasing()
        self.check()

    def held(self, home: tuple[str, bytes], names: list[bytes]) -> list[bool]:
        request = Lookup(*home, names, LookupMode.EACH, 0)
        sizes = self.world.engine.lookup(request, self.world.now_ns).sizes_bytes
        return [size is not None for size in sizes]

    def begin(self, home: tuple[str, bytes], names: list[bytes]) -> None:
        entries = self.world.begin(names, 1024, ns=home[0], scope=home[1])
        for name, entry in zip(names, entries, strict=True):
            if isinstance(entry, WritePlan):
                assert (home, name) not in self.visible
                assert (home, name) not in self.writing
                self.writing[home, name] = entry
            elif entry is StoreStatus.EXISTS:
                assert (home, name) in self.visible
        self.forget_evicted()

    def forget_evicted(self) -> None:
        for home, name in list(self.visible):
            if not self.held(home, [name])[0]:
                del self.visible[home, name]

    def commit(self, what: tuple[tuple[str, bytes], bytes]) -> None:
        plan = self.writing.pop(what)
        assert self.world.commit([plan]) == [StoreStatus.STORED]
        self.visible[what] = 1
        if self.cancelled:
            assert self.world.commit([self.cancelled.pop()]) == [StoreStatus.CANCELLED]

    def cancel(self, what: tuple[tuple[str, bytes], bytes]) -> None:
        plan = self.writing.pop(what, None)
        if plan is not None:
            self.cancelled.append(plan)

    def wipe(self, namespace: str, scope: bytes | None) -> None:
        self.world.engine.wipe(namespace, scope, self.world.now_ns, erase=self.erase)
        for what in list(self.visible):
            if inside(what[0], namespace, scope):
                del self.visible[what]
        for what in list(self.writing):
            if inside(what[0], namespace, scope):
                self.cancel(what)

    def go_on_erasing(self) -> None:
        engine = self.world.engine
        if self.erasing and self.dice.random() < 0.7:
            (engine.wiping.erased if self.dice.random() < 0.8 else engine.wiping.not_erased)(self.erasing)
            self.erasing = []
        elif not self.erasing:
            self.erasing = engine.wiping.take_erasable(self.dice.randint(1, 5), self.dice.randint(1, 5))
        engine.audit()

    def check(self) -> None:
        self.world.engine.audit()
        for home in HOMES:
            expected = [(home, name) in self.visible for name in NAMES]
            assert self.held(home, NAMES) == expected

    def end(self) -> None:
        """Everything ends: all units come back."""
        for what in list(self.writing):
            self.commit(what)
        for plan in self.cancelled:
            self.world.commit([plan])
        for namespace in ("", "n"):
            self.wipe(namespace, None)
        self.visible.clear()
        for _ in range(90):
            self.world.wait(SECOND_NS)
            self.world.persist()
            self.go_on_erasing()
        self.check()
        assert self.world.engine.usage().free_au == 60
        assert not self.world.engine._state.names.scopes
        assert all(counts.done for counts in self.world.engine.wiping.wipes.values())
        assert not any(counts.left_au for counts in self.world.engine.wiping.wipes.values())


@pytest.mark.parametrize("erase", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_between_two_steps_only_what_was_there_before_a_wipe_goes(
    seed: int, erase: bool
) -> None:
    story = Story(seed, erase=erase)
    for _ in range(100):
        story.step()
    story.end()


@pytest.mark.parametrize("seed", range(4))
def test_a_checkpoint_in_the_middle_of_a_wipe_does_not_bring_anything_back(seed: int) -> None:
    story = Story(seed, erase=True)
    for _ in range(60):
        story.step()
    story.world.persist()
    story.world.engine.wipe("n", None, story.world.now_ns, erase=True)
    for what in [what for what in story.visible if what[0][0] == "n"]:
        del story.visible[what]
    story.world.persist()
    image = story.world.engine.image
    objects, extents = image.rows(0, image.slots_used, story.world.now_ns)
    names = image.names()
    restored = Restored(story.world.limits, story.world.now_ns)
    restored.begin(story.world.engine.last_lsn + 1, image.used_stamp_max, image.generation_max())
    restored.add_names(names.namespaces, names.scopes)
    restored.add_objects(objects)
    restored.add_extents(extents)
    again = Engine(story.world.limits, digest_secret=SECRET, entropy=Counter(), restored=restored)
    again.audit()
    story.world.engine = again
    story.check()
    # What was wiped is erased before it is free, also by the next run.
    held = int((objects["state"] == ROW_WIPED).sum())
    assert held
    for _ in range(100):
        story.world.wait(SECOND_NS)
        if plans := again.wiping.take_erasable(3, 100):
            again.wiping.erased(plans)
        story.world.persist()
    assert again.counters.erased == held
    assert all(counts.done for counts in again.wiping.wipes.values())
    again.audit()


def test_wiped_units_are_not_free_before_they_are_erased() -> None:
    world = World(capacity_au=4)
    world.store(keys(4))
    outcome = world.engine.wipe("n", None, world.now_ns, erase=True)
    for _ in range(4):
        world.wait(0)
        world.persist()
    assert outcome.counts.scanned
    assert (outcome.counts.left_au, outcome.counts.ready_au) == (4, 4)
    assert not any(isinstance(record, FreedBatch) for record in world.records)
    assert world.engine.begin_store(BeginStore("n", b"s", [b"k"], [1]), world.now_ns).entries == [
        StoreStatus.NO_SPACE
    ]
    plans = world.engine.wiping.take_erasable(100, 3)
    assert len(plans) == 3
    world.engine.wiping.erased(plans)
    world.persist()
    assert world.engine.usage().free_au == 3
    world.store([b"k"])
