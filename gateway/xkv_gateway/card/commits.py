"""Commits of one turn of the loop, gathered into one call of the engine, and so into one record of the journal.

Stores that one flush has covered hear of it in the same turn, and what the engine does costs nearly the same for one object as for several.
"""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import TYPE_CHECKING

from xkv_gateway.core.errors import StalePlan
from xkv_gateway.core.types import CommitOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xkv_gateway.core.types import WritePlan

_Waiting = tuple["Sequence[WritePlan]", "Sequence[int]", "asyncio.Future[CommitOutcome]"]


class Commits:
    """Gathers; `commit` is called from the loop with plans and checksums, and what it records is submitted by it."""

    def __init__(self, commit: Callable[[Sequence[WritePlan], Sequence[int]], CommitOutcome]) -> None:
        self._commit = commit
        self._waiting: list[_Waiting] = []
        self._loop = asyncio.get_running_loop()

    async def add(self, plans: Sequence[WritePlan], checksums: Sequence[int]) -> CommitOutcome:
        """Commit these plans at the end of this turn; their statuses, and the LSN of the records of all.

        Who is cancelled meanwhile has committed nothing.

        Raises:
            StalePlan: the same plan twice.
        """
        future: asyncio.Future[CommitOutcome] = self._loop.create_future()
        self._waiting.append((plans, checksums, future))
        if len(self._waiting) == 1:
            self._loop.call_soon(self._gathered)
        return await future

    def _gathered(self) -> None:
        waiting = [entry for entry in self._waiting if not entry[2].done()]
        self._waiting = []
        if not waiting:
            return
        plans = list(chain.from_iterable(plans for plans, _, _ in waiting))
        try:
            outcome = self._commit(plans, list(chain.from_iterable(sums for _, sums, _ in waiting)))
        except StalePlan as error:
            for _, _, future in waiting:
                future.set_exception(error)
            return
        statuses = iter(outcome.statuses)
        for plans_of_one, _, future in waiting:
            future.set_result(CommitOutcome([next(statuses) for _ in plans_of_one], outcome.lsn))
