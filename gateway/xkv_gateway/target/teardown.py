"""What of a target the gateway made, and the steps that take it away again. Pure.

Told by names and numbers alone (see `desired`): a subsystem with our NQN, serial number and model number; bdevs and controllers
called `xkv-...` that no other subsystem has; keys of this subsystem. The transport stays, as others may use it. Volumes and
their store hold the card's bytes: they go only when that is asked for. A file or an SSD keeps its bytes in any case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xkv_gateway.config.target import PREFIX
from xkv_gateway.target.desired import MODEL
from xkv_gateway.target.plan import Draft, Plan

if TYPE_CHECKING:
    from xkv_gateway.target.actual import ActualTarget
    from xkv_gateway.target.desired import DesiredTarget


def plan_destroy(desired: DesiredTarget, actual: ActualTarget, *, volumes: bool) -> Plan:
    """Return the steps that take away what the gateway made; with `volumes` also the volume, and its store if it is empty."""
    draft = Draft(desired, actual)
    if not actual.started:
        return draft.done()
    subsystem = actual.subsystem(desired.nqn)
    if subsystem is not None:
        if subsystem.model != MODEL or subsystem.serial != desired.serial:
            draft.refusals.append(
                f"the subsystem {desired.nqn} was not made by this gateway: serial number {subsystem.serial!r}, model"
                f" number {subsystem.model!r}"
            )
            return draft.done()
        draft.step("nvmf_delete_subsystem", {"nqn": desired.nqn}, "take the subsystem away", drops=True)
    _bdevs(draft, volumes=volumes)
    for name in actual.keys:
        if name.startswith(desired.key_prefix):
            draft.step("keyring_file_remove_key", {"name": name}, "forget a key")
    return draft.done()


def _bdevs(draft: Draft, *, volumes: bool) -> None:
    desired, actual = draft.desired, draft.actual
    volume, base = desired.volume, desired.bdev
    store = None if volume is None else actual.store(volume.store)
    if volume is not None and store is not None and volumes:
        if actual.bdev(volume.alias) is not None:
            if _used_elsewhere(draft, volume.alias):
                return
            draft.step("bdev_lvol_delete", {"name": volume.alias}, "give up the volume", erases=True)
        inside = [
            bdev.name
            for bdev in actual.bdevs
            if any(alias.startswith(f"{volume.store}/") and alias != volume.alias for alias in bdev.aliases)
        ]
        if inside:
            draft.remarks.append(f"the store {volume.store} has other volumes too; it stays")
            return
        draft.step("bdev_lvol_delete_lvstore", {"lvs_name": volume.store}, "give up the store", erases=True)
    elif store is not None:
        draft.remarks.append(f"the store {store.name} stays, and with it the bdev {base.name}")
        return
    if actual.bdev(base.bdev_name) is None or base.kind == "existing" or not base.name.startswith(PREFIX):
        return
    if _used_elsewhere(draft, base.bdev_name):
        return
    if base.kind == "nvme":
        draft.step("bdev_nvme_detach_controller", {"name": base.name}, "detach the SSD")
    else:
        draft.step(
            f"bdev_{base.kind}_delete",
            {"name": base.name},
            "give the memory back" if base.kind == "malloc" else "close the file, which keeps its bytes",
            erases=base.kind == "malloc",
        )


def _used_elsewhere(draft: Draft, name: str) -> bool:
    """Return whether another subsystem has the bdev; that is told."""
    bdev = draft.actual.bdev(name)
    for other in draft.actual.subsystems:
        if other.nqn == draft.desired.nqn or bdev is None:
            continue
        if any(bdev.is_called(space.bdev) for space in other.namespaces):
            draft.remarks.append(f"the bdev {name} is a namespace of {other.nqn} too; it stays")
            return True
    return False
