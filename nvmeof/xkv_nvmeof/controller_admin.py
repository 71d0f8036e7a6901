"""Answers to admin commands (Base 5). Functions over a controller; one table says which commands exist."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from xkv_nvmeof.blockdev import ReservationType
from xkv_nvmeof.controller_guard import COMMANDS
from xkv_nvmeof.controller_io import outbound_status
from xkv_nvmeof.controller_types import MAX_ABORTS, MAX_ASYNC_EVENTS, MIN_PAGE_BYTES, Reply
from xkv_nvmeof.discovery import discovery_log
from xkv_nvmeof.identify import (
    IdentifyController,
    IdentifyNamespace,
    NamespaceDescriptors,
    encode_active_namespaces,
)
from xkv_nvmeof.logpages import ACCESS_GROUPS_ONLY, AccessGroup, SmartLog, encode_access_log
from xkv_nvmeof.reservation import ONCS_RESERVATIONS, type_bit
from xkv_nvmeof.spec import (
    ASYNC_ACCESS_CHANGE,
    ASYNC_NAMESPACE_ATTRIBUTE,
    DISCOVERY_NQN,
    IDENTIFY_BYTES,
    MULTIPATH_ACCESS_REPORTING,
    NSID_BROADCAST,
    SQE_BYTES,
    AdminOpcode,
    Cns,
    FeatureId,
    IoOpcode,
    LogPageId,
    Status,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_nvmeof.command import SubmissionEntry
    from xkv_nvmeof.controller import Controller

_SGL_SUPPORT: Final = 1 | 1 << 20 | 1 << 21
"""SGLS: any alignment; offsets in the capsule; transport data blocks (Base Figure 275)."""
_ONCS_DSM: Final = 1 << 2
_ONCS_WRITE_ZEROES: Final = 1 << 3
_RESCAP: Final = sum(map(type_bit, ReservationType)) | 1 << 7
"""All types; the ignored key as Base 1.3 defines it; nothing persists (NVM 4.1.5.1)."""
_ACCESS_GROUP: Final = 1
"""The namespace's group of asymmetric access, the only one."""
_ACCESS_STATES: Final = 0x1F
"""ANACAP: all states are reported (Base Figure 275)."""
_ACCESS_TRANSITION_S: Final = 10
_EFFECT_SUPPORTED: Final = 1
_EFFECT_CONTENT: Final = 1 << 1


def default_features(controller: Controller) -> dict[int, int]:
    """Values of the features after a reset."""
    queues = controller.granted_io_queues - 1
    if controller.discovery:
        return {FeatureId.ASYNC_EVENT_CONFIGURATION: 0}
    return {
        FeatureId.ARBITRATION: 7,
        FeatureId.POWER_MANAGEMENT: 0,
        FeatureId.TEMPERATURE_THRESHOLD: 0,
        FeatureId.ERROR_RECOVERY: 0,
        FeatureId.VOLATILE_WRITE_CACHE: 1,
        FeatureId.NUMBER_OF_QUEUES: queues | queues << 16,
        FeatureId.WRITE_ATOMICITY: 0,
        FeatureId.ASYNC_EVENT_CONFIGURATION: 0,
    }


def answer(controller: Controller, entry: SubmissionEntry, capsule_bytes: int, now_ns: int) -> Reply | None:
    """Answer one admin command; None: it is answered later."""
    if entry.flags & 3 or capsule_bytes:
        return Reply(Status.INVALID_FIELD)
    if not controller.ready:
        return Reply(Status.COMMAND_SEQUENCE_ERROR)
    match entry.opcode:
        case AdminOpcode.KEEP_ALIVE:
            controller.last_alive_ns = now_ns
            return Reply()
        case AdminOpcode.ASYNC_EVENT_REQUEST:
            return controller.request_event(entry.cid)
        case AdminOpcode.IDENTIFY:
            return _identify(controller, entry)
        case AdminOpcode.GET_LOG_PAGE:
            return _get_log_page(controller, entry)
        case AdminOpcode.SET_FEATURES:
            return _set_features(controller, entry, now_ns)
        case AdminOpcode.GET_FEATURES:
            return _get_features(controller, entry)
        case AdminOpcode.ABORT if not controller.discovery:
            aborted = entry.cdw10 & 0xFFFF == 0 and controller.abort_event(entry.cdw10 >> 16)
            return Reply(dw0=0 if aborted else 1)
        case _:
            return Reply(Status.INVALID_OPCODE)


# ---- Identify ------------------------------------------------------------------------------------------------


def _identify(controller: Controller, entry: SubmissionEntry) -> Reply:
    status = outbound_status(entry, 0, IDENTIFY_BYTES)
    if status:
        return Reply(status)
    cns = entry.cdw10 & 0xFF
    if cns == Cns.CONTROLLER:
        return Reply(data=identify_controller(controller).to_bytes())
    if controller.discovery:
        return Reply(Status.INVALID_FIELD)
    namespace = controller.card.config.namespace
    match cns:
        case Cns.NAMESPACE | Cns.NAMESPACE_DESCRIPTORS:
            return _identify_namespace(controller, entry, cns)
        case Cns.ACTIVE_NAMESPACES:
            if entry.nsid >= NSID_BROADCAST - 1:
                return Reply(Status.INVALID_NAMESPACE)
            active = [namespace.nsid] if namespace.attached and namespace.nsid > entry.nsid else []
            return Reply(data=encode_active_namespaces(active))
        case Cns.IO_CONTROLLER if entry.cdw11 >> 24 == 0:
            # All limits of NVM Figure 100 are zero: none beyond those of the commands themselves.
            return Reply(data=bytes(IDENTIFY_BYTES))
        case _:
            return Reply(Status.INVALID_FIELD)


def _identify_namespace(controller: Controller, entry: SubmissionEntry, cns: int) -> Reply:
    """The namespace, or its identifiers; of one that is taken away there is nothing to tell (Base 5.17.2.2, 5.17.2.3)."""
    namespace = controller.card.config.namespace
    if entry.nsid != namespace.nsid:
        return Reply(Status.INVALID_NAMESPACE)
    if cns == Cns.NAMESPACE:
        present = namespace.attached
        return Reply(data=identify_namespace(controller).to_bytes() if present else bytes(IDENTIFY_BYTES))
    if not namespace.attached:
        return Reply(Status.INVALID_NAMESPACE)
    return Reply(data=NamespaceDescriptors(namespace.nguid, namespace.uuid, command_set=0).to_bytes())


def identify_controller(controller: Controller) -> IdentifyController:
    """What the controller tells about itself (Base 5.17.2.1)."""
    config = controller.card.config
    discovery = controller.discovery
    reporting = config.access_reporting and not discovery
    transfer_pages = config.max_transfer_bytes // MIN_PAGE_BYTES
    reservations = ONCS_RESERVATIONS if config.reservations else 0
    return IdentifyController(
        serial=config.serial,
        model=config.model,
        firmware=config.firmware,
        subnqn=DISCOVERY_NQN if discovery else config.nqn,
        cntlid=controller.cntlid,
        version=config.version,
        mdts=transfer_pages.bit_length() - 1,
        controller_type=2 if discovery else 1,
        multipath=0 if discovery else 0x02 | (MULTIPATH_ACCESS_REPORTING if reporting else 0),
        async_events=0
        if discovery
        else ASYNC_NAMESPACE_ATTRIBUTE | (ASYNC_ACCESS_CHANGE if reporting else 0),
        attributes=0x01,
        abort_limit=MAX_ABORTS - 1,
        async_event_limit=MAX_ASYNC_EVENTS - 1,
        log_attributes=0x04 if discovery else 0x06,
        keep_alive_granularity=10,
        access_transition_s=_ACCESS_TRANSITION_S if reporting else 0,
        access_capabilities=_ACCESS_STATES if reporting else 0,
        access_group_max=_ACCESS_GROUP if reporting else 0,
        access_group_count=_ACCESS_GROUP if reporting else 0,
        max_commands=config.max_queue_entries,
        namespace_count=0 if discovery else config.namespace.nsid,
        nvm_commands=0 if discovery else _ONCS_DSM | _ONCS_WRITE_ZEROES | reservations,
        volatile_write_cache=0 if discovery else 0x07,
        sgl_support=_SGL_SUPPORT,
        max_allowed_namespaces=0 if discovery else config.namespace.nsid,
        io_command_capsule_units=0 if discovery else (SQE_BYTES + config.in_capsule_bytes) // 16,
        io_response_capsule_units=0 if discovery else 1,
        max_sgl_descriptors=1,
        optional_fabrics_commands=0 if discovery else 1,
    )


def identify_namespace(controller: Controller) -> IdentifyNamespace:
    """What the controller tells about its namespace (NVM 4.1.5.1)."""
    namespace = controller.card.config.namespace
    return IdentifyNamespace(
        size_blocks=namespace.block_count,
        capacity_blocks=namespace.block_count,
        used_blocks=min(namespace.used_blocks(), namespace.block_count),
        formats=IdentifyNamespace.one_format(namespace.block_bytes),
        features=0x01,
        sharing=0x01,
        reservation_capabilities=_RESCAP if controller.card.config.reservations else 0,
        deallocate_features=0x09,
        access_group=_ACCESS_GROUP if controller.card.config.access_reporting else 0,
        nguid=namespace.nguid,
    )


# ---- log pages -----------------------------------------------------------------------------------------------


def _error_information(_controller: Controller) -> bytes:
    return bytes(64)  # one entry with an error count of zero: nothing is logged (Base 5.16.1.2)


def _smart(controller: Controller) -> bytes:
    counters = controller.card.counters
    return SmartLog(
        read_bytes=counters.read_bytes,
        written_bytes=counters.write_bytes,
        read_commands=counters.read_commands,
        write_commands=counters.write_commands,
        media_errors=counters.media_errors,
    ).to_bytes()


def _firmware_slot(controller: Controller) -> bytes:
    revision = controller.card.config.firmware.encode("ascii").ljust(8)
    return (b"\x01".ljust(8, b"\0") + revision).ljust(512, b"\0")


def _changed_namespaces(controller: Controller) -> bytes:
    return encode_active_namespaces(controller.changed_namespaces)


def _commands_effects(controller: Controller) -> bytes:
    effects = [0] * 512
    for admin in AdminOpcode:
        if admin.name not in {"CREATE_IO_SQ", "CREATE_IO_CQ", "DELETE_IO_SQ", "DELETE_IO_CQ"}:
            effects[admin] = _EFFECT_SUPPORTED
    harmless = (IoOpcode.FLUSH, IoOpcode.READ, *(COMMANDS if controller.card.config.reservations else ()))
    for opcode in harmless:
        effects[256 + opcode] = _EFFECT_SUPPORTED
    for opcode in (IoOpcode.WRITE, IoOpcode.WRITE_ZEROES, IoOpcode.DATASET_MANAGEMENT):
        effects[256 + opcode] = _EFFECT_SUPPORTED | _EFFECT_CONTENT
    return b"".join(value.to_bytes(4, "little") for value in effects).ljust(4096, b"\0")


def _asymmetric_access(controller: Controller, *, groups_only: bool = False) -> bytes:
    namespace = controller.card.config.namespace
    group = AccessGroup(_ACCESS_GROUP, controller.access)
    nsids = [] if groups_only or not namespace.attached else [namespace.nsid]
    return encode_access_log(0, [group], nsids)


def _discovery(controller: Controller) -> bytes:
    return discovery_log(controller.admin_connection.portal, controller.card.config.nqn)


_IO_PAGES: Final[dict[int, Callable[[Controller], bytes]]] = {
    LogPageId.ERROR_INFORMATION: _error_information,
    LogPageId.SMART_HEALTH: _smart,
    LogPageId.FIRMWARE_SLOT: _firmware_slot,
    LogPageId.CHANGED_NAMESPACES: _changed_namespaces,
    LogPageId.COMMANDS_EFFECTS: _commands_effects,
    LogPageId.ASYMMETRIC_ACCESS: _asymmetric_access,
}
_DISCOVERY_PAGES: Final[dict[int, Callable[[Controller], bytes]]] = {LogPageId.DISCOVERY: _discovery}


def _get_log_page(controller: Controller, entry: SubmissionEntry) -> Reply:
    """Get Log Page (Base 5.16): beyond the end of a page there are zeroes; an offset beyond it is refused."""
    page = entry.cdw10 & 0xFF
    pages = _DISCOVERY_PAGES if controller.discovery else _IO_PAGES
    reported = page != LogPageId.ASYMMETRIC_ACCESS or controller.card.config.access_reporting
    if page not in pages or not reported:
        return Reply(Status.INVALID_LOG_PAGE)
    length_bytes = ((entry.cdw10 >> 16 | (entry.cdw11 & 0xFFFF) << 16) + 1) * 4
    offset_bytes = entry.cdw12 | entry.cdw13 << 32
    if length_bytes > controller.card.config.max_transfer_bytes or offset_bytes % 4 or entry.cdw14 >> 23 & 1:
        return Reply(Status.INVALID_FIELD)
    status = outbound_status(entry, 0, length_bytes)
    if status:
        return Reply(status)
    content = pages[page](controller)
    if page == LogPageId.ASYMMETRIC_ACCESS and entry.cdw10 >> 8 & ACCESS_GROUPS_ONLY:
        content = _asymmetric_access(controller, groups_only=True)
    if offset_bytes > len(content):
        return Reply(Status.INVALID_FIELD)
    if not entry.cdw10 >> 15 & 1:
        controller.log_read(page)
    return Reply(data=content[offset_bytes : offset_bytes + length_bytes].ljust(length_bytes, b"\0"))


# ---- features ------------------------------------------------------------------------------------------------

_CHANGEABLE: Final = frozenset(
    {
        FeatureId.ARBITRATION,
        FeatureId.TEMPERATURE_THRESHOLD,
        FeatureId.ERROR_RECOVERY,
        FeatureId.WRITE_ATOMICITY,
        FeatureId.ASYNC_EVENT_CONFIGURATION,
        FeatureId.NUMBER_OF_QUEUES,
        FeatureId.KEEP_ALIVE_TIMER,
    }
)


def _set_features(controller: Controller, entry: SubmissionEntry, now_ns: int) -> Reply:
    """Set Features (Base 5.27)."""
    feature, value = entry.cdw10 & 0xFF, entry.cdw11
    if entry.cdw10 >> 31:
        return Reply(Status.FEATURE_NOT_SAVEABLE)
    if feature == FeatureId.KEEP_ALIVE_TIMER:
        controller.set_keep_alive(value, now_ns)
        return Reply()
    if feature == FeatureId.HOST_IDENTIFIER and not controller.discovery:
        return Reply(Status.COMMAND_SEQUENCE_ERROR)  # over Fabrics it is set by Connect alone
    if feature not in controller.features:
        return Reply(Status.INVALID_FIELD)
    if feature == FeatureId.NUMBER_OF_QUEUES:
        return _number_of_queues(controller, value)
    if feature in _CHANGEABLE:
        controller.features[feature] = value
        return Reply()
    return Reply() if value == controller.features[feature] else Reply(Status.FEATURE_NOT_CHANGEABLE)


def _number_of_queues(controller: Controller, value: int) -> Reply:
    """Number of Queues (Base 5.27.1.5): the host may ask until the first I/O queue exists."""
    submission, completion = value & 0xFFFF, value >> 16
    if 0xFFFF in (submission, completion):
        return Reply(Status.INVALID_FIELD)
    if len(controller.queues) > 1:
        return Reply(Status.COMMAND_SEQUENCE_ERROR)
    # Over Fabrics a queue is a pair, so both numbers are the same.
    controller.granted_io_queues = min(submission + 1, completion + 1, controller.card.config.max_io_queues)
    granted = controller.granted_io_queues - 1
    controller.features[FeatureId.NUMBER_OF_QUEUES] = granted | granted << 16
    return Reply(dw0=granted | granted << 16)


def _get_features(controller: Controller, entry: SubmissionEntry) -> Reply:
    """Get Features (Base 5.15). Nothing is saveable, so that the saved value is the default."""
    feature, select = entry.cdw10 & 0xFF, entry.cdw10 >> 8 & 7
    known = set(controller.features) | {FeatureId.KEEP_ALIVE_TIMER}
    if not controller.discovery:
        known.add(FeatureId.HOST_IDENTIFIER)
    if feature not in known or select > 3:
        return Reply(Status.INVALID_FIELD)
    if select == 3:
        return Reply(dw0=4 if feature in _CHANGEABLE else 0)
    if feature == FeatureId.KEEP_ALIVE_TIMER:
        return Reply(dw0=controller.keep_alive_ns // 1_000_000)
    if feature == FeatureId.HOST_IDENTIFIER:
        status = outbound_status(entry, 0, 16) if entry.cdw11 & 1 else Status.INVALID_FIELD
        return Reply(status) if status else Reply(data=controller.host.hostid)
    values = controller.features if select == 0 else default_features(controller)
    return Reply(dw0=values[feature])
