"""How long one turn of the daemon's loop may take: the largest requests and the steps of background work, one by one.

On an engine of five million objects, in time of the processor of this thread (what else the machine does is not in it).
The daemon does each of these in one turn of its loop, and whatever else arrives waits for it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from bench.engine_scale import OBJECT_BYTES, _key, _limits, _store
from bench.harness import at_most
from xkv_gateway.card.checkpointer import SLOTS_PER_TURN
from xkv_gateway.card.journal_format import beginning
from xkv_gateway.card.structure import Stamp
from xkv_gateway.card.table_file import FileIdentity, FileKind, TableWriter
from xkv_gateway.card.tables import EXTENTS, OBJECTS
from xkv_gateway.core.engine import Engine
from xkv_gateway.core.types import BeginLoad, BeginStore, Delete, Lookup, LookupMode, WritePlan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from xkv_gateway.core.types import ReadPlan

OBJECTS_HELD: Final = 5_000_000
KEYS: Final = 4096
"""The largest request."""
FILL_BATCH: Final = 4096
VICTIMS_EACH: Final = 16
"""Objects of one unit that each object of a store that evicts takes the place of."""
ROUNDS: Final = 7
TURN_MS_MAX: Final = 20.0
REGION_BYTES: Final = 1 << 30
SCOPE: Final = b"s0"
RUN: Final = Stamp(bytes(16), 1, bytes(16))


class Turns:
    """The longest turn of each kind."""

    def __init__(self) -> None:
        self.longest_ms: dict[str, float] = {}

    def time(self, name: str, work: Callable[[], Any]) -> Any:
        """Do it, and note how long it took."""
        begin_ns = time.thread_time_ns()
        result = work()
        spent_ms = (time.thread_time_ns() - begin_ns) / 1e6
        self.longest_ms[name] = max(spent_ms, self.longest_ms.get(name, 0.0))
        return result


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run it and return the results."""
    parser = argparse.ArgumentParser(prog="bench.turns", description=__doc__)
    parser.add_argument("--objects", type=int, default=OBJECTS_HELD)
    held = parser.parse_args(list(argv)).objects
    numbers = itertools.count(1)
    # One batch more than is filled: so a store of the largest request never evicts, and the one after it does.
    engine = Engine(
        _limits(held), digest_secret=bytes(32), entropy=lambda count: next(numbers).to_bytes(count, "big")
    )
    for first in range(0, held - KEYS, FILL_BATCH):
        _store(
            engine, b"s%d" % (first // FILL_BATCH % 100), range(first, min(held - KEYS, first + FILL_BATCH))
        )
    gc.collect()
    gc.freeze()
    turns = Turns()
    for number in range(ROUNDS):
        _requests(turns, engine, held + number * KEYS)
        _eviction(turns, engine, 2 * held + number * KEYS)
        _checkpoint(turns, engine)
    gc.unfreeze()
    longest = max(turns.longest_ms, key=lambda name: turns.longest_ms[name])
    return {
        "objects": held,
        "keys": KEYS,
        "longest_turn_ms": turns.longest_ms,
        "bars": [at_most(f"longest turn, ms ({longest})", turns.longest_ms[longest], TURN_MS_MAX)],
    }


def _requests(turns: Turns, engine: Engine, fresh: int) -> None:
    held = [_key(number) for number in range(KEYS)]
    new = [_key(number) for number in range(fresh, fresh + KEYS)]
    sizes = [OBJECT_BYTES] * KEYS
    lookup = Lookup("bench", SCOPE, held, LookupMode.PREFIX, 60_000_000_000)
    found = turns.time("lookup", lambda: engine.lookup(lookup, 0))
    turns.time("lease entered", engine.next_deadline)
    plans = turns.time(
        "load begun", lambda: engine.begin_load(BeginLoad("bench", SCOPE, held, found.lease), 0)
    )
    read: list[ReadPlan] = [plan for plan in plans if plan is not None]
    turns.time("load ended", lambda: engine.end_load(read, [], 0))
    turns.time("lease released", lambda: engine.release(found.lease, 0))
    stored = turns.time("store begun", lambda: engine.begin_store(BeginStore("bench", SCOPE, new, sizes), 0))
    turns.time("store committed", lambda: engine.commit_store(stored.entries, [1] * KEYS, 0))
    _durable(turns, engine, "stored")
    turns.time("delete", lambda: engine.delete(Delete("bench", SCOPE, new), 0))
    _durable(turns, engine, "deleted")
    turns.time("tick", lambda: engine.tick(0))


def _eviction(turns: Turns, engine: Engine, fresh: int) -> None:
    """A store that finds no room: as many victims as one call may take, then the room is given back."""
    keys, sizes = (
        [_key(number) for number in range(fresh, fresh + KEYS)],
        [VICTIMS_EACH * OBJECT_BYTES] * KEYS,
    )
    begin = BeginStore("bench", b"large", keys, sizes)
    turns.time("store that evicts", lambda: engine.begin_store(begin, 0))
    _durable(turns, engine, "evicted")
    stored = turns.time("store into what was evicted", lambda: engine.begin_store(begin, 0))
    plans = [entry for entry in stored.entries if isinstance(entry, WritePlan)]
    turns.time("store given up", lambda: engine.abort_store(plans, 0, None))


def _durable(turns: Turns, engine: Engine, what: str) -> None:
    engine.take_records()
    turns.time(f"{what} durably", lambda: engine.persisted(engine.last_lsn, 0))
    engine.take_records()
    engine.persisted(engine.last_lsn, 0)


def _checkpoint(turns: Turns, engine: Engine) -> None:
    """As `Checkpointer` does it: rows are gathered, then each piece is on its way to the card before the next is made."""
    writer = TableWriter(REGION_BYTES, FileIdentity(RUN, FileKind.CHECKPOINT, 1, beginning(RUN)))
    image = engine.image

    def pieces(first: int, last: int) -> Iterator[None]:
        objects, extents = image.rows(first, last, 0)
        for table, columns in ((OBJECTS, objects), (EXTENTS, extents)):
            for _ in writer.chunks(table, columns):
                yield

    for first in range(0, image.slots_used, SLOTS_PER_TURN):
        part = pieces(first, min(first + SLOTS_PER_TURN, image.slots_used))
        while turns.time("checkpoint part", partial(next, part, part)) is not part:
            continue
    turns.time("checkpoint closed", lambda: writer.close(1, image.used_stamp_max, image.generation_max()))


if __name__ == "__main__":
    import json
    import sys

    print(json.dumps(main(sys.argv[1:]), indent=2))
