"""The admin queue of an association: what a controller is asked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from xkv_nvmeof import builders
from xkv_nvmeof.blockdev import (
    CommandFailed,
    DeviceIdentity,
    Geometry,
    ReservationType,
)
from xkv_nvmeof.identify import (
    IdentifyController,
    IdentifyFormatError,
    IdentifyNamespace,
    NamespaceDescriptors,
)
from xkv_nvmeof.initiator_errors import NamespaceUnusable
from xkv_nvmeof.initiator_execute import Answer, execute
from xkv_nvmeof.reservation import ONCS_RESERVATIONS, type_bit
from xkv_nvmeof.spec import (
    IDENTIFY_BYTES,
    PROPERTY_BYTES,
    Cns,
    FeatureId,
    Register,
    Status,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xkv_nvmeof.command import SubmissionEntry
    from xkv_nvmeof.initiator_link import QueueLink

_NS_PER_MS: Final = 1_000_000
_MAX_BLOCK_BYTES: Final = 65_536
_MIN_BLOCK_BYTES: Final = 512
_MAX_COMMAND_BLOCKS: Final = 65_536
_ONCS_DATASET_MANAGEMENT: Final = 1 << 2
_ONCS_WRITE_ZEROES: Final = 1 << 3
_DSM_MAX_RANGES: Final = 256
_AUTHENTICATION_REQUIRED_SHIFT: Final = 17
"""ATR and ASCR, bits 17 and 18 of dword 0 of Connect's completion (Base 6.3)."""
ADMIN_QUEUE_ENTRIES: Final = 32
"""Size of the admin queue, the least that Fabrics allows (Base 3.1.3.1)."""


@dataclass(frozen=True, slots=True)
class NamespaceView:
    """All that was learnt about the namespace in one look."""

    geometry: Geometry
    identity: DeviceIdentity
    write_zeroes_blocks: int
    """Most blocks of one Write Zeroes."""
    deallocate_ranges: int
    """Most ranges of one Dataset Management."""
    reservable: bool = False
    """Whether it can be reserved in the way of `Reservations`."""
    access_group: int = 0
    """Its group of asymmetric access at this controller; 0: not reported."""

    def by_any_of(self, others: Sequence[NamespaceView]) -> NamespaceView:
        """Return what holds by whichever path a command goes: controllers of one namespace may differ in what they can."""
        ways = (self, *others)
        geometries = [one.geometry for one in ways]
        geometry = replace(
            self.geometry,
            volatile_write_cache=any(one.volatile_write_cache for one in geometries),
            can_deallocate=all(one.can_deallocate for one in geometries),
            deallocate_zeroes=all(one.deallocate_zeroes for one in geometries),
            can_write_zeroes=all(one.can_write_zeroes for one in geometries),
            preferred_io_bytes=min(one.preferred_io_bytes for one in geometries),
        )
        return replace(
            self,
            geometry=geometry,
            write_zeroes_blocks=min(one.write_zeroes_blocks for one in ways),
            deallocate_ranges=min(one.deallocate_ranges for one in ways),
            reservable=all(one.reservable for one in ways),
        )


class AdminChannel:
    """Commands of the admin queue. Every method raises as `execute` does."""

    def __init__(self, link: QueueLink, clock: Callable[[], int], timeout_ms: int) -> None:
        self.link = link
        self._clock = clock
        self._timeout_ns = timeout_ms * _NS_PER_MS

    async def run(self, entry: SubmissionEntry, what: str, receive_bytes: int = 0) -> Answer:
        """Run one command under the usual deadline."""
        deadline_ns = self._clock() + self._timeout_ns
        return await execute(self.link, entry, what, deadline_ns, receive_bytes=receive_bytes)

    async def property_get(self, register: Register) -> int:
        """Read a controller property."""
        size = PROPERTY_BYTES[register]
        answer = await self.run(builders.property_get(0, register, size), f"Property Get {register.name}")
        return answer.result & ((1 << size * 8) - 1)

    async def property_set(self, register: Register, value: int) -> None:
        """Write a controller property."""
        entry = builders.property_set(0, register, PROPERTY_BYTES[register], value)
        await self.run(entry, f"Property Set {register.name}")

    async def identify(self, cns: Cns, nsid: int = 0) -> memoryview:
        """Return one Identify structure."""
        what = f"Identify {cns.name}"
        return (await self.run(builders.identify(0, cns, nsid=nsid), what, IDENTIFY_BYTES)).data

    async def set_feature(self, feature: FeatureId, value: int) -> int:
        """Set a feature; return dword 0 of the completion."""
        answer = await self.run(builders.set_features(0, feature, value), f"Set Features {feature.name}")
        return answer.result & 0xFFFF_FFFF

    async def get_feature(self, feature: FeatureId) -> int:
        """Return the current value of a feature."""
        answer = await self.run(builders.get_features(0, feature), f"Get Features {feature.name}")
        return answer.result & 0xFFFF_FFFF

    async def log_page(
        self, page: int, length_bytes: int, offset_bytes: int = 0, *, specific: int = 0
    ) -> memoryview:
        """Return part of a log page; reading it re-arms the event that told of it."""
        entry = builders.get_log_page(0, page, length_bytes, offset_bytes=offset_bytes, specific=specific)
        return (await self.run(entry, f"Get Log Page {page:#04x}", length_bytes)).data


async def look_at_namespace(
    admin: AdminChannel,
    controller: IdentifyController,
    nqn: str,
    nsid: int,
    *,
    page_bytes: int,
    transfer_bytes: int,
) -> NamespaceView:
    """Identify the namespace and judge whether it can be used.

    `page_bytes` is CAP.MPSMIN; `transfer_bytes` the largest single command.

    Raises:
        NamespaceUnusable: it does not exist, or has a format that cannot be used.
        DeviceError: as `execute`.
    """
    try:
        raw = await admin.identify(Cns.NAMESPACE, nsid)
        space = IdentifyNamespace.from_bytes(raw)
        if space.size_blocks == 0:
            # Before its ids are asked for: a controller refuses those of one that is not there.
            raise NamespaceUnusable(f"namespace {nsid} does not exist")
        descriptors = NamespaceDescriptors.from_bytes(await admin.identify(Cns.NAMESPACE_DESCRIPTORS, nsid))
    except IdentifyFormatError as error:
        raise NamespaceUnusable(f"namespace {nsid}: {error}") from error
    except CommandFailed as failed:
        if failed.status_code_type == 0 and failed.status_code == Status.INVALID_NAMESPACE:
            raise NamespaceUnusable(f"namespace {nsid} does not exist") from failed
        raise
    block = space.block_bytes
    if not _MIN_BLOCK_BYTES <= block <= _MAX_BLOCK_BYTES or space.metadata_bytes:
        reason = f"blocks of {block} bytes with {space.metadata_bytes} bytes of metadata"
        raise NamespaceUnusable(f"namespace {nsid}: {reason}")
    if transfer_bytes < block:
        raise NamespaceUnusable(f"namespace {nsid}: a block of {block} bytes is over the transfer limit")
    zeroes_blocks, ranges = await _io_limits(admin, page_bytes, block, transfer_bytes)
    preferred = min(transfer_bytes, _MAX_COMMAND_BLOCKS * block)
    geometry = Geometry(
        block_bytes=block,
        block_count=space.size_blocks,
        volatile_write_cache=bool(controller.volatile_write_cache & 1),
        can_deallocate=bool(controller.nvm_commands & _ONCS_DATASET_MANAGEMENT),
        deallocate_zeroes=space.deallocate_zeroes,
        can_write_zeroes=bool(controller.nvm_commands & _ONCS_WRITE_ZEROES),
        preferred_io_bytes=preferred // block * block,
    )
    nguid = descriptors.nguid if any(descriptors.nguid) else space.nguid
    identity = DeviceIdentity(nqn, nsid, nguid, descriptors.uuid, controller.serial, controller.model)
    reservable = bool(
        controller.nvm_commands & ONCS_RESERVATIONS
        and space.reservation_capabilities & type_bit(ReservationType.WRITE_EXCLUSIVE_REGISTRANTS_ONLY)
    )
    return NamespaceView(geometry, identity, zeroes_blocks, ranges, reservable, space.access_group)


async def _io_limits(
    admin: AdminChannel, page_bytes: int, block: int, transfer_bytes: int
) -> tuple[int, int]:
    """Return the most blocks of a Write Zeroes and the most ranges of a Dataset Management (NVM 4.1.5.2).

    A controller that does not tell gets Write Zeroes of at most the transfer limit, as Linux does.
    """
    try:
        raw = await admin.identify(Cns.IO_CONTROLLER)
    except CommandFailed:
        return transfer_bytes // block, _DSM_MAX_RANGES
    zeroes_shift, ranges = raw[1], raw[3]
    blocks = (page_bytes << zeroes_shift) // block if zeroes_shift else _MAX_COMMAND_BLOCKS
    return max(1, min(blocks, _MAX_COMMAND_BLOCKS)), ranges or _DSM_MAX_RANGES
