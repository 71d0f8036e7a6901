"""Connections that Linux holds: made and undone for the operator, or for a gateway that may not do it itself."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import grp
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from xkv_gateway.errors import CardUnavailableError, ConfigError
from xkv_gateway.target import udev
from xkv_nvmeof.blockdev import DeviceError
from xkv_nvmeof.initiator_options import TargetAddress
from xkv_nvmeof.kernel.link import FabricLink
from xkv_nvmeof.kernel.nvmecli import disconnect_arguments
from xkv_nvmeof.kernel.sysfs import read_view
from xkv_nvmeof.kernel.tool import NvmeTool
from xkv_nvmeof.kernel.view import Peer, Wanted, path_of, subsystem_of
from xkv_nvmeof.kernel.ways import DEV, resolve, tune

if TYPE_CHECKING:
    from xkv_gateway.cardurl import KernelCardUrl
    from xkv_nvmeof.initiator_options import InitiatorOptions
    from xkv_nvmeof.kernel.view import Namespace

NODE_MODE = 0o660


@dataclass(frozen=True, slots=True)
class Connected:
    """A connection that is up."""

    controller: str
    node: str
    namespace: Namespace
    new: bool
    """Whether it was made just now."""


async def connect(url: KernelCardUrl, options: InitiatorOptions, group: str | None) -> Connected:
    """Connect, unless that is done; wait for the namespace; let the group use its node. It stays connected.

    Raises:
        CardUnavailableError: it cannot be reached; nothing is left half made.
        ConfigError: there is no such group.
    """
    group_id = None if group is None else _group_id(group)
    if group_id is not None:
        await udev.give(url.nqn, group_id, NODE_MODE)
    # Nobody will be there to connect it again.
    link = FabricLink(options, NvmeTool(), for_ever=True)
    try:
        traddr = await resolve(TargetAddress(url.host, url.port, url.nqn, url.nsid), options)
        controller, namespace = await link.up(
            traddr, url.port, Wanted(url.nqn, url.nsid, url.nguid, url.uuid)
        )
    except DeviceError as error:
        raise CardUnavailableError(
            f"cannot connect {url}: {error}",
            advice="Is the target running, and does it allow this host (nvme.host_nqn)? Is the NQN right?",
        ) from None
    if link.ours:
        await tune(controller, options)
    node = DEV / namespace.node
    if group_id is not None:
        try:
            os.chown(node, -1, group_id)
            os.chmod(node, NODE_MODE)  # noqa: PTH101 - beside chown
        except OSError as error:
            raise CardUnavailableError(
                f"{node} cannot be given to {group}: {error.strerror}", advice="Run this as root."
            ) from None
    return Connected(controller, str(node), namespace, link.ours)


def _group_id(group: str) -> int:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(f"--group: there is no group {group!r}") from None


async def disconnect(url: KernelCardUrl, options: InitiatorOptions) -> str | None:
    """Undo the connection that is exactly that one; return the controller's name, or None where there is none.

    Raises:
        CardUnavailableError: its namespace is in use, or Linux keeps it.
    """
    try:
        # What is connected may be disconnected, wherever it is.
        everywhere = replace(options, admits=None)
        traddr = await resolve(TargetAddress(url.host, url.port, url.nqn, url.nsid), everywhere)
    except DeviceError as error:
        raise CardUnavailableError(f"{url}: {error}") from None
    peer = Peer(url.nqn, traddr, url.port, options.host_nqn, options.host_id)
    view = read_view()
    path, subsystem = path_of(view, peer), subsystem_of(view, url.nqn)
    if path is None or subsystem is None:
        await udev.take_back(url.nqn)
        return None
    if subsystem.is_last_way(path.name):
        for namespace in subsystem.namespaces:
            _require_unused(namespace.node)
    try:
        ended = await NvmeTool().run(disconnect_arguments(path.name), options.connect_timeout_ms / 1000)
    except DeviceError as error:
        raise CardUnavailableError(f"{path.name} stays connected: {error}") from None
    # It ends with 0 also where it did nothing; what Linux still deletes is gone soon.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(options.connect_timeout_ms / 1000):
            while _is_there(peer, path.name):  # noqa: ASYNC110 - Linux tells nobody
                await asyncio.sleep(0.02)
            if len(subsystem.controllers) == 1:
                await udev.take_back(url.nqn)
            return path.name
    raise CardUnavailableError(
        f"{path.name} stays connected: nvme-cli: {ended.said}", advice="Run this as root."
    )


def _is_there(peer: Peer, name: str) -> bool:
    path = path_of(read_view(), peer)
    return path is not None and path.name == name


def _require_unused(node: str) -> None:
    """Refuse what is mounted, part of another device, or a gateway's card. One that cannot be looked at is not refused."""
    try:
        os.close(os.open(DEV / node, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise CardUnavailableError(
                f"/dev/{node} is in use on this host", advice="Stop the gateway, or unmount it, first."
            ) from None
