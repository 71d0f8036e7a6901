"""How Linux gets to a namespace: by a connection that it is told to make, or by a device that somebody else attached.

What is connected is told by sysfs alone, before and after each attempt: exit codes and messages of nvme-cli say neither
whether a connection is there nor whose it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from xkv_nvmeof.aside import Aside
from xkv_nvmeof.blockdev import DeviceIdentity, Geometry
from xkv_nvmeof.initiator_errors import ConnectFailed, ConnectUnanswered, NamespaceUnusable
from xkv_nvmeof.kernel import sysfs
from xkv_nvmeof.kernel.file import BlockFile, NotABlockDevice
from xkv_nvmeof.kernel.link import Cause, FabricLink, NotConnected
from xkv_nvmeof.kernel.view import Subsystem, Wanted, namespace_of, subsystem_of
from xkv_nvmeof.lookup import look_up

if TYPE_CHECKING:
    from xkv_nvmeof.initiator_options import InitiatorOptions, TargetAddress
    from xkv_nvmeof.kernel.tool import NvmeTool

log = logging.getLogger(__name__)

DEV: Final = Path("/dev")
TRANSFER_BYTES_MAX: Final = 1 << 20
LISTENS_S: Final = 1.0
ALLOWED_POLL_S: Final = 0.05
FOREVER_MS: Final = 600_000
"""Taken for "for ever", where whoever attached a device lets Linux keep commands without an end."""
TUNINGS_MAX: Final = 4
_tunings: Final = Aside("nvme-times", TUNINGS_MAX, "Linux does not come back from it")


@dataclass(slots=True)
class Opened:
    """An open namespace."""

    file: BlockFile
    block: Path
    """Its folder in sysfs."""
    folder: tuple[int, int]
    """Which folder that is: another device of the same name, a later one, has another."""
    identity: DeviceIdentity
    geometry: Geometry
    nvme: bool
    late_ms: int
    """How long after its sender is gone a command may still be executed, keep-alive time of the target included."""
    facts: dict[str, object] = field(default_factory=dict)
    """For status displays."""
    root: Path = sysfs.SYSFS


class Way(Protocol):
    """A way to a namespace."""

    async def open(self, expected: DeviceIdentity | None) -> Opened:
        """Get there and open it. Raises ConnectFailed, and leaves nothing half made."""
        ...

    async def leave(self) -> None:
        """Undo what `open` did, and nothing that others did."""
        ...


class FabricWay:
    """A connection to a controller over TCP; made here unless it is there."""

    def __init__(
        self,
        address: TargetAddress,
        options: InitiatorOptions,
        tool: NvmeTool,
        wanted: Wanted,
        *,
        read_only: bool,
    ) -> None:
        self._address = address
        self._options = options
        self._wanted = wanted
        self._opener = Opener(options.connect_timeout_ms, read_only=read_only)
        self._link = FabricLink(options, tool)

    async def open(self, expected: DeviceIdentity | None) -> Opened:
        """Connect, wait for the namespace, open it.

        Raises:
            ConnectFailed: or a subclass.
        """
        wanted = _pinned(self._wanted, expected)
        traddr = await resolve(self._address, self._options)
        try:
            controller, namespace = await self._link.up(traddr, self._address.port, wanted)
        except NotConnected as error:
            # Somebody who may connect may do so in a moment; nobody listens there, but may.
            by_others = error.cause is Cause.NOT_ROOT
            absent = error.cause is Cause.REFUSED and not await _listens(traddr, self._address.port)
            if by_others or absent:
                raise ConnectUnanswered(str(error)) from error
            raise
        try:
            if self._link.ours:
                await tune(controller, self._options)
            opened = await self._open_soon(namespace.node)
        except BaseException:
            await self._link.down()
            raise
        opened.facts["controller"] = controller
        opened.facts["connected by us"] = self._link.ours
        return opened

    async def _open_soon(self, node: str) -> Opened:
        """Open a node; one that is new belongs to root alone for a moment, until udev has come that far."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._options.connect_timeout_ms / 1000
        while True:
            try:
                return await self._opener.open(DEV / node, node)
            except NamespaceUnusable as error:
                if not isinstance(error.__cause__, PermissionError) or loop.time() >= until:
                    raise
            await asyncio.sleep(ALLOWED_POLL_S)

    async def leave(self) -> None:
        """Disconnect what was connected here, if it still is that."""
        await self._link.down()


class NodeWay:
    """A block device that is there. After it was away it is found by its identity, where that says more than its path."""

    def __init__(self, path: Path, options: InitiatorOptions, *, read_only: bool) -> None:
        self._path = path
        self._opener = Opener(options.connect_timeout_ms, read_only=read_only)

    async def open(self, expected: DeviceIdentity | None) -> Opened:
        """Open it.

        Raises:
            ConnectFailed: or a subclass.
        """
        if expected is not None and expected.nqn:
            wanted = _pinned(Wanted(expected.nqn, expected.nsid), expected)
            namespace = namespace_of(sysfs.read_view(), wanted)
            if namespace is None:
                raise ConnectFailed(
                    f"namespace {expected.nsid} of {expected.nqn} is not attached to this host"
                )
            return await self._opener.open(DEV / namespace.node, namespace.node)
        return await self._opener.open(self._path, None)

    async def leave(self) -> None:
        """Leave it attached: somebody else did that."""


class Opener:
    """Opens nodes in a thread, one at a time: while a controller is silent Linux keeps who opens its namespace, beyond any kill."""

    def __init__(self, timeout_ms: int, *, read_only: bool) -> None:
        self._timeout_ms = timeout_ms
        self._read_only = read_only
        self._aside = Aside("card-open", 1, "Linux still has not opened it for an attempt from before")

    async def open(self, path: Path, node: str | None) -> Opened:
        """Open a node and tell what it is; `node` is the name in sysfs that it has to have.

        Raises:
            NamespaceUnusable: it is something else, is in use, or cannot be used whole.
            ConnectUnanswered: it is not there, or Linux does not open it.
        """
        try:
            async with asyncio.timeout(self._timeout_ms / 1000):
                return await self._aside.run(
                    lambda: _open(path, node, read_only=self._read_only), late=_give_back
                )
        except TimeoutError:
            raise ConnectUnanswered(f"{path}: Linux did not open it in time") from None
        except OSError as error:
            raise ConnectUnanswered(f"{path}: {error.strerror}") from None


def _give_back(opened: Opened) -> None:
    opened.file.close()


def _pinned(wanted: Wanted, expected: DeviceIdentity | None) -> Wanted:
    """Return what is wanted, with the ids that are known by now."""
    if expected is None:
        return wanted
    return Wanted(wanted.nqn, wanted.nsid, expected.nguid, expected.uuid)


async def resolve(address: TargetAddress, options: InitiatorOptions) -> str:
    """Return the numeric address, one that the options admit: nvme-cli does not know names in all its versions."""
    try:
        async with asyncio.timeout(options.connect_timeout_ms / 1000):
            found = await look_up(address.host, address.port)
    except TimeoutError:
        raise ConnectUnanswered(f"{address.host}: its address could not be found in time") from None
    except (OSError, UnicodeError) as error:
        raise ConnectUnanswered(f"{address.host}: {getattr(error, 'strerror', None) or error}") from error
    for entry in found:
        if options.admits is None or options.admits(str(entry[4][0])):
            return str(entry[4][0])
    raise ConnectFailed(f"{found[0][4][0]} is no address where a card may be")


async def _listens(traddr: str, port: int) -> bool:
    """Tell whether anybody listens there; Linux gives one error for that and for a target that refuses this host."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(LISTENS_S):
            _, writer = await asyncio.open_connection(traddr, port)
            writer.close()
            return True
    return False


def _open(path: Path, node: str | None, *, read_only: bool) -> Opened:
    """Open a node and tell what it is; `node` is the name in sysfs that it has to have.

    Raises:
        NamespaceUnusable: it is something else, is in use, or cannot be used whole.
    """
    try:
        number = path.stat().st_rdev if node is None else _number_of(path, node)
        if not stat.S_ISBLK(path.stat().st_mode):
            raise NamespaceUnusable(f"{path} is no block device")
        block = sysfs.block_folder(number)
        if block is None:
            raise NamespaceUnusable(f"{path}: Linux does not know this block device (any more)")
        folder = sysfs.folder_of(block)
        queue = sysfs.queue_of(block)
        _judge(path, queue, read_only=read_only)
        file = BlockFile.open_node(path, number, read_only=read_only)
    except NotABlockDevice as error:
        raise NamespaceUnusable(str(error)) from None
    except OSError as error:
        away = error.errno in {errno.ENOENT, errno.ENXIO, errno.ENODEV}
        raise (ConnectUnanswered if away else NamespaceUnusable)(f"{path}: {_explained(error)}") from error
    return describe(file, block, folder, queue)


def _number_of(path: Path, node: str) -> int:
    """Return the device number of a name in sysfs, which the node under /dev has to have."""
    major, _, minor = sysfs.text_of(sysfs.SYSFS / "block" / node / "dev").partition(":")
    if not (major.isdecimal() and minor.isdecimal()):
        raise NamespaceUnusable(f"{path}: Linux does not know {node} any more")
    return os.makedev(int(major), int(minor))


def _judge(path: Path, queue: sysfs.Queue, *, read_only: bool) -> None:
    if queue.partition:
        raise NamespaceUnusable(f"{path} is a partition: a card is a whole device")
    if queue.partitions and not read_only:
        raise NamespaceUnusable(f"{path} is partitioned ({', '.join(queue.partitions)})")
    if queue.read_only and not read_only:
        raise NamespaceUnusable(f"{path} is read-only")
    if not queue.size_bytes or queue.block_bytes not in (512, 4096):
        raise NamespaceUnusable(
            f"{path}: {queue.size_bytes} bytes in blocks of {queue.block_bytes} cannot be used"
        )


def _explained(error: OSError) -> str:
    match error.errno:
        case errno.EBUSY:
            return "in use on this host: mounted, part of another device, or opened by another gateway"
        case errno.EACCES | errno.EPERM:
            return (
                "this user may not open it: give the device to the user's group, and let the service see it"
            )
        case _:
            return error.strerror or str(error)


def describe(file: BlockFile, block: Path, folder: tuple[int, int], queue: sysfs.Queue) -> Opened:
    """Return what an open block device is."""
    subsystem, nvme = _subsystem_of(block), (block / "nsid").exists()
    nguid, own_uuid = sysfs.namespace_ids(block) if nvme else (bytes(16), sysfs.foreign_id(block))
    identity = DeviceIdentity(
        nqn="" if subsystem is None else subsystem.nqn,
        nsid=sysfs.number_of(block / "nsid", 1),
        nguid=nguid,
        uuid=own_uuid,
        serial="" if subsystem is None else subsystem.serial,
        model=sysfs.text_of(block / "device" / "model") if subsystem is None else subsystem.model,
    )
    io_timeout_ms, late_ms = _late_ms(subsystem, queue)
    facts: dict[str, object] = {
        "node": block.name,
        "controllers": [one.name for one in subsystem.controllers] if subsystem else [],
        "io_timeout_ms": io_timeout_ms,
        "late_ms": late_ms,
    }
    return Opened(file, block, folder, identity, geometry_of(queue), nvme, late_ms, facts)


def geometry_of(queue: sysfs.Queue) -> Geometry:
    """Return the geometry that Linux tells."""
    transfer = min(queue.transfer_bytes_max or TRANSFER_BYTES_MAX, TRANSFER_BYTES_MAX)
    return Geometry(
        block_bytes=queue.block_bytes,
        block_count=queue.size_bytes // queue.block_bytes,
        volatile_write_cache=queue.volatile_write_cache,
        can_deallocate=queue.discard_bytes_max > 0,
        # Linux does not say whether discarded blocks read as zeroes.
        deallocate_zeroes=False,
        can_write_zeroes=queue.write_zeroes_bytes_max > 0,
        preferred_io_bytes=max(queue.block_bytes, transfer // queue.block_bytes * queue.block_bytes),
    )


def _subsystem_of(block: Path) -> Subsystem | None:
    """Return the NVMe subsystem that a block device belongs to."""
    view = sysfs.read_view()
    return next((one for one in view if block.name in {each.node for each in one.namespaces}), None)


def is_gone(opened: Opened) -> bool:
    """Tell whether the device that was opened is there no more, whatever has its name now."""
    return sysfs.folder_of(opened.block) != opened.folder


def is_live(opened: Opened) -> tuple[bool, str]:
    """Tell whether commands get to the namespace, and why not."""
    if is_gone(opened):
        return False, "the device is gone"
    if not opened.identity.nqn:
        return True, "attached"
    subsystem = subsystem_of(sysfs.read_view(opened.root), opened.identity.nqn)
    if subsystem is None or not subsystem.controllers:
        return False, "no controller leads to the namespace"
    if subsystem.live:
        return True, "connected"
    states = ", ".join(f"{one.name} is {one.state or 'gone'}" for one in subsystem.controllers)
    return False, f"no controller is live: {states}"


def _late_ms(subsystem: Subsystem | None, queue: sysfs.Queue) -> tuple[int, int]:
    """Return the deadline of a command, and how long it may still be executed once its sender is gone.

    A command waits for its answer, then for a controller that is away; what was sent last is over when the keep-alive time of the
    controller has passed.
    """
    if subsystem is None:
        return queue.io_timeout_ms, queue.io_timeout_ms
    io_timeout_ms, late_ms = 0, 0
    for one in subsystem.controllers:
        folder = sysfs.SYSFS / "class" / "nvme" / one.name
        deadlines = [sysfs.number_of(place, queue.io_timeout_ms) for place in sysfs.timeouts(folder)]
        io_timeout_ms = max(io_timeout_ms, *deadlines) if deadlines else queue.io_timeout_ms
        kept_ms = 0 if one.transport == "pcie" else sysfs.loss_ms(folder)
        if kept_ms is None:
            log.warning(
                "%s: Linux keeps commands for ever while the controller is away; set ctrl_loss_tmo", one.name
            )
            kept_ms = FOREVER_MS
        late_ms = max(late_ms, io_timeout_ms + kept_ms + 1000 * sysfs.number_of(folder / "kato"))
    return io_timeout_ms, late_ms


async def tune(controller: str, options: InitiatorOptions) -> None:
    """Tell Linux how long commands may take, and how long they wait for a controller that is away: nvme-cli has no flag for it.

    Some kernels take such a word only when no command is under way, so that it may last as long as a controller is silent.
    """
    try:
        async with asyncio.timeout(options.connect_timeout_ms / 1000):
            await _tunings.run(lambda: _tune(controller, options))
    except OSError as error:
        log.warning("the times of %s stay as they are: %s", controller, error.strerror or "Linux is silent")


def _tune(controller: str, options: InitiatorOptions) -> None:
    fail_after_s = max(1, options.keep_alive_ms // 2000)
    folder = sysfs.SYSFS / "class" / "nvme" / controller
    wanted = [(place, options.command_timeout_ms) for place in sysfs.timeouts(folder)]
    for path, value in (*wanted, (folder / "fast_io_fail_tmo", fail_after_s)):
        try:
            path.write_text(f"{value}\n", encoding="ascii")
        except OSError as error:
            log.warning("%s of %s stays as it is: %s", path.name, controller, error.strerror)
