"""The usual case of what a controller sends, in few steps: PDUs that are exactly what is expected, one after another.

On a connection without digests nearly every PDU is the whole data of a read with SUCCESS, one request for all data of a
write, or a completion with success; all three have 24 bytes of header. `take_usual` handles those and stops at the
first byte that is anything else, however slightly: that is for framing and `host_checks` to judge. So what it does is
what the long way would have done, and it refuses nothing.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

from xkv_nvmeof.pdu import PduFlag, PduType

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_nvmeof.host_command import Exchange
    from xkv_nvmeof.host_outbox import Outbox
    from xkv_nvmeof.host_table import CommandTable

HEADER_BYTES: Final = 24
_HEADER: Final = Struct("<IIHHIII")
"""Type, flags, HLEN and PDO as one number; PLEN; CCCID; TTAG; offset; length; reserved (3.6.2.9 to 3.6.2.11).

Of a completion the last number is the command's identifier and, above it, status and phase; the three before hold dwords 0 and 1.
"""


def _first_dword(kind: PduType, flags: int, data_offset_bytes: int) -> int:
    return kind | flags << 8 | HEADER_BYTES << 16 | data_offset_bytes << 24


_WRITE_DATA: Final = _first_dword(PduType.H2C_DATA, PduFlag.LAST, HEADER_BYTES)
_READ_DATA: Final = _first_dword(PduType.C2H_DATA, PduFlag.LAST | PduFlag.SUCCESS, HEADER_BYTES)
_REQUEST: Final = _first_dword(PduType.R2T, 0, 0)
_RESPONSE: Final = _first_dword(PduType.CAPSULE_RESP, 0, 0)
_OK_MAX: Final = 0x1FFFF
"""A status of zero, with either phase, above any identifier."""


def take_usual(
    chunk: memoryview,
    table: CommandTable,
    max_data_bytes: int,
    max_whole_bytes: int,
    request: Callable[[Exchange, int, int, int], None],
) -> tuple[int, Exchange | None]:
    """Handle the usual PDUs at the start of `chunk`.

    Args:
        chunk: starts with a PDU.
        table: the commands in flight, without submission queue flow control, of a queue pair that is connected.
        max_data_bytes: what a PDU of the controller may carry.
        max_whole_bytes: up to so much data of a write leaves as one PDU of header and data alone.
        request: called for any other request for data with exchange, tag, offset and length.

    Returns:
        The place of the first byte that was not handled, and the read whose data goes on behind the chunk.
    """
    at, end = 0, len(chunk)
    in_flight, outbox = table.slots.in_flight, table.outbox
    while end - at >= HEADER_BYTES:
        first, plen, cid, tag, offset, length, last = _HEADER.unpack_from(chunk, at)
        exchange = in_flight.get(last & 0xFFFF if first == _RESPONSE else cid)
        if exchange is None:
            break
        if first == _REQUEST and plen == HEADER_BYTES and _is_next(exchange, offset, length):
            at += HEADER_BYTES
            if length == exchange.send_bytes <= max_whole_bytes:
                header = _HEADER.pack(_WRITE_DATA, length + HEADER_BYTES, cid, tag, 0, length, 0)
                exchange.requested_bytes = length
                exchange.send_end = outbox.put(header, exchange.send, length)
                exchange.r2t_ends = (exchange.send_end,)
            else:
                request(exchange, tag, offset, length)
        elif first == _RESPONSE and plen == HEADER_BYTES and last <= _OK_MAX and _is_done(exchange, outbox):
            at += HEADER_BYTES
            exchange.result = cid | tag << 16 | offset << 32
            table.succeed(exchange)
        elif (
            first == _READ_DATA
            and plen == length + HEADER_BYTES
            and length <= max_data_bytes
            and _is_rest(exchange, offset, length)
        ):
            at += HEADER_BYTES
            data = chunk[at : at + length]
            exchange.place(data)
            at += len(data)
            if len(data) < length:
                exchange.saw_last = True
                return at, exchange
            table.succeed(exchange)
        else:
            break
    return at, None


def _is_rest(exchange: Exchange, offset: int, length: int) -> bool:
    """Whether this is all data that a read still lacks."""
    return (
        0 < length == exchange.receive_bytes - offset
        and offset == exchange.received_bytes
        and not exchange.saw_last
    )


def _is_done(exchange: Exchange, outbox: Outbox) -> bool:
    """Whether all data of a command was transferred."""
    return (
        exchange.received_bytes == exchange.receive_bytes
        and exchange.requested_bytes == exchange.send_bytes
        and exchange.send_end <= outbox.sent_bytes
    )


def _is_next(exchange: Exchange, offset: int, length: int) -> bool:
    """Whether this data of a write may be asked for now, and no other request for it waits."""
    return (
        not exchange.r2t_ends
        and offset == exchange.requested_bytes
        and 0 < length <= exchange.send_bytes - offset
    )
