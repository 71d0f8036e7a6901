"""`TcpInitiator`: a namespace reached over NVMe/TCP from user space, as a `BlockDevice`.

It connects once, and then keeps itself connected: when the association ends, everything in flight fails, every call is
refused at once, and a new association is made from the admin queue up, with growing delays, until the same namespace
answers again. With several addresses there is an association by each, and only the end of the last one is an end.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

from xkv_nvmeof.blockdev import DeviceCounters, DeviceOffline, DeviceState
from xkv_nvmeof.command import BlockRange
from xkv_nvmeof.initiator_association import Host
from xkv_nvmeof.initiator_calls import byte_views, deallocations, flush, transfer, transfers, zeroing
from xkv_nvmeof.initiator_dispatch import Dispatcher
from xkv_nvmeof.initiator_errors import command_failed
from xkv_nvmeof.initiator_keeper import Keeper
from xkv_nvmeof.initiator_options import InitiatorOptions, Negotiated, PathStatus, TargetAddress
from xkv_nvmeof.initiator_reservations import NamespaceReservations
from xkv_nvmeof.kept import KeptDevice
from xkv_nvmeof.multipath import PATHS_MAX
from xkv_nvmeof.spec import IoOpcode, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from xkv_nvmeof.blockdev import ByteRange, Geometry

__all__ = ["InitiatorOptions", "Negotiated", "TargetAddress", "TcpInitiator"]

_MAX_RANGE_BLOCKS: Final = 0xFFFF_FFFF


class TcpInitiator(KeptDevice[Keeper]):
    """See the module and `BlockDevice`. Made by `connect`; `clock` is monotonic, in nanoseconds."""

    def __init__(
        self,
        address: TargetAddress,
        options: InitiatorOptions,
        clock: Callable[[], int],
        entropy: Callable[[int], bytes],
        portals: Sequence[tuple[str, int]] = (),
    ) -> None:
        addresses = [address, *(replace(address, host=host, port=port) for host, port in portals)]
        if len(set(addresses)) < len(addresses) or len(addresses) > PATHS_MAX:
            raise ValueError(f"a card has at most {PATHS_MAX} addresses, all different")
        self._nsid = address.nsid
        self._counters = DeviceCounters()
        self._dispatcher = Dispatcher(options, clock, self._counters)
        host = Host(options, clock, entropy)
        super().__init__(Keeper(host, addresses, self._dispatcher, self._counters, entropy))
        self._reservations = NamespaceReservations(self._dispatcher, address.nsid, options.host_id)

    @classmethod
    async def connect(
        cls,
        address: TargetAddress,
        options: InitiatorOptions,
        *,
        clock: Callable[[], int],
        entropy: Callable[[int], bytes],
        portals: Sequence[tuple[str, int]] = (),
    ) -> Self:
        """Connect and return the device, which keeps itself connected until `aclose`.

        Args:
            address: where the namespace is reached.
            options: settings.
            clock: monotonic, in nanoseconds.
            entropy: random bytes.
            portals: more hosts and ports at which controllers of the same subsystem offer the same namespace. All that are up
                are used; the loss of one is nobody's error as long as there is another.

        Raises:
            ConnectFailed: or a subclass; the message says with which address, at which step and why.
        """
        device = cls(address, options, clock, entropy, portals)
        await device._keeper.start()
        return device

    # -- what it is ------------------------------------------------------------------------------------------

    @property
    def negotiated(self) -> Negotiated | None:
        """What was agreed upon with the controller; None while offline."""
        association = self._keeper.association
        return None if association is None else association.negotiated

    @property
    def queues_granted(self) -> int:
        """I/O queues in use; 0 while offline."""
        paths = self._keeper.paths
        return sum(len(path.association.links) for path in paths if path.association is not None)

    @property
    def paths(self) -> list[PathStatus]:
        """How each way to the card is, in the order of the addresses."""
        return self._keeper.status()

    @property
    def settles_at_ns(self) -> int:
        """From this moment nothing sent on associations that have ended can still be executed (0: none ended)."""
        return self._keeper.settles_at_ns

    @property
    def incarnation(self) -> int:
        """Grows whenever an association by which commands went has ended, or is not used any more."""
        return self._dispatcher.incarnation

    @property
    def reservations(self) -> NamespaceReservations | None:
        """Reservations of the namespace, None where the controller or the namespace has none."""
        return self._reservations if self._keeper.seen.reservable else None

    def retarget(self, host: str, port: int) -> None:
        """The namespace is (or will be) reached there: used from the next attempt, made at once while offline."""
        self._keeper.retarget(host, port)

    def hurry(self) -> None:
        """The controller is there again: connect at once, if offline."""
        self._keeper.hurry()

    async def aclose(self) -> None:
        """End the association in order (shutdown notification) and release everything. Idempotent."""
        await self._keeper.aclose()

    # -- input and output --------------------------------------------------------------------------------------

    def read_into(self, offset_bytes: int, buffers: Sequence[memoryview]) -> Coroutine[Any, Any, None]:
        """Fill `buffers`, in order, from the namespace."""
        return self._transfer("READ", offset_bytes, buffers)

    def write_from(self, offset_bytes: int, buffers: Sequence[memoryview]) -> Coroutine[Any, Any, None]:
        """Write `buffers`, in order."""
        return self._transfer("WRITE", offset_bytes, buffers)

    async def _transfer(self, what: str, offset_bytes: int, buffers: Sequence[memoryview]) -> None:
        views = byte_views(buffers)
        total = sum(map(len, views))
        writes = what == "WRITE"
        geometry = _bounded(self._keeper, what, offset_bytes, total)
        if not total:
            return
        opcode, block = IoOpcode.WRITE if writes else IoOpcode.READ, geometry.block_bytes
        if total <= geometry.preferred_io_bytes:
            one = transfer(opcode, self._nsid, block, offset_bytes, views, total)
            await self._dispatcher.run_one(what, one, mutates=writes)
        else:
            limit = geometry.preferred_io_bytes
            commands = transfers(opcode, self._nsid, block, offset_bytes, views, total, limit)
            await self._dispatcher.run(what, commands, mutates=writes)
        counters = self._counters
        if writes:
            counters.write_commands += 1
            counters.write_bytes += total
        else:
            counters.read_commands += 1
            counters.read_bytes += total

    async def flush(self) -> None:
        """Make every write of this incarnation that returned before this call durable.

        A Flush covers what its own controller has completed (Base 7.1): with several there is one for each that is used.
        """
        geometry = _bounded(self._keeper, "FLUSH", 0, 0)
        if geometry.volatile_write_cache:
            await self._dispatcher.run_by_each("FLUSH", partial(flush, self._nsid))
            self._counters.flush_commands += 1

    async def deallocate(self, ranges: Sequence[ByteRange]) -> None:
        """Tell the device that the ranges hold nothing."""
        blocks: list[BlockRange] = []
        geometry = _bounded(self._keeper, "DEALLOCATE", 0, 0)
        block = geometry.block_bytes
        for one in ranges:
            _bounded(self._keeper, "DEALLOCATE", one.offset_bytes, one.length_bytes)
            first, end = one.offset_bytes // block, (one.offset_bytes + one.length_bytes) // block
            blocks += [
                BlockRange(start, min(_MAX_RANGE_BLOCKS, end - start))
                for start in range(first, end, _MAX_RANGE_BLOCKS)
            ]
        if not geometry.can_deallocate:
            raise command_failed("DEALLOCATE", Status.INVALID_OPCODE, do_not_retry=True)
        if blocks:
            commands = deallocations(self._nsid, blocks, self._keeper.seen.deallocate_ranges)
            await self._dispatcher.run("DEALLOCATE", commands, mutates=True)
            self._counters.deallocate_commands += 1

    async def write_zeroes(self, byte_range: ByteRange) -> None:
        """Zero the range without sending the zeroes."""
        geometry = _bounded(self._keeper, "WRITE ZEROES", byte_range.offset_bytes, byte_range.length_bytes)
        if not geometry.can_write_zeroes:
            raise command_failed("WRITE ZEROES", Status.INVALID_OPCODE, do_not_retry=True)
        if byte_range.length_bytes:
            block = geometry.block_bytes
            first, count = byte_range.offset_bytes // block, byte_range.length_bytes // block
            commands = zeroing(self._nsid, first, count, self._keeper.seen.write_zeroes_blocks)
            await self._dispatcher.run("WRITE ZEROES", commands, mutates=True)
            self._counters.write_zeroes_commands += 1


def _bounded(keeper: Keeper, what: str, offset_bytes: int, length_bytes: int) -> Geometry:
    """Check a range against the geometry, which is returned.

    Raises:
        DeviceOffline: there is no association.
        CommandFailed: the range goes beyond the end; the controller would say the same.
    """
    if keeper.state is DeviceState.OFFLINE:
        keeper.counters.errors += 1
        raise DeviceOffline(f"{what}: {keeper.reason}")
    geometry = keeper.seen.geometry
    assert offset_bytes >= 0
    assert offset_bytes % geometry.block_bytes == 0
    assert length_bytes % geometry.block_bytes == 0
    if offset_bytes + length_bytes > geometry.size_bytes:
        keeper.counters.errors += 1
        raise command_failed(what, Status.LBA_OUT_OF_RANGE, do_not_retry=True)
    return geometry
