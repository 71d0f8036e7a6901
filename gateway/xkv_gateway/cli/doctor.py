"""`xkv-gateway doctor`: looks at this host with the eyes of the configuration."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from xkv_gateway.cardurl import KernelCardUrl, TcpCardUrl, parse_card_url
from xkv_gateway.cli.options import load_settings, setting_options, state_dir_of
from xkv_gateway.cli.tables import print_json
from xkv_gateway.clock import monotonic_ns
from xkv_gateway.config.target import NVMF_PORT, split_address
from xkv_gateway.daemon.ports import TokenBox, judge
from xkv_gateway.doctor.checks import Finding, Level, examine
from xkv_gateway.doctor.facts import Questions, gather
from xkv_gateway.errors import ExitCode, GatewayError
from xkv_gateway.networks import StorageNetworks
from xkv_gateway.target import spdk
from xkv_gateway.target.desired import desired_of
from xkv_gateway.target.plan import plan
from xkv_rpc.spdk import SpdkClient

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_gateway.config import Config


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
    findings = examine(await gather(questions, wall_s=time.time()), config, storage)
    findings.append(
        _judged("ports", "may all be opened where they are configured", lambda: _ports(config, directory))
    )
    if config.target.rpc is not None:
        findings.append(await _target(config, storage, directory))
    return findings


def _targets(config: Config) -> tuple[tuple[str, int], ...]:
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


def _ports(config: Config, credentials: Path | None) -> None:
    judge(config, TokenBox(config, credentials))


def _judged(check: str, text: str, work: Callable[[], None]) -> Finding:
    """Return what comes of a check that raises what a start would raise."""
    try:
        work()
    except GatewayError as error:
        return Finding(check, Level.PROBLEM, str(error), error.advice)
    return Finding(check, Level.OK, text)


async def _target(config: Config, storage: StorageNetworks, credentials: Path | None) -> Finding:
    """Ask the target itself."""
    check = "target"
    try:
        desired = desired_of(config.target, storage, credentials)
        client = SpdkClient(desired.rpc, clock=monotonic_ns)
        try:
            found = plan(desired, await spdk.look(client))
        finally:
            client.close()
    except GatewayError as error:
        return Finding(check, Level.PROBLEM, str(error), error.advice)
    if found.refusals:
        return Finding(check, Level.PROBLEM, found.refusals[0], "`xkv-gateway target plan` says more.")
    if found.steps:
        text = f"{len(found.steps)} steps are missing"
        return Finding(check, Level.NOTE, text, "`xkv-gateway target apply` takes them; `serve` does so too.")
    return Finding(check, Level.OK, f"{config.target.rpc}: as it shall be")


def _print(findings: list[Finding]) -> None:
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        mark = {Level.OK: "ok     ", Level.NOTE: "note   ", Level.PROBLEM: "PROBLEM"}[finding.level]
        click.echo(f"{mark}  {finding.check:<{width}}  {finding.text}")
        if finding.advice:
            click.echo(f"{'':7}  {'':<{width}}  -> {finding.advice}")
    problems = sum(finding.level is Level.PROBLEM for finding in findings)
    notes = sum(finding.level is Level.NOTE for finding in findings)
    click.echo(f"{problems} problem{'s' * (problems != 1)}, {notes} note{'s' * (notes != 1)}")
