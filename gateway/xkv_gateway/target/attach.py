"""Attaches the card that a URL names: starts the soft card where it is one; connects our initiator, or has Linux connect."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final

from xkv_gateway.cardurl import KernelCardUrl, NodeCardUrl, SoftCardUrl, TcpCardUrl
from xkv_gateway.errors import CardAwayError, CardUnavailableError, ConfigError
from xkv_gateway.target.softcard import SoftCard
from xkv_nvmeof.blockdev import DeviceError
from xkv_nvmeof.initiator import TcpInitiator
from xkv_nvmeof.initiator_errors import AuthenticationRefused, ConnectUnanswered
from xkv_nvmeof.initiator_options import InitiatorOptions, TargetAddress
from xkv_nvmeof.kernel.device import KernelDevice
from xkv_nvmeof.kernel.tool import NvmeTool
from xkv_nvmeof.kernel.view import Wanted
from xkv_nvmeof.kernel.ways import FabricWay, NodeWay

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_gateway.cardurl import CardUrl
    from xkv_gateway.config import NvmeConfig
    from xkv_gateway.networks import StorageNetworks
    from xkv_gateway.state import HostIdentity
    from xkv_nvmeof.dhchap.host import HostKeys

log = logging.getLogger(__name__)

DEVICE_CLOSE_TIMEOUT_S: Final = 1.0
CANCEL_GRACE_MS: Final = 300
"""Writes are cancelled only when the gateway ends, which must not take long."""


CardDevice = TcpInitiator | KernelDevice


@dataclass(slots=True)
class AttachedCard:
    """A connected card. `run` in a task keeps the soft card's process up; `aclose` detaches."""

    url: CardUrl
    device: CardDevice
    soft_card: SoftCard | None

    def keep_alive_ms(self, configured_ms: int) -> int:
        """Return how long commands may still be executed when this host is gone, as far as the way to the card knows."""
        if isinstance(self.device, KernelDevice):
            return max(configured_ms, self.device.late_ms)
        negotiated = self.device.negotiated
        return configured_ms if negotiated is None else negotiated.keep_alive_ms

    @property
    def connection(self) -> dict[str, object]:
        """What is known of the way to the card, for status displays; empty while there is none."""
        if isinstance(self.device, KernelDevice):
            return self.device.facts
        negotiated = self.device.negotiated
        if negotiated is None:
            return {}
        paths = [
            {
                "address": f"{path.address.host}:{path.address.port}",
                "connected": path.connected,
                "access": None if path.access is None else path.access.name.lower(),
                "reason": path.reason,
            }
            for path in self.device.paths
        ]
        return {**asdict(negotiated), "paths": paths}

    async def run(self) -> None:
        """Look after the soft card's process, if there is one. Ends only by cancellation, or at once without one."""
        if self.soft_card is not None:
            assert isinstance(self.device, TcpInitiator)
            await self.soft_card.run(self.device.retarget)

    def hurry(self) -> None:
        """The target has been made right: connect at once, if offline."""
        if isinstance(self.device, TcpInitiator):
            self.device.hurry()

    def kill(self) -> None:
        """End the soft card's process on the spot, if there is one."""
        if self.soft_card is not None:
            self.soft_card.kill()

    async def aclose(self) -> None:
        """End the association in order, then the soft card's process. Idempotent."""
        try:
            async with asyncio.timeout(DEVICE_CLOSE_TIMEOUT_S):
                await self.device.aclose()
        except TimeoutError:
            log.warning("the card did not take its leave within %.1f s", DEVICE_CLOSE_TIMEOUT_S)
        finally:
            if self.soft_card is not None:
                await self.soft_card.aclose()


def initiator_options(
    config: NvmeConfig, identity: HostIdentity, keys: HostKeys | None = None
) -> InitiatorOptions:
    """Return the initiator's options; `keys` are for targets that ask who we are.

    Raises:
        ConfigError: the initiator refuses one of them; it names the field.
    """
    try:
        return InitiatorOptions(
            host_nqn=identity.host_nqn,
            host_id=identity.host_id.bytes,
            io_queues=config.io_queues,
            queue_depth=config.queue_depth,
            keep_alive_ms=config.keep_alive_ms,
            command_timeout_ms=config.command_timeout_ms,
            connect_timeout_ms=config.connect_timeout_ms,
            cancel_grace_ms=CANCEL_GRACE_MS,
            header_digest=config.header_digest,
            data_digest=config.data_digest,
            dhchap=keys,
        )
    except ValueError as error:
        raise ConfigError(f"[nvme]: {error}") from None


async def attach(
    url: CardUrl,
    options: InitiatorOptions,
    storage: StorageNetworks,
    *,
    clock: Callable[[], int],
    entropy: Callable[[int], bytes],
    read_only: bool = False,
) -> AttachedCard:
    """Return the card, connected, inside the storage networks; with `read_only` a soft card's file is opened for reading only.

    Raises:
        CardAwayError: nobody answers there; nothing is left running.
        CardUnavailableError: it cannot be used or does not accept us; nothing is left running.
        FabricRefusedError: it is outside of the storage networks.
    """
    async with AsyncExitStack() as undo:
        soft_card: SoftCard | None = None
        if isinstance(url, SoftCardUrl):
            soft_card = SoftCard(url.path, url.size_bytes, clock=clock, read_only=read_only)
            undo.push_async_callback(soft_card.aclose)
            ready = await soft_card.start()
            address = TargetAddress(host=ready.host, port=ready.port, nqn=ready.nqn, nsid=ready.nsid)
            options = replace(options, dhchap=None)  # the process is ours: neither has to prove anything
        elif not isinstance(url, NodeCardUrl):
            address = TargetAddress(host=url.host, port=url.port, nqn=url.nqn, nsid=url.nsid)
            _judge(storage, url)
            # Asked at each attempt to connect, of the address that a name stands for then.
            options = replace(options, admits=storage.admits_target)
        advice = "Is the target running, and does it allow this host (nvme.host_nqn)? Is the NQN right?"
        device: CardDevice
        try:
            match url:
                case KernelCardUrl():
                    wanted = Wanted(url.nqn, url.nsid, url.nguid, url.uuid)
                    way = FabricWay(address, _for_linux(options), NvmeTool(), wanted, read_only=read_only)
                    device = await KernelDevice.connect(way, options, clock=clock, entropy=entropy)
                case NodeCardUrl():
                    advice = "Is it attached, free, and may this user open it?"
                    node = NodeWay(url.path, options, read_only=read_only)
                    device = await KernelDevice.connect(node, options, clock=clock, entropy=entropy)
                case _:
                    portals = url.portals if isinstance(url, TcpCardUrl) else ()
                    device = await TcpInitiator.connect(
                        address, options, clock=clock, entropy=entropy, portals=portals
                    )
        except DeviceError as error:
            kind = CardAwayError if isinstance(error, ConnectUnanswered) else CardUnavailableError
            if isinstance(error, AuthenticationRefused):
                advice = "Are the keys of [fabric] those that the target has for this host (nvme.host_nqn)?"
            raise kind(f"cannot use the card {url}: {error}", advice=advice) from None
        undo.pop_all()
        return AttachedCard(url=url, device=device, soft_card=soft_card)


def _for_linux(options: InitiatorOptions) -> InitiatorOptions:
    """Return the options where Linux is the initiator.

    Raises:
        ConfigError: it would have to prove who this host is; nvme-cli takes keys as arguments, which every user can read.
    """
    if options.dhchap is not None:
        raise ConfigError(
            "[fabric]: the keys of DH-HMAC-CHAP are not given to Linux",
            advice="Use nvme+tcp:// for this card.",
        )
    return options


def _judge(storage: StorageNetworks, url: TcpCardUrl | KernelCardUrl) -> None:
    """Refuse at once what is an address already; a name is judged when it stands for one."""
    hosts = [url.host, *(host for host, _port in url.portals)] if isinstance(url, TcpCardUrl) else [url.host]
    for host in hosts:
        with contextlib.suppress(ValueError):
            storage.judge_target(host, f"the card {url}")
