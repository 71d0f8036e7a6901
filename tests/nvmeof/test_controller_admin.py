"""Admin commands and discovery, without sockets: answers and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.nvmeof.card_bench import (
    BLOCKS,
    HOST_ID,
    NQN,
    CardBench,
    RawHost,
    make_config,
    read_entry,
    write_entry,
)
from xkv_nvmeof import builders
from xkv_nvmeof.command import Sgl, SubmissionEntry
from xkv_nvmeof.identify import (
    IdentifyController,
    IdentifyNamespace,
    NamespaceDescriptors,
    decode_active_namespaces,
)
from xkv_nvmeof.logpages import DiscoveryEntry, DiscoveryHeader, SmartLog
from xkv_nvmeof.spec import DISCOVERY_NQN, NSID_BROADCAST, Cns, FeatureId, LogPageId, Status

if TYPE_CHECKING:
    from xkv_nvmeof.command import CompletionEntry

NAMESPACE_NOTICES = 1 << 8


def read_data(host: RawHost, entry: SubmissionEntry) -> bytes:
    answer = host.command(entry)
    assert all(completion.ok for completion in answer.completions), answer
    return answer.data[entry.cid]


def complete(host: RawHost, entry: SubmissionEntry) -> CompletionEntry:
    (completion,) = host.command(entry).completions
    return completion


def test_identify_controller_tells_what_a_fabrics_host_needs() -> None:
    admin = CardBench().admin()
    told = IdentifyController.from_bytes(read_data(admin, builders.identify(4, Cns.CONTROLLER)))
    assert told.subnqn == NQN
    assert told.cntlid == 1
    assert told.controller_type == 1
    assert told.max_transfer_bytes(4096) == 128 << 10
    assert told.in_capsule_bytes == 8192
    assert told.io_response_capsule_units == 1
    assert told.in_capsule_data_offset_units == 0
    assert told.fabrics_attributes == 0
    assert told.sgl_support & 3
    assert told.sgl_support >> 20 & 3 == 3
    assert told.keep_alive_granularity == 10
    assert told.max_commands == 128
    assert told.nvm_commands == 0x2C
    assert told.volatile_write_cache & 1
    assert (told.namespace_count, told.max_allowed_namespaces) == (1, 1)
    assert (told.serial, told.model, told.firmware) == ("SERIAL0001", "xkv soft card", "1")


def test_identify_namespace_and_its_lists() -> None:
    admin = CardBench().admin()
    told = IdentifyNamespace.from_bytes(read_data(admin, builders.identify(4, Cns.NAMESPACE, nsid=1)))
    assert (told.size_blocks, told.capacity_blocks, told.used_blocks) == (BLOCKS, BLOCKS, 3)
    assert told.block_bytes == 4096
    assert told.metadata_bytes == 0
    assert told.deallocate_zeroes
    assert told.nguid == b"N" * 16
    ids = NamespaceDescriptors.from_bytes(
        read_data(admin, builders.identify(5, Cns.NAMESPACE_DESCRIPTORS, nsid=1))
    )
    assert (ids.nguid, ids.uuid, ids.command_set) == (b"N" * 16, b"U" * 16, 0)
    for after, active in ((0, [1]), (1, [])):
        data = read_data(admin, builders.identify(6, Cns.ACTIVE_NAMESPACES, nsid=after))
        assert decode_active_namespaces(data) == active
    assert not any(read_data(admin, builders.identify(7, Cns.IO_CONTROLLER)))


@pytest.mark.parametrize(
    ("entry", "status"),
    [
        (builders.identify(1, Cns.NAMESPACE, nsid=2), Status.INVALID_NAMESPACE),
        (builders.identify(1, Cns.NAMESPACE, nsid=0), Status.INVALID_NAMESPACE),
        (builders.identify(1, Cns.NAMESPACE, nsid=NSID_BROADCAST), Status.INVALID_NAMESPACE),
        (builders.identify(1, Cns.NAMESPACE_DESCRIPTORS, nsid=9), Status.INVALID_NAMESPACE),
        (builders.identify(1, Cns.ACTIVE_NAMESPACES, nsid=NSID_BROADCAST), Status.INVALID_NAMESPACE),
        (builders.identify(1, 0x13), Status.INVALID_FIELD),
        (builders.identify(1, Cns.IO_CONTROLLER, csi=1), Status.INVALID_FIELD),
        (replace(builders.identify(1, 1), sgl=Sgl.transport(512)), Status.DATA_SGL_LENGTH_INVALID),
        (replace(builders.identify(1, 1), sgl=Sgl.in_capsule(4096)), Status.SGL_TYPE_INVALID),
        (replace(builders.identify(1, 1), flags=0x42), Status.INVALID_FIELD),
        (builders.get_log_page(1, 0x42, 512), Status.INVALID_LOG_PAGE),
        (builders.get_log_page(1, LogPageId.DISCOVERY, 1024), Status.INVALID_LOG_PAGE),
        (builders.get_log_page(1, LogPageId.SMART_HEALTH, 512, offset_bytes=2), Status.INVALID_FIELD),
        (builders.get_log_page(1, LogPageId.SMART_HEALTH, 512, offset_bytes=516), Status.INVALID_FIELD),
        (builders.get_log_page(1, LogPageId.SMART_HEALTH, 256 << 10), Status.INVALID_FIELD),
        (builders.get_features(1, 0x7E), Status.INVALID_FIELD),
        (builders.get_features(1, FeatureId.ARBITRATION, select=4), Status.INVALID_FIELD),
        (builders.set_features(1, 0x7E, 0), Status.INVALID_FIELD),
        (builders.set_features(1, FeatureId.ARBITRATION, 0, save=True), Status.FEATURE_NOT_SAVEABLE),
        (builders.set_features(1, FeatureId.VOLATILE_WRITE_CACHE, 0), Status.FEATURE_NOT_CHANGEABLE),
        (builders.set_features(1, FeatureId.NUMBER_OF_QUEUES, 0xFFFF), Status.INVALID_FIELD),
        (builders.set_features(1, FeatureId.HOST_IDENTIFIER, 0), Status.COMMAND_SEQUENCE_ERROR),
        (SubmissionEntry(0x01, 1), Status.INVALID_OPCODE),
        (SubmissionEntry(0xC0, 1), Status.INVALID_OPCODE),
        (replace(builders.property_get(1, 0, 8), nsid=5), Status.INVALID_OPCODE),
        (replace(builders.property_get(1, 0, 8), nsid=8), Status.INVALID_OPCODE),
    ],
)
def test_a_wrong_admin_command_is_refused_and_the_queue_goes_on(
    entry: SubmissionEntry, status: Status
) -> None:
    admin = CardBench().admin()
    assert admin.status(entry) is status
    assert admin.status(builders.keep_alive(2)) is Status.SUCCESS


@pytest.mark.parametrize(("asked", "granted"), [(1, 1), (4, 4), (16, 16), (300, 16)])
def test_as_many_queues_are_granted_as_there_are(asked: int, granted: int) -> None:
    bench = CardBench()
    admin = bench.admin()
    value = (asked - 1) | (asked - 1) << 16
    completion = complete(admin, builders.set_features(4, FeatureId.NUMBER_OF_QUEUES, value))
    assert completion.dw0 == (granted - 1) | (granted - 1) << 16
    assert complete(admin, builders.get_features(5, FeatureId.NUMBER_OF_QUEUES)).dw0 == completion.dw0
    bench.queue(admin, granted)
    late = builders.set_features(6, FeatureId.NUMBER_OF_QUEUES, value)
    assert admin.status(late) is Status.COMMAND_SEQUENCE_ERROR


def test_features_are_kept_and_reset_and_say_what_they_are() -> None:
    admin = CardBench().admin()
    assert admin.status(builders.set_features(4, FeatureId.ARBITRATION, 3)) is Status.SUCCESS
    values = [
        complete(admin, builders.get_features(5, FeatureId.ARBITRATION, select=s)).dw0 for s in range(4)
    ]
    assert values == [3, 7, 7, 4]
    assert complete(admin, builders.get_features(6, FeatureId.VOLATILE_WRITE_CACHE)).dw0 == 1
    host_id = replace(builders.get_features(7, FeatureId.HOST_IDENTIFIER), cdw11=1, sgl=Sgl.transport(16))
    assert read_data(admin, host_id) == HOST_ID


def test_the_smart_log_counts_what_was_transferred() -> None:
    bench = CardBench()
    admin = bench.admin()
    queue = bench.queue(admin)
    queue.command(write_entry(1, 0, 1, in_capsule=True), bytes(4096))
    for cid in range(4):
        queue.command(read_entry(cid, 0, 32))
    queue.command(read_entry(9, BLOCKS, 1))
    smart = SmartLog.from_bytes(read_data(admin, builders.get_log_page(4, LogPageId.SMART_HEALTH, 512)))
    assert (smart.read_commands, smart.write_commands) == (4, 1)
    assert (smart.read_bytes, smart.written_bytes) == (1_024_000, 512_000)
    counters = bench.card.counters
    assert (counters.read_bytes, counters.write_bytes, counters.failed_commands) == (524_288, 4096, 1)


@pytest.mark.parametrize(
    ("page", "size_bytes"),
    [(LogPageId.ERROR_INFORMATION, 64), (LogPageId.FIRMWARE_SLOT, 512), (LogPageId.COMMANDS_EFFECTS, 4096)],
)
def test_mandatory_log_pages_exist_and_are_padded_with_zeroes(page: LogPageId, size_bytes: int) -> None:
    admin = CardBench().admin()
    whole = read_data(admin, builders.get_log_page(4, page, size_bytes + 64))
    assert not any(whole[size_bytes:])
    assert read_data(admin, builders.get_log_page(5, page, 32, offset_bytes=8)) == whole[8:40]


def test_event_requests_wait_are_limited_and_can_be_aborted() -> None:
    admin = CardBench().admin()
    for cid in range(10, 14):
        assert not admin.command(builders.async_event_request(cid)).pdus
    assert admin.status(builders.async_event_request(14)) is Status.ASYNC_EVENT_LIMIT_EXCEEDED
    aborted, done = admin.command(builders.abort(15, 0, 12)).completions
    assert (aborted.cid, aborted.status) == (12, Status.ABORT_REQUESTED)
    assert (done.cid, done.status, done.dw0) == (15, Status.SUCCESS, 0)
    assert complete(admin, builders.abort(16, 0, 99)).dw0 == 1
    assert not admin.command(builders.async_event_request(17)).pdus


def test_a_namespace_change_is_told_once_until_its_log_page_is_read() -> None:
    bench = CardBench()
    admin = bench.admin()
    admin.command(builders.set_features(4, FeatureId.ASYNC_EVENT_CONFIGURATION, NAMESPACE_NOTICES))
    admin.command(builders.async_event_request(10))
    admin.command(builders.async_event_request(11))
    bench.card.namespace_changed()
    (event,) = admin.answer().completions
    assert (event.cid, event.dw0) == (10, 0x04_00_02)
    bench.card.namespace_changed()
    assert not admin.answer().pdus
    retained = builders.get_log_page(5, LogPageId.CHANGED_NAMESPACES, 4096, retain=True)
    assert decode_active_namespaces(read_data(admin, retained)) == [1]
    answer = admin.command(builders.get_log_page(6, LogPageId.CHANGED_NAMESPACES, 4096))
    assert decode_active_namespaces(answer.data[6]) == [1]
    assert not admin.answer().pdus
    bench.card.namespace_changed()
    (event,) = admin.answer().completions
    assert event.cid == 11


def test_nothing_is_told_to_a_host_that_did_not_ask() -> None:
    bench = CardBench()
    admin = bench.admin()
    admin.command(builders.async_event_request(10))
    bench.card.namespace_changed()
    assert not admin.answer().pdus


def test_an_event_before_its_request_is_delivered_with_it() -> None:
    bench = CardBench()
    admin = bench.admin()
    admin.command(builders.set_features(4, FeatureId.ASYNC_EVENT_CONFIGURATION, NAMESPACE_NOTICES))
    bench.card.namespace_changed()
    assert complete(admin, builders.async_event_request(10)).dw0 == 0x04_00_02


def test_discovery_lists_the_card_and_itself() -> None:
    bench = CardBench(make_config(allowed_hosts=frozenset({"nqn.2026-01.example:nobody"})))
    admin = bench.admin(subnqn=DISCOVERY_NQN)
    told = IdentifyController.from_bytes(read_data(admin, builders.identify(4, Cns.CONTROLLER)))
    assert (told.controller_type, told.subnqn, told.namespace_count) == (2, DISCOVERY_NQN, 0)
    header = DiscoveryHeader.from_bytes(read_data(admin, builders.get_log_page(5, LogPageId.DISCOVERY, 1024)))
    assert header.record_count == 2
    log = read_data(admin, builders.get_log_page(6, LogPageId.DISCOVERY, 3072))
    entries = [DiscoveryEntry.from_bytes(log[at : at + 1024]) for at in (1024, 2048)]
    assert [(entry.subnqn, entry.subsystem_type) for entry in entries] == [(DISCOVERY_NQN, 3), (NQN, 2)]
    assert {(entry.address, entry.service, entry.transport) for entry in entries} == {
        ("127.0.0.1", "4420", 3)
    }
    part = read_data(admin, builders.get_log_page(7, LogPageId.DISCOVERY, 1024, offset_bytes=2048))
    assert part == log[2048:]


@pytest.mark.parametrize(
    ("entry", "status"),
    [
        (builders.identify(1, Cns.NAMESPACE, nsid=1), Status.INVALID_FIELD),
        (builders.get_log_page(1, LogPageId.SMART_HEALTH, 512), Status.INVALID_LOG_PAGE),
        (builders.set_features(1, FeatureId.NUMBER_OF_QUEUES, 0), Status.INVALID_FIELD),
        (builders.abort(1, 0, 2), Status.INVALID_OPCODE),
    ],
)
def test_a_discovery_controller_does_only_discovery(entry: SubmissionEntry, status: Status) -> None:
    bench = CardBench()
    admin = bench.admin(subnqn=DISCOVERY_NQN)
    assert admin.status(entry) is status
    assert bench.host().connect(1, subnqn=DISCOVERY_NQN, cntlid=1).status == Status.CONNECT_INVALID_PARAMETERS
