"""What sysfs and nvme-cli tell of Linux's NVMe is the same, in whatever shape: never a wrong node, never "none" for "unknown"."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xkv_nvmeof.kernel import sysfs
from xkv_nvmeof.kernel.nvmecli import (
    ConnectOptions,
    UnknownAnswer,
    connect_arguments,
    parse,
    parse_namespaces,
    parse_view,
)
from xkv_nvmeof.kernel.view import (
    Namespace,
    Peer,
    Wanted,
    half_identities,
    is_namespace_node,
    namespace_of,
    path_of,
    strangers_at,
    subsystem_of,
)

from .fake_sysfs import HOST_ID, HOST_NQN, NQN, FakeSysfs

if TYPE_CHECKING:
    from pathlib import Path

PEER = Peer(NQN, "127.0.0.1", 4420, HOST_NQN, HOST_ID)
FOUND = Namespace(1, "nvme0n1", 16 << 20, 4096)


@pytest.fixture
def fake(tmp_path: Path) -> FakeSysfs:
    fake = FakeSysfs(tmp_path)
    fake.subsystem()
    return fake


# --- sysfs ------------------------------------------------------------------------------------------------------------


def test_a_connection_and_its_namespace_are_found(fake: FakeSysfs) -> None:
    fake.controller()
    fake.namespace()
    view = sysfs.read_view(fake.root)
    path = path_of(view, PEER)
    assert path is not None
    assert (path.name, path.live, path.host_id) == ("nvme0", True, HOST_ID.hex())
    namespace = namespace_of(view, Wanted(NQN, 1, b"\x11" * 16, b"\x22" * 16))
    assert namespace == Namespace(1, "nvme0n1", 16 << 20, 4096, b"\x11" * 16, b"\x22" * 16)


def test_where_there_is_no_nvme_nothing_is_seen(tmp_path: Path) -> None:
    assert sysfs.read_view(tmp_path) == ()


def test_the_nodes_of_single_paths_and_partitions_are_not_namespaces(fake: FakeSysfs) -> None:
    fake.controller()
    for hidden in ("nvme0c0n1", "nvme0n1p1"):
        (fake.root / f"class/nvme/nvme0/{hidden}").mkdir(parents=True)
        fake.write(f"block/{hidden}/nsid", 1)
        fake.write(f"block/{hidden}/size", 8)
        fake.write(f"block/{hidden}/queue/logical_block_size", 1)
    fake.namespace()
    (only,) = sysfs.read_view(fake.root)[0].namespaces
    assert only.node == "nvme0n1"
    assert not is_namespace_node("nvme0c1n1")
    assert not is_namespace_node("nvme0")


def test_the_number_in_a_node_is_the_subsystems(tmp_path: Path) -> None:
    fake = FakeSysfs(tmp_path)
    for number, nqn in ((0, NQN), (1, "nqn.2014-08.com.example:other")):
        fake.subsystem(number, nqn)
    # Two controllers, one subsystem, one namespace: one card, whose size counts once.
    fake.controller("nvme4", subsystem=0)
    fake.controller("nvme7", subsystem=0, address="traddr=127.0.0.2,trsvcid=4420")
    fake.namespace("nvme0n1", subsystem=0)
    fake.controller("nvme0", subsystem=1)
    fake.namespace("nvme1n1", subsystem=1, nguid=b"\x33" * 16)
    view = sysfs.read_view(fake.root)
    subsystem = subsystem_of(view, NQN)
    assert subsystem is not None
    assert [one.name for one in subsystem.controllers] == ["nvme4", "nvme7"]
    assert [one.node for one in subsystem.namespaces] == ["nvme0n1"]


def test_without_multipath_the_namespaces_are_below_the_controller(fake: FakeSysfs) -> None:
    fake.controller()
    fake.namespace()
    fake.remove("class/nvme-subsystem/nvme-subsys0/nvme0n1")
    (fake.root / "class/nvme/nvme0/nvme0n1").mkdir()
    assert namespace_of(sysfs.read_view(fake.root), Wanted(NQN, 1)) is not None


def test_a_uuid_that_repeats_the_nguid_counts_only_if_it_is_one(fake: FakeSysfs) -> None:
    fake.controller()
    block = fake.namespace(own_uuid=bytes(16))
    assert sysfs.namespace_ids(block) == (b"\x11" * 16, bytes(16))
    block = fake.namespace(own_uuid=b"\x11" * 16)
    assert sysfs.namespace_ids(block) == (b"\x11" * 16, b"\x11" * 16)


@pytest.mark.parametrize(
    ("field", "value"), [("size", 0), ("nguid", uuid.uuid4()), ("nsid", 2), ("queue/logical_block_size", 0)]
)
def test_a_namespace_that_is_not_whole_or_another_one_is_not_found(
    fake: FakeSysfs, field: str, value: object
) -> None:
    fake.controller()
    fake.namespace()
    fake.write(f"block/nvme0n1/{field}", value)
    assert namespace_of(sysfs.read_view(fake.root), Wanted(NQN, 1, b"\x11" * 16, b"\x22" * 16)) is None


def test_a_connection_of_another_host_is_no_connection_of_ours(fake: FakeSysfs) -> None:
    fake.controller(host_nqn="nqn.2026-01.org.example:other", host_id=b"\x09" * 16)
    view = sysfs.read_view(fake.root)
    assert path_of(view, PEER) is None
    assert [one.name for one in strangers_at(view, PEER)] == ["nvme0"]


@pytest.mark.parametrize("state", ["live", "connecting", "deleting", ""])
def test_only_a_live_controller_makes_another_one_dispensable(fake: FakeSysfs, state: str) -> None:
    fake.controller("nvme4", state=state)
    subsystem = subsystem_of(sysfs.read_view(fake.root), NQN)
    assert subsystem is not None
    assert subsystem.is_last_way("nvme0") is (state != "live")
    fake.controller("nvme0", state="connecting")
    subsystem = subsystem_of(sysfs.read_view(fake.root), NQN)
    assert subsystem is not None
    assert subsystem.is_last_way("nvme4")


def test_a_live_path_goes_before_one_that_is_away(fake: FakeSysfs) -> None:
    fake.controller("nvme0", state="connecting", address="traddr=127.0.0.1,trsvcid=4420")
    fake.controller("nvme1")
    path = path_of(sysfs.read_view(fake.root), PEER)
    assert path is not None
    assert path.name == "nvme1"


def test_half_of_an_identity_that_somebody_else_has_is_noticed(fake: FakeSysfs) -> None:
    fake.controller(host_nqn="nqn.2026-01.org.example:other")
    (clash,) = half_identities(sysfs.read_view(fake.root), PEER)
    assert "other" in clash


def test_addresses_are_compared_as_addresses(fake: FakeSysfs) -> None:
    fake.controller(address="traddr=fd00:0:0:0::1,trsvcid=4420")
    assert path_of(sysfs.read_view(fake.root), Peer(NQN, "fd00::1", 4420, HOST_NQN, HOST_ID)) is not None


def test_how_long_linux_keeps_commands_is_told_or_is_for_ever(fake: FakeSysfs) -> None:
    fake.controller()
    folder = fake.root / "class/nvme/nvme0"
    assert sysfs.loss_ms(folder) == 20_000
    fake.write("class/nvme/nvme0/fast_io_fail_tmo", 5)
    assert sysfs.loss_ms(folder) == 5_000
    fake.write("class/nvme/nvme0/fast_io_fail_tmo", "off")
    fake.write("class/nvme/nvme0/ctrl_loss_tmo", "off")
    assert sysfs.loss_ms(folder) is None


# --- nvme-cli ---------------------------------------------------------------------------------------------------------

PATHS = [
    {
        "Name": "nvme0",
        "Transport": "tcp",
        "Address": "traddr=127.0.0.1,trsvcid=4420,src_addr=127.0.0.1",
        "State": "live",
    }
]
HOST = {"HostNQN": HOST_NQN, "HostID": str(uuid.UUID(bytes=HOST_ID))}
ENTRY = {"Name": "nvme-subsys0", "NQN": NQN, "Paths": PATHS}
SUBSYSTEMS: dict[str, Any] = {
    "array": [{**HOST, "Subsystems": [ENTRY]}],
    "object": {**HOST, "Subsystems": [ENTRY]},
    "HostId": [{"HostNQN": HOST_NQN, "HostId": HOST_ID.hex().upper(), "Subsystems": [ENTRY]}],
    "blanks": [
        {
            **HOST,
            "Subsystems": [{**ENTRY, "Paths": [{**PATHS[0], "Address": "traddr=127.0.0.1 trsvcid=4420"}]}],
        }
    ],
}
NODE = {"NameSpace": "nvme0n1", "NSID": 1, "PhysicalSize": 16 << 20, "SectorSize": 4096}
PATH_NODE = {"NameSpace": "nvme0c0n1", "NSID": 1, "PhysicalSize": 1, "SectorSize": 1}
VERBOSE_CONTROLLER = {"Controller": "nvme0", "Transport": "tcp", "Namespaces": [NODE], "Paths": []}
LISTS: dict[str, Any] = {
    "flat": {"Devices": [{"DevicePath": "/dev/nvme0n1", "PhysicalSize": 16 << 20, "SectorSize": 4096}]},
    "flat, a path first": {
        "Devices": [
            {"DevicePath": "/dev/nvme0c0n1", "PhysicalSize": 1, "SectorSize": 1},
            {"NameSpace": 1, "DevicePath": "/dev/nvme0n1", "PhysicalSize": 16 << 20, "SectorSize": 4096},
        ]
    },
    "verbose": {
        "Devices": [
            {**HOST, "Subsystems": [{"Subsystem": "nvme-subsys0", "SubsystemNQN": NQN, "Controllers": [VERBOSE_CONTROLLER]}]}
        ]
    },
    "verbose, multipath": {
        "Devices": [
            {
                **HOST,
                "Subsystems": [
                    {
                        "Subsystem": "nvme-subsys0",
                        "SubsystemNQN": NQN,
                        "Controllers": [
                            {"Controller": "nvme0", "Namespaces": [], "Paths": [{"Path": "nvme0c0n1"}]},
                            {"Controller": "nvme1", "Namespaces": [PATH_NODE], "Paths": []},
                        ],
                        "Namespaces": [NODE],
                    }
                ],
            }
        ]
    },
}  # fmt: skip


def encoded(document: Any) -> bytes:
    return json.dumps(document).encode()


@pytest.mark.parametrize("subsystems", list(SUBSYSTEMS))
@pytest.mark.parametrize("devices", list(LISTS))
def test_all_shapes_of_all_versions_tell_the_same(subsystems: str, devices: str) -> None:
    view = parse_view(encoded(SUBSYSTEMS[subsystems]), encoded(LISTS[devices]), "2.3")
    path = path_of(view, PEER)
    assert path is not None
    assert path.live
    (subsystem,) = view
    assert subsystem.namespaces == (FOUND,)


@pytest.mark.parametrize("nothing", [b"", b"\n", b"{}", b"[]", b'{"Devices": []}'])
def test_nothing_is_nothing(nothing: bytes) -> None:
    assert parse_view(b"[]", nothing if nothing != b"[]" else b"", "2.3") == ()
    assert parse_view(nothing if b"Devices" not in nothing else b"", b"", "2.3") == ()


STRANGE = [
    b'{"error": "Failed to scan topology"}',
    b'{"Devices": {"nvme0n1": {}}}',
    b'{"Devices": [{"Name": "nvme0n1"}]}',
    b'{"Namespaces": []}',
    b"nvme0n1 is a device",
    b'{"Devices": [',
    b'"text"',
    b"[" * 3_000_000,
    b'{"Devices": ' + b"9" * 5_000 + b"}",
]


def test_a_subsystem_that_is_told_once_for_each_host_is_one() -> None:
    other = {**PATHS[0], "Name": "nvme4"}
    hosts = [
        {**HOST, "Subsystems": [ENTRY]},
        {
            "HostNQN": "nqn.other",
            "HostID": str(uuid.UUID(int=9)),
            "Subsystems": [{**ENTRY, "Paths": [other]}],
        },
    ]
    (found,) = parse_view(encoded(hosts), encoded(LISTS["flat"]), "2.9")
    assert [(one.name, one.host_nqn) for one in found.controllers] == [
        ("nvme0", HOST_NQN),
        ("nvme4", "nqn.other"),
    ]
    assert [one.node for one in found.namespaces] == ["nvme0n1"]


def test_a_part_of_a_document_is_not_taken_for_it() -> None:
    host = b'{"HostNQN":"h","HostID":"1","Subsystems":[]}'
    for cut in (b"[" + host, b"[" + host + b",{", b"[" + host + b', nan" ]', b'{"a":' + host + b",]}"):
        with pytest.raises(UnknownAnswer, match=r"nvme 2\.99"):
            parse_view(cut, b"", "2.99")
    assert parse_view(b"a warning [of no use\n[" + host + b"]\n", b"", "2.99") == ()


@pytest.mark.parametrize(
    "strange",
    STRANGE,
)
def test_what_is_not_known_is_an_error_that_names_the_version_and_never_an_empty_list(strange: bytes) -> None:
    with pytest.raises(UnknownAnswer, match=r"nvme 2\.99"):
        parse_namespaces(strange, "2.99")


def test_noise_around_the_document_and_control_characters_inside_are_put_up_with() -> None:
    noise = b"\n".join(b"warning: line %d {" % number for number in range(20))
    serial = encoded(LISTS["flat"]).replace(b'"SectorSize"', b'"SerialNumber": "a\nb\x00c\xff", "SectorSize"')
    assert parse_namespaces(noise + b"\n" + serial + b"\x00\n", "2.3") == [("", FOUND)]


def test_a_path_without_a_name_or_a_controller_without_paths_is_no_connection() -> None:
    nameless = {**ENTRY, "Paths": [{**PATHS[0], "Name": "(null)", "State": "connecting"}]}
    for entry in (nameless, {**ENTRY, "Paths": []}):
        view = parse_view(encoded([{**HOST, "Subsystems": [entry]}]), b"", "2.3")
        path = path_of(view, PEER)
        assert path is None or not path.live
        assert not view[0].live


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["Devices", "Subsystems", "Controllers", "Namespaces", "NQN", "NameSpace", "DevicePath", "NSID", "Paths", "Address"]), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=200, derandomize=True, deadline=None)
@given(JSON, JSON)
def test_any_document_is_read_or_is_a_named_error(one: Any, other: Any) -> None:
    try:
        parse_view(encoded(one), encoded(other), "2.3")
    except UnknownAnswer:
        return


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_are_a_named_error(noise: bytes) -> None:
    try:
        parse(noise, "2.3")
    except UnknownAnswer:
        return


def test_connect_leaves_nothing_to_files_of_the_system() -> None:
    options = ConnectOptions(2, 64, 10, 1, 20, header_digest=True, data_digest=False)
    arguments = connect_arguments(PEER, options)
    assert "--hostid=01020304-0506-0708-090a-0b0c0d0e0f10" in arguments
    assert f"--hostnqn={HOST_NQN}" in arguments
    assert "--ctrl-loss-tmo=20" in arguments
    assert "--hdr-digest" in arguments
    assert "--data-digest" not in arguments
