"""`xkv-gateway doctor`: looks at this host with the eyes of the configuration."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from xkv_gateway.cardurl import KernelCardUrl, TcpCardUrl, parse_card_url
from xkv_gateway.cli.options import load_settings, setting_options, state_dir_of
from xkv_gateway.cli.tables import print_json
from xkv_gateway.clock import monotonic_ns
from xkv_gateway.config.target import NVMF_PORT, split_address
from xkv_gateway.daemon.ports import TokenBox, judge
from xkv_gateway.doctor.checks import Finding, Level, examine
from xkv_gateway.doctor.facts import Questions, gather, in_time
from xkv_gateway.doctor.keys import examine_keys
from xkv_gateway.errors import ExitCode, GatewayError
from xkv_gateway.networks import StorageNetworks
from xkv_gateway.target import spdk
from xkv_gateway.target.desired import desired_of
from xkv_gateway.target.plan import plan
from xkv_process.text import ascii_only
from xkv_rpc.spdk import SpdkClient

if TYPE_CHECKING:
    from xkv_gateway.config import Config
    from xkv_gateway.target.plan import Plan

TARGET_TIMEOUT_S: Final = 10.0
"""For all that is asked of the target: one that begins, or is very slow, is asked again by whoever wants to know."""
Address = tuple[str, int]


@click.command()
@setting_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def doctor(file: Path | None, as_json: bool, **flags: str | None) -> ExitCode:
    """Check this host: limits, clock, memory, kernel, storage network, target. Changes nothing.

    Exit code 0: nothing is wrong, 1: something keeps the gateway from doing what is configured. Notes cost speed or safety only.
    """
    loaded = load_settings(file, flags)
    findings = asyncio.run(_examine(loaded.config, state_dir_of(loaded)))
    wrong = any(finding.level is Level.PROBLEM for finding in findings)
    if as_json:
        rows = [
            {"check": entry.check, "level": entry.level, "text": entry.text, "advice": entry.advice}
            for entry in findings
        ]
        print_json({"healthy": not wrong, "findings": rows})
    else:
        _print(findings)
    return ExitCode.DEGRADED if wrong else ExitCode.OK


async def _examine(config: Config, state_dir: Path) -> list[Finding]:
    credentials = os.environ.get("CREDENTIALS_DIRECTORY")
    directory = Path(credentials) if credentials else None
    storage = StorageNetworks(config.fabric.networks)
    questions = Questions(
        reaches=_targets(config),
        files=_files(config),
        pci=config.target.bdev.pci,
        state_dir=state_dir,
    )
    facts, ports, keys, (target, coming) = await asyncio.gather(
        gather(questions, wall_s=time.time()),
        _ports(config, directory),
        _keys(config, directory),
        _target(config, storage, directory),
    )
    return [*examine(facts, config, storage, coming), ports, *keys, *target]


def _targets(config: Config) -> tuple[Address, ...]:
    """Return where the card is, and where the target shall listen."""
    found = []
    if config.card.url is not None:
        url = parse_card_url(config.card.url)
        if isinstance(url, TcpCardUrl | KernelCardUrl):
            found.append((url.host, url.port))
        if isinstance(url, TcpCardUrl):
            found += url.portals
    found += [split_address(text, NVMF_PORT) for text in config.target.listeners]
    return tuple(dict.fromkeys(found))


def _files(config: Config) -> tuple[tuple[str, str], ...]:
    """Return the files of keys that are named by a path; credentials are systemd's business."""
    fabric = config.fabric
    named = [
        ("fabric.dhchap_key_file", fabric.dhchap_key_file),
        ("fabric.dhchap_ctrl_key_file", fabric.dhchap_ctrl_key_file),
    ]
    if config.target.rpc is not None and config.target.rpc.startswith("/"):
        for host in config.target.hosts:
            named += [
                (f"target.hosts {setting}", path)
                for setting, path in host.model_dump().items()
                if setting.endswith("_file")
            ]
    return tuple(dict.fromkeys((setting, path) for setting, path in named if path and path.startswith("/")))


async def _ports(config: Config, credentials: Path | None) -> Finding:
    """Judge the doors as a start would: their addresses, keys and tokens."""
    check = "ports"
    try:
        await in_time(lambda: judge(config, TokenBox(config, credentials)))
    except GatewayError as error:
        return Finding(check, Level.PROBLEM, str(error), error.advice)
    except TimeoutError:
        text = "reading the keys and tokens that are named does not come to an end"
        return Finding(check, Level.PROBLEM, text, "Is the server of their file system away?")
    return Finding(check, Level.OK, "may all be opened where they are configured")


async def _keys(config: Config, credentials: Path | None) -> list[Finding]:
    try:
        return await in_time(lambda: examine_keys(config, credentials))
    except TimeoutError:
        return []  # its files are told to be silent one by one


async def _target(
    config: Config, storage: StorageNetworks, credentials: Path | None
) -> tuple[list[Finding], frozenset[Address]]:
    """Ask the target itself, where there is one to look after; return also where `serve` will have it listen."""
    if config.target.rpc is None:
        return [], frozenset()
    try:
        desired = desired_of(config.target, storage, credentials)
        client = SpdkClient(desired.rpc, clock=monotonic_ns)
        try:
            async with asyncio.timeout(TARGET_TIMEOUT_S):
                found = plan(desired, await spdk.look(client))
        finally:
            client.close()
    except TimeoutError:
        text = f"{config.target.rpc}: it answers, but did not tell all within {TARGET_TIMEOUT_S:.0f} s"
        return [_finding(Level.PROBLEM, text, "Is it still starting? Then ask again.")], frozenset()
    except GatewayError as error:
        return [_finding(Level.PROBLEM, str(error), error.advice)], frozenset()
    coming = frozenset((listener.ip, listener.port) for listener in desired.listeners)
    return [
        _verdict(config.target.rpc, found, with_volume=desired.volume is not None)
    ], coming if _is_made_by_serve(found) else frozenset()


def _is_made_by_serve(found: Plan) -> bool:
    return bool(found.steps) and not any(step.erases for step in found.steps)


def _verdict(rpc: str, found: Plan, *, with_volume: bool) -> Finding:
    if found.refusals:
        return _finding(Level.PROBLEM, found.refusals[0], "`xkv-gateway target plan` says more.")
    if not found.steps:
        return _finding(Level.OK, f"{rpc}: as it shall be")
    number = len(found.steps)
    text = f"{number} step{'s are' if number > 1 else ' is'} missing"
    if _is_made_by_serve(found):
        advice = "`xkv-gateway target apply` takes them; `serve` does so too."
        if found.open_end and with_volume:
            advice += " A store of volumes that is not on the device yet needs `target apply --format-store`."
        return _finding(Level.NOTE, text, advice)
    return _finding(
        Level.PROBLEM,
        f"{text}; what is on a device would be given up for a store of volumes",
        "`xkv-gateway target apply --format-store` takes them; `serve` never does.",
    )


def _finding(level: Level, text: str, advice: str = "") -> Finding:
    return Finding("target", level, text, advice)


def _print(findings: list[Finding]) -> None:
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        mark = {Level.OK: "ok     ", Level.NOTE: "note   ", Level.PROBLEM: "PROBLEM"}[finding.level]
        click.echo(f"{mark}  {finding.check:<{width}}  {ascii_only(finding.text)}")
        if finding.advice:
            click.echo(f"{'':7}  {'':<{width}}  -> {ascii_only(finding.advice)}")
    problems = sum(finding.level is Level.PROBLEM for finding in findings)
    notes = sum(finding.level is Level.NOTE for finding in findings)
    click.echo(f"{problems} problem{'s' * (problems != 1)}, {notes} note{'s' * (notes != 1)}")
