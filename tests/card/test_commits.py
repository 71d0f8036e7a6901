"""Commits of one turn are one call, and each caller gets its own part of the answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from xkv_gateway.card.commits import Commits
from xkv_gateway.core.errors import StalePlan
from xkv_gateway.core.types import CommitOutcome, Lsn, StoreStatus, WritePlan

if TYPE_CHECKING:
    from collections.abc import Sequence


def plan(slot: int) -> WritePlan:
    return WritePlan(slot, 0, 1, ())


class Recorder:
    """What an engine would be asked; plans of odd slots are cancelled."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], list[int]]] = []

    def __call__(self, plans: Sequence[WritePlan], checksums: Sequence[int]) -> CommitOutcome:
        slots = [one.slot for one in plans]
        self.calls.append((slots, list(checksums)))
        if len(set(slots)) < len(slots):
            raise StalePlan("the same plan twice")
        statuses = [StoreStatus.CANCELLED if slot % 2 else StoreStatus.STORED for slot in slots]
        return CommitOutcome(statuses, Lsn(len(self.calls)))


async def test_stores_of_one_turn_are_one_call_and_each_hears_of_its_own() -> None:
    engine = Recorder()
    commits = Commits(engine)
    first, second = await asyncio.gather(
        commits.add([plan(2), plan(3)], [20, 30]), commits.add([plan(4)], [40])
    )
    assert engine.calls == [([2, 3, 4], [20, 30, 40])]
    assert first == CommitOutcome([StoreStatus.STORED, StoreStatus.CANCELLED], Lsn(1))
    assert second == CommitOutcome([StoreStatus.STORED], Lsn(1))
    assert await commits.add([plan(6)], [60]) == CommitOutcome([StoreStatus.STORED], Lsn(2))


async def test_who_is_cancelled_in_that_turn_commits_nothing() -> None:
    engine = Recorder()
    commits = Commits(engine)
    alone = asyncio.ensure_future(commits.add([plan(2)], [20]))
    await asyncio.sleep(0)
    alone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await alone
    assert engine.calls == []
    tasks = [asyncio.ensure_future(commits.add([plan(slot)], [slot])) for slot in (4, 6)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    assert await tasks[1] == CommitOutcome([StoreStatus.STORED], Lsn(1))
    assert engine.calls == [([6], [6])]


async def test_a_stale_plan_is_told_to_all_of_the_turn() -> None:
    commits = Commits(Recorder())
    results = await asyncio.gather(*(commits.add([plan(2)], [20]) for _ in range(2)), return_exceptions=True)
    assert [type(result) for result in results] == [StalePlan, StalePlan]
