"""Opens the attached card: who we are, how the card is formatted if it is blank, what the engine is built for."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from xkv_gateway.card.blocks import CardBlocks
from xkv_gateway.card.opening import FormatWish, OpenOptions, open_card
from xkv_gateway.card.ownership import Owner
from xkv_gateway.card.runs import DataArea
from xkv_gateway.card.store import CardStore
from xkv_gateway.cardurl import SoftCardUrl, parse_card_url
from xkv_gateway.core.tenancy import Enforcement, EvictionPolicy, EvictionRules
from xkv_gateway.core.types import EngineLimits
from xkv_gateway.target.softcard import default_size, is_new

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_gateway.card.layout import Layout
    from xkv_gateway.card.session import CardSession
    from xkv_gateway.cardurl import CardUrl
    from xkv_gateway.config import Config
    from xkv_gateway.state import HostIdentity
    from xkv_gateway.target.attach import AttachedCard

log = logging.getLogger(__name__)

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
OWNER_BYTES_MAX: Final = 64


def card_url(config: Config, state_dir: Path) -> CardUrl:
    """Return the card's URL; a soft card that does not exist yet gets a size."""
    configured = config.card.url
    url = parse_card_url(configured) if configured else SoftCardUrl(state_dir / "card.img", None)
    if isinstance(url, SoftCardUrl) and url.size_bytes is None and is_new(url.path):
        return SoftCardUrl(url.path, default_size(url.path.absolute().parent))
    return url


def engine_limits(config: Config, layout: Layout) -> EngineLimits:
    """Return what the engine is built for on a card of this layout."""
    limits, capacity_bytes = config.control.limits, layout.capacity_au * layout.au_bytes
    leased_bytes = limits.leased_bytes_per_scope
    return EngineLimits(
        capacity_au=layout.capacity_au,
        au_bytes=layout.au_bytes,
        max_objects=layout.max_objects,
        object_bytes_max=limits.object_bytes,
        lease_ttl_max_ns=limits.lease_ms * 1_000_000,
        leases_per_scope_max=limits.leases_per_scope,
        leased_bytes_per_scope_max=capacity_bytes // 2 if leased_bytes is None else leased_bytes,
        eviction=eviction_rules(config),
        written_bytes_per_day=config.admission.bytes_per_day,
        direct_grace_ns=config.control.direct_grace_ms * 1_000_000,
    )


def eviction_rules(config: Config) -> EvictionRules:
    """Return the rules of eviction."""
    eviction = config.eviction
    return EvictionRules(
        policy=EvictionPolicy(eviction.policy),
        trigger_watermark=eviction.trigger_watermark,
        eviction_ratio=eviction.eviction_ratio,
        interval_ns=round(eviction.interval_s * 1e9),
        enforcement=Enforcement(eviction.enforcement),
        unregistered_limit_bytes=eviction.unregistered_limit,
    )


def adopt_rules(config: Config, store: CardStore) -> None:
    """Let the rules of eviction and admission of these settings hold from now on."""
    store.engine.set_rules(eviction_rules(config), config.admission.bytes_per_day)
    store.changed()


def owner_of(
    identity: HostIdentity, keep_alive_ms: int, lease_ms: int, direct_grace_ms: int | None = None
) -> Owner:
    """Return who opens the card, for the superblock; `keep_alive_ms` as the controller has it, a grace where clients use it directly."""
    boot_id = bytes(16)
    with suppress(OSError, ValueError):
        boot_id = uuid.UUID(BOOT_ID.read_text(encoding="ascii").strip()).bytes
    host = socket.gethostname().encode()[:OWNER_BYTES_MAX].decode(errors="ignore")
    return Owner(
        name=host,
        host_nqn=identity.host_nqn,
        host_id=identity.host_id.bytes,
        boot_id=boot_id,
        pid=os.getpid(),
        keep_alive_ms=keep_alive_ms,
        # Of what clients are given: a lease, or a ticket that is written to until its grace is over.
        lease_max_ns=(lease_ms + (direct_grace_ms or 0)) * 1_000_000,
        hands_out_extents=direct_grace_ms is not None,
    )


async def open_attached(
    config: Config,
    attached: AttachedCard,
    identity: HostIdentity,
    *,
    takeover: bool,
    clock: Callable[[], int],
    wall_clock: Callable[[], int],
    entropy: Callable[[int], bytes],
) -> tuple[CardSession, CardStore]:
    """Return the run on the card, and the store that serves it.

    Raises:
        CardUnavailableError: the card may not, or cannot, be opened.
    """
    soft, keep_alive_ms = attached.soft_card is not None, attached.keep_alive_ms(config.nvme.keep_alive_ms)
    control = config.control
    direct_grace_ms = control.direct_grace_ms if control.direct else None
    options = OpenOptions(
        owner=owner_of(identity, keep_alive_ms, control.limits.lease_ms, direct_grace_ms),
        limits_of=lambda layout: engine_limits(config, layout),
        clock=clock,
        wall_clock=wall_clock,
        entropy=entropy,
        command_timeout_ms=config.nvme.command_timeout_ms,
        flush=config.card.durability == "power",
        # Its file is locked by the process that we started: the one that served the run before has ended.
        exclusive=soft,
        takeover=takeover,
        # Nothing but an empty soft card is ever formatted without being asked for.
        format_blank=FormatWish(config.card.au, config.card.max_objects) if soft else None,
    )
    device = attached.device
    session = await open_card(device, CardBlocks(device, options.clock), options)
    layout = session.superblock.layout
    if layout.au_bytes != config.card.au and "au" in config.card.model_fields_set:
        log.warning("card.au is ignored: the card was formatted with units of %d bytes", layout.au_bytes)
    store = CardStore(session.engine, device, data_area(layout), None, clock, session)
    _log_recovery(session)
    return session, store


def data_area(layout: Layout) -> DataArea:
    """Return where payloads lie on a card of this layout."""
    return DataArea(layout.data.offset_bytes, layout.au_bytes, layout.block_bytes)


def _log_recovery(session: CardSession) -> None:
    recovery = session.recovery
    log.info(
        "read the index in %.2f s: %d objects, %d of them from a checkpoint; %d journal batches (%d bytes)",
        recovery.duration_ns / 1e9,
        recovery.objects,
        recovery.checkpoint_objects,
        recovery.journal_batches,
        recovery.journal_bytes,
    )
    before = session.superblock
    # After a takeover the superblock is ours already, and the log has said whom the card was taken from.
    if before.owner_host_nqn and not session.taken:
        log.info(
            "the last run on the card was of %s (%s), epoch %d, which %s",
            before.owner or "an unknown host",
            before.owner_host_nqn,
            before.stamp.epoch,
            "ended in order" if before.clean else "did not end in order",
        )
    for damage in recovery.damage:
        log.error("the card is damaged: %s", damage)
    if recovery.restored.dropped_objects:
        log.error("%d objects were given up because of the damage", recovery.restored.dropped_objects)
