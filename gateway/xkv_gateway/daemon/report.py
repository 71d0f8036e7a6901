"""Takes the status snapshot from the parts of the running gateway."""

from __future__ import annotations

import logging
import os
import uuid
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from xkv_gateway import __version__
from xkv_gateway.card.session import Phase
from xkv_gateway.cardurl import KernelCardUrl, TcpCardUrl
from xkv_gateway.service.status import (
    DAMAGE_LINES_MAX,
    AddressStatus,
    AdmissionStatus,
    CardStatus,
    JournalStatus,
    RecoveryStatus,
    RunStatus,
    SoftCardStatus,
    Status,
    TargetStatus,
    UsageStatus,
)
from xkv_nvmeof.blockdev import DeviceState, Geometry
from xkv_nvmeof.initiator import TcpInitiator
from xkv_rpc.addresses import host_port
from xkv_rpc.messages import CardInfo, CardState, HelloReply, TargetInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_gateway.card.session import CardSession
    from xkv_gateway.card.store import CardStore
    from xkv_gateway.cardurl import CardUrl
    from xkv_gateway.target.attach import AttachedCard
    from xkv_gateway.target.keeping import TargetKeeper
    from xkv_rpc.messages import Limits
    from xkv_rpc.server import Server

log = logging.getLogger(__name__)

NO_CARD_YET: Final = CardInfo(uuid="", state=CardState.OFFLINE, block_bytes=0, capacity_bytes=0)
"""What is told of a card that was not seen yet."""


def hello_of(card: CardInfo, url: CardUrl, limits: Limits, regions: str) -> HelloReply:
    """Return the reply to `hello` of a gateway with this card."""
    target = None
    if isinstance(url, TcpCardUrl | KernelCardUrl):
        addresses = list(url.addresses) if isinstance(url, TcpCardUrl) else [url.address]
        target = TargetInfo(url.nqn, url.nsid, addresses)
    return HelloReply(
        server=f"xkv-gateway {__version__}",
        card=card,
        limits=limits,
        features=["region"],
        regions=regions,
        target=target,
    )


class Reporter:
    """Knows the parts that figures come from; `status` is cheap and never blocks."""

    def __init__(
        self,
        *,
        attached: AttachedCard,
        store: CardStore,
        server: Server,
        session: CardSession,
        limits: Limits,
        addresses: AddressStatus,
        state_dir: str,
        clock: Callable[[], int],
        host_id: bytes,
        target: TargetKeeper | None = None,
    ) -> None:
        self._host_id = host_id
        self._attached = attached
        self._store = store
        self._server = server
        self._session = session
        layout = session.superblock.layout
        self._au_bytes = layout.au_bytes
        self._objects_max = layout.max_objects
        self._limits = limits
        self._addresses = addresses
        self._state_dir = state_dir
        self._clock = clock
        self._target = target
        self._started_ns = clock()
        self._card_since_ns = self._started_ns
        self.draining = False
        attached.device.add_state_listener(self._on_state)
        attached.device.add_geometry_listener(self._on_geometry)

    def _on_state(self, state: DeviceState, reason: str) -> None:
        self._card_since_ns = self._clock()
        expected = state is DeviceState.ONLINE or self.draining
        log.log(
            logging.INFO if expected else logging.ERROR,
            "the card is %s: %s",
            state.value,
            reason,
        )

    @staticmethod
    def _on_geometry(before: Geometry, now: Geometry) -> None:
        log.warning(
            "the namespace of the card has %d bytes now, %d before; what it grew by is used after a new format",
            now.size_bytes,
            before.size_bytes,
        )

    def hello(self) -> HelloReply:
        """Return the reply to `hello`."""
        card = CardInfo(
            uuid=str(uuid.UUID(bytes=self._session.superblock.stamp.card_uuid)),
            state=self._card_state(),
            block_bytes=self._attached.device.geometry.block_bytes,
            capacity_bytes=self._session.superblock.layout.capacity_bytes,
        )
        return hello_of(card, self._attached.url, self._limits, self._addresses.regions)

    def direct_target(self) -> TargetInfo | None:
        """Return where clients find the card, and as which host they may write to it; None where they cannot reach it."""
        device, url, host_id = self._attached.device, self._attached.url, self._host_id
        if isinstance(device, TcpInitiator):
            addresses = [path.address for path in device.paths]
            return TargetInfo(
                addresses[0].nqn,
                addresses[0].nsid,
                [host_port(address.host, address.port) for address in addresses],
                host_id,
            )
        if isinstance(url, KernelCardUrl):
            return TargetInfo(url.nqn, url.nsid, [url.address], host_id)
        return None

    def status(self) -> Status:
        """Return a snapshot of everything."""
        counters = self._server.counters
        return Status(
            version=__version__,
            pid=os.getpid(),
            uptime_s=self._age_s(self._started_ns),
            state="draining" if self.draining else "serving",
            warm=self._session.recovery.objects > 0,
            state_dir=self._state_dir,
            addresses=self._addresses,
            card=self._card(),
            usage=self._usage(),
            cache=asdict(self._store.engine.counters),
            requests=dict(counters.requests),
            errors=dict(counters.errors),
            transport={name: value for name, value in asdict(counters).items() if isinstance(value, int)},
            device=asdict(self._attached.device.counters),
            queues={
                "requests": self._server.in_flight,
                "loads": self._store.loads,
                "stores": self._store.saves,
            },
            admission=self._admission(),
            target=self._target_status(),
        )

    def _target_status(self) -> TargetStatus | None:
        keeper = self._target
        if keeper is None:
            return None
        return TargetStatus(keeper.rpc, keeper.state.value, keeper.reason, keeper.pid, keeper.remade)

    def _admission(self) -> AdmissionStatus:
        engine = self._store.engine
        return AdmissionStatus(engine.budget.bytes_per_day, engine.budget.written(engine.lifetimes.now_s))

    def _card_state(self) -> CardState:
        if not self._store.online:
            return CardState.OFFLINE
        return CardState.ONLINE if self._store.writable else CardState.RECOVERING

    def _age_s(self, since_ns: int) -> float:
        return round((self._clock() - since_ns) / 1e9, 3)

    def _card(self) -> CardStatus:
        device, soft_card = self._attached.device, self._attached.soft_card
        geometry, identity = device.geometry, device.identity
        facts = None if soft_card is None else soft_card.facts
        return CardStatus(
            url=str(self._attached.url),
            state=self._card_state().value,
            reason=self._reason(),
            state_age_s=self._age_s(self._card_since_ns),
            size_bytes=geometry.size_bytes,
            block_bytes=geometry.block_bytes,
            volatile_write_cache=geometry.volatile_write_cache,
            nqn=identity.nqn,
            nsid=identity.nsid,
            nguid=identity.nguid.hex(),
            uuid=str(uuid.UUID(bytes=identity.uuid)),
            model=identity.model,
            serial=identity.serial,
            connection=self._attached.connection,
            soft_card=None if facts is None else SoftCardStatus(facts.pid, facts.restarts),
            run=self._run(),
            recovery=self._recovery(),
            journal=self._journal(),
        )

    def _reason(self) -> str:
        if self._card_state() is CardState.RECOVERING:
            return f"the run before may still write: writes begin in {self._writes_in_s():.1f} s"
        device, soft_card = self._attached.device, self._attached.soft_card
        if soft_card is not None and soft_card.facts.reason:
            return soft_card.facts.reason
        if device.state is DeviceState.ONLINE and not self._store.online:
            return "it is reached, and about to be looked at: is it still this gateway's?"
        return device.reason

    def _writes_in_s(self) -> float:
        if self._session.phase is not Phase.RECOVERING:
            return 0.0
        return max(0.0, round((self._session.writes_from_ns - self._clock()) / 1e9, 3))

    def _run(self) -> RunStatus:
        superblock = self._session.superblock
        return RunStatus(
            card_uuid=str(uuid.UUID(bytes=superblock.stamp.card_uuid)),
            label=superblock.label,
            epoch=superblock.stamp.epoch,
            phase=self._session.phase.value,
            writes_in_s=self._writes_in_s(),
            reservation=self._reservation(),
        )

    def _reservation(self) -> str:
        reservation = self._session.reservation
        if reservation is None:
            return "unsupported"
        return "held" if reservation.held else "lost"

    def _recovery(self) -> RecoveryStatus:
        recovery = self._session.recovery
        return RecoveryStatus(
            objects=recovery.objects,
            checkpoint_objects=recovery.checkpoint_objects,
            journal_batches=recovery.journal_batches,
            journal_bytes=recovery.journal_bytes,
            duration_s=round(recovery.duration_ns / 1e9, 3),
            dropped_objects=recovery.restored.dropped_objects,
            damage=recovery.damage[:DAMAGE_LINES_MAX],
        )

    def _journal(self) -> JournalStatus:
        journal, checkpointer = self._session.journal, self._session.checkpointer
        if journal is None or checkpointer is None:
            return JournalStatus(self._session.superblock.layout.journal.length_bytes, 0, 0, 0, 0, 0, 0)
        return JournalStatus(
            ring_bytes=journal.ring_bytes,
            used_bytes=journal.kept_bytes,
            batches=journal.batches,
            batch_bytes=journal.batch_bytes,
            checkpoints=checkpointer.completed,
            checkpoint_objects=checkpointer.last_objects,
            checkpoint_bytes=checkpointer.last_bytes,
        )

    def _usage(self) -> UsageStatus:
        usage, au_bytes = self._store.engine.usage(), self._au_bytes
        tickets = self._store.engine.tickets.usage()
        return UsageStatus(
            capacity_bytes=self._session.superblock.layout.capacity_bytes,
            free_bytes=usage.free_au * au_bytes,
            reserved_bytes=usage.reserved_au * au_bytes,
            live_bytes=usage.live_au * au_bytes,
            doomed_bytes=usage.doomed_au * au_bytes,
            quarantined_bytes=usage.quarantined_au * au_bytes,
            objects=usage.live_objects,
            objects_max=self._objects_max,
            leases=usage.leases,
            leased_bytes=usage.leased_au * au_bytes,
            tickets=tickets.tickets,
            ticket_bytes=tickets.reserved_bytes,
        )
