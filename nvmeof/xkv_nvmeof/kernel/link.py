"""One connection that Linux holds on our behalf: made by nvme-cli, judged by sysfs, undone only if it is ours."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import stat
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from xkv_nvmeof.initiator_errors import ConnectFailed, ConnectUnanswered
from xkv_nvmeof.kernel.nvmecli import ConnectOptions, connect_arguments, disconnect_arguments
from xkv_nvmeof.kernel.sysfs import SYSFS, read_view, text_of
from xkv_nvmeof.kernel.tool import ToolStuck
from xkv_nvmeof.kernel.view import Peer, Wanted, half_identities, namespace_of, path_of, strangers_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_nvmeof.initiator_options import InitiatorOptions
    from xkv_nvmeof.kernel.tool import Ended, NvmeTool
    from xkv_nvmeof.kernel.view import Namespace, View

log = logging.getLogger(__name__)

FABRICS: Final = Path("/dev/nvme-fabrics")
NVME_TCP: Final = SYSFS / "module" / "nvme_tcp"
RECONNECT_DELAY_S: Final = 1
POLL_MIN_S: Final = 0.01
POLL_MAX_S: Final = 0.25


class Cause(Enum):
    """Why there is no connection after an attempt, as far as facts tell. What nvme-cli says is only shown."""

    NOT_ROOT = "only root may connect: run `xkv-gateway fabric connect` as root, or the unit xkv-card-attach@"
    NO_FABRICS = "this kernel has no NVMe over fabrics: load the module nvme-fabrics"
    NO_TCP = "this kernel has no NVMe over TCP: load the module nvme-tcp"
    HALF_IDENTITY = (
        "this host's NQN and id are not used as a pair everywhere; set nvme.host_nqn and nvme.host_id"
    )
    STRANGER = "it is connected already, as another host"
    REFUSED = "Linux could not connect; its reason is in the kernel's log"


class NotConnected(ConnectFailed):
    """An attempt left no connection behind. `cause` is made from facts of this host."""

    def __init__(self, message: str, *, cause: Cause) -> None:
        super().__init__(message)
        self.cause = cause


class NoNamespace(ConnectFailed):
    """The controller is connected, but the namespace did not become usable in time."""


def judge(view: View, peer: Peer, *, root: bool, fabrics: bool, tcp: bool) -> Cause:
    """Return why there is no connection although nvme-cli was run. Pure."""
    if not root:
        return Cause.NOT_ROOT
    if not fabrics:
        return Cause.NO_FABRICS
    if not tcp:
        return Cause.NO_TCP
    if half_identities(view, peer):
        return Cause.HALF_IDENTITY
    return Cause.STRANGER if strangers_at(view, peer) else Cause.REFUSED


def may_connect() -> bool:
    """Tell whether this process may have Linux connect; else nvme-cli is not run at all."""
    return os.geteuid() == 0 or os.access(FABRICS, os.W_OK, effective_ids=True)


def connect_options(options: InitiatorOptions, *, for_ever: bool) -> ConnectOptions:
    """Return how Linux is to treat the connection. Linux cannot negotiate digests: "preferred" is off.

    With `for_ever` Linux looks for a controller that is away until somebody disconnects; else it gives up some time, and whoever
    connected does so again.
    """
    keep_alive_s = max(1, math.ceil(options.keep_alive_ms / 1000))
    return ConnectOptions(
        io_queues=options.io_queues,
        queue_entries=min(1024, max(16, options.queue_depth)),
        keep_alive_s=keep_alive_s,
        reconnect_delay_s=RECONNECT_DELAY_S,
        controller_loss_s=-1 if for_ever else max(10, 2 * keep_alive_s),
        header_digest=options.header_digest == "required",
        data_digest=options.data_digest == "required",
    )


class FabricLink:
    """The connection of one device. `view` tells what is connected; `is_whole` whether a namespace's node can be opened."""

    def __init__(
        self,
        options: InitiatorOptions,
        tool: NvmeTool,
        *,
        for_ever: bool = False,
        view: Callable[[], View] = read_view,
        is_whole: Callable[[Namespace], bool] | None = None,
    ) -> None:
        self._options = options
        self._tool = tool
        self._for_ever = for_ever
        self._view = view
        self._is_whole = is_whole or node_is_whole
        self._peer: Peer | None = None
        self._ours: str | None = None

    @property
    def ours(self) -> bool:
        """Whether the connection was made here."""
        return self._ours is not None

    async def up(self, traddr: str, port: int, wanted: Wanted) -> tuple[str, Namespace]:
        """Return the name of the live controller and the namespace behind it; connect if nothing is connected.

        Raises:
            ConnectFailed: or a subclass; what was half made is undone.
        """
        options = self._options
        peer = Peer(wanted.nqn, traddr, port, options.host_nqn, options.host_id)
        self._peer = peer
        if path_of(self._view(), peer) is None:
            await self._connect(peer)
        try:
            return await self._wait(peer, wanted, options.connect_timeout_ms / 1000)
        except BaseException:
            await self.down()
            raise

    async def _connect(self, peer: Peer) -> None:
        """Have nvme-cli connect; a path that was not there before is ours, whatever nvme-cli says."""
        self._ours = None
        if not may_connect():
            # Somebody who may will do it: that is waited for, and looking costs nothing.
            raise NotConnected(f"{peer.address}: {Cause.NOT_ROOT.value}", cause=Cause.NOT_ROOT)
        ended: Ended | None = None
        failure: ConnectFailed | None = None
        arguments = connect_arguments(peer, connect_options(self._options, for_ever=self._for_ever))
        try:
            ended = await self._tool.run(arguments, self._options.connect_timeout_ms / 1000)
        except ToolStuck as error:
            failure = error
        view = self._view()
        path = path_of(view, peer)
        if path is not None:
            self._ours = path.name
            return
        if failure is not None:
            raise failure
        assert ended is not None
        cause = judge(
            view,
            peer,
            root=os.geteuid() == 0,
            fabrics=FABRICS.exists(),
            tcp=NVME_TCP.exists(),
        )
        raise NotConnected(f"{peer.address}: {cause.value}. nvme-cli: {ended.said}", cause=cause)

    async def _wait(self, peer: Peer, wanted: Wanted, timeout_s: float) -> tuple[str, Namespace]:
        """Wait until the path is live and the namespace is whole."""
        delay_s, path = POLL_MIN_S, None
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    view = self._view()
                    path = path_of(view, peer)
                    if path is None:
                        raise NotConnected(f"{peer.address}: the connection is gone", cause=Cause.REFUSED)
                    namespace = namespace_of(view, wanted)
                    if path.live and namespace is not None and self._is_whole(namespace):
                        return path.name, namespace
                    await asyncio.sleep(delay_s)
                    delay_s = min(POLL_MAX_S, 2 * delay_s)
        except TimeoutError:
            if path is not None and not path.live:
                state = path.state or "in no known state"
                raise ConnectUnanswered(f"{path.name} is {state} after {timeout_s:.0f} s") from None
            raise NoNamespace(self._missing(wanted, timeout_s)) from None

    def _missing(self, wanted: Wanted, timeout_s: float) -> str:
        there = namespace_of(self._view(), Wanted(wanted.nqn, wanted.nsid))
        if there is not None and (wanted.nguid, wanted.uuid) != (b"", b""):
            return (
                f"namespace {wanted.nsid} is another one: NGUID {there.nguid.hex()}, UUID {there.uuid.hex()}"
            )
        return f"namespace {wanted.nsid} of {wanted.nqn} did not appear within {timeout_s:.0f} s"

    async def down(self) -> None:
        """Disconnect what was connected here, after a look whether it still is that. Never raises, never waits long."""
        name, self._ours = self._ours, None
        if name is None or self._peer is None:
            return
        path = path_of(self._view(), self._peer)
        if path is None or path.name != name:
            return
        try:
            ended = await self._tool.run(disconnect_arguments(name), self._options.close_timeout_ms / 1000)
        except ConnectFailed as error:
            log.warning("%s stays connected: %s", name, error)
            return
        # Its exit code is 0 also where it disconnected nothing.
        after = path_of(self._view(), self._peer)
        if after is not None and after.name == name and after.live:
            log.warning("%s stays connected: nvme-cli: %s", name, ended.said)


def node_is_whole(namespace: Namespace) -> bool:
    """Tell whether the node under /dev is the block device that sysfs speaks of."""
    try:
        found = Path("/dev", namespace.node).stat()
    except OSError:
        return False
    number = f"{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}"
    return stat.S_ISBLK(found.st_mode) and text_of(SYSFS / "block" / namespace.node / "dev") == number
