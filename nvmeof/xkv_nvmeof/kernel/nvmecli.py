"""nvme-cli, as text: what it is asked, and what its answers mean in each of the shapes that its versions have. Pure.

The gateway goes by sysfs for what is connected; of `connect` it takes nothing but whether it ended. `list-subsys` and `list`
are read for people (`xkv-gateway fabric list --nvme-cli`).

    version   list -o json                                                   list-subsys -o json
    --------  -------------------------------------------------------------  ---------------------------
    1.x       {"Devices": [{"DevicePath", "PhysicalSize", "SectorSize"}]}    {"Subsystems": [{"NQN", "Paths"}]}
    2.0-2.10  the same; -v: Devices[].Subsystems[].Controllers[].Namespaces  [{"HostNQN", "HostID", "Subsystems": [...]}]
    2.11 on   Devices[].Subsystems[].Namespaces, Controllers with Paths      the same
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from xkv_nvmeof.blockdev import DeviceError
from xkv_nvmeof.kernel.sysfs import address_fields, host_id_text
from xkv_nvmeof.kernel.view import Controller, Namespace, Subsystem, View, is_namespace_node

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xkv_nvmeof.kernel.view import Peer

LIST_SUBSYSTEMS: Final = ("list-subsys", "-o", "json")
LIST: Final = ("list", "-v", "-o", "json")
VERSION: Final = ("version",)
BEGINNINGS_MAX: Final = 256
"""So many brackets in the text before a document are taken for its beginning."""
_OPENING: Final = re.compile(r"[\[{]")


class UnknownAnswer(DeviceError):  # noqa: N818
    """nvme-cli answered in a shape that is not known, or with an error of its own."""


@dataclass(frozen=True, slots=True)
class ConnectOptions:
    """How Linux is to treat a connection: times in whole seconds, as nvme-cli takes them."""

    io_queues: int
    queue_entries: int
    keep_alive_s: int
    reconnect_delay_s: int
    controller_loss_s: int
    header_digest: bool
    data_digest: bool


def connect_arguments(peer: Peer, options: ConnectOptions) -> tuple[str, ...]:
    """Return the arguments of `nvme connect`. Nothing is left to files of the system: they would be someone else's word."""
    host_id = peer.host_id.hex()
    groups = (host_id[:8], host_id[8:12], host_id[12:16], host_id[16:20], host_id[20:])
    digests = (*(("--hdr-digest",) * options.header_digest), *(("--data-digest",) * options.data_digest))
    return (
        "connect",
        "--transport=tcp",
        f"--traddr={peer.traddr}",
        f"--trsvcid={peer.port}",
        f"--nqn={peer.nqn}",
        f"--hostnqn={peer.host_nqn}",
        f"--hostid={'-'.join(groups)}",
        f"--nr-io-queues={options.io_queues}",
        f"--queue-size={options.queue_entries}",
        f"--keep-alive-tmo={options.keep_alive_s}",
        f"--reconnect-delay={options.reconnect_delay_s}",
        f"--ctrl-loss-tmo={options.controller_loss_s}",
        *digests,
        "-o",
        "json",
    )


def disconnect_arguments(controller: str) -> tuple[str, ...]:
    """Return the arguments of `nvme disconnect` of one controller; by NQN it would take others' connections too."""
    return ("disconnect", f"--device={controller}")


def parse(output: bytes, version: str) -> Any:
    """Return the JSON document in an output, whatever text stands before it; None: nothing was said.

    Raises:
        UnknownAnswer: there is no document, or it is an error.
    """
    text = output.decode(errors="replace").strip(" \r\n\t\0")
    if not text:
        return None
    # Control characters in serial numbers come through as they are.
    decoder = json.JSONDecoder(strict=False)
    places = (found.start() for found in _OPENING.finditer(text))
    for at in islice(places, BEGINNINGS_MAX):
        try:
            document, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            if error.pos >= len(text):
                break  # it is cut off: what is whole inside of it is a part
            continue
        except (ValueError, RecursionError):
            continue
        if text[end:].lstrip()[:1] in {",", "]", "}"}:
            continue  # a part of something that cannot be read
        if isinstance(document, dict) and "error" in document:
            raise UnknownAnswer(f"nvme {version}: {str(document['error'])[:200]}")
        return document
    raise UnknownAnswer(f"nvme {version}: no JSON in its answer: {text[:80]!r}")


def parse_view(subsystems: bytes, devices: bytes, version: str) -> View:
    """Return the view that `list-subsys` and `list` tell, in any of their shapes.

    Raises:
        UnknownAnswer: a shape that is not known; never an empty view instead of that.
    """
    listed = parse(subsystems, version)
    found = list(_subsystems(listed, version)) if listed else []
    namespaces = parse_namespaces(devices, version)
    view: dict[tuple[str, str], Subsystem] = {}
    for entry, host_nqn, host_id in found:
        nqn = _text(entry, "NQN", "SubsystemNQN")
        controllers = tuple(
            _controller(path, host_nqn, host_id) for path in _objects(entry, "Paths", "Controllers")
        )
        names = {one.name for one in controllers}
        # The flat list knows no NQN, but the subsystem has its number in its own name and in its nodes'.
        name = _text(entry, "Name")
        number = name.removeprefix("nvme-subsys")
        behind = tuple(
            one
            for where, one in namespaces
            if where == nqn or (not where and _instance(one.node) == number) or where in names
        )
        # It is told once for each host that this machine is connected as, and is one all the same.
        before = view.get((nqn, name))
        if before is not None:
            controllers = (*before.controllers, *controllers)
            behind = tuple(dict.fromkeys((*before.namespaces, *behind)))
        view[nqn, name] = Subsystem(nqn, controllers, behind)
    return tuple(view.values())


def parse_namespaces(output: bytes, version: str) -> list[tuple[str, Namespace]]:
    """Return the namespaces of `list`, each with the NQN of its subsystem, "" where the list does not say it.

    Raises:
        UnknownAnswer: a shape that is not known.
    """
    document = parse(output, version)
    if not document:
        return []
    if not isinstance(document, dict) or not isinstance(document.get("Devices"), list):
        raise UnknownAnswer(f"nvme {version}: a list in a shape that is not known")
    found: dict[str, tuple[str, Namespace]] = {}
    for device in document["Devices"]:
        if not isinstance(device, dict) or not ({"DevicePath", "Subsystems"} & device.keys()):
            raise UnknownAnswer(f"nvme {version}: a device in a shape that is not known")
        if "DevicePath" in device:
            _add(found, "", device, version)
        for subsystem in _objects(device, "Subsystems"):
            nqn = _text(subsystem, "SubsystemNQN", "NQN")
            for holder in (subsystem, *_objects(subsystem, "Controllers")):
                for namespace in _objects(holder, "Namespaces"):
                    _add(found, nqn, namespace, version)
    return list(found.values())


def _add(found: dict[str, tuple[str, Namespace]], nqn: str, entry: dict[str, Any], version: str) -> None:
    node = (_text(entry, "DevicePath", "NameSpace", "Namespace") or "").rpartition("/")[2]
    if not is_namespace_node(node):
        return  # the node of a path, or one whose name is not known yet
    block_bytes, size_bytes = _number(entry, "SectorSize"), _number(entry, "PhysicalSize", "NamespaceSize")
    nsid = _number(entry, "NSID", "NameSpaceId", "Namespace")
    if not nsid:
        # Version 1 has the number only at the end of the node's name.
        nsid = int(node.rpartition("n")[2])
    if node in found and found[node][1].size_bytes != size_bytes:
        raise UnknownAnswer(f"nvme {version}: {node} is there twice, with two sizes")
    found[node] = (nqn, Namespace(nsid, node, size_bytes, block_bytes))


def _subsystems(document: Any, version: str) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield each subsystem with the NQN and the id of its host."""
    hosts = document if isinstance(document, list) else [document]
    for host in hosts:
        if not isinstance(host, dict) or not isinstance(host.get("Subsystems"), list):
            raise UnknownAnswer(f"nvme {version}: subsystems in a shape that is not known")
        host_id = host_id_text(_text(host, "HostID", "HostId"))
        for entry in _objects(host, "Subsystems"):
            yield entry, _text(host, "HostNQN"), host_id


def _controller(path: dict[str, Any], host_nqn: str, host_id: str) -> Controller:
    # nvme-cli 1 writes blanks between the fields.
    address = address_fields(_text(path, "Address").replace(" ", ","))
    return Controller(
        name=_text(path, "Name", "Controller"),
        transport=_text(path, "Transport"),
        traddr=address.get("traddr", ""),
        trsvcid=address.get("trsvcid", ""),
        state=_text(path, "State"),
        host_nqn=host_nqn,
        host_id=host_id,
    )


def _objects(entry: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    """Return the objects in the first of these lists that is there."""
    for name in names:
        if isinstance(entry.get(name), list):
            return [one for one in entry[name] if isinstance(one, dict)]
    return []


def _text(entry: dict[str, Any], *names: str) -> str:
    for name in names:
        value = entry.get(name)
        if isinstance(value, str) and value != "(null)":
            return value.strip(" \0")
    return ""


def _number(entry: dict[str, Any], *names: str) -> int:
    for name in names:
        value = entry.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


def _instance(node: str) -> str:
    return node.removeprefix("nvme").partition("n")[0]
