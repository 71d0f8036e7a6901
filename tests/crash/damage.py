"""Damage to a card at rest: every field of every structure on it, flipped or wrong under a right checksum."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Final

from crc32c import crc32c

from tests.crash.bench import CrashBench, Life, prepared
from tests.crash.scenarios import format_only, populate
from tests.sim.medium import SECTOR_BYTES, read_image
from xkv_gateway.card import heartbeat, journal_format, superblock
from xkv_gateway.card.layout import CHUNK_HEADER_BYTES, HEARTBEAT_OFFSET, chunk_bytes_of
from xkv_gateway.card.structure import BLOCK_BYTES, Field, Structure, align_up, crc_of
from xkv_gateway.card.table_file import CHUNK, CLOSING, FILE_HEADER, add_chunk
from xkv_gateway.errors import CardUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.crash.bench import Base
    from tests.sim.medium import Image
    from xkv_gateway.card.layout import Layout, Region

CRC: Final = slice(12, 16)


async def lived(bench: CrashBench) -> None:
    """Both checkpoints, both ledgers, records behind, a replaced key, a wiped scope; ended by a kill."""
    life = await bench.open_owned()
    await populate(bench, life)
    await life.save(b"secret", b"also secret", scope=b"wiped")
    assert life.session.checkpointer is not None
    await life.operator.set_limit(b"tenant", 1 << 30)
    await life.session.checkpointer.write()
    await life.delete(b"two")
    await life.save(b"two", b"nine")
    await life.wipe(b"wiped")
    await life.session.checkpointer.write()
    await life.save(b"six", b"seven")
    await life.delete(b"one", b"seven")
    await life.operator.set_limit(b"tenant", 1 << 31)
    await life.save(b"eight")
    await life.kill()


@dataclass(frozen=True, slots=True)
class Place:
    """A structure on the card."""

    name: str
    structure: Structure
    offset_bytes: int
    length_bytes: int
    """With the body."""


def layout_of(image: Image) -> Layout:
    return superblock.decode(read_image(image, 0, BLOCK_BYTES), 0).layout


def places_of(image: Image) -> list[Place]:
    """Everything that is on a card."""
    layout = layout_of(image)
    copies = layout.superblock_offsets
    found = [
        Place(f"superblock {copy}", superblock.SUPERBLOCK, at, BLOCK_BYTES) for copy, at in enumerate(copies)
    ]
    found.append(Place("heartbeat", heartbeat.HEARTBEAT, HEARTBEAT_OFFSET, BLOCK_BYTES))
    batches = list(batches_of(image, layout.journal))
    for name, batch in {"first": 0, "middle": len(batches) // 2, "last": len(batches) - 1}.items():
        at, length_bytes = batches[batch]
        found.append(Place(f"{name} batch", journal_format.BATCH, at, length_bytes))
    for name in ("checkpoint_a", "checkpoint_b", "ledger_a", "ledger_b"):
        region: Region = getattr(layout, name)
        found.append(Place(f"{name} header", FILE_HEADER, region.offset_bytes, BLOCK_BYTES))
        chunks = list(_chunks(image, region))
        assert chunks, name
        found += [
            Place(f"{name} chunk {at}", CHUNK, begin, length) for at, (begin, length) in enumerate(chunks)
        ]
        found.append(Place(f"{name} closing", CLOSING, region.end_bytes - BLOCK_BYTES, BLOCK_BYTES))
    return found


def batches_of(image: Image, region: Region) -> Iterator[tuple[int, int]]:
    at = region.offset_bytes
    while read_image(image, at, SECTOR_BYTES).startswith(journal_format.BATCH.magic):
        header = read_image(image, at, SECTOR_BYTES)
        length = align_up(journal_format.HEADER_BYTES + int.from_bytes(header[96:100], "little"))
        yield at, length
        at += length


def _chunks(image: Image, region: Region) -> Iterator[tuple[int, int]]:
    at = region.offset_bytes + BLOCK_BYTES
    while read_image(image, at, SECTOR_BYTES).startswith(CHUNK.magic):
        body_bytes = int.from_bytes(read_image(image, at, SECTOR_BYTES)[84:88], "little")
        yield at, align_up(CHUNK_HEADER_BYTES + body_bytes)
        at += chunk_bytes_of(region.length_bytes)


def changed(image: Image, offset_bytes: int, data: bytes) -> Image:
    """The image with other bytes at a place (of whole sectors)."""
    new = dict(image)
    for at in range(0, len(data), SECTOR_BYTES):
        new[(offset_bytes + at) // SECTOR_BYTES] = data[at : at + SECTOR_BYTES]
    return new


def flipped(image: Image, place: Place, at: int, bit: int = 0) -> Image:
    """One bit of a structure is another one."""
    data = bytearray(read_image(image, place.offset_bytes, place.length_bytes))
    data[at] ^= 1 << bit
    return changed(image, place.offset_bytes, bytes(data))


def forged(image: Image, place: Place, field: Field, fill: int) -> Image:
    """A faulty program wrote a field: the structure's checksum is right."""
    data = bytearray(read_image(image, place.offset_bytes, place.length_bytes))
    data[field.offset : field.offset + field.size] = bytes([fill]) * field.size
    seal(place, data)
    return changed(image, place.offset_bytes, bytes(data))


def seal(place: Place, data: bytearray) -> None:
    data[CRC] = crc_of(memoryview(data)[: place.structure.size_bytes]).to_bytes(4, "little")


def forged_body(image: Image, place: Place, begin: int, length: int, fill: int) -> Image:
    """A faulty program wrote a body; every checksum up to the closing block is right."""
    data = bytearray(read_image(image, place.offset_bytes, place.length_bytes))
    data[begin : begin + length] = bytes([fill]) * length
    header_bytes = place.structure.size_bytes
    body_crc = crc32c(bytes(data[header_bytes:]))
    at = 100 if place.structure is journal_format.BATCH else 96
    data[at : at + 4] = body_crc.to_bytes(4, "little")
    seal(place, data)
    new = changed(image, place.offset_bytes, bytes(data))
    return _closed_again(new, place) if place.structure is CHUNK else new


def _closed_again(image: Image, place: Place) -> Image:
    """The closing block says that these are the chunks that were closed."""
    layout = layout_of(image)
    name = place.name.split(" ", maxsplit=1)[0]
    region: Region = getattr(layout, name)
    content_crc = 0
    for at, _ in _chunks(image, region):
        header = read_image(image, at, SECTOR_BYTES)
        content_crc = add_chunk(content_crc, header, int.from_bytes(header[96:100], "little"))
    closing = Place("", CLOSING, region.end_bytes - BLOCK_BYTES, BLOCK_BYTES)
    data = bytearray(read_image(image, closing.offset_bytes, BLOCK_BYTES))
    data[96:100] = content_crc.to_bytes(4, "little")
    seal(closing, data)
    return changed(image, closing.offset_bytes, bytes(data))


def opens(
    base: Base, image: Image, *, strict: bool = False, twice: bool = True, size_change: int = 0
) -> tuple[str, ...]:
    """Open a damaged card, twice: what comes of it is the same both times; then use it. `strict`: nothing may be lost.

    Returns:
        The refusal, or the damage that was reported, then what became of each key.
    """
    first = _open_once(base, image, strict=strict, use=twice, size_change=size_change)
    if twice:
        second = _open_once(base, image, strict=strict, use=False, size_change=size_change)
        assert first == second, "another outcome on the second try"
    return first


def _open_once(base: Base, image: Image, *, strict: bool, use: bool, size_change: int) -> tuple[str, ...]:
    seen: list[str] = []
    bench = replace(base, image=image, lives=base.lives + 1).bench()
    bench.medium.size_bytes += size_change

    async def work(bench: CrashBench) -> None:
        try:
            life = await bench.open(exclusive=True)
        except CardUnavailableError as refused:
            seen.append(f"refused: {refused}")
            return
        seen.extend(life.session.recovery.damage)
        seen.extend(await what_is_there(life, strict=strict))
        await life.owned()
        if not use:
            await life.kill()
            return
        await life.fill()
        await what_is_there(life, strict=strict)
        assert await life.stop()

    assert bench.run(work)
    return tuple(seen)


async def what_is_there(life: Life, *, strict: bool) -> list[str]:
    """Check that nothing is there but what once was, and that what was wiped is not."""
    told, found = life.bench.told, []
    life.store.engine.audit()
    homes: dict[tuple[str, bytes], list[bytes]] = {}
    for namespace, scope, name in told.ever:
        homes.setdefault((namespace, scope), []).append(name)
    for (namespace, scope), names in homes.items():
        for name, (status, payload) in zip(names, await life.load_all(namespace, scope, names), strict=True):
            key = (namespace, scope, name)
            found.append(f"{key} {status.value}")
            assert payload is None or payload in told.ever[key], f"{key} has bytes that nobody stored"
            assert payload is None or key not in told.wiped, f"{key} was wiped and is back"
            if strict:
                assert payload in told.may[key], f"{key} is {status.value}"
    return found


@cache
def lived_base() -> Base:
    """The card that is damaged."""
    return prepared(lived, prepared(format_only))


@cache
def older_base() -> Base:
    """The same card, after it lived on a little."""
    return prepared(lived_on, lived_base())


async def lived_on(bench: CrashBench) -> None:
    """Enough for new checkpoints and another lap of the ledgers."""
    life = await bench.open_owned()
    assert life.session.checkpointer is not None
    for _ in range(2):
        await life.delete(b"eight")
        await life.save(b"eight", b"ten", size_bytes=2 * 4096)
        await life.operator.set_limit(b"tenant", 1 << 29)
        await life.session.checkpointer.write()
    await life.save(b"secret again", scope=b"wiped")
    await life.wipe(b"wiped")
    await life.delete(b"nine")
    await life.kill()
