"""The short way of the host core does what the long way does: whole input against the same input byte by byte."""

from __future__ import annotations

from random import Random

from xkv_nvmeof.host_command import Exchange, Outcome
from xkv_nvmeof.pdu import ICResp

from .hosts import pattern
from .test_host import SIZE, Wire, ready

ROUNDS = 400
ANSWERS = 12


def _start(chunk: int) -> tuple[Wire, list[Exchange], list[bytearray]]:
    """Two reads and two writes, all sent."""
    wire = ready(chunk, ICResp(max_h2c_data_bytes=4096), entries=8)
    pairs = [wire.read(), wire.read(2 * SIZE)]
    exchanges = [exchange for exchange, _ in pairs]
    exchanges += [wire.write(pattern(SIZE)), wire.write(pattern(4 * SIZE, 3))]
    wire.pump()
    wire.sent.clear()
    return wire, exchanges, [buffer for _, buffer in pairs]


def _stream(random: Random, wire: Wire, exchanges: list[Exchange]) -> bytes:
    """What a controller might answer: mostly in order, sometimes twice, too much, or with a flipped bit."""
    made = bytearray()
    for _ in range(random.randrange(1, ANSWERS)):
        exchange = random.choice(exchanges)
        size = exchange.receive_bytes or exchange.send_bytes
        half = size // 2
        start, length = random.choice([(0, size), (0, size), (0, half), (half, half)])
        last = start + length == size
        kind = random.randrange(6)
        if kind == 0:
            made += wire.maker.response(exchange.cid, random.choice([0, 0, 0x80]))
        elif exchange.send_bytes:
            made += wire.maker.r2t(exchange.cid, start, length, random.randrange(9))
        else:
            body = pattern(length, exchange.cid & 0xFF)
            success = last and kind > 1
            made += wire.maker.data(exchange.cid, start, body, last=last, success=success)
    if random.random() < 0.3:
        made[random.randrange(min(len(made), 48))] ^= 1 << random.randrange(8)
    return bytes(made)


def _told(wire: Wire, exchanges: list[Exchange], buffers: list[bytearray]) -> object:
    failure = wire.core.failure
    wire.pump()
    return (
        type(failure),
        getattr(failure, "fatal_status", None),
        getattr(failure, "field_offset_bytes", None),
        wire.core.state,
        [exchanges.index(one) for one in wire.finished] if failure is None else None,
        [(one.outcome, one.status, one.result) for one in exchanges],
        [one.received_bytes for one in exchanges if one.outcome is Outcome.COMPLETED],
        [bytes(buffer) for buffer in buffers] if failure is None else None,
        bytes(wire.sent) if failure is None else None,
        wire.core.room,
        wire.core.load_bytes,
    )


def test_the_short_way_ends_where_the_long_way_does() -> None:
    for seed in range(ROUNDS):
        results = []
        for chunk, direct in ((1, False), (1 << 20, False), (1 << 20, True)):
            wire, exchanges, buffers = _start(chunk)
            stream = _stream(Random(seed), wire, exchanges)
            wire.give(stream, direct=direct)
            results.append(_told(wire, exchanges, buffers))
        assert results[1:] == [results[0]] * 2, seed
