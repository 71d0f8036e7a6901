"""Authentication on real queues: our initiator with the soft card, with controllers that fall silent, and with SPDK."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.nvmeof.card_bench import HOST_NQN as BENCH_HOST
from tests.nvmeof.card_bench import NQN as BENCH_NQN
from tests.nvmeof.card_bench import CardBench, make_config
from tests.nvmeof.card_process import refused_card, running_card
from tests.nvmeof.dhchap.exchange import Counted, card_keys, host_keys
from tests.nvmeof.fake_target import HANG_S, FakeTarget, Script
from tests.nvmeof.hosts import connect, eventually, options
from xkv_nvmeof import builders
from xkv_nvmeof.blockdev import DeviceState
from xkv_nvmeof.command import Sgl
from xkv_nvmeof.controller_types import SETUP_DEADLINE_NS
from xkv_nvmeof.dhchap.controller import ControllerKeys
from xkv_nvmeof.dhchap.crypto import Group, Hash
from xkv_nvmeof.dhchap.host import Authenticated, Fault, HostAuthentication, HostKeys
from xkv_nvmeof.dhchap.messages import Challenge, Negotiate
from xkv_nvmeof.dhchap.secret import DhchapSecret, new_dhchap_secret
from xkv_nvmeof.initiator_errors import AuthenticationRefused, ConnectFailed
from xkv_nvmeof.spec import FabricsType, SglType, Status

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.nvmeof.fake_target import FakeConnection
    from xkv_nvmeof.command import SubmissionEntry

HOST_TEXT = new_dhchap_secret(Hash.SHA_256, Counted("host"))
CARD_TEXT = new_dhchap_secret(Hash.SHA_384, Counted("card"))
OTHER_TEXT = new_dhchap_secret(None, Counted("other"))
HOST, CARD, OTHER = (DhchapSecret.parse(text) for text in (HOST_TEXT, CARD_TEXT, OTHER_TEXT))


def key_file(folder: Path, name: str, text: str, mode: int = 0o600) -> Path:
    path = folder / name
    path.write_text(text + "\n")
    path.chmod(mode)
    return path


@pytest.fixture
def arguments(tmp_path: Path) -> list[str | Path]:
    host, card = key_file(tmp_path, "host.key", HOST_TEXT), key_file(tmp_path, "card.key", CARD_TEXT)
    return ["--memory", "--size", "64MiB", "--dhchap-key-file", host, "--dhchap-ctrl-key-file", card]


@pytest.mark.parametrize("controller", [None, CARD])
@pytest.mark.parametrize("digests", ["off", "required"])
async def test_the_right_key_opens_every_queue(
    arguments: list[str | Path], controller: DhchapSecret | None, digests: str
) -> None:
    how = {"header_digest": digests, "data_digest": digests}
    with running_card(*arguments, "--header-digest", digests, "--data-digest", digests) as card:
        keys = HostKeys(HOST, controller)
        device = await connect(card.ready["port"], card.ready["nqn"], dhchap=keys, io_queues=3, **how)
        assert device.queues_granted == 3
        assert device.negotiated is not None
        both = controller is not None
        assert device.negotiated.authenticated == Authenticated("SHA-512", "FFDHE8192", both_ways=both)
        await device.write_from(0, [memoryview(b"x" * 4096)])
        await device.aclose()


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        (HostKeys(OTHER), Fault.HOST_KEY),
        (HostKeys(OTHER, CARD), Fault.HOST_KEY),
        (HostKeys(HOST, OTHER), Fault.CONTROLLER_KEY),
        (None, Fault.HOST_KEY),
    ],
    ids=["wrong", "wrong of the host", "wrong of the card", "none"],
)
async def test_a_wrong_key_is_one_error_that_says_whose_it_is(
    arguments: list[str | Path], keys: HostKeys | None, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with running_card(*arguments) as card:
        with pytest.raises(AuthenticationRefused) as caught:
            await connect(card.ready["port"], card.ready["nqn"], dhchap=keys)
        assert caught.value.fault is fault
        _code, log = card.stop()
    for text in (HOST_TEXT, CARD_TEXT, OTHER_TEXT):
        shown = f"{caught.value!r} {caught.value} {options(dhchap=keys)!r} {caplog.text} {log}"
        assert text[10:40] not in shown


async def test_a_card_that_asks_for_nothing_cannot_pass_for_one_with_a_key() -> None:
    with running_card("--memory", "--size", "64MiB") as card:
        with pytest.raises(AuthenticationRefused, match="does not take part") as caught:
            await connect(card.ready["port"], card.ready["nqn"], dhchap=HostKeys(HOST, CARD))
        assert caught.value.fault is Fault.CONTROLLER_KEY
        device = await connect(card.ready["port"], card.ready["nqn"], dhchap=HostKeys(HOST))
        await device.aclose()


@pytest.mark.parametrize("name", ["header", "data"])
async def test_a_card_that_requires_a_digest_says_so_to_a_host_without(name: str) -> None:
    with running_card("--memory", "--size", "64MiB", f"--{name}-digest", "required") as card:
        with pytest.raises(ConnectFailed, match="requires a digest"):
            await connect(card.ready["port"], card.ready["nqn"])
        device = await connect(card.ready["port"], card.ready["nqn"], **{f"{name}_digest": "preferred"})
        await device.aclose()


@pytest.mark.parametrize("name", ["header", "data"])
async def test_a_host_that_requires_a_digest_refuses_a_card_without(name: str) -> None:
    with running_card("--memory", "--size", "64MiB", f"--{name}-digest", "off") as card:
        with pytest.raises(ConnectFailed, match=f"the {name} digest is required"):
            await connect(card.ready["port"], card.ready["nqn"], **{f"{name}_digest": "required"})
        device = await connect(card.ready["port"], card.ready["nqn"], **{f"{name}_digest": "preferred"})
        assert device.negotiated is not None
        assert not getattr(device.negotiated, f"{name}_digest")
        await device.aclose()


def test_key_files_that_others_can_read_or_that_hold_no_key_are_refused(tmp_path: Path) -> None:
    card = ("--memory", "--size", "64MiB", "--dhchap-key-file")
    open_to_all = key_file(tmp_path, "open.key", HOST_TEXT, 0o640)
    said = refused_card(*card, open_to_all)
    assert "chmod 600" in said
    assert str(open_to_all) in said
    broken = key_file(tmp_path, "broken.key", HOST_TEXT[:-2] + "A:")
    said = refused_card(*card, broken)
    assert str(broken) in said
    assert HOST_TEXT[10:30] not in said


# ---- controllers that do not play along ------------------------------------------------------------------------


def wanting(
    connection: FakeConnection, entry: SubmissionEntry, answer: Callable[[int], list[bytes]], asks: int = 2
) -> list[bytes] | None:
    """A controller that asks for authentication on Connect; `answer` makes its answers to the steps."""
    if entry.opcode != 0x7F:
        return None
    if entry.fabrics_type == FabricsType.CONNECT:
        return [connection.response(entry.cid, 0, asks << 16 | 5)]
    if entry.fabrics_type in (FabricsType.AUTHENTICATION_SEND, FabricsType.AUTHENTICATION_RECEIVE):
        return answer(entry.cid)
    return None


@pytest.mark.parametrize("silent_after", [0, 1])
async def test_a_controller_that_falls_silent_during_authentication_is_given_up_in_time(
    silent_after: int,
) -> None:
    steps: list[int] = []

    def hook(connection: FakeConnection, entry: SubmissionEntry) -> list[bytes] | None:
        def answer(cid: int) -> list[bytes]:
            steps.append(cid)
            return [] if len(steps) > silent_after else [connection.response(cid)]

        if entry.fabrics_type == FabricsType.AUTHENTICATION_SEND:
            return wanting(connection, entry, answer)
        return wanting(connection, entry, lambda _cid: [])

    async with FakeTarget(Script(on_command=hook)) as target:
        async with asyncio.timeout(HANG_S):
            with pytest.raises(ConnectFailed, match="no answer in time"):
                await connect(target.port, connect_timeout_ms=200, dhchap=host_keys())
        await target.until(lambda: not target.connections)


async def test_messages_are_in_the_capsule_and_a_controller_that_hangs_up_on_the_answer_does_not_accept_the_key() -> (
    None
):
    pointers: list[SglType] = []

    def hook(connection: FakeConnection, entry: SubmissionEntry) -> list[bytes] | None:
        def challenge(cid: int) -> list[bytes]:
            if len(pointers) > 1:
                connection.drop()
                return []
            transaction = Negotiate.from_bytes(target.seen.capsule_data).transaction
            message = Challenge(transaction, Hash.SHA_256, Group.NULL, 1, bytes(32), b"").to_bytes()
            return [connection.data(cid, 0, message, last=True), connection.response(cid)]

        def taken(cid: int) -> list[bytes]:
            pointers.append(SglType(entry.sgl.kind))
            return [connection.response(cid)]

        sends = entry.fabrics_type == FabricsType.AUTHENTICATION_SEND
        return wanting(connection, entry, taken if sends else challenge)

    async with FakeTarget(Script(on_command=hook)) as target:
        with pytest.raises(AuthenticationRefused, match="when it had the answer") as caught:
            await connect(target.port, dhchap=host_keys())
    assert caught.value.fault is Fault.HOST_KEY
    assert pointers == [SglType.IN_CAPSULE_OFFSET] * 2


async def test_a_controller_that_wants_a_secure_channel_is_refused() -> None:
    script = Script(on_command=lambda conn, entry: wanting(conn, entry, lambda _cid: [], asks=6))
    async with FakeTarget(script) as target:
        with pytest.raises(AuthenticationRefused, match="secure channel"):
            await connect(target.port, dhchap=host_keys())


async def test_a_refused_key_is_not_tried_again_in_a_hurry() -> None:
    wants: list[int] = [0]

    def hook(connection: FakeConnection, entry: SubmissionEntry) -> list[bytes] | None:
        return wanting(connection, entry, lambda _cid: [], asks=2) if wants[0] else None

    async with FakeTarget(Script(on_command=hook)) as target:
        device = await connect(target.port, reconnect_delay_min_ms=1, reconnect_delay_max_ms=3_600_000)
        wants[0] = 1
        target.seen.connects.clear()
        for connection in list(target.connections):
            connection.drop()
        await eventually(lambda: "requires authentication" in device.reason)
        assert device.state is DeviceState.OFFLINE
        assert len(target.seen.connects) == 1
        assert device._keeper.paths[0].backoff.next_s() >= 1_800
        await device.aclose()


# ---- the card against hosts that do not play along -------------------------------------------------------------


def gated() -> CardBench:
    return CardBench(make_config(authentication=card_keys()))


def receive_entry(cid: int, size: int = 4096) -> SubmissionEntry:
    return builders.authentication_receive(cid, size)


def test_nothing_else_is_done_on_a_queue_before_authentication() -> None:
    host = gated().host()
    completion = host.connect()
    assert completion.dw0 >> 16 == 2
    for entry in (builders.property_get(4, 0, 8), builders.keep_alive(4), builders.identify(4, 1)):
        assert host.status_of_data(entry) is Status.AUTHENTICATION_REQUIRED


def test_a_queue_opens_with_authentication_and_stays_open() -> None:
    host = gated().host()
    host.connect()
    session = HostAuthentication(
        host_keys(groups=(Group.FFDHE2048,)), (BENCH_HOST, BENCH_NQN), 9, Counted("h")
    )

    def send(message: bytes) -> Status:
        return host.status(with_data(builders.authentication_send(5, len(message)), len(message)), message)

    assert send(session.begin()) is Status.SUCCESS
    answer = host.command(receive_entry(6))
    assert send(session.answer(answer.data[6])) is Status.SUCCESS
    assert session.conclude(host.command(receive_entry(7)).data[7]) is None
    assert host.configure() is Status.SUCCESS
    assert send(Negotiate(9, (1,), (0,)).to_bytes()) is Status.COMMAND_SEQUENCE_ERROR
    assert host.connection.controller is not None
    assert host.connection.set_up


def with_data(entry: SubmissionEntry, size: int) -> SubmissionEntry:
    return replace(entry, sgl=Sgl.in_capsule(size))


@pytest.mark.parametrize(
    ("entry", "status"),
    [
        (builders.authentication_receive(4, 0), Status.INVALID_FIELD),
        (builders.authentication_receive(4, 4100), Status.INVALID_FIELD),
        (builders.authentication_send(4, 1 << 31), Status.INVALID_FIELD),
    ],
)
def test_steps_of_impossible_length_are_refused(entry: SubmissionEntry, status: Status) -> None:
    host = gated().host()
    host.connect()
    assert host.status(entry) is status


def test_another_protocol_than_the_one_of_nvme_is_refused() -> None:
    host = gated().host()
    host.connect()
    assert host.status(replace(receive_entry(4), cdw10=0xE8_00_01_00)) is Status.INVALID_FIELD


def test_two_steps_at_once_are_refused_and_the_first_goes_on() -> None:
    bench = gated()
    host = bench.host()
    host.connect()
    message = Negotiate(9, (1,), (0,)).to_bytes()
    bench.hold = True
    host.command(with_data(builders.authentication_send(4, len(message)), len(message)), message)
    assert host.status(receive_entry(5)) is Status.COMMAND_SEQUENCE_ERROR
    bench.hold = False
    bench.finish(*bench.held.pop())
    assert [one.cid for one in host.answer().completions] == [4]
    assert Challenge.from_bytes(host.command(receive_entry(6)).data[6]).hash is Hash.SHA_256


def test_a_refused_host_hears_why_and_loses_its_association() -> None:
    bench = gated()
    host = bench.host()
    host.connect()
    assert host.command(receive_entry(5)).data[5][:8] == bytes((0, 0xF1, 0, 0, 0, 0, 1, 7))
    assert host.connection.ended
    assert host.connection.controller is not None
    assert not host.connection.controller.ready


def test_a_host_that_never_authenticates_loses_its_association_in_time() -> None:
    bench = gated()
    host = bench.host()
    host.connect()
    assert bench.card.next_deadline_ns() == bench.now_ns + SETUP_DEADLINE_NS
    bench.card.tick(bench.now_ns + SETUP_DEADLINE_NS)
    assert host.connection.ended
    assert bench.card.next_deadline_ns() is None


def test_the_keys_of_a_card_are_in_no_text_of_it() -> None:
    keys = ControllerKeys(HOST, os.urandom, CARD)
    shown = repr(make_config(authentication=keys))
    assert HOST_TEXT[10:30] not in shown
    assert "DhchapSecret(...)" in shown
