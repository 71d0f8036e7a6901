"""Formats the blank namespace of a target, which the gateway does not do without being asked."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final

import uvloop

from xkv_gateway.card import ownership
from xkv_gateway.card.blocks import CardBlocks
from xkv_gateway.card.layout import plan
from xkv_nvmeof.initiator import TcpInitiator
from xkv_nvmeof.initiator_options import InitiatorOptions

if TYPE_CHECKING:
    from xkv_nvmeof.initiator_options import TargetAddress

AU_BYTES: Final = 64 * 1024
HOST_NQN: Final = "nqn.2026-01.org.example:bench-format"
HOST_ID: Final = bytes(range(2, 18))


def format_blank_card(address: TargetAddress) -> None:
    """Format the namespace; whatever it held is lost."""
    uvloop.run(_format(address))


async def _format(address: TargetAddress) -> None:
    options = InitiatorOptions(host_nqn=HOST_NQN, host_id=HOST_ID)
    device = await TcpInitiator.connect(address, options, clock=time.monotonic_ns, entropy=os.urandom)
    try:
        geometry = device.geometry
        await ownership.format_card(
            CardBlocks(device, time.monotonic_ns),
            plan(geometry.size_bytes, geometry.block_bytes, AU_BYTES),
            ownership.facts_of(device),
            label="bench",
            sequence=1,
            wall_ns=time.time_ns(),
            entropy=os.urandom,
        )
    finally:
        await device.aclose()
