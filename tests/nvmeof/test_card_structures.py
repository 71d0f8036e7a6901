"""Bytes of entries, Identify structures and log pages: golden files, round trips, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nvmeof.card_bench import HOST_ID, HOST_NQN, NQN, CardBench
from xkv_nvmeof import builders
from xkv_nvmeof.command import (
    NO_DATA,
    BlockRange,
    CommandFormatError,
    CompletionEntry,
    ConnectCommand,
    ConnectData,
    Sgl,
    SubmissionEntry,
    decode_ranges,
    encode_ranges,
)
from xkv_nvmeof.controller_admin import identify_controller, identify_namespace
from xkv_nvmeof.discovery import Portal, discovery_log
from xkv_nvmeof.identify import (
    IdentifyController,
    IdentifyFormatError,
    IdentifyNamespace,
    NamespaceDescriptors,
    decode_active_namespaces,
    encode_active_namespaces,
)
from xkv_nvmeof.logpages import DiscoveryEntry, DiscoveryHeader, LogFormatError, SmartLog
from xkv_nvmeof.spec import (
    Capabilities,
    ControllerConfiguration,
    ControllerStatus,
    FeatureId,
    ShutdownNotification,
    ShutdownStatus,
    Status,
    status_name,
)

GOLDEN = Path(__file__).parent.parent / "golden"
CONNECT_DATA = ConnectData(HOST_ID, 0xFFFF, NQN, HOST_NQN)
COMPLETION = CompletionEntry(0x1234, Status.UNRECOVERED_READ_ERROR, 7, 3, 0xA1A2A3A4, 5, True, True, 2)


def structures() -> dict[str, bytes]:
    """Everything whose bytes are fixed, by name."""
    controller = CardBench().admin().connection.controller
    assert controller is not None
    entries = {
        "connect": ConnectCommand(1, 2, 127, 10_000, 4).to_entry(),
        "property-get": builders.property_get(2, 0, 8),
        "property-set": builders.property_set(3, 0x14, 4, 0x460001),
        "identify": builders.identify(4, 1),
        "set-features": builders.set_features(5, FeatureId.NUMBER_OF_QUEUES, 0x30003),
        "get-features": builders.get_features(6, FeatureId.VOLATILE_WRITE_CACHE, select=1),
        "get-log-page": builders.get_log_page(7, 0x70, 1 << 19, offset_bytes=(1 << 32) + 4, retain=True),
        "async-event-request": builders.async_event_request(8),
        "keep-alive": builders.keep_alive(9),
        "abort": builders.abort(10, 3, 77),
        "read": builders.read(11, 1, (1 << 32) + 5, 65536, Sgl.transport(1 << 28)),
        "write": builders.write(12, 1, 9, 1, Sgl.in_capsule(4096), force_unit_access=True),
        "write-zeroes": builders.write_zeroes(13, 1, 9, 2, deallocate=True),
        "flush": builders.flush(14, 1),
        "dataset-management": builders.dataset_management(15, 1, 2, Sgl.in_capsule(32)),
    }
    found = {f"sqe-{name}": entry.to_bytes() for name, entry in entries.items()}
    found["cqe"] = COMPLETION.to_bytes()
    found["connect-data"] = CONNECT_DATA.to_bytes()
    found["dsm-ranges"] = encode_ranges([BlockRange(1, 2), BlockRange(1 << 40, 0xFFFFFFFF)])
    found["identify-controller"] = identify_controller(controller).to_bytes()
    found["identify-namespace"] = identify_namespace(controller).to_bytes()
    found["identify-descriptors"] = NamespaceDescriptors(b"N" * 16, b"U" * 16, b"E" * 8, 0).to_bytes()
    found["identify-active"] = encode_active_namespaces([3, 1])
    found["log-discovery"] = discovery_log(Portal("::1", 4421), NQN)
    found["log-smart"] = SmartLog(1, 512_001, 3, 4, media_errors=5).to_bytes()
    return found


def dump(data: bytes) -> str:
    """Lines of `offset: 16 bytes`; those that are all zero are left out, the length closes."""
    rows = ((at, data[at : at + 16]) for at in range(0, len(data), 16))
    return "".join(f"{at:04x}: {row.hex(' ')}\n" for at, row in rows if any(row)) + f"{len(data):04x}\n"


@pytest.mark.parametrize("name", sorted(structures()))
def test_bytes_on_the_wire_are_those_of_the_golden_file(name: str) -> None:
    golden = GOLDEN / f"nvme-{name}.hex"
    assert dump(structures()[name]) == golden.read_text()


@pytest.mark.parametrize("name", [name for name in sorted(structures()) if name.startswith("sqe-")])
def test_entries_are_read_back_as_they_were_written(name: str) -> None:
    data = structures()[name]
    assert len(data) == 64
    assert SubmissionEntry.from_bytes(data).to_bytes() == data


def test_structures_are_read_back_as_they_were_written() -> None:
    found = structures()
    for name, kind in (
        ("identify-controller", IdentifyController),
        ("identify-namespace", IdentifyNamespace),
        ("identify-descriptors", NamespaceDescriptors),
    ):
        assert len(found[name]) == 4096
        assert kind.from_bytes(found[name]).to_bytes() == found[name]
    assert decode_active_namespaces(found["identify-active"]) == [1, 3]
    assert ConnectData.from_bytes(found["connect-data"]) == CONNECT_DATA
    assert CompletionEntry.from_bytes(found["cqe"]) == COMPLETION
    command = ConnectCommand(1, 2, 127, 10_000, 4)
    assert ConnectCommand.from_entry(command.to_entry()) == command
    smart = SmartLog.from_bytes(found["log-smart"])
    assert (smart.read_bytes, smart.written_bytes, smart.media_errors) == (512_000, 1_024_000, 5)


def test_the_registers_are_read_back_as_they_were_written() -> None:
    capabilities = Capabilities(128, 15_000_000_000, subsystem_reset=True, max_page_bytes=65536)
    assert Capabilities.from_int(capabilities.to_int()) == capabilities
    assert capabilities.to_int() & 0xFFFF == 127
    configuration = ControllerConfiguration(
        True, shutdown=ShutdownNotification.NORMAL, sq_entry_log2=6, cq_entry_log2=4
    )
    assert configuration.to_int() == 0x464001
    assert ControllerConfiguration.from_int(0x464001) == configuration
    status = ControllerStatus(ready=True, shutdown=ShutdownStatus.COMPLETE)
    assert ControllerStatus.from_int(status.to_int()) == status


def test_wrong_lengths_are_refused() -> None:
    with pytest.raises(CommandFormatError):
        SubmissionEntry.from_bytes(bytes(63))
    with pytest.raises(CommandFormatError):
        CompletionEntry.from_bytes(bytes(17))
    with pytest.raises(CommandFormatError):
        ConnectData.from_bytes(bytes(1023))
    for size in (0, 15, 257 * 16):
        with pytest.raises(CommandFormatError):
            decode_ranges(bytes(size))
    for decoder in (
        IdentifyController.from_bytes,
        IdentifyNamespace.from_bytes,
        NamespaceDescriptors.from_bytes,
        decode_active_namespaces,
    ):
        with pytest.raises(IdentifyFormatError):
            decoder(bytes(4095))
    for reader in (DiscoveryHeader.from_bytes, DiscoveryEntry.from_bytes, SmartLog.from_bytes):
        with pytest.raises(LogFormatError):
            reader(bytes(100))


@pytest.mark.parametrize("field", [b"x" * 256, b"\xff\xfe\0".ljust(256, b"\0")])
def test_a_name_that_is_no_text_is_refused(field: bytes) -> None:
    data = bytearray(CONNECT_DATA.to_bytes())
    data[256:512] = field
    with pytest.raises(CommandFormatError):
        ConnectData.from_bytes(data)


@pytest.mark.parametrize("descriptor", [b"\x03\x11", b"\x02\x08", b"\x09\xff"])
def test_a_namespace_descriptor_that_cannot_be_is_refused_and_an_unknown_one_skipped(
    descriptor: bytes,
) -> None:
    data = descriptor.ljust(4096, b"\0")
    if descriptor[0] == 9:
        assert NamespaceDescriptors.from_bytes(data) == NamespaceDescriptors()
    else:
        with pytest.raises(IdentifyFormatError):
            NamespaceDescriptors.from_bytes(data)


def test_identify_text_is_for_people_and_rubbish_in_it_is_replaced() -> None:
    data = bytearray(structures()["identify-controller"])
    data[4:24] = b"A\xff\x1b[2J\0\n".ljust(20)
    assert IdentifyController.from_bytes(data).serial == "A\ufffd\ufffd[2J\ufffd\ufffd"


@pytest.mark.parametrize("header", [(1, 1025, 0), (1, 1, 1)])
def test_a_discovery_log_beyond_belief_is_refused(header: tuple[int, int, int]) -> None:
    with pytest.raises(LogFormatError):
        DiscoveryHeader.from_bytes(DiscoveryHeader(*header).to_bytes())


def test_mdts_of_zero_is_no_limit_and_capsules_without_room_hold_nothing() -> None:
    told = IdentifyController("s", "m", "f", NQN, 1, 0)
    assert told.max_transfer_bytes(4096) is None
    assert told.in_capsule_bytes == 0
    assert IdentifyController("s", "m", "f", NQN, 1, 0, mdts=1).max_transfer_bytes(8192) == 16384


def test_statuses_have_names_for_people() -> None:
    assert status_name(Status.LBA_OUT_OF_RANGE) == "LBA_OUT_OF_RANGE (0/80h)"
    assert status_name(0x7FF) == "status 7/FFh"
    assert CompletionEntry(1, Status.SUCCESS).ok
    assert (Status.WRITE_FAULT.code_type, Status.WRITE_FAULT.code) == (2, 0x80)
    assert NO_DATA.length_bytes == 0
