"""PDUs of a controller, made by hand."""

from __future__ import annotations

from xkv_nvmeof import digest
from xkv_nvmeof.command import CompletionEntry
from xkv_nvmeof.pdu import R2T, C2HData, CapsuleResp, WireFormat, encode


class PduMaker:
    """Makes the PDUs of a controller by hand."""

    def __init__(self) -> None:
        self.wire = WireFormat()
        self._head = 0
        self._entries = 1 << 16

    def data(
        self,
        cid: int,
        offset: int,
        payload: bytes,
        *,
        last: bool = False,
        success: bool = False,
        flip: bool = False,
    ) -> bytes:
        tail = digest.to_wire(digest.crc32c(payload)) if self.wire.data_digest else b""
        if flip:
            payload = bytes([payload[0] ^ 1]) + payload[1:]
        return encode(C2HData(cid, offset, len(payload), last, success), self.wire) + payload + tail

    def response(self, cid: int, status: int = 0, result: int = 0, *, do_not_retry: bool = False) -> bytes:
        self._head = (self._head + 1) % self._entries
        dw0, dw1 = result & 0xFFFF_FFFF, result >> 32
        return encode(
            CapsuleResp(
                CompletionEntry(
                    cid, status, self._head, dw0=dw0, dw1=dw1, do_not_retry=do_not_retry
                ).to_bytes()
            ),
            self.wire,
        )

    def r2t(self, cid: int, offset: int, length: int, tag: int = 7) -> bytes:
        return encode(R2T(cid, tag, offset, length), self.wire)
