"""`xkv-gateway replay`: plays a trace against a running gateway and says what came of it."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import uvloop
from rich.console import Console

from xkv_gateway.clock import monotonic_ns
from xkv_gateway.config import load_config
from xkv_gateway.errors import ConfigError, ExitCode
from xkv_gateway.replay.generate import PACKAGED
from xkv_gateway.replay.progress import show_progress
from xkv_gateway.replay.report import as_document, print_report
from xkv_gateway.replay.run import ReplayPlan, Where, run_replay
from xkv_gateway.replay.tenants import TENANTS_MAX
from xkv_gateway.replay.trace import TraceError, read_trace
from xkv_gateway.sizes import format_size, parse_size
from xkv_rpc.curve_files import CertificateError, read_client_keys
from xkv_rpc.messages import DEFAULT_NAME, NAMESPACE_BYTES_MAX, SCOPE_BYTES_MAX

if TYPE_CHECKING:
    from xkv_gateway.replay.report import ReplayOutcome
    from xkv_rpc.doors import ClientKeys

BLOCK_BYTES_MAX: Final = 1 << 30
SPEED_MIN: Final = 1e-6
"""Slower than a million times real time is a typing error."""
SPEED_MAX: Final = 1e9
WILDCARDS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - what was bound, not what is bound


def _size(_: click.Context, __: click.Parameter, text: str) -> int:
    try:
        size_bytes = parse_size(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if not 1 <= size_bytes <= BLOCK_BYTES_MAX:
        raise click.BadParameter(f"must be between 1 byte and {format_size(BLOCK_BYTES_MAX)}")
    return size_bytes


def _speed(_: click.Context, __: click.Parameter, text: str) -> float | None:
    if text == "max":
        return None
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not SPEED_MIN <= speed <= SPEED_MAX:
        raise click.BadParameter(f"{text!r} is neither `max` nor a multiple of real time above 0")
    return speed


def _namespace(_: click.Context, __: click.Parameter, text: str) -> str:
    if not text.isprintable() or len(text.encode("utf-8", "replace")) > NAMESPACE_BYTES_MAX:
        raise click.BadParameter(f"must be at most {NAMESPACE_BYTES_MAX} bytes of text")
    return "" if text == DEFAULT_NAME else text


def _scope(_: click.Context, __: click.Parameter, text: str) -> bytes:
    try:
        scope = bytes.fromhex(text)
    except ValueError:
        # The text is not repeated: somebody may have taken a salt for a scope.
        raise click.BadParameter("is not a scope in hexadecimal (salts never go on a command line)") from None
    if len(scope) > SCOPE_BYTES_MAX:
        raise click.BadParameter(f"is longer than {SCOPE_BYTES_MAX} bytes")
    if scope == DEFAULT_NAME.encode():
        raise click.BadParameter("is reserved; leave it out for the default scope")
    return scope


def _timeout(_: click.Context, __: click.Parameter, seconds: float) -> float:
    if math.isnan(seconds):  # it passes every range
        raise click.BadParameter("is not a number")
    return seconds


@click.command()
@click.argument("trace", type=click.Path(path_type=Path), required=False)
@click.option("--limit", type=click.IntRange(min=1), help="Play only the first N requests.", metavar="N")
@click.option(
    "--speed",
    metavar="X|max",
    callback=_speed,
    default="max",
    show_default=True,
    help="Multiple of real time, or as fast as possible.",
)
@click.option(
    "--block-bytes",
    metavar="SIZE",
    callback=_size,
    default="64KiB",
    show_default=True,
    help="Payload of a block.",
)
@click.option("--namespace", metavar="NAME", callback=_namespace, default="replay", show_default=True)
@click.option(
    "--scope", metavar="HEX", callback=_scope, default="", help="Scope of a tenant; none: the default scope."
)
@click.option(
    "--tenants",
    type=click.IntRange(1, TENANTS_MAX),
    metavar="N",
    help="Split the trace over N tenants: a prompt is the tenant's whose number is its second block modulo N."
    " Their scopes are those of the salts replay-0, replay-1, ...",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Requests at the same time; above 1 the hit count depends on their timing.",
)
@click.option(
    "--region/--inline",
    "region",
    default=None,
    help="Bytes through shared memory or inside the messages. Default: shared memory where the gateway offers it here.",
)
@click.option("--lease-ms", type=click.IntRange(1, 60_000), default=30_000, show_default=True)
@click.option(
    "--timeout",
    type=click.FloatRange(0.1, 3600),
    callback=_timeout,
    default=30.0,
    show_default=True,
    help="Seconds for one answer.",
)
@click.option("--host", help="Address of the control port. Default: as configured.")
@click.option("--port", type=click.IntRange(1, 65535), help="Control port. Default: as configured.")
@click.option(
    "--socket", "unix_path", metavar="PATH", help="The gateway's Unix socket, instead of --host and --port."
)
@click.option(
    "--key",
    "key_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Key for an endpoint with keys: the NAME.key_secret of `keys new NAME`.",
)
@click.option("--config", "file", type=click.Path(path_type=Path), help="Settings (TOML).")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as one JSON document.")
def replay(
    *,
    trace: Path | None,
    limit: int | None,
    speed: float | None,
    block_bytes: int,
    namespace: str,
    scope: bytes,
    tenants: int | None,
    concurrency: int,
    region: bool | None,
    lease_ms: int,
    timeout: float,
    host: str | None,
    port: int | None,
    unix_path: str | None,
    key_file: Path | None,
    file: Path | None,
    as_json: bool,
) -> ExitCode:
    """Play a TRACE of block hashes against a running gateway, as a connector would.

    For each request: look up the blocks of the prompt with a lease, load the hits and compare every byte, store the
    rest. TRACE has one JSON object a line (plain or gzip) with timestamp, input_length, output_length and hash_ids;
    without TRACE a small packaged one is played.

    Exit code 0: every loaded byte was right; 8: some were not; 2: the trace or an option is wrong; 3: no gateway
    answers, or it went away; 6: the card is offline.
    """
    if tenants and scope:
        raise ConfigError("--tenants and --scope: tenants have scopes of their own")
    if unix_path is not None and (host is not None or port is not None or key_file is not None):
        raise ConfigError("--socket: stands instead of --host and --port, and asks for no --key")
    try:
        loaded = read_trace(trace if trace is not None else PACKAGED, limit=limit)
    except TraceError as error:
        raise ConfigError(str(error)) from None
    plan = ReplayPlan(
        where=Where("", 0, unix_path) if unix_path is not None else _where(host, port, file),
        block_bytes=block_bytes,
        namespace=namespace,
        scope=scope,
        concurrency=concurrency,
        region=region,
        speed=speed,
        lease_ms=lease_ms,
        timeout_ns=int(timeout * 1e9),
        tenants=tenants or 0,
        keys=_keys(key_file),
    )
    with show_progress(loaded) as on_progress:
        result = uvloop.run(run_replay(plan, loaded, on_progress, clock=monotonic_ns))
    _print(result.outcome, as_json=as_json)
    if result.failure is not None:
        raise result.failure
    return ExitCode.MISMATCH if result.outcome.stats.blocks_mismatched else ExitCode.OK


def _keys(file: Path | None) -> ClientKeys | None:
    try:
        return None if file is None else read_client_keys(file)
    except CertificateError as error:
        raise ConfigError(f"--key: {error}") from None


def _where(host: str | None, port: int | None, file: Path | None) -> Where:
    if host is not None and port is not None:
        return Where(host, port)
    control = load_config(file=file, environment=os.environ, flags={}).config.control
    if host is None and port is None and not control.open and control.socket is not None:
        return Where("", 0, control.socket)
    return Where(
        host if host is not None else WILDCARDS.get(control.bind_address, control.bind_address),
        port if port is not None else control.port,
    )


def _print(outcome: ReplayOutcome, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(as_document(outcome), indent=2, allow_nan=False))
    elif outcome.stats.requests or outcome.problem is None:
        print_report(outcome, Console(file=sys.stdout, highlight=False))
