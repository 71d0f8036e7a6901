"""`xkv-frontend serve`: the reverse proxy, in the foreground."""

from __future__ import annotations

import contextlib
import gc
import ipaddress
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import uvloop

from xkv_frontend import __version__
from xkv_frontend.clock import monotonic_ns
from xkv_frontend.errors import AddressInUseError, ConfigError, ExitCode
from xkv_frontend.files import read_private
from xkv_frontend.front import Front
from xkv_frontend.server import CONNECTIONS_MAX_DEFAULT, DRAIN_S_DEFAULT, Listeners, Service, address_of, bind
from xkv_frontend.settings import FrontSettings, build_parts, stated_version
from xkv_frontend.upstream import READ_S_DEFAULT, Upstream, UpstreamOptions, parse_upstream
from xkv_process.open_files import allow_open_files

if TYPE_CHECKING:
    import socket
    from typing import Any

log = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
METRICS_PORT_DEFAULT = 9464
_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.option("--upstream", required=True, metavar="URL", help="vLLM: http://HOST:PORT.")
@click.option("--bind-address", default="127.0.0.1", show_default=True, help="Where clients connect.")
@click.option(
    "--port", default=8080, show_default=True, type=click.IntRange(0, 65535), help="0: any free one."
)
@click.option(
    "--deployment",
    required=True,
    metavar="NAME",
    help="Part of every salt: different deployments share nothing.",
)
@click.option(
    "--secret-file", type=_FILE, help="The secret of all salts; else the credential, else CACHE_SALT_SECRET."
)
@click.option("--keys-file", type=_FILE, help="API keys (`xkv-frontend keys`); read again when it changes.")
@click.option(
    "--auth-hook", metavar="MODULE:FUNCTION", help="Your own authentication, instead of a keys file."
)
@click.option(
    "--trusted-header", metavar="NAME", help="A header with the tenant's name, set by a trusted peer."
)
@click.option("--trusted-user-header", metavar="NAME", help="A header with the user's name, set by the same.")
@click.option(
    "--trusted-peer",
    "trusted_peers",
    multiple=True,
    metavar="ADDRESS",
    help="Who may set it. May be repeated.",
)
@click.option("--policy-file", type=_FILE, help="Scopes, limits, media, fields: see docs/isolation.md.")
@click.option("--upstream-key-file", type=_FILE, help="vLLM's own API key, if it has one.")
@click.option("--upstream-timeout", type=click.FloatRange(1, 86400), default=READ_S_DEFAULT, show_default=True,
              help="Seconds that vLLM may be silent.")  # fmt: skip
@click.option("--vllm-version", metavar="X.Y", help="Instead of asking vLLM where a route needs it.")
@click.option(
    "--metrics-bind-address", default="127.0.0.1", show_default=True, help="Where Prometheus connects."
)
@click.option("--metrics-port", type=click.IntRange(0, 65535),
              help=f"Its port.  [default: {METRICS_PORT_DEFAULT}, or none if that is taken]")  # fmt: skip
@click.option(
    "--max-connections", type=click.IntRange(1, 1_000_000), default=CONNECTIONS_MAX_DEFAULT, show_default=True
)
@click.option("--drain-seconds", type=click.FloatRange(1, 3600), default=DRAIN_S_DEFAULT, show_default=True,
              help="What running streams get at the end.")  # fmt: skip
@click.option(
    "--access-log/--no-access-log",
    default=True,
    show_default=True,
    help="One JSON line a request, to stderr.",
)
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
def serve(**given: Any) -> ExitCode:
    """Serve, in the foreground, until Ctrl-C or SIGTERM."""
    logging.basicConfig(level=given["log_level"].upper(), format=LOG_FORMAT, stream=sys.stderr)
    # What these would say of a request may quote it; our own log has what matters.
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    allow_open_files(ConfigError)
    for name in ("httpcore", "httpx", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)
    names = ("deployment", "secret_file", "keys_file", "auth_hook", "trusted_header", "trusted_user_header",
             "trusted_peers", "policy_file", "access_log")  # fmt: skip
    settings = FrontSettings(
        **{name: given[name] for name in names}, vllm_version=stated_version(given["vllm_version"])
    )
    if given["auth_hook"]:
        sys.path.insert(0, str(Path.cwd()))
    parts = build_parts(settings, os.environ)
    upstream = Upstream(_upstream_options(given, settings), monotonic_ns)
    front = Front(parts, upstream)
    listeners = _listen(given)
    _warn_of_open_address(given["bind_address"])
    service = Service(front, parts.metrics, listeners, given["max_connections"], given["drain_seconds"])
    # What has been loaded stays: the collector need not look at it again and again while requests wait.
    gc.collect()
    gc.freeze()
    return uvloop.run(service.run(lambda: _announce(listeners, given["upstream"])))


def _upstream_options(given: dict[str, Any], settings: FrontSettings) -> UpstreamOptions:
    scheme, host, port = parse_upstream(given["upstream"])
    authorization = None
    if given["upstream_key_file"] is not None:
        key = read_private(given["upstream_key_file"], "the upstream's key file", 4096).strip()
        if not key or not key.isascii() or not key.decode("ascii").isprintable():
            raise ConfigError("the upstream's key file holds no key")
        authorization = b"Bearer " + key
    return UpstreamOptions(
        scheme, host, port, authorization, settings.vllm_version, given["upstream_timeout"]
    )


def _listen(given: dict[str, Any]) -> Listeners:
    front = bind(given["bind_address"], given["port"], "--port")
    metrics: socket.socket | None = None
    try:
        port = METRICS_PORT_DEFAULT if given["metrics_port"] is None else given["metrics_port"]
        metrics = bind(given["metrics_bind_address"], port, "--metrics-port")
    except AddressInUseError:
        if given["metrics_port"] is not None:
            front.close()
            raise
        log.warning(
            "port %d is taken: there are no metrics; --metrics-port chooses another one", METRICS_PORT_DEFAULT
        )
    return Listeners(front, metrics)


def _warn_of_open_address(host: str) -> None:
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        log.warning(
            "listening on %s without TLS: keys and prompts can be read on the way; put TLS in front", host
        )


def _announce(listeners: Listeners, upstream: str) -> None:
    lines = [
        f"xkv-frontend {__version__} serves http://{address_of(listeners.front)}",
        f"  upstream  {upstream}",
    ]
    if listeners.metrics is not None:
        lines.append(f"  metrics   http://{address_of(listeners.metrics)}/metrics")
    with contextlib.suppress(OSError):  # nobody can read it: no reason to stop serving
        click.echo("\n".join(lines))
