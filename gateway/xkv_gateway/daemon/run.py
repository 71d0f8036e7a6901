"""The daemon: makes the parts in the order in which they may fail, runs them, and takes them down in reverse.

    judge addresses, read keys -> state directory -> bind ports -> lock -> card -> engine -> serve
    draining: refuse new requests -> finish those in flight -> close ports -> detach the card

A port that is taken, or an address that may not be used, is found before the card is touched.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from xkv_gateway.card.blocks import CardFailed
from xkv_gateway.card.direct import Direct
from xkv_gateway.card.fence import CardLost
from xkv_gateway.card.operator import Operator
from xkv_gateway.cardurl import NodeCardUrl
from xkv_gateway.daemon.card import adopt_rules, card_url, data_area, open_attached
from xkv_gateway.daemon.lag import watch_lag
from xkv_gateway.daemon.notify import Notifier
from xkv_gateway.daemon.ports import CLOSE_GRACE_MS, CLOSE_LINGER_MS, PortOpener, Ports
from xkv_gateway.daemon.report import NO_CARD_YET, Reporter, hello_of
from xkv_gateway.daemon.stopping import StopRequest, close_card
from xkv_gateway.daemon.upkeep import Reloader, keep_told, sentence
from xkv_gateway.daemon.waiting import answer_without_card, attach_when_there, waits
from xkv_gateway.errors import CardLostError, CardUnavailableError, ConfigError, ExitCode
from xkv_gateway.networks import StorageNetworks
from xkv_gateway.service.admin import AdminServer, create_app, create_metrics_app
from xkv_gateway.service.control import ControlService
from xkv_gateway.service.direct import DirectService
from xkv_gateway.service.meter import Meter
from xkv_gateway.service.metrics import AdminSources
from xkv_gateway.service.waiting import NoCardYet
from xkv_gateway.state import HostIdentity, configured_identity, lock_state_dir
from xkv_gateway.target.attach import AttachedCard, attach, initiator_options
from xkv_gateway.target.desired import desired_of
from xkv_gateway.target.hostkeys import read_host_keys
from xkv_gateway.target.keeping import TargetKeeper, follow
from xkv_rpc.messages import Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from xkv_gateway.card.session import CardSession
    from xkv_gateway.card.store import CardStore
    from xkv_gateway.cardurl import CardUrl
    from xkv_gateway.config import Config
    from xkv_gateway.errors import GatewayError
    from xkv_gateway.service.status import Status

log = logging.getLogger(__name__)

INLINE_MESSAGES_READ_MAX: Final = 4
"""So many of the largest inline loads may be in memory at a time."""
# All steps of the end together stay below `stopping.STOP_DEADLINE_S`, also with a card that does not answer.
DRAIN_TIMEOUT_S: Final = 1.2
CLOSE_CARD_TIMEOUT_S: Final = 2.0
CLOSE_STUCK_CARD_TIMEOUT_S: Final = 0.5
"""For a card that did not finish what was in flight."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """What serves."""

    ports: Ports
    attached: AttachedCard
    session: CardSession
    store: CardStore
    service: ControlService
    reporter: Reporter
    admin: list[AdminServer]
    target: TargetKeeper | None


class Daemon:
    """One gateway. `run` once."""

    def __init__(
        self,
        config: Config,
        *,
        clock: Callable[[], int],
        wall_clock: Callable[[], int],
        entropy: Callable[[int], bytes],
        takeover: bool,
        environment: Mapping[str, str],
        reload: Callable[[], Config] | None,
    ) -> None:
        assert config.state_dir is not None, "the caller chooses the state directory"
        self._config = config
        self._state_dir = Path(config.state_dir)
        self._clock = clock
        self._wall_clock = wall_clock
        self._takeover = takeover
        self._entropy = entropy
        control = config.control.limits
        self._limits = Limits(control.keys, control.object_bytes, control.inline_bytes, control.lease_ms)
        self._stop = StopRequest()
        self._notifier = Notifier(environment, clock)
        self._reloader = Reloader(config, reload, self._notifier)
        credentials = environment.get("CREDENTIALS_DIRECTORY")
        self._credentials = Path(credentials) if credentials else None
        self._storage = StorageNetworks(config.fabric.networks)
        self._lost: GatewayError | None = None
        self._operator: Operator | None = None
        self._meter = Meter(self._label)

    async def run(self, on_serving: Callable[[Status], None]) -> ExitCode:
        """Serve until SIGINT or SIGTERM; `on_serving` is called once everything answers.

        Raises:
            GatewayError: it cannot start; nothing is left behind.
        """
        with self._stop.signals(), self._reloader.signals():
            async with AsyncExitStack() as undo:
                starting = asyncio.create_task(self._start(undo), name="start")
                stopped = asyncio.create_task(self._stop.wait(), name="stop")
                await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
                if not starting.done():
                    self._reloader.stopping()
                    starting.cancel()
                    await asyncio.wait((starting,))
                    return ExitCode.OK
                stopped.cancel()
                await self._serve(starting.result(), on_serving)
        return ExitCode.OK

    def stop(self) -> None:
        """Ask for an orderly end, as SIGTERM does."""
        self._stop.request()

    # --- start ----------------------------------------------------------------------------------------------

    async def _start(self, undo: AsyncExitStack) -> _Parts:
        config = self._config
        opener = PortOpener(
            config,
            self._state_dir,
            self._limits,
            clock=self._clock,
            entropy=self._entropy,
            credentials=self._credentials,
        )
        ports = await opener.open(undo)
        self._reloader.opened(ports)
        undo.callback(os.close, lock_state_dir(self._state_dir))
        self._notifier.status("opening the card")
        identity = self._identity()
        target = await self._make_target(undo)
        attached = await self._attach(identity, undo, ports, target)
        if config.control.direct and isinstance(attached.url, NodeCardUrl):
            raise ConfigError(f"control.direct: clients cannot reach {attached.url} by themselves")
        if target is not None:
            follow(target, attached)
        session, store = await open_attached(
            config,
            attached,
            identity,
            takeover=self._takeover,
            clock=self._clock,
            wall_clock=self._wall_clock,
            entropy=self._entropy,
        )
        return self._join(ports, attached, session, store, target, identity)

    async def _make_target(self, undo: AsyncExitStack) -> TargetKeeper | None:
        """Make the SPDK target right before the card is reached through it, where there is one to look after."""
        config = self._config.target
        if config.rpc is None:
            return None
        desired = desired_of(config, self._storage, self._credentials)
        keeper = TargetKeeper(desired, interval_s=config.interval_s, clock=self._clock, entropy=self._entropy)
        undo.callback(keeper.close)
        self._notifier.status("looking at the target")
        await keeper.first()
        return keeper

    async def _attach(
        self, identity: HostIdentity, undo: AsyncExitStack, ports: Ports, target: TargetKeeper | None
    ) -> AttachedCard:
        keys = read_host_keys(self._config.fabric, self._credentials)
        options = initiator_options(self._config.nvme, identity, keys)
        url = card_url(self._config, self._state_dir)
        attached = await attach_when_there(
            partial(attach, url, options, self._storage, clock=self._clock, entropy=self._entropy),
            partial(answer_without_card, ports, self._storage, self._no_card_yet(url, ports)),
            self._notifier,
            wait=waits(self._config, self._notifier),
            before=None if target is None else target.first,
            clock=self._clock,
            entropy=self._entropy,
        )
        undo.push_async_callback(attached.aclose)
        self._stop.at_force.append(attached.kill)
        return attached

    def _no_card_yet(self, url: CardUrl, ports: Ports) -> NoCardYet:
        hello = partial(hello_of, NO_CARD_YET, url, self._limits, ports.addresses.regions)
        return NoCardYet(hello, ports.regions, self._meter, self._clock)

    def _identity(self) -> HostIdentity:
        nvme = self._config.nvme
        return configured_identity(nvme.host_nqn, nvme.host_id, self._state_dir, self._entropy)

    def _join(
        self,
        ports: Ports,
        attached: AttachedCard,
        session: CardSession,
        store: CardStore,
        target: TargetKeeper | None,
        identity: HostIdentity,
    ) -> _Parts:
        config = self._config
        reporter = Reporter(
            attached=attached,
            store=store,
            server=ports.server,
            session=session,
            limits=self._limits,
            addresses=ports.addresses,
            state_dir=str(self._state_dir),
            clock=self._clock,
            host_id=identity.host_id.bytes,
            target=target,
        )
        operator = self._operator = Operator(session, store)
        self._reloader.joined(partial(adopt_rules, store=store))
        self._meter.renamed()
        service = ControlService(
            store,
            reporter.hello,
            ports.regions,
            self._limits,
            store_wait_ns=config.eviction.store_wait_ms * 1_000_000,
            inline_loads_bytes_max=INLINE_MESSAGES_READ_MAX * self._limits.inline_bytes,
            meter=self._meter,
            direct=self._direct(store, session, reporter),
        )
        admin = _admin(ports, AdminSources(reporter, self._meter, operator, self._clock), self._storage)
        return _Parts(ports, attached, session, store, service, reporter, admin, target)

    def _label(self, scope: bytes) -> str | None:
        """Return the name under which a tenant is counted: those that have no counters of their own have none."""
        tenant = None if self._operator is None else self._operator.tenant(scope)
        return None if tenant is None or tenant.counters is None else tenant.name

    def _direct(self, store: CardStore, session: CardSession, reporter: Reporter) -> DirectService | None:
        """Return the operations with which clients use the card themselves, where the operator wants them."""
        config = self._config
        if not config.control.direct:
            return None
        log.warning("direct: every client on this host can read and write the whole card")
        return DirectService(
            Direct(store, data_area(session.superblock.layout)),
            reporter.direct_target,
            grace_ms=config.control.direct_grace_ms,
            store_wait_ns=config.eviction.store_wait_ms * 1_000_000,
        )

    # --- serve and stop -------------------------------------------------------------------------------------

    async def _serve(self, parts: _Parts, on_serving: Callable[[Status], None]) -> None:
        async with asyncio.TaskGroup() as tasks:
            card = tasks.create_task(parts.attached.run(), name="card")
            run = tasks.create_task(self._own(parts), name="run")
            for admin in parts.admin:
                tasks.create_task(admin.run(), name="admin")
            target = None
            if parts.target is not None:
                target = tasks.create_task(parts.target.run(), name="target")
            lag = tasks.create_task(watch_lag(self._clock, self._meter.lagged), name="lag")
            told = tasks.create_task(keep_told(self._notifier, parts.reporter.status), name="told")
            stopped = asyncio.create_task(self._stop.wait(), name="stop")
            owned = asyncio.create_task(parts.session.owned_soon(), name="owned")
            await asyncio.wait((owned, run, stopped), return_when=asyncio.FIRST_COMPLETED)
            if owned.done():
                parts.ports.gate.open(parts.service)
                for admin in parts.admin:
                    await admin.answers()
                status = parts.reporter.status()
                on_serving(status)
                self._notifier.status(sentence(status))
                self._reloader.ready()
            owned.cancel()
            await stopped
            self._reloader.stopping()
            drained = await _drain(parts)
            # Nothing is evicted or expires from here on: after its last checkpoint the card does not change.
            parts.store.close()
            await close_card(parts.session, CLOSE_CARD_TIMEOUT_S if drained else CLOSE_STUCK_CARD_TIMEOUT_S)
            run.cancel()
            card.cancel()
            told.cancel()
            lag.cancel()
            if target is not None:
                target.cancel()
        if self._lost is not None:
            raise self._lost

    async def _own(self, parts: _Parts) -> None:
        """Take and keep the card; when that ends, everything ends."""
        try:
            await parts.session.run(parts.store)
        except CardLost as error:
            kind = CardUnavailableError if parts.session.journal is None else CardLostError
            self._lost = kind(
                f"stopped: {error}",
                advice="Nothing was acknowledged since. `xkv-gateway card info URL` tells whose the card is.",
            )
        except CardFailed as error:
            soft = parts.attached.soft_card is not None
            advice = "Is the disk full? The log says more." if soft else "Look at the target's log."
            self._lost = CardUnavailableError(f"stopped: {error}", advice=advice)
        if self._lost is not None:
            log.error("%s", self._lost)
            self._stop.request()


async def _drain(parts: _Parts) -> bool:
    """Refuse what is new, finish what is in flight, let the replies leave. Returns whether all of it was finished."""
    parts.reporter.draining = True
    parts.ports.server.stop_accepting()
    drained = await parts.service.drain(DRAIN_TIMEOUT_S)
    if not drained:
        log.warning("requests in flight were cancelled")
    await parts.ports.server.aclose(grace_ms=CLOSE_GRACE_MS, linger_ms=CLOSE_LINGER_MS)
    for admin in parts.admin:
        admin.stop()
    return drained


def _admin(ports: Ports, sources: AdminSources, storage: StorageNetworks) -> list[AdminServer]:
    """Return a server for each listener of the admin port."""
    app = create_app(sources, ports.admin_bind, ports.tokens.now, storage)
    servers = [AdminServer(app, ports.admin_listener)]
    if ports.admin_unix_listener is not None:
        servers.append(AdminServer(create_app(sources, None), ports.admin_unix_listener))
    if ports.metrics_listener is not None:
        servers.append(AdminServer(create_metrics_app(sources, storage), ports.metrics_listener))
    return servers


def build(
    config: Config,
    *,
    clock: Callable[[], int],
    wall_clock: Callable[[], int],
    entropy: Callable[[int], bytes],
    takeover: bool = False,
    environment: Mapping[str, str] | None = None,
    reload: Callable[[], Config] | None = None,
) -> Daemon:
    """Return a gateway for `config`, whose `state_dir` is set. Nothing else reads a clock or draws randomness.

    With `takeover` it takes the card from an owner that lives. The `environment` is the one that a service manager has
    prepared (NOTIFY_SOCKET, CREDENTIALS_DIRECTORY ...); `reload` reads the settings again.
    """
    return Daemon(
        config,
        clock=clock,
        wall_clock=wall_clock,
        entropy=entropy,
        takeover=takeover,
        environment={} if environment is None else environment,
        reload=reload,
    )
