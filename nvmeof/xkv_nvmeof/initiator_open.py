"""From nothing to a working association: the order of Base 2.0, 3.5 (initialisation) over NVMe/TCP."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

from xkv_nvmeof.blockdev import CommandFailed, DeviceError
from xkv_nvmeof.initiator_admin import ADMIN_QUEUE_ENTRIES, AdminChannel
from xkv_nvmeof.initiator_association import NS_PER_MS, Association, Host, configuration
from xkv_nvmeof.initiator_errors import (
    AuthenticationRefused,
    ConnectFailed,
    ConnectUnanswered,
    IdentityChanged,
    NamespaceShrunk,
)
from xkv_nvmeof.initiator_options import Negotiated
from xkv_nvmeof.spec import (
    ASYNC_ACCESS_CHANGE,
    ASYNC_NAMESPACE_ATTRIBUTE,
    CNTLID_DYNAMIC,
    Capabilities,
    ControllerStatus,
    FeatureId,
    Register,
)

if TYPE_CHECKING:
    from xkv_nvmeof.blockdev import DeviceIdentity, Geometry
    from xkv_nvmeof.identify import IdentifyController
    from xkv_nvmeof.initiator_admin import NamespaceView
    from xkv_nvmeof.initiator_options import TargetAddress

_READY_POLL_MIN_S: Final = 0.002
_READY_POLL_MAX_S: Final = 0.1
_LEAST_QUEUE_ENTRIES: Final = 2
"""One slot of a queue stays empty (Base 3.3.1)."""
_KEEP_ALIVE_MS_MAX: Final = 600_000
_MIN_READY_WAIT_NS: Final = 500 * NS_PER_MS


async def open_association(host: Host, address: TargetAddress, opened: NamespaceView | None) -> Association:
    """Make an association with the namespace at `address`, which must be the one that was `opened` at first, if any was.

    Raises:
        ConnectFailed: or a subclass; the message has the address, the step and the reason.
    """
    association = Association(host, address)
    try:
        cntlid, capabilities = await open_admin(association, address.nqn, host.options.keep_alive_ms)
        assert association.admin is not None
        association.start_keep_alive()
        controller = await association.identify_controller()
        await _read_keep_alive(association)
        wanted = await _ask_for_queues(association)
        view = await association.look()
        if opened is not None:
            check_namespace(opened, view)
        events = controller.async_events & (ASYNC_NAMESPACE_ATTRIBUTE | ASYNC_ACCESS_CHANGE)
        if events:
            await association.admin.set_feature(FeatureId.ASYNC_EVENT_CONFIGURATION, events)
        entries = min(host.options.queue_depth + 1, capabilities.max_queue_entries)
        await _open_io_queues(association, controller, cntlid, wanted, entries)
        association.negotiated = _negotiated(association, controller, cntlid, entries)
        # Behind the events' configuration, so that a change after this look is told.
        association.access = await association.read_access()
        association.arm_events()
    except DeviceError as error:
        failure = with_address(error, address)
        association.end(failure)
        raise failure from error
    except BaseException:
        association.end(ConnectFailed("the attempt to connect was given up"))
        raise
    return association


def with_address(error: DeviceError, address: TargetAddress) -> DeviceError:
    """Return the error with the address in front; other kinds of device error become `ConnectFailed`."""
    message = f"{address.host}:{address.port} {address.nqn}: {error}"
    if isinstance(error, ConnectFailed):
        error.args = (message,)
        return error
    return ConnectFailed(message)


async def open_admin(association: Association, nqn: str, keep_alive_ms: int) -> tuple[int, Capabilities]:
    """Connect the admin queue and enable the controller; return controller id and CAP.

    Raises:
        DeviceError: what went wrong, at which step.
    """
    host = association.host
    link, cntlid = await association.connect_link(
        0, ADMIN_QUEUE_ENTRIES, 0, nqn=nqn, cntlid=CNTLID_DYNAMIC, keep_alive_ms=keep_alive_ms
    )
    admin = association.admin = AdminChannel(link, host.clock, host.options.connect_timeout_ms)
    capabilities = Capabilities.from_int(await admin.property_get(Register.CAP))
    association.page_bytes = capabilities.min_page_bytes
    await admin.property_set(Register.CC, configuration(capabilities.min_page_bytes))
    deadline_ns = host.clock() + max(capabilities.timeout_ns, _MIN_READY_WAIT_NS)
    delay_s = _READY_POLL_MIN_S
    while True:
        status = ControllerStatus.from_int(await admin.property_get(Register.CSTS))
        if status.fatal:
            raise ConnectFailed("the controller reports a fatal status (CSTS.CFS)")
        if status.ready:
            return cntlid, capabilities
        if host.clock() >= deadline_ns:
            waited_ms = capabilities.timeout_ns // NS_PER_MS
            raise ConnectUnanswered(f"the controller was not ready within {waited_ms} ms (CAP.TO)")
        await asyncio.sleep(delay_s)
        delay_s = min(delay_s * 2, _READY_POLL_MAX_S)


def check_identity(expected: DeviceIdentity, found: DeviceIdentity) -> None:
    """Compare who answers with who it should be: NQN, NSID, NGUID and UUID.

    Raises:
        IdentityChanged: naming what differs.
    """
    for name in ("nqn", "nsid", "nguid", "uuid"):
        before, now = getattr(expected, name), getattr(found, name)
        if before != now:
            texts = [value.hex() if isinstance(value, bytes) else str(value) for value in (before, now)]
            raise IdentityChanged(f"another namespace answers: {name} is {texts[1]}, it was {texts[0]}")


class Namespace(Protocol):
    """What is known of a namespace, whoever looked at it."""

    @property
    def identity(self) -> DeviceIdentity:
        """Which one it is."""
        ...

    @property
    def geometry(self) -> Geometry:
        """What it is like."""
        ...


def check_namespace(opened: Namespace, found: Namespace) -> None:
    """Compare the namespace with what it was when the device was opened: it may have another size, and nothing else.

    Raises:
        IdentityChanged: it is another one.
        NamespaceShrunk: it has other blocks.
    """
    check_identity(opened.identity, found.identity)
    before, now = opened.geometry, found.geometry
    if now.block_bytes != before.block_bytes:
        raise NamespaceShrunk(f"blocks of {now.block_bytes} bytes, {before.block_bytes} when it was opened")


async def _read_keep_alive(association: Association) -> None:
    """Learn the keep-alive timeout in force, which the controller may have rounded up (Base 5.27.1.12)."""
    assert association.admin is not None
    try:
        reported_ms = await association.admin.get_feature(FeatureId.KEEP_ALIVE_TIMER)
    except CommandFailed:
        return
    if reported_ms > _KEEP_ALIVE_MS_MAX:
        # What a lost connection left would count as under way for so long, and its space would be nobody's.
        raise ConnectFailed(
            f"the controller keeps the association of a lost host for {reported_ms // 1000} s (KATO)"
        )
    association.keep_alive_ms = max(association.keep_alive_ms, reported_ms)


async def _ask_for_queues(association: Association) -> int:
    """Return how many I/O queues to connect: what was asked for, as far as granted (Base 5.27.1.5)."""
    assert association.admin is not None
    asked = association.host.options.io_queues
    value = (asked - 1) | (asked - 1) << 16
    try:
        granted = await association.admin.set_feature(FeatureId.NUMBER_OF_QUEUES, value)
    except CommandFailed as failed:
        raise ConnectFailed(f"the controller grants no I/O queues: {failed}") from failed
    return min(asked, (granted & 0xFFFF) + 1, (granted >> 16) + 1)


async def _open_io_queues(
    association: Association, controller: IdentifyController, cntlid: int, count: int, entries: int
) -> None:
    """Connect the I/O queues; one that is refused is done without, as long as there is another."""
    if entries < _LEAST_QUEUE_ENTRIES:
        raise ConnectFailed("the controller has queues of one entry (CAP.MQES), which cannot be used")
    room = controller.in_capsule_bytes
    refused: ConnectFailed | None = None
    for qid in range(1, count + 1):
        try:
            link, _ = await association.connect_link(
                qid, entries, room, nqn=association.address.nqn, cntlid=cntlid, keep_alive_ms=0
            )
        except ConnectFailed as error:
            if association.over or isinstance(error, AuthenticationRefused):
                raise
            refused = error
            break
        association.links.append(link)
    if not association.links:
        raise ConnectFailed(f"the controller grants no I/O queue: {refused}")


def _negotiated(
    association: Association, controller: IdentifyController, cntlid: int, entries: int
) -> Negotiated:
    grants = [link.core.granted for link in association.links if link.core.granted is not None]
    proofs = [link.authenticated for link in association.links]
    assert association.namespace is not None
    return Negotiated(
        max_transfer_bytes=association.namespace.geometry.preferred_io_bytes,
        mdts_bytes=controller.max_transfer_bytes(association.page_bytes),
        in_capsule_bytes=controller.in_capsule_bytes,
        max_h2c_data_bytes=min(grant.max_h2c_data_bytes for grant in grants),
        header_digest=all(grant.header_digest for grant in grants),
        data_digest=all(grant.data_digest for grant in grants),
        queue_entries=entries,
        io_queues=len(grants),
        keep_alive_ms=association.keep_alive_ms,
        controller_id=cntlid,
        authenticated=proofs[0] if all(proofs) else None,
    )
