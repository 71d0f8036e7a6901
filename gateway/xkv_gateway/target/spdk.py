"""Looks at an SPDK target, and makes it what it shall be."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from xkv_gateway.errors import TargetAwayError, TargetError, TargetRefusedError, TargetStepError
from xkv_gateway.target import actual as read
from xkv_gateway.target.actual import ActualTarget, UnreadableAnswerError
from xkv_gateway.target.plan import plan
from xkv_rpc.spdk import SpdkClient, SpdkError, SpdkRefusedError, SpdkUnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_gateway.target.desired import DesiredTarget
    from xkv_gateway.target.plan import Plan, Step

log = logging.getLogger(__name__)

START_METHOD: Final = "framework_start_init"
INIT_TIMEOUT_MS: Final = 30_000
"""A target that loads a configuration of its own opens its socket before."""
STEP_TIMEOUT_MS: Final = 30_000
"""Attaching an SSD and making a store take seconds."""
LOOKS_MAX: Final = 3
"""A look at a target that is restarted meanwhile shows halves of two; it is repeated."""
TAKEN_MAX: Final = 2
"""A step that is missing again: the target may have been restarted, and in a container be the same process by its number."""
ROUNDS_MAX: Final = 12
"""Looks and plans of one application: each round brings the target further, or it fails."""


async def look(client: SpdkClient) -> ActualTarget:
    """Return the target as it is.

    Raises:
        TargetAwayError: it cannot be reached, does not answer or cannot be understood.
    """
    try:
        for _ in range(LOOKS_MAX):
            found = await _look(client)
            if found.pid is None or found.pid == read.read_pid(await client.call("framework_get_reactors")):
                return found
        raise UnreadableAnswerError("it is restarted again and again")  # noqa: TRY301 - as any answer of no use
    except (SpdkError, UnreadableAnswerError) as error:
        advice = "Does it run, and is target.rpc where it takes orders (nvmf_tgt -r)?"
        if isinstance(error, SpdkUnreachableError) and error.denied:
            advice = "Let this user in: in the target's unit Group=xkv-gateway and UMask=0007, or run this as root."
        raise TargetAwayError(f"the SPDK target at {client.address}: {error}", advice=advice) from None


async def _look(client: SpdkClient) -> ActualTarget:
    methods = read.read_methods(await client.call("rpc_get_methods", {"current": True}))
    reactors = await client.call("framework_get_reactors") if "framework_get_reactors" in methods else None
    version = read.read_version(await client.call("spdk_get_version"))
    if START_METHOD in methods:
        return ActualTarget(read.read_pid(reactors), version, started=False)
    await client.call("framework_wait_init", timeout_ms=INIT_TIMEOUT_MS)
    if reactors is None:
        reactors = await client.call("framework_get_reactors")
    # A store that is on a bdev shows by itself, after a moment.
    await client.call("bdev_wait_for_examine", timeout_ms=INIT_TIMEOUT_MS)
    saved = await client.call("framework_get_config", {"name": "nvmf"})
    return ActualTarget(
        pid=read.read_pid(reactors),
        version=version,
        transport=read.read_transport(await client.call("nvmf_get_transports")),
        startup=read.read_startup(saved),
        keys=read.read_keys(await _listed(client, methods, "keyring_get_keys")),
        bdevs=read.read_bdevs(await client.call("bdev_get_bdevs")),
        stores=read.read_stores(await _listed(client, methods, "bdev_lvol_get_lvstores")),
        subsystems=read.read_subsystems(await client.call("nvmf_get_subsystems"), saved),
    )


async def _listed(client: SpdkClient, methods: frozenset[str], method: str) -> Any:
    """Return what a method lists: nothing, where the target was built without what it is about."""
    return await client.call(method) if method in methods else []


async def pid_of(client: SpdkClient) -> int:
    """Return the process id of the target.

    Raises:
        TargetAwayError: it did not tell.
    """
    method = "framework_get_reactors"
    try:
        pid = read.read_pid(await client.call(method))
    except SpdkError as error:
        raise TargetAwayError(str(error)) from None
    if pid is None:
        raise TargetAwayError(f"{method}: the answer does not tell the process")
    return pid


async def apply(
    client: SpdkClient,
    desired: DesiredTarget,
    *,
    may_erase: bool = False,
    on_step: Callable[[Step], None] | None = None,
) -> tuple[Step, ...]:
    """Make the target what it shall be; return the steps that were taken.

    Before each round it is looked at anew, so that it does not matter how far an earlier attempt came.

    Args:
        client: the target.
        desired: how it shall be.
        may_erase: whether steps may give up what is on a device.
        on_step: told of each step before it is taken.

    Raises:
        TargetRefusedError: it would lose something, or is somebody else's: nothing (more) was done.
        TargetError: a step failed, or the target went away. What was done stays; applying again goes on.
    """
    taken: list[Step] = []
    refused: list[Step] = []
    before: list[Step] = []
    pid: int | None = None
    for _ in range(ROUNDS_MAX):
        actual = await look(client)
        if actual.pid != pid:
            # Restarted meanwhile, it knows nothing of what was done.
            pid, before, taken, refused = actual.pid, before + taken, [], []
        coming = plan(desired, actual)
        if coming.refusals:
            raise TargetRefusedError(coming.refusals[0], advice="; ".join(coming.refusals[1:]))
        if not coming.steps:
            return (*before, *taken)
        _judge(coming, taken, may_erase=may_erase)
        for step in coming.steps:
            if on_step is not None:
                on_step(step)
            try:
                await take(client, step)
            except TargetStepError:
                # Somebody else may have done it meanwhile, another gateway or another hand: look before it counts.
                if step in refused:
                    raise
                refused.append(step)
                break
            taken.append(step)
            if step.look:
                break
    raise TargetError(f"after {ROUNDS_MAX} rounds the target is still not as it shall be")


def _judge(coming: Plan, taken: list[Step], *, may_erase: bool) -> None:
    for step in coming.steps:
        if step.erases and not may_erase:
            raise TargetRefusedError(
                f"{step.why}: only when asked for",
                advice="`xkv-gateway target apply --format-store` does it. What is on that device is lost.",
            )
        if taken.count(step) >= TAKEN_MAX:
            text = f"{step.method} was done, and had no effect ({step.why})"
            raise TargetError(text, advice=_advice(step))


async def take(client: SpdkClient, step: Step) -> Any:
    """Take one step.

    Raises:
        TargetStepError: the target said no.
        TargetAwayError: it did not answer; whether it was done is not known.
    """
    try:
        return await client.call(step.method, step.params, timeout_ms=STEP_TIMEOUT_MS)
    except SpdkRefusedError as error:
        raise TargetStepError(f"the target refused to {step.why}: {error}", advice=_advice(step)) from None
    except SpdkError as error:
        raise TargetAwayError(f"while it was to {step.why}: {error}") from None


_ADVICE: Final = {
    "keyring_file_add_key": "The file must exist where the target runs, belong to its user, and have mode 0600.",
    "bdev_aio_create": "The file must exist where the target runs: `truncate -s SIZE FILE` makes an empty one.",
    "bdev_uring_create": "The file must exist where the target runs: `truncate -s SIZE FILE` makes an empty one.",
    "bdev_aio_rescan": "Has the file that size where the target runs? `truncate -s SIZE FILE` gives it.",
    "bdev_malloc_create": "Has the target so much memory (huge pages, or nvmf_tgt -s)?",
    "bdev_nvme_attach_controller": "Is the SSD bound to vfio-pci (SPDK's setup.sh), and used by nothing else?",
    "nvmf_subsystem_add_listener": "Is it an address of the target's machine, and the port free?",
    "bdev_lvol_create": "Has the store room for it?",
    "bdev_lvol_resize": "Has the store room for it?",
}


def _advice(step: Step) -> str:
    return _ADVICE.get(step.method, "The target's own log says more.")
