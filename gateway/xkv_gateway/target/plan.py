"""From the target as it shall be and as it is: the steps in between, in order. Pure.

The order: what a start needs, keys, transport, bdev, subsystem, hosts, namespace; listeners last, so that nobody connects to a
half of it. What is there and right is left alone, so that a plan that was carried out is followed by an empty one.

What would lose somebody's bytes, or is somebody else's, is no step but a refusal, and nothing is done at all then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xkv_gateway.target.desired import MAX_NAMESPACES, MODEL
from xkv_gateway.target.plan_bdev import plan_storage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xkv_gateway.target.actual import ActualListener, ActualSubsystem, ActualTarget
    from xkv_gateway.target.desired import DesiredTarget, HostAccess


@dataclass(frozen=True, slots=True)
class Step:
    """One call."""

    method: str
    params: Mapping[str, Any]
    why: str
    """For people."""
    look: bool = False
    """What follows depends on what is there afterwards: look again."""
    erases: bool = False
    """It gives up what may be on a device: only when somebody has said so."""
    drops: bool = False
    """Connections that are open may end."""

    def shown(self) -> dict[str, Any]:
        """Return it for display: without the paths of keys, which are nobody's business."""
        params = {name: "(a file)" if name == "path" else value for name, value in self.params.items()}
        return {"method": self.method, "params": params, "why": self.why, "erases": self.erases}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done."""

    steps: tuple[Step, ...] = ()
    refusals: tuple[str, ...] = ()
    """Why nothing is done."""
    remarks: tuple[str, ...] = ()
    """What differs and stays so, and why."""
    open_end: bool = False
    """The last step is followed by others that only a look afterwards can tell."""

    @property
    def right(self) -> bool:
        """Whether there is nothing to do."""
        return not self.steps and not self.refusals


@dataclass(slots=True)
class Draft:
    """A plan in the making."""

    desired: DesiredTarget
    actual: ActualTarget
    steps: list[Step] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def step(self, method: str, params: Mapping[str, Any], why: str, **marks: bool) -> None:
        """Add a step."""
        self.steps.append(Step(method, params, why, **marks))

    def done(self, *, open_end: bool = False) -> Plan:
        """Return the plan."""
        steps = () if self.refusals else tuple(self.steps)
        return Plan(steps, tuple(self.refusals), tuple(self.remarks), open_end and bool(steps))


def plan(desired: DesiredTarget, actual: ActualTarget) -> Plan:
    """Return the steps from `actual` to `desired`."""
    draft = Draft(desired, actual)
    if not actual.started:
        _start(draft)
        return draft.done(open_end=True)
    _startup_remarks(draft)
    subsystem = actual.subsystem(desired.nqn)
    if subsystem is not None:
        _judge_subsystem(draft, subsystem)
        _close(draft, subsystem)
    _keys(draft)
    _transport(draft)
    if not plan_storage(draft):
        return draft.done(open_end=True)
    if subsystem is None:
        draft.step(
            "nvmf_create_subsystem",
            {
                "nqn": desired.nqn,
                "serial_number": desired.serial,
                "model_number": MODEL,
                "allow_any_host": desired.allow_any_host,
                "max_namespaces": MAX_NAMESPACES,
            },
            "make the subsystem",
        )
    elif desired.allow_any_host and subsystem.allow_any_host is False:
        draft.step(
            "nvmf_subsystem_allow_any_host",
            {"nqn": desired.nqn, "allow_any_host": True},
            "let any host connect, as is written down",
        )
    _hosts(draft, subsystem)
    _namespace(draft, subsystem)
    _listeners(draft, subsystem)
    _stale_keys(draft)
    return draft.done()


# --- the parts, in their order ------------------------------------------------------------------------------------


def _start(draft: Draft) -> None:
    """A target that waits: its settings, then let it begin; what it has then is looked at."""
    startup = draft.desired.startup
    dhchap = {
        name: list(values)
        for name, values in (
            ("dhchap_digests", startup.dhchap_digests),
            ("dhchap_dhgroups", startup.dhchap_dhgroups),
        )
        if values
    }
    if dhchap:
        draft.step("nvmf_set_config", dhchap, "say which hashes and groups may be used")
    if startup.tls_buffer_bytes is not None:
        draft.step(
            "sock_impl_set_options",
            {
                "impl_name": "ssl",
                "recv_buf_size": startup.tls_buffer_bytes,
                "send_buf_size": startup.tls_buffer_bytes,
            },
            "make the buffers of TLS large enough",
        )
    draft.step("framework_start_init", {}, "let the target begin", look=True)


def _startup_remarks(draft: Draft) -> None:
    startup = draft.desired.startup
    for name, wanted in (
        ("dhchap_digests", startup.dhchap_digests),
        ("dhchap_dhgroups", startup.dhchap_dhgroups),
    ):
        found = draft.actual.startup.get(name)
        if wanted and isinstance(found, list) and set(found) != set(wanted):
            draft.remarks.append(
                f"target.startup.{name}: the target has {', '.join(map(str, found))}; that can only be set before it begins"
                " (start it with --wait-for-rpc)"
            )


def _judge_subsystem(draft: Draft, subsystem: ActualSubsystem) -> None:
    """A subsystem of this NQN must be ours; its serial number cannot be changed."""
    desired = draft.desired
    if subsystem.model != MODEL:
        draft.refusals.append(
            f"the subsystem {desired.nqn} is somebody else's: its model number is {subsystem.model!r}, not {MODEL!r}"
        )
    elif subsystem.serial != desired.serial:
        draft.refusals.append(
            f"the subsystem {desired.nqn} has the serial number {subsystem.serial!r}, not {desired.serial!r},"
            " and that cannot be changed: `target destroy` it first"
        )


def _close(draft: Draft, subsystem: ActualSubsystem) -> None:
    """First of all shut doors that shall not be open: listeners and hosts that nobody has declared."""
    desired = draft.desired
    for listener in subsystem.listeners:
        if not _wanted(desired, listener):
            draft.step(
                "nvmf_subsystem_remove_listener",
                {"nqn": desired.nqn, "listen_address": dict(listener.params)},
                f"stop listening on {listener.address or 'an address'}, which is not declared",
                drops=True,
            )
    if subsystem.allow_any_host is not False and not desired.allow_any_host:
        draft.step(
            "nvmf_subsystem_allow_any_host",
            {"nqn": desired.nqn, "allow_any_host": False},
            "let only the hosts connect that are declared",
        )
    declared = {host.nqn: host for host in desired.hosts}
    for host in subsystem.hosts:
        access = declared.get(host.nqn)
        if access is None:
            why = f"do not let {host.nqn} connect, which is not declared"
        elif host.psk != _name(access.psk):
            why = f"give {host.nqn} another PSK"
        else:
            continue
        draft.step("nvmf_subsystem_remove_host", {"nqn": desired.nqn, "host": host.nqn}, why, drops=True)


def _wanted(desired: DesiredTarget, listener: ActualListener) -> bool:
    return listener.address in desired.listeners and listener.tls == desired.tls


def _keys(draft: Draft) -> None:
    for key in draft.desired.keys.values():
        if key.name not in draft.actual.keys:
            draft.step("keyring_file_add_key", {"name": key.name, "path": key.path}, "make a key known")
        elif draft.actual.keys[key.name] != key.path:
            draft.refusals.append(f"the key {key.name} is there, and not of the file that is declared")


def _transport(draft: Draft) -> None:
    wanted, found = draft.desired.transport, draft.actual.transport
    params = {
        "max_io_size": wanted.max_io_bytes,
        "in_capsule_data_size": wanted.in_capsule_bytes,
        "max_queue_depth": wanted.queue_depth,
    }
    if found is None:
        draft.step("nvmf_create_transport", {"trtype": "TCP", **params}, "speak NVMe/TCP")
        return
    for name, value in params.items():
        if found.get(name) not in {None, value}:
            draft.remarks.append(
                f"target.transport.{name}: the target has {found[name]}, not {value}; it can only be changed by a restart of"
                " the target"
            )


def _hosts(draft: Draft, subsystem: ActualSubsystem | None) -> None:
    desired = draft.desired
    there = {host.nqn: host for host in subsystem.hosts} if subsystem is not None else {}
    for access in desired.hosts:
        found, keys = there.get(access.nqn), _key_params(access)
        if found is None or found.psk != _name(access.psk):
            psk = {} if access.psk is None else {"psk": access.psk.name}
            draft.step(
                "nvmf_subsystem_add_host",
                {"nqn": desired.nqn, "host": access.nqn, **psk, **keys},
                f"let {access.nqn} connect{' with keys' if keys or psk else ''}",
            )
        elif (found.dhchap, found.dhchap_ctrl) != (_name(access.dhchap), _name(access.dhchap_ctrl)):
            draft.step(
                "nvmf_subsystem_set_keys",
                {"nqn": desired.nqn, "host": access.nqn, **keys},
                f"{'ask' if keys else 'do not ask'} {access.nqn} for {'other keys' if keys else 'keys any more'}",
            )


def _key_params(access: HostAccess) -> dict[str, str]:
    pairs = (("dhchap_key", access.dhchap), ("dhchap_ctrlr_key", access.dhchap_ctrl))
    return {name: key.name for name, key in pairs if key is not None}


def _name(key: Any) -> str | None:
    return None if key is None else str(key.name)


def _namespace(draft: Draft, subsystem: ActualSubsystem | None) -> None:
    desired, actual = draft.desired, draft.actual
    wanted = desired.bdev.bdev_name if desired.volume is None else desired.volume.alias
    bdev = actual.bdev(wanted)
    for other in actual.subsystems:
        if other.nqn != desired.nqn and any(_same(bdev, space.bdev) for space in other.namespaces):
            draft.refusals.append(f"the bdev {wanted} is a namespace of {other.nqn} already")
    there = {space.nsid: space for space in subsystem.namespaces} if subsystem is not None else {}
    for nsid, space in there.items():
        if nsid == desired.nsid:
            continue
        if _same(bdev, space.bdev):
            draft.refusals.append(f"the bdev {wanted} is namespace {nsid} already, not {desired.nsid}")
        else:
            draft.remarks.append(f"namespace {nsid} ({space.bdev}) is not declared; it is left alone")
    found = there.get(desired.nsid)
    if found is None:
        draft.step(
            "nvmf_subsystem_add_ns",
            {
                "nqn": desired.nqn,
                "namespace": {
                    "bdev_name": wanted,
                    "nsid": desired.nsid,
                    "uuid": desired.uuid,
                    "nguid": desired.nguid.upper(),
                },
            },
            f"make the bdev namespace {desired.nsid}",
        )
        return
    if not _same(bdev, found.bdev):
        draft.refusals.append(f"namespace {desired.nsid} is the bdev {found.bdev}, not {wanted}")
    for name, value, now in (
        ("UUID", desired.uuid, found.uuid),
        ("NGUID", desired.nguid, found.nguid),
    ):
        if now is not None and now.lower().replace("-", "") != value.replace("-", ""):
            draft.refusals.append(f"namespace {desired.nsid} has the {name} {now}, not {value}")


def _same(bdev: Any, name: str) -> bool:
    return bdev is not None and bdev.is_called(name)


def _listeners(draft: Draft, subsystem: ActualSubsystem | None) -> None:
    desired = draft.desired
    there = subsystem.listeners if subsystem is not None else ()
    right = {listener.address for listener in there if _wanted(desired, listener)}
    for address in desired.listeners:
        if address not in right:
            tls = {"secure_channel": True, "sock_impl": "ssl"} if desired.tls else {}
            draft.step(
                "nvmf_subsystem_add_listener",
                {"nqn": desired.nqn, "listen_address": address.params, **tls},
                f"listen on {address}{' with TLS' if tls else ''}",
            )


def _stale_keys(draft: Draft) -> None:
    """Keys of this subsystem that nobody is asked for any more."""
    for name in draft.actual.keys:
        if name.startswith(draft.desired.key_prefix) and name not in draft.desired.keys:
            draft.step("keyring_file_remove_key", {"name": name}, "forget a key that is not used any more")
