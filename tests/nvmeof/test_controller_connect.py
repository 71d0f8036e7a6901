"""Connect, properties and the life of an association, without sockets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.nvmeof.card_bench import (
    BLOCK_BYTES,
    ENABLE,
    HOST_ID,
    PORTAL,
    SECOND_NS,
    CardBench,
    RawHost,
    make_config,
    read_entry,
)
from xkv_nvmeof import builders
from xkv_nvmeof.controller_states import CONNECTION_TABLE, CONTROLLER_TABLE, ConnectionState, ControllerPhase
from xkv_nvmeof.controller_types import SETUP_DEADLINE_NS, ShutdownCommand
from xkv_nvmeof.digest import DigestPolicy
from xkv_nvmeof.pdu import FatalStatus, ICReq, ICResp, encode
from xkv_nvmeof.spec import (
    DISCOVERY_NQN,
    Capabilities,
    ControllerConfiguration,
    ControllerStatus,
    FeatureId,
    Register,
    ShutdownNotification,
    ShutdownStatus,
    Status,
)

IN_DATA = 1 << 16


@pytest.mark.parametrize(
    ("changes", "status", "where"),
    [
        ({"subnqn": "nqn.2026-01.example:other"}, Status.CONNECT_INVALID_PARAMETERS, IN_DATA | 256),
        ({"hostid": bytes(16)}, Status.CONNECT_INVALID_PARAMETERS, IN_DATA | 0),
        ({"hostnqn": ""}, Status.CONNECT_INVALID_PARAMETERS, IN_DATA | 512),
        ({"hostnqn": "nqn." + "x" * 221}, Status.CONNECT_INVALID_PARAMETERS, IN_DATA | 512),
        ({"cntlid": 5}, Status.CONNECT_INVALID_PARAMETERS, IN_DATA | 16),
        ({"sqsize": 0}, Status.CONNECT_INVALID_PARAMETERS, 44),
        ({"sqsize": 128}, Status.CONNECT_INVALID_PARAMETERS, 44),
        ({"sqsize": 30}, Status.CONNECT_INVALID_PARAMETERS, 44),
        ({"attributes": 0x80}, Status.CONNECT_INVALID_PARAMETERS, 46),
        ({"record_format": 1}, Status.CONNECT_INCOMPATIBLE_FORMAT, 0),
        ({"hostnqn": "nqn.2026-01.example:stranger"}, Status.CONNECT_INVALID_HOST, 0),
    ],
)
def test_a_wrong_connect_is_refused_with_its_status_and_may_be_tried_again(
    changes: dict[str, Any], status: Status, where: int
) -> None:
    hosts = frozenset({"nqn.2014-08.org.nvmexpress:uuid:5c0a7e1e-7a51-4d2e-8c11-000000000001", ""})
    bench = CardBench(make_config(allowed_hosts=hosts))
    host = bench.host()
    completion = host.connect(**changes)
    assert completion.status == status
    assert completion.dw0 == where
    assert completion.do_not_retry
    assert host.connection.state is ConnectionState.WAIT_CONNECT
    assert host.connect().ok


def test_an_io_queue_before_enable_is_a_sequence_error() -> None:
    bench = CardBench()
    admin = bench.admin(enable=False)
    controller = admin.connection.controller
    assert controller is not None
    assert bench.host().connect(1, cntlid=controller.cntlid).status == Status.COMMAND_SEQUENCE_ERROR


@pytest.mark.parametrize(
    ("qid", "changes", "status"),
    [
        (1, {"cntlid": 77}, Status.CONNECT_INVALID_PARAMETERS),
        (1, {"cntlid": 0xFFFF}, Status.CONNECT_INVALID_PARAMETERS),
        (1, {"hostid": b"x" * 16}, Status.CONNECT_INVALID_PARAMETERS),
        (1, {"hostnqn": "nqn.2026-01.example:b"}, Status.CONNECT_INVALID_PARAMETERS),
        (1, {"subnqn": DISCOVERY_NQN}, Status.CONNECT_INVALID_PARAMETERS),
        (3, {}, Status.CONNECT_INVALID_PARAMETERS),
        (2, {}, Status.COMMAND_SEQUENCE_ERROR),
    ],
)
def test_a_wrong_io_connect_is_refused(qid: int, changes: dict[str, Any], status: Status) -> None:
    bench = CardBench(make_config(max_io_queues=2))
    admin = bench.admin()
    bench.queue(admin, 2)
    host = bench.host()
    assert host.connect(qid, **{"cntlid": 1, **changes}).status == status


def test_every_other_command_before_connect_is_a_sequence_error() -> None:
    host = CardBench().host()
    assert host.status(builders.keep_alive(7)) is Status.COMMAND_SEQUENCE_ERROR
    assert host.status(builders.property_get(8, Register.CAP, 8)) is Status.COMMAND_SEQUENCE_ERROR


def test_a_second_connect_on_a_queue_is_a_sequence_error() -> None:
    admin = CardBench().admin()
    assert admin.connect().status == Status.COMMAND_SEQUENCE_ERROR


def test_a_full_card_is_busy() -> None:
    bench = CardBench(make_config(max_controllers=1))
    bench.admin()
    completion = bench.host().connect()
    assert completion.status == Status.CONNECT_CONTROLLER_BUSY
    assert not completion.do_not_retry


def test_connect_without_flow_control_is_granted_by_sqhd() -> None:
    bench = CardBench()
    assert bench.host().connect(attributes=4).sqhd == 0xFFFF
    assert bench.host().connect().sqhd == 1


def test_properties_say_what_the_card_can() -> None:
    admin = CardBench().admin(enable=False)
    capabilities = Capabilities.from_int(admin.property_get(Register.CAP, 8))
    assert capabilities.max_queue_entries == 128
    assert capabilities.timeout_ns == 15 * SECOND_NS
    assert admin.property_get(Register.VS) == 0x10400
    assert not ControllerStatus.from_int(admin.property_get(Register.CSTS)).ready
    assert admin.configure() is Status.SUCCESS
    assert ControllerStatus.from_int(admin.property_get(Register.CSTS)).ready
    assert ControllerConfiguration.from_int(admin.property_get(Register.CC)) == ENABLE


@pytest.mark.parametrize(
    ("register", "size_bytes"),
    [(Register.CAP, 4), (Register.CC, 8), (Register.NSSR, 4), (0x24, 4), (0x1000, 8)],
)
def test_an_unknown_property_or_size_is_an_invalid_field(register: int, size_bytes: int) -> None:
    admin = CardBench().admin()
    assert admin.status(builders.property_get(5, register, size_bytes)) is Status.INVALID_FIELD
    assert admin.status(builders.property_set(6, Register.CAP, 8, 1)) is Status.INVALID_FIELD


@pytest.mark.parametrize(
    "wrong",
    [
        replace(ENABLE, command_set=6),
        replace(ENABLE, page_bytes=8192),
        replace(ENABLE, sq_entry_log2=7),
        replace(ENABLE, cq_entry_log2=0),
        replace(ENABLE, arbitration=1),
    ],
)
def test_a_configuration_that_is_not_supported_is_fatal_until_reset(wrong: ControllerConfiguration) -> None:
    admin = CardBench().admin(enable=False)
    admin.configure(wrong)
    status = ControllerStatus.from_int(admin.property_get(Register.CSTS))
    assert status.fatal
    assert not status.ready
    admin.configure(ControllerConfiguration())
    admin.configure()
    assert ControllerStatus.from_int(admin.property_get(Register.CSTS)).ready


def test_commands_on_a_disabled_controller_are_sequence_errors() -> None:
    admin = CardBench().admin(enable=False)
    for entry in (builders.identify(4, 1), builders.keep_alive(5), builders.async_event_request(6)):
        assert admin.status(entry) is Status.COMMAND_SEQUENCE_ERROR


def test_a_reset_ends_the_io_queues_and_keeps_the_admin_queue() -> None:
    bench = CardBench()
    admin = bench.admin()
    queue = bench.queue(admin)
    admin.command(builders.async_event_request(9))
    answer = admin.command(builders.property_set(3, Register.CC, 4, 0))
    assert [(c.cid, c.status) for c in answer.completions] == [(9, Status.ABORTED_SQ_DELETION), (3, 0)]
    assert queue.connection.ended
    assert not admin.connection.ended
    queue.connection.lost()
    admin.configure()
    bench.queue(admin)


def test_a_shutdown_is_complete_only_when_everything_is_durable() -> None:
    bench = CardBench()
    admin = bench.admin()
    queue = bench.queue(admin)
    bench.hold = True
    admin.configure(replace(ENABLE, shutdown=ShutdownNotification.NORMAL))
    assert ControllerStatus.from_int(admin.property_get(Register.CSTS)).shutdown is ShutdownStatus.OCCURRING
    assert queue.status(read_entry(1, 0, 1)) is Status.COMMAND_SEQUENCE_ERROR
    ((connection, command),) = bench.held
    assert isinstance(command, ShutdownCommand)
    connection.complete(command)
    assert ControllerStatus.from_int(admin.property_get(Register.CSTS)).shutdown is ShutdownStatus.COMPLETE
    admin.connection.lost()
    assert queue.connection.ended


def test_a_controller_that_was_shut_down_can_be_used_again() -> None:
    admin = CardBench().admin(enable=False)
    admin.configure(ControllerConfiguration(shutdown=ShutdownNotification.NORMAL))
    for _ in range(2):
        admin.configure()
        assert ControllerStatus.from_int(admin.property_get(Register.CSTS)).to_int() == 1
        admin.configure(replace(ENABLE, shutdown=ShutdownNotification.ABRUPT))
        assert ControllerStatus.from_int(admin.property_get(Register.CSTS)).to_int() == 8
        admin.configure(ControllerConfiguration())


def test_a_lost_io_connection_costs_its_queue_alone_as_a_disconnect_does() -> None:
    bench = CardBench()
    admin = bench.admin()
    first, second = bench.queue(admin, 1), bench.queue(admin, 2)
    disconnect = replace(builders.property_get(4, 0, 4), nsid=8, cdw10=0, cdw11=0)
    assert first.status(disconnect) is Status.SUCCESS
    assert first.connection.ended
    first.connection.lost()
    second.connection.lost()
    assert not admin.connection.ended
    again = bench.queue(admin, 1)
    bench.queue(admin, 2)
    admin.connection.lost()
    assert again.connection.ended


def test_a_host_may_close_its_io_queues_before_it_shuts_the_controller_down() -> None:
    """So does Linux, which waits a minute for an answer to the shutdown."""
    bench = CardBench()
    admin = bench.admin()
    bench.queue(admin, 1).connection.lost()
    assert admin.configure(replace(ENABLE, shutdown=ShutdownNotification.NORMAL)) is Status.SUCCESS
    bench.work()
    assert ControllerStatus.from_int(admin.property_get(Register.CSTS)).shutdown is ShutdownStatus.COMPLETE


def test_the_association_ends_when_its_keep_alive_timer_expires() -> None:
    bench = CardBench()
    admin = bench.admin(kato_ms=1500)
    queue = bench.queue(admin)
    bench.now_ns += 1_900_000_000
    bench.card.tick(bench.now_ns)
    assert not admin.connection.ended
    assert admin.status(builders.keep_alive(4)) is Status.SUCCESS
    bench.now_ns += 1_900_000_000
    queue.command(read_entry(1, 0, 1))
    bench.card.tick(bench.now_ns)
    assert not admin.connection.ended
    assert bench.card.next_deadline_ns() == bench.now_ns + 100_000_000
    bench.now_ns += 100_000_000
    bench.card.tick(bench.now_ns)
    assert admin.connection.ended
    assert queue.connection.ended
    assert bench.card.next_deadline_ns() is None


def test_the_keep_alive_timeout_is_rounded_up_and_zero_turns_it_off() -> None:
    admin = CardBench().admin(kato_ms=1)
    (completion,) = admin.command(builders.get_features(4, FeatureId.KEEP_ALIVE_TIMER)).completions
    assert completion.dw0 == 1000
    assert admin.status(builders.set_features(5, FeatureId.KEEP_ALIVE_TIMER, 0)) is Status.SUCCESS
    assert admin.connection.controller is not None
    assert admin.connection.controller.keep_alive_deadline_ns is None


def test_a_connection_without_connect_is_closed_in_time() -> None:
    bench = CardBench()
    host = bench.host()
    assert bench.card.next_deadline_ns() == bench.now_ns + SETUP_DEADLINE_NS
    bench.card.tick(bench.now_ns + SETUP_DEADLINE_NS)
    assert host.connection.ended


@pytest.mark.parametrize("asked", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("offered", [(False, False), (True, True)])
def test_digests_are_granted_when_asked_for_and_offered(
    asked: tuple[bool, bool], offered: tuple[bool, bool]
) -> None:
    header, data = (DigestPolicy.PREFERRED if one else DigestPolicy.OFF for one in offered)
    bench = CardBench(make_config(header_digest=header, data_digest=data))
    host = bench.host(init=ICReq(3, *asked))
    assert host.wire.header_digest == (asked[0] and offered[0])
    assert host.wire.data_digest == (asked[1] and offered[1])
    assert host.connect().ok


@pytest.mark.parametrize("name", ["header_digest", "data_digest"])
def test_a_host_without_a_required_digest_is_refused(name: str) -> None:
    bench = CardBench(make_config(**{name: DigestPolicy.REQUIRED}))
    (term,) = (
        RawHost(bench)
        .init(ICReq(header_digest=name != "header_digest", data_digest=name != "data_digest"))
        .terms
    )
    assert (term.fatal_status, term.field_offset_bytes) == (FatalStatus.UNSUPPORTED_PARAMETER, 11)
    assert bench.host(init=ICReq(header_digest=True, data_digest=True)).connect().ok


def test_an_unknown_pdu_format_version_ends_the_connection() -> None:
    host = RawHost(CardBench())
    (term,) = host.init(ICReq(pdu_format_version=1)).terms
    assert term.fatal_status == FatalStatus.UNSUPPORTED_PARAMETER
    assert term.field_offset_bytes == 8
    assert host.connection.ended


def test_a_second_icreq_ends_the_connection() -> None:
    (term,) = CardBench().host().send(encode(ICReq())).terms
    assert term.fatal_status == FatalStatus.SEQUENCE_ERROR


def test_icresp_grants_no_alignment_of_its_own() -> None:
    (pdu,) = RawHost(CardBench()).init(ICReq(max_r2t=4)).pdus
    assert pdu == ICResp(1, header_digest=False, data_digest=False, max_h2c_data_bytes=1 << 20)


def test_too_many_connections_are_not_opened() -> None:
    bench = CardBench(make_config(max_controllers=1, max_io_queues=1))
    hosts = [bench.host() for _ in range(bench.card.config.max_connections)]
    assert bench.card.open(hosts[0].buffers, PORTAL, bench.now_ns) is None
    hosts[0].connection.lost()
    bench.host()


def test_two_hosts_have_associations_of_their_own() -> None:
    bench = CardBench()
    first, second = bench.admin(), bench.admin(hostid=b"2" * 16, hostnqn="nqn.2026-01.example:two")
    assert first.connection.controller is not second.connection.controller
    first.connection.lost()
    assert not second.connection.ended
    assert second.connection.controller is not None
    assert second.connection.controller.host.hostid != HOST_ID
    assert bench.card.config.namespace.block_bytes == BLOCK_BYTES


def test_tables_lead_only_to_known_states_and_every_association_can_end() -> None:
    assert set(CONNECTION_TABLE.values()) <= set(ConnectionState)
    for phase in ControllerPhase:
        assert any(state is phase for state, _event in CONTROLLER_TABLE)
