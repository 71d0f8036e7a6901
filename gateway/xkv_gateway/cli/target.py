"""`xkv-gateway target`: the SPDK target of `[target]`, compared with what is there, made, watched, taken away."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from xkv_gateway.cli.options import config_option
from xkv_gateway.cli.tables import print_facts, print_json, print_table
from xkv_gateway.clock import monotonic_ns
from xkv_gateway.config import load_config
from xkv_gateway.errors import ConfigError, ExitCode, TargetError, TargetRefusedError
from xkv_gateway.networks import StorageNetworks
from xkv_gateway.sizes import format_size
from xkv_gateway.target import spdk
from xkv_gateway.target.actual import UnreadableAnswerError
from xkv_gateway.target.desired import desired_of
from xkv_gateway.target.figures import count, rates_between, read_sample
from xkv_gateway.target.plan import plan as plan_of
from xkv_gateway.target.teardown import plan_destroy
from xkv_process.text import ascii_only
from xkv_rpc.spdk import SpdkClient, SpdkError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from click.decorators import FC

    from xkv_gateway.target.actual import ActualBdev, ActualTarget
    from xkv_gateway.target.desired import DesiredTarget
    from xkv_gateway.target.figures import Rates
    from xkv_gateway.target.plan import Plan, Step

INTERVAL_S_MAX: Final = 60.0
T = TypeVar("T")


@click.group()
def target() -> None:
    """Make the SPDK target what [target] in the configuration says, and look at it."""


def _options(command: FC) -> FC:
    as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
    return config_option()(as_json(command))


def _desired(file: Path | None) -> DesiredTarget:
    config = load_config(file=file, environment=os.environ, flags={}).config
    if config.target.rpc is None:
        raise ConfigError(
            "there is no target to look after: target.rpc is not set",
            advice="`xkv-gateway config sample` shows the keys of [target].",
        )
    credentials = os.environ.get("CREDENTIALS_DIRECTORY")
    storage = StorageNetworks(config.fabric.networks)
    return desired_of(config.target, storage, Path(credentials) if credentials else None)


@contextlib.contextmanager
def _client(desired: DesiredTarget) -> Iterator[SpdkClient]:
    client = SpdkClient(desired.rpc, clock=monotonic_ns)
    try:
        yield client
    finally:
        client.close()


def _with_client(desired: DesiredTarget, work: Callable[[SpdkClient], Awaitable[T]]) -> T:
    async def run() -> T:
        with _client(desired) as client:
            return await work(client)

    return asyncio.run(run())


# --- plan and apply ---------------------------------------------------------------------------------------------


@target.command()
@_options
def plan(file: Path | None, as_json: bool) -> ExitCode:
    """Show what differs from the target that runs, step by step. Changes nothing.

    Exit code 0: nothing differs, 1: something does, 10: it cannot be made so without a loss.
    """
    desired = _desired(file)
    found = plan_of(desired, _with_client(desired, spdk.look))
    if as_json:
        print_json(_plan_json(found))
    else:
        _print_plan(found)
    return _verdict(found)


def _verdict(found: Plan) -> ExitCode:
    if found.refusals:
        return ExitCode.REFUSED
    return ExitCode.DEGRADED if found.steps else ExitCode.OK


def _plan_json(found: Plan) -> dict[str, Any]:
    return {
        "right": found.right,
        "steps": [step.shown() for step in found.steps],
        "open_end": found.open_end,
        "refusals": list(found.refusals),
        "remarks": list(found.remarks),
    }


def _print_plan(found: Plan) -> None:
    if found.right:
        click.echo("the target is as it shall be")
    for number, step in enumerate(found.steps, 1):
        click.echo(ascii_only(f"{number:3}. {_step_text(step)}"))
    if found.open_end:
        click.echo("     then it is looked at again: what follows depends on what is there")
    for text in found.refusals:
        click.echo(ascii_only(f"refused: {text}"))
    for text in found.remarks:
        click.echo(ascii_only(f"note: {text}"))


def _step_text(step: Step) -> str:
    marks = "; what is on it is lost" if step.erases else "; open connections end" if step.drops else ""
    return f"{step.why}{marks}  [{step.method}]"


@target.command()
@_options
@click.option(
    "--format-store",
    is_flag=True,
    help="Make the store of volumes if there is none: gives up what is on its bdev.",
)
def apply(file: Path | None, as_json: bool, format_store: bool) -> None:
    """Make the target what it shall be, listeners last. Again and again: only what is missing is done."""
    desired = _desired(file)

    def say(step: Step) -> None:
        if not as_json:
            click.echo(ascii_only(_step_text(step)))

    steps = _with_client(
        desired, lambda client: spdk.apply(client, desired, may_erase=format_store, on_step=say)
    )
    if as_json:
        print_json({"right": True, "steps": [step.shown() for step in steps]})
    else:
        click.echo("the target is as it shall be")


# --- destroy ----------------------------------------------------------------------------------------------------


@target.command()
@_options
@click.option("--yes", is_flag=True, help="Do it.")
@click.option("--volumes", is_flag=True, help="Also the volume of [target.lvol]: the card's bytes are lost.")
def destroy(file: Path | None, as_json: bool, yes: bool, volumes: bool) -> None:
    """Take away what the gateway made in the target, and nothing else.

    That is: the subsystem with our NQN, serial number and model number; the bdev, if its name begins with xkv- and no other
    subsystem has it; the keys of the subsystem. Files and SSDs keep their bytes; memory does not.
    """
    desired = _desired(file)

    async def work(client: SpdkClient) -> Plan:
        found = plan_destroy(desired, await spdk.look(client), volumes=volumes)
        if found.refusals:
            raise TargetRefusedError(found.refusals[0])
        if yes:
            for step in found.steps:
                await spdk.take(client, step)
        return found

    found = _with_client(desired, work)
    if as_json:
        print_json(_plan_json(found) | {"done": yes})
    else:
        for step in found.steps:
            click.echo(ascii_only(_step_text(step)))
        for text in found.remarks:
            click.echo(ascii_only(f"note: {text}"))
        if not found.steps:
            click.echo("there is nothing that the gateway made")
    if found.steps and not yes:
        raise TargetRefusedError("nothing was done", advice="To do that: --yes.")


# --- status -----------------------------------------------------------------------------------------------------


@target.command()
@_options
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0.05, INTERVAL_S_MAX),
    default=1.0,
    show_default=True,
    help="Seconds over which bandwidth and latency are measured.",
)
def status(file: Path | None, as_json: bool, interval_s: float) -> ExitCode:
    """Show the target: whether it is right, who is connected, bandwidth and latency.

    Exit codes as of `plan`.
    """
    desired = _desired(file)
    document = _with_client(desired, lambda client: _status(client, desired, interval_s))
    if as_json:
        print_json(document)
    else:
        _print_status(document)
    return ExitCode(document.pop("verdict"))


async def _status(client: SpdkClient, desired: DesiredTarget, interval_s: float) -> dict[str, Any]:
    actual = await spdk.look(client)
    found = plan_of(desired, actual)
    wanted = desired.bdev.bdev_name if desired.volume is None else desired.volume.alias
    bdev = actual.bdev(wanted)
    subsystem = actual.subsystem(desired.nqn)
    try:
        controllers, queue_pairs, rates = await _figures(client, desired, actual, bdev, interval_s)
    except (SpdkError, UnreadableAnswerError) as error:
        raise TargetError(f"the SPDK target at {client.address}: {error}") from None
    return {
        "rpc": str(client.address),
        "version": actual.version,
        "pid": actual.pid,
        "started": actual.started,
        "nqn": desired.nqn,
        "listeners": [] if subsystem is None else [str(entry.address) for entry in subsystem.listeners],
        "hosts": [] if subsystem is None else [host.nqn for host in subsystem.hosts],
        "allow_any_host": None if subsystem is None else subsystem.allow_any_host,
        "bdev": wanted,
        "size_bytes": None if bdev is None else bdev.size_bytes,
        "block_bytes": None if bdev is None else bdev.block_bytes,
        "controllers": controllers,
        "queue_pairs": queue_pairs,
        "rates": None if rates is None else asdict(rates),
        "plan": _plan_json(found),
        "verdict": int(_verdict(found)),
    }


async def _figures(
    client: SpdkClient,
    desired: DesiredTarget,
    actual: ActualTarget,
    bdev: ActualBdev | None,
    interval_s: float,
) -> tuple[int | None, int | None, Rates | None]:
    """Return controllers, queue pairs and rates, as far as there are any."""
    controllers = queue_pairs = None
    if actual.subsystem(desired.nqn) is not None:
        nqn = {"nqn": desired.nqn}
        controllers = count(await client.call("nvmf_subsystem_get_controllers", nqn))
        queue_pairs = count(await client.call("nvmf_subsystem_get_qpairs", nqn))
    if bdev is None:
        return controllers, queue_pairs, None
    before = read_sample(await client.call("bdev_get_iostat", {"names": [bdev.name]}))
    await asyncio.sleep(interval_s)
    after = read_sample(await client.call("bdev_get_iostat", {"names": [bdev.name]}))
    return controllers, queue_pairs, rates_between(before, after)


def _print_status(document: dict[str, Any]) -> None:
    size_bytes, rates = document["size_bytes"], document["rates"]
    bdev = document["bdev"]
    if size_bytes is None:
        bdev += ": not there"
    else:
        bdev += f": {format_size(size_bytes)} in blocks of {document['block_bytes']} B"
    plan = document["plan"]
    state = "is as it shall be" if plan["right"] else "is NOT as it shall be: see `xkv-gateway target plan`"
    print_facts(
        f"SPDK {document['version']} at {document['rpc']}, process {document['pid']}, {state}",
        [
            ("subsystem", document["nqn"]),
            ("listens on", ", ".join(document["listeners"]) or "nothing"),
            ("hosts", "any" if document["allow_any_host"] else ", ".join(document["hosts"]) or "none"),
            ("bdev", bdev),
            (
                "connected",
                f"{document['controllers'] or 0} controllers, {document['queue_pairs'] or 0} queue pairs",
            ),
        ],
    )
    for text in plan["remarks"]:
        click.echo(ascii_only(f"note: {text}"))
    if rates is not None:
        rows = [
            (
                name,
                f"{format_size(int(rates[f'{word}_bytes_per_s']))}/s",
                f"{rates[f'{word}s_per_s']:.0f}",
                "-" if (latency := rates[f"{word}_latency_us"]) is None else f"{latency:.0f}",
            )
            for name, word in (("reads", "read"), ("writes", "write"))
        ]
        print_table(("", "bandwidth", "per second", "latency us"), rows)
