"""The part of the plan that is about bytes: the bdev, and the volume on it. Pure.

Nothing here ever makes anything smaller, takes a bdev that is another one under the same name, or writes to a device that may
bear something, but for the store of volumes, which the step says of itself.
"""

from __future__ import annotations

from posixpath import normpath
from typing import TYPE_CHECKING, Final

from xkv_gateway.sizes import format_size

if TYPE_CHECKING:
    from xkv_gateway.target.actual import ActualBdev
    from xkv_gateway.target.desired import Volume
    from xkv_gateway.target.plan import Draft

MIB: Final = 1 << 20
PRODUCTS: Final = {"aio": "AIO disk", "uring": "URING bdev", "malloc": "Malloc disk"}
"""How SPDK calls what is made by each kind; others have many names."""


def plan_storage(draft: Draft) -> bool:
    """Plan the bdev, and the volume where there shall be one.

    Returns:
        Whether the rest can be planned: not before a look at what a bdev that is to be made holds.
    """
    desired, actual = draft.desired, draft.actual
    wanted = desired.bdev
    found = actual.bdev(wanted.bdev_name)
    if found is None:
        return _make(draft)
    problems = len(draft.refusals)
    _judge(draft, found)
    if len(draft.refusals) > problems:
        return True
    if wanted.size_bytes is not None and (found.size_bytes or 0) < wanted.size_bytes:
        if wanted.kind not in {"aio", "uring"}:
            draft.refusals.append(
                f"the bdev {found.name} has {_size(found.size_bytes)}, less than {_size(wanted.size_bytes)}"
            )
            return True
        draft.step(
            f"bdev_{wanted.kind}_rescan",
            {"name": found.name},
            f"see whether the file has {_size(wanted.size_bytes)} now",
            look=True,
        )
        return False
    return True if desired.volume is None else _volume(draft, desired.volume, found)


def _make(draft: Draft) -> bool:
    """Plan to make the bdev; whether the rest can be planned."""
    desired = draft.desired
    wanted = desired.bdev
    uuid = {} if wanted.uuid is None else {"uuid": wanted.uuid}
    match wanted.kind:
        case "existing":
            draft.refusals.append(f"there is no bdev called {wanted.name}, and target.bdev.kind is existing")
            return True
        case "aio" | "uring":
            _judge_file(draft)
            more = {"fallocate": True} if wanted.kind == "aio" and wanted.fallocate else {}
            draft.step(
                f"bdev_{wanted.kind}_create",
                {
                    "name": wanted.name,
                    "filename": wanted.file,
                    "block_size": wanted.block_bytes,
                    **uuid,
                    **more,
                },
                f"open {wanted.file}",
                look=desired.volume is not None or wanted.size_bytes is not None,
            )
        case "malloc":
            assert wanted.size_bytes is not None
            draft.step(
                "bdev_malloc_create",
                {
                    "name": wanted.name,
                    "num_blocks": wanted.size_bytes // wanted.block_bytes,
                    "block_size": wanted.block_bytes,
                    **uuid,
                },
                f"take {_size(wanted.size_bytes)} of memory",
                look=desired.volume is not None,
            )
        case _:
            draft.step(
                "bdev_nvme_attach_controller",
                {"name": wanted.name, "trtype": "PCIe", "traddr": wanted.pci},
                f"attach the SSD {wanted.pci}",
                look=True,
            )
    return not draft.steps[-1].look


def _judge_file(draft: Draft) -> None:
    """Two bdevs on one file would write over each other, however its path is spelled."""
    wanted = draft.desired.bdev
    for bdev in draft.actual.bdevs:
        if bdev.file is not None and wanted.file is not None and normpath(bdev.file) == normpath(wanted.file):
            draft.refusals.append(f"{wanted.file} is in use as the bdev {bdev.name} already")


def _judge(draft: Draft, found: ActualBdev) -> None:
    """Whether a bdev that has the name is the one that is meant."""
    wanted = draft.desired.bdev
    differs = []
    product = PRODUCTS.get(wanted.kind)
    if product is not None and found.product not in {"", product}:
        differs.append(f"it is a {found.product!r}, not a {product!r}")
    if wanted.file is not None and found.file not in {None, wanted.file}:
        differs.append(f"it is the file {found.file}, not {wanted.file}")
    if wanted.pci is not None and found.pci not in {None, wanted.pci}:
        differs.append(f"it is at {found.pci}, not at {wanted.pci}")
    if wanted.uuid is not None and found.uuid not in {None, wanted.uuid}:
        differs.append(f"its UUID is {found.uuid}, not {wanted.uuid}")
    made = wanted.kind in PRODUCTS
    if made and found.block_bytes not in {None, wanted.block_bytes}:
        differs.append(f"its blocks have {found.block_bytes} bytes, not {wanted.block_bytes}")
    if wanted.kind == "malloc" and found.size_bytes not in {None, wanted.size_bytes}:
        differs.append(f"it has {_size(found.size_bytes)}, not {_size(wanted.size_bytes)}")
    if differs:
        draft.refusals.append(f"the bdev {found.name} is another one: {'; '.join(differs)}")


def _volume(draft: Draft, volume: Volume, base: ActualBdev) -> bool:
    """Plan the volume; whether the rest can be planned."""
    actual = draft.actual
    store = actual.store(volume.store)
    if store is None:
        others = [
            other.name for other in actual.stores if other.base is not None and base.is_called(other.base)
        ]
        if others or base.claimed is not False:
            user = f"the store {others[0]}" if others else "something else"
            draft.refusals.append(f"the bdev {base.name} is in use by {user}: there is no room for a store")
            return True
        in_memory = draft.desired.bdev.kind == "malloc"
        draft.step(
            "bdev_lvol_create_lvstore",
            {
                "bdev_name": base.name,
                "lvs_name": volume.store,
                "cluster_sz": volume.cluster_bytes,
            },
            f"make a store of volumes on {base.name}"
            + ("" if in_memory else ", which gives up what is on it"),
            look=True,
            erases=not in_memory,
        )
        return False
    if store.base is not None and not base.is_called(store.base):
        draft.refusals.append(f"the store {volume.store} is on {store.base}, not on {base.name}")
        return True
    found = actual.bdev(volume.alias)
    size_mib = volume.size_bytes // MIB
    if found is None:
        draft.step(
            "bdev_lvol_create",
            {
                "lvs_name": volume.store,
                "lvol_name": volume.name,
                "size_in_mib": size_mib,
                "thin_provision": volume.thin,
            },
            f"make a volume of {_size(volume.size_bytes)}",
            look=True,
        )
        return False
    # Sizes are rounded up to whole clusters.
    clusters = store.cluster_bytes or volume.cluster_bytes
    rounded = -(-volume.size_bytes // clusters) * clusters
    if found.size_bytes is None or found.size_bytes > rounded:
        draft.remarks.append(
            f"the volume {volume.alias} has {_size(found.size_bytes)} and stays so: making it {_size(volume.size_bytes)} would"
            " give up what is beyond"
        )
    elif found.size_bytes < rounded:
        draft.step(
            "bdev_lvol_resize",
            {"name": volume.alias, "size_in_mib": size_mib},
            f"grow the volume to {_size(volume.size_bytes)}",
        )
    return True


def _size(size_bytes: int | None) -> str:
    return "an unknown size" if size_bytes is None else format_size(size_bytes)
