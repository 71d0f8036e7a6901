"""What the facts mean for this configuration. Pure.

A problem keeps the gateway from doing what is configured; a note costs speed or safety, or could not be told; the rest is in
order. Each says what to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from xkv_gateway.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xkv_gateway.config import Config
    from xkv_gateway.doctor.facts import Facts, FileFact, Reach
    from xkv_gateway.networks import StorageNetworks

OPEN_FILES_MIN: Final = 4096
OPEN_FILES_FEW: Final = 512
JUMBO_MTU: Final = 9000
RECEIVE_BUFFER_BYTES: Final = 4 << 20
SLOW_CLOCKS: Final = frozenset({"hpet", "acpi_pm", "jiffies"})
EARLIEST_WALL_S: Final = 1_704_067_200
"""2024: a clock before that was never set."""
FAR_MS: Final = 5.0
KERNEL_SCHEME: Final = "kernel+tcp:"
SPARE_MEMORY_BYTES: Final = 512 << 20


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    check: str
    level: Level
    text: str
    advice: str = ""


def examine(
    facts: Facts,
    config: Config,
    storage: StorageNetworks,
    coming: frozenset[tuple[str, int]] = frozenset(),
) -> list[Finding]:
    """Return a finding for everything that was looked at. `coming`: where nobody has to listen before `serve` has made it so."""
    kernel_card = (config.card.url or "").startswith(KERNEL_SCHEME)
    return [
        *_process(facts),
        *_clock(facts),
        *_memory(facts, config),
        *_state_dir(facts, config),
        *_kernel(facts, needed=kernel_card),
        *_networks(facts, storage),
        *(finding for reach in facts.reaches for finding in _reach(reach, storage, coming)),
        *(_file(fact, facts.uid) for fact in facts.files),
        *_target(facts, config),
    ]


def _process(facts: Facts) -> Iterator[Finding]:
    number = facts.open_files_max
    advice = "Raise it: LimitNOFILE=65536 in the unit (ours has it), or `ulimit -n`."
    if number < OPEN_FILES_FEW:
        yield Finding(
            "open files", Level.PROBLEM, f"at most {number}: too few for clients and queues", advice
        )
    elif number < OPEN_FILES_MIN:
        yield Finding("open files", Level.NOTE, f"at most {number}: enough for some hundred clients", advice)
    else:
        yield Finding("open files", Level.OK, f"at most {number}")


def _clock(facts: Facts) -> Iterator[Finding]:
    if facts.wall_s < EARLIEST_WALL_S:
        yield Finding(
            "clock", Level.PROBLEM, "the time of day was never set", "Run a time service, such as chrony."
        )
    elif facts.clock_synchronised is False:
        yield Finding(
            "clock",
            Level.NOTE,
            "the time service has not synchronised the clock",
            "Times in logs and on the card may be off; nothing else depends on them.",
        )
    else:
        told = "" if facts.clock_synchronised else "; whether it is synchronised cannot be told here"
        yield Finding("clock", Level.OK, f"the time of day is set{told}")
    if facts.clocksource in SLOW_CLOCKS:
        yield Finding(
            "clock source",
            Level.NOTE,
            f"{facts.clocksource}: every look at the clock is a slow system call",
            "Find out why the kernel gave up tsc (dmesg), and boot with it.",
        )
    elif facts.clocksource is not None:
        yield Finding("clock source", Level.OK, facts.clocksource)


def _memory(facts: Facts, config: Config) -> Iterator[Finding]:
    available = facts.memory_available_bytes
    if available is None or facts.memory_bytes is None:
        yield Finding("memory", Level.NOTE, "how much there is cannot be told")
        return
    text = f"{format_size(available)} of {format_size(facts.memory_bytes)} available"
    regions = config.control.limits.regions_bytes
    if available < SPARE_MEMORY_BYTES:
        yield Finding(
            "memory", Level.PROBLEM, text, "The gateway needs some hundred MiB: give the host more."
        )
    elif available < regions:
        yield Finding(
            "memory",
            Level.NOTE,
            f"{text}; clients may attach {format_size(regions)} of shared memory",
            "Lower control.limits.regions_bytes, or give the host more.",
        )
    else:
        yield Finding("memory", Level.OK, text)


def _state_dir(facts: Facts, config: Config) -> Iterator[Finding]:
    if facts.state_dir_problem:
        yield Finding(
            "state directory",
            Level.PROBLEM,
            facts.state_dir_problem,
            "Choose another one (--state-dir), or make it writable.",
        )
    elif facts.state_dir_free_bytes is not None:
        room = format_size(facts.state_dir_free_bytes)
        small = config.card.url is None and facts.state_dir_free_bytes < 1 << 30
        advice = "The soft card is kept there: make room, or name a card (--card)." if small else ""
        yield Finding("state directory", Level.NOTE if small else Level.OK, f"room for {room}", advice)


def _kernel(facts: Facts, *, needed: bool) -> Iterator[Finding]:
    """What `kernel+tcp://` needs; without such a card it is told, and no problem."""
    bad = Level.PROBLEM if needed else Level.OK
    unless = "" if needed else "; only needed for kernel+tcp:// cards"
    for name in ("nvme_fabrics", "nvme_tcp"):
        state = facts.modules.get(name)
        module = name.replace("_", "-")
        check = f"module {module}"
        if state == "loaded":
            yield Finding(check, Level.OK, "loaded")
        elif state == "available":
            yield Finding(
                check,
                Level.PROBLEM if needed and not facts.admin else Level.OK,
                f"not loaded{unless}",
                f"`modprobe {module}`, and a line {module} in /etc/modules-load.d/." if needed else "",
            )
        elif state == "absent":
            advice = f"This kernel ({facts.kernel}) has not got it: install its modules, or use nvme+tcp://."
            yield Finding(check, bad, f"not there{unless}", advice if needed else "")
        else:
            advice = f"`modinfo {module}` tells." if needed else ""
            yield Finding(check, Level.NOTE if needed else Level.OK, f"cannot be told{unless}", advice)
    match facts.nvme_cli:
        case "":
            yield Finding(
                "nvme-cli", bad, f"not installed{unless}", "Install the package nvme-cli." if needed else ""
            )
        case None:
            yield Finding("nvme-cli", Level.NOTE, "did not say its version", "Try `nvme version`.")
        case version:
            old = version.startswith(("nvme version 1.", "nvme version 0."))
            advice = "Version 2 is needed." if old and needed else ""
            yield Finding("nvme-cli", bad if old else Level.OK, version, advice)
    if needed and not facts.admin:
        yield Finding(
            "permissions",
            Level.PROBLEM,
            "connecting through the kernel needs CAP_SYS_ADMIN, which this process has not",
            "Run it as root, or have xkv-card-attach@.service connect and name the device (--card /dev/...).",
        )


def _networks(facts: Facts, storage: StorageNetworks) -> Iterator[Finding]:
    if facts.receive_buffer_max is not None and facts.receive_buffer_max < RECEIVE_BUFFER_BYTES:
        yield Finding(
            "TCP buffers",
            Level.NOTE,
            f"a connection's receive buffer grows to {format_size(facts.receive_buffer_max)}",
            "On fast networks: sysctl -w net.ipv4.tcp_rmem='4096 131072 16777216'.",
        )
    if not storage:
        yield Finding(
            "storage network", Level.OK, "none is configured: cards and targets are on loopback only"
        )
        return
    if facts.interfaces is None:
        yield Finding(
            "storage network", Level.NOTE, "the interfaces cannot be listed", "Install iproute2 (`ip`)."
        )
        return
    if storage.on_loopback:
        yield Finding("storage network", Level.OK, "on loopback: cards and targets are on this host")
        return
    ours = [
        (interface, ip) for interface in facts.interfaces for ip in interface.addresses if storage.holds(ip)
    ]
    if not ours:
        yield Finding(
            "storage network",
            Level.PROBLEM,
            "this host has no address in any of the storage networks",
            "Give an interface one, or correct [fabric] networks.",
        )
    for interface, ip in ours:
        name = f"interface {interface.name}"
        if not interface.up:
            yield Finding(name, Level.PROBLEM, f"{ip}, but it is down", f"`ip link set {interface.name} up`.")
        elif interface.mtu is not None and interface.mtu < JUMBO_MTU:
            yield Finding(
                name,
                Level.NOTE,
                f"{ip}, MTU {interface.mtu}",
                f"Frames of {JUMBO_MTU} bytes save much work: set the MTU on hosts, targets and switches alike.",
            )
        else:
            yield Finding(name, Level.OK, f"{ip}, MTU {interface.mtu}")


def _reach(reach: Reach, storage: StorageNetworks, coming: frozenset[tuple[str, int]]) -> Iterator[Finding]:
    check = f"target {reach.host}:{reach.port}"
    if not reach.addresses:
        yield Finding(check, Level.PROBLEM, reach.problem, "Correct it, or write the address.")
        return
    for ip in reach.addresses:
        if not storage.admits_target(ip):
            yield Finding(
                check, Level.PROBLEM, storage.refusal(ip), "Correct the address, or [fabric] networks."
            )
            return
    if reach.source is not None and not storage.on_loopback and not storage.holds(reach.source):
        yield Finding(
            check,
            Level.NOTE,
            f"packets to it leave from {reach.source}, which is in no storage network",
            "Correct the routes: `ip route get " + reach.addresses[0] + "` shows the way.",
        )
    if reach.connected_ms is None and (reach.host, reach.port) in coming:
        yield Finding(
            check,
            Level.NOTE,
            f"nobody listens there yet ({reach.problem}): the target is not made",
            "`serve` makes it before it connects; `xkv-gateway target apply` makes it now.",
        )
    elif reach.connected_ms is None:
        yield Finding(
            check,
            Level.PROBLEM,
            reach.problem,
            "Does the target run and listen there? Does a firewall stand in between?",
        )
    elif reach.connected_ms > FAR_MS:
        yield Finding(
            check,
            Level.NOTE,
            f"connecting took {reach.connected_ms:.1f} ms: every command takes as long",
            "A storage network has well below 1 ms: look at its load, its route, its switches.",
        )
    else:
        yield Finding(check, Level.OK, f"connected in {reach.connected_ms:.1f} ms")


def _file(fact: FileFact, uid: int) -> Finding:
    if not fact.answers:
        advice = "Is the server of that file system away? `findmnt --target` tells which it is."
        return Finding(fact.setting, Level.PROBLEM, f"{fact.path}: its file system does not answer", advice)
    if not fact.exists:
        theirs = fact.setting.startswith("target.")
        advice = "It is the target that has to see it, and to own it." if theirs else "Make it."
        text = f"{fact.path} does not exist, or cannot be looked at"
        return Finding(fact.setting, Level.NOTE if theirs else Level.PROBLEM, text, advice)
    if fact.mode is not None and fact.mode & 0o077:
        return Finding(fact.setting, Level.PROBLEM, f"others may read {fact.path}", f"chmod 600 {fact.path}")
    if fact.owner not in {None, uid}:
        return Finding(
            fact.setting,
            Level.NOTE,
            f"{fact.path} belongs to user {fact.owner}, not to {uid}, who asks",
            "It has to belong to whoever reads it: the target, or the gateway.",
        )
    return Finding(fact.setting, Level.OK, fact.path)


def _target(facts: Facts, config: Config) -> Iterator[Finding]:
    """Of a target on this host: memory, and its SSD. Whether it is right is asked of itself."""
    target = config.target
    if target.rpc is None or not target.rpc.startswith("/"):
        return
    if facts.huge_pages is not None:
        total, free, size_bytes = facts.huge_pages
        if total:
            text = f"{total} of {format_size(size_bytes)}, {free} free"
            yield Finding("huge pages", Level.OK, text)
        else:
            yield Finding(
                "huge pages",
                Level.NOTE,
                "none are set aside: a target on this host starts with --no-huge only, and cannot use an SSD by itself",
                "sysctl -w vm.nr_hugepages=1024, and the same in /etc/sysctl.d/.",
            )
    if target.bdev.pci is not None:
        pci, driver = target.bdev.pci, facts.pci_driver
        if driver is None:
            yield Finding(f"SSD {pci}", Level.PROBLEM, "there is no such device", "`lspci -D` lists them.")
        elif driver not in {"vfio-pci", "uio_pci_generic", "igb_uio"}:
            yield Finding(
                f"SSD {pci}",
                Level.PROBLEM,
                f"has the driver {driver or 'none'}: the target cannot take it",
                f"PCI_ALLOWED={pci} scripts/setup.sh, of SPDK. What is on it is lost to the kernel.",
            )
        else:
            yield Finding(f"SSD {pci}", Level.OK, f"has the driver {driver}")
