"""Formats a card: `xkv-gateway card format`. What is on a card is given up only where that was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xkv_gateway.card import ownership
from xkv_gateway.card.blocks import CardBlocks, CardFailed
from xkv_gateway.card.format_errors import FormatError
from xkv_gateway.card.layout import plan
from xkv_gateway.card.opening import in_use, refusal_of
from xkv_gateway.card.superblock import Blank, Chosen
from xkv_gateway.errors import CardUnavailableError
from xkv_gateway.target.attach import attach, initiator_options
from xkv_nvmeof.blockdev import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_gateway.card.opening import FormatWish
    from xkv_gateway.card.superblock import Superblock
    from xkv_gateway.cardurl import CardUrl
    from xkv_gateway.config import NvmeConfig
    from xkv_gateway.state import HostIdentity
    from xkv_nvmeof.blockdev import BlockDevice

FORCE_ADVICE = "If what is on it can be given up: --force."


async def format_card(
    url: CardUrl,
    wish: FormatWish,
    nvme: NvmeConfig,
    identity: HostIdentity,
    *,
    force: bool,
    clock: Callable[[], int],
    wall_clock: Callable[[], int],
    entropy: Callable[[int], bytes],
) -> Superblock:
    """Format the card at `url`; return its superblock.

    Raises:
        CardUnavailableError: it cannot be reached, a living gateway has it, or it is not blank and `force` is not given.
    """
    attached = await attach(url, initiator_options(nvme, identity), clock=clock, entropy=entropy)
    device = attached.device
    blocks = CardBlocks(device)
    try:
        sequence = 1 + await _sequence_before(device, blocks, force=force)
        geometry = device.geometry
        layout = plan(geometry.size_bytes, geometry.block_bytes, wish.au_bytes, wish.max_objects)
        return await ownership.format_card(
            blocks,
            layout,
            ownership.facts_of(device),
            label=wish.label,
            sequence=sequence,
            wall_ns=wall_clock(),
            entropy=entropy,
        )
    except FormatError as error:
        raise refusal_of(error) from error
    except (DeviceError, CardFailed) as error:
        raise CardUnavailableError(f"the card {url} could not be formatted: {error}") from error
    finally:
        await attached.aclose()


async def _sequence_before(device: BlockDevice, blocks: CardBlocks, *, force: bool) -> int:
    """Return the number of the newest superblock on the card, 0 where there is none; refuse what must not be lost."""
    size_bytes = device.geometry.size_bytes
    try:
        found = await ownership.read_superblocks(blocks, size_bytes)
    except FormatError as error:
        if force:
            return 0
        raise CardUnavailableError(f"the card is damaged: {error}", advice=FORCE_ADVICE) from error
    if isinstance(found, Chosen):
        superblock = found.superblock
        if not superblock.clean and await ownership.owner_beats(blocks, superblock.stamp.card_uuid):
            raise in_use(superblock)
        if not force:
            raise CardUnavailableError("the card is formatted already", advice=FORCE_ADVICE)
        return superblock.sequence
    blank = isinstance(found, Blank) and await ownership.edges_are_blank(blocks, size_bytes)
    if not blank and not force:
        raise CardUnavailableError("the card bears somebody else's data", advice=FORCE_ADVICE)
    return 0
