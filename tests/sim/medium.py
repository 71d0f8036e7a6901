"""What a simulated card holds: sparse memory under a volatile write cache.

Fault model. The unit is the sector of 512 bytes, whatever the block size:

    volatile   a write that has been executed is seen by every read, and is durable only after a flush
    power      of the versions of a sector written since it was last durable, and of the durable one, any may survive; each
               sector chooses for itself. So of each block written since the last flush: lost, torn at 512 bytes, whole,
               in any combination, and writes that come in any order
    in flight  a write that was cut by the power failure is one more version of each of its sectors
    flush      covers the writes that returned before it was asked for, and nothing else; a write whose connection has ended
               counts as returned once it is executed
    damage     a bit may flip for good; which sectors were damaged is remembered, so that an oracle knows

`survivors` enumerates the images that a power failure may leave, up to a bound; `draw_survivor` draws one.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from xkv_nvmeof.controller_reservations import ReservationTable

SECTOR_BYTES: Final = 512
ZEROES: Final = bytes(SECTOR_BYTES)
SURVIVOR_DRAWS: Final = 4
"""So many draws for each image that is asked for: some come twice."""

Image = dict[int, bytes]
"""Sector number to its 512 bytes; what is absent is zero."""


@dataclass(slots=True, eq=False)
class Written:
    """One write on its way: `returned` once the caller knows that it was executed."""

    offset_bytes: int
    data: bytes
    host_id: bytes = b""
    executed: bool = False
    returned: bool = False

    def sectors(self) -> Iterator[tuple[int, bytes]]:
        """Each sector of the write and what it shall hold."""
        first = self.offset_bytes // SECTOR_BYTES
        for at in range(0, len(self.data), SECTOR_BYTES):
            yield first + at // SECTOR_BYTES, self.data[at : at + SECTOR_BYTES]


@dataclass(slots=True)
class Medium:
    """The memory of a card. It outlives devices, connections and processes."""

    size_bytes: int
    block_bytes: int
    volatile: bool = True
    durable: Image = field(default_factory=dict)
    cache: dict[int, list[tuple[Written, bytes]]] = field(default_factory=dict)
    """Versions that are not durable yet, oldest first."""
    in_flight: dict[int, Written] = field(default_factory=dict)
    """Writes that were sent and not (wholly) executed, by a number of their own."""
    damaged: set[int] = field(default_factory=set)
    """Sectors that give other bytes than were written, until they are written again."""
    reservations: ReservationTable | None = None
    """Of the controller, which lives until the power fails; None: it has none."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        assert self.block_bytes % SECTOR_BYTES == 0
        assert self.size_bytes % self.block_bytes == 0

    # --- writes -----------------------------------------------------------------------------------------------

    def send(self, write: Written) -> int:
        """Note that a write is on its way; returns its number."""
        number = next(self._numbers)
        self.in_flight[number] = write
        return number

    def execute(self, number: int, begin: int = 0, end: int | None = None) -> None:
        """Execute the sectors `begin`..`end` of a write that is on its way (all of them: it has arrived)."""
        write = self.in_flight[number]
        whole = list(write.sectors())
        for sector, data in whole[begin:end]:
            self.damaged.discard(sector)
            if self.volatile:
                self.cache.setdefault(sector, []).append((write, data))
            else:
                self._keep(sector, data)
        if end is None or end >= len(whole):
            write.executed = True
            del self.in_flight[number]

    def forget(self, number: int) -> None:
        """A write that will never be executed (any more)."""
        self.in_flight.pop(number, None)

    def abort(self, host_ids: frozenset[bytes]) -> None:
        """What these hosts have on its way is never executed (any more)."""
        self.in_flight = {
            number: write for number, write in self.in_flight.items() if write.host_id not in host_ids
        }

    def returned_so_far(self) -> set[int]:
        """Which writes a flush that is asked for now covers (identities, for `flush`)."""
        return {id(write) for versions in self.cache.values() for write, _ in versions if write.returned}

    def flush(self, covered: set[int]) -> None:
        """Make the covered writes durable; a newer version of a sector stays volatile."""
        for sector, versions in list(self.cache.items()):
            last = len(versions) - 1
            while last >= 0 and id(versions[last][0]) not in covered:
                last -= 1
            if last < 0:
                continue
            self._keep(sector, versions[last][1])
            del versions[: last + 1]
            if not versions:
                del self.cache[sector]

    def resize(self, size_bytes: int) -> None:
        """Become larger, or smaller: then what is beyond the end is lost."""
        self.size_bytes = size_bytes
        end = size_bytes // SECTOR_BYTES
        self.durable = {sector: data for sector, data in self.durable.items() if sector < end}
        self.cache = {sector: versions for sector, versions in self.cache.items() if sector < end}

    def _keep(self, sector: int, data: bytes) -> None:
        if data == ZEROES:
            self.durable.pop(sector, None)
        else:
            self.durable[sector] = data

    # --- reads ------------------------------------------------------------------------------------------------

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """What a read sees now."""
        first = offset_bytes // SECTOR_BYTES
        return b"".join(map(self._current, range(first, first + length_bytes // SECTOR_BYTES)))

    def _current(self, sector: int) -> bytes:
        versions = self.cache.get(sector)
        return versions[-1][1] if versions else self.durable.get(sector, ZEROES)

    def damage(self, sector: int, bit: int) -> None:
        """Flip one bit for good."""
        data = bytearray(self._current(sector))
        data[bit // 8] ^= 1 << bit % 8
        versions = self.cache.get(sector)
        if versions:
            versions[-1] = (versions[-1][0], bytes(data))
        else:
            self._keep(sector, bytes(data))
        self.damaged.add(sector)

    def current(self) -> Image:
        """What reads see now, as an image."""
        return {**self.durable, **{sector: versions[-1][1] for sector, versions in self.cache.items()}}

    # --- power ------------------------------------------------------------------------------------------------

    def choices(self) -> dict[int, list[bytes]]:
        """For each sector that is not settled, what may be there after a power failure now. The durable version is first."""
        options: dict[int, list[bytes]] = {}
        for sector, versions in self.cache.items():
            options[sector] = [self.durable.get(sector, ZEROES), *(data for _, data in versions)]
        for write in self.in_flight.values():
            for sector, data in write.sectors():
                options.setdefault(sector, [self._current(sector)]).append(data)
        return {sector: list(dict.fromkeys(versions)) for sector, versions in sorted(options.items())}

    def draw_survivor(self, rng: random.Random) -> Image:
        """One image that a power failure now may leave. Some draws lose all, some keep all, most mix."""
        image = dict(self.durable)
        mood = rng.choice(("lose", "keep", "mix", "mix"))
        for sector, versions in self.choices().items():
            pick = {"lose": versions[0], "keep": versions[-1]}.get(mood) or rng.choice(versions)
            image[sector] = pick
        return image

    def survivors(self, images_max: int, rng: random.Random | None = None) -> Iterator[Image]:
        """Every image that a power failure now may leave, or, where there are more than that, `images_max` of them.

        Beyond the bound come first the telling ones (nothing, everything, the writes up to each, all but one, each one torn),
        then, with `rng`, random ones.
        """
        options = self.choices()
        if math.prod(map(len, options.values())) <= images_max or rng is None:
            combinations = itertools.product(*options.values())
            for picks in itertools.islice(combinations, images_max):
                yield {**self.durable, **dict(zip(options, picks, strict=True))}
            return
        seen: set[int] = set()
        for _ in range(SURVIVOR_DRAWS * images_max):
            for image in (
                (*self._telling(), self.draw_survivor(rng)) if not seen else (self.draw_survivor(rng),)
            ):
                mark = hash(tuple(image.get(sector, ZEROES) for sector in options))
                if mark not in seen:
                    seen.add(mark)
                    yield image
                if len(seen) == images_max:
                    return

    def _telling(self) -> list[Image]:
        """Survivors that one would think of: by whole writes, and with one write torn."""
        writes = list(
            {id(write): write for versions in self.cache.values() for write, _ in versions}.values()
        )
        writes += [write for write in self.in_flight.values() if write not in writes]
        parts: list[dict[int, bytes]] = [dict(write.sectors()) for write in writes]
        whole = [
            {**self.durable, **_joined(parts[:count])} for count in (0, len(parts), *range(1, len(parts)))
        ]
        without = [
            {**self.durable, **_joined([part for part in parts if part is not each])} for each in parts
        ]
        torn = []
        for at, part in enumerate(parts):
            sectors = sorted(part)
            for half in (
                sectors[: len(sectors) // 2],
                sectors[len(sectors) // 2 :],
                sectors[:1],
                sectors[1:],
            ):
                rest = {sector: part[sector] for sector in half}
                torn.append({**self.durable, **_joined([*parts[:at], rest])})
        return [*whole, *without, *torn]

    def lose_power(self, image: Image) -> None:
        """Become one of the survivors."""
        self.durable = dict(image)
        self.cache.clear()
        self.in_flight.clear()
        if self.reservations is not None:
            self.reservations = type(self.reservations)()


def _joined(parts: list[dict[int, bytes]]) -> Image:
    return {sector: data for part in parts for sector, data in part.items()}


def read_image(image: Image, offset_bytes: int, length_bytes: int) -> bytes:
    """Bytes of an image."""
    first = offset_bytes // SECTOR_BYTES
    return b"".join(
        image.get(sector, ZEROES) for sector in range(first, first + length_bytes // SECTOR_BYTES)
    )
