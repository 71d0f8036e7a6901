"""`python -m bench [NAME...] [--json FILE]`: runs the parts, prints a table of the bars, writes the results."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.harness import BenchError, machine_facts
from xkv_nvmeof.blockdev import DeviceError
from xkv_rpc.errors import XkvRpcError

PARTS: Final = {
    "lookups": "bench.lookups",
    "device": "bench.device",
    "whole_way": "bench.whole_way",
    "journal": "bench.journal",
    "engine_scale": "bench.engine_scale",
    "turns": "bench.turns",
    "card_format": "bench.card_format",
    "frontend": "bench.frontend",
    "recovery": "bench.recovery",
    "tenants": "bench.tenants",
    "tenants_stack": "bench.tenants_stack",
    "tenants_live": "bench.tenants_live",
    "isolation": "bench.isolation",
    "scrape": "bench.scrape",
    "connector": "bench.connector",
    "vllm_ttft": "bench.vllm_ttft",
    "vllm_steps": "bench.vllm_steps",
}

FAILURES: Final = (BenchError, DeviceError, XkvRpcError, OSError)
"""What ends one part and not the run."""

BUSY_LOAD: Final = 0.5
"""Load average above which a warning stands beside the figures."""


def main(argv: list[str]) -> int:
    """Run the parts named in `argv` (none: all); 0 when all of them ran, whatever they measured."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(PARTS)}; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.names if name not in PARTS]
    if unknown:
        parser.error(f"no part is called {unknown[0]}; there are {', '.join(PARTS)}")
    console = Console(highlight=False)
    results: dict[str, Any] = {"machine": machine_facts(), "parts": {}}
    failed = False
    for name in arguments.names or PARTS:
        console.print(f"[bold]{name}[/] ...")
        begin = time.monotonic()
        try:
            part = importlib.import_module(PARTS[name]).main(())
        except FAILURES as error:
            console.print(f"{name}: {error}", style="red", markup=False)
            part, failed = {"failed": str(error)}, True
        part["seconds"] = round(time.monotonic() - begin, 1)
        results["parts"][name] = part
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    _print(results, console)
    return 1 if failed else 0


def _print(results: dict[str, Any], console: Console) -> None:
    machine = results["machine"]
    title = f"{machine['cores']} cores ({machine['cpu']}), {machine['memory_gib']} GiB, Python {machine['python']}"
    table = Table(title=title, title_justify="left")
    for name in ("part", "figure"):
        table.add_column(name)
    for name in ("value", "bar"):
        table.add_column(name, justify="right")
    table.add_column("met")
    for name, part in results["parts"].items():
        for bar in part.get("bars", ()):
            sign = "<=" if bar["at_most"] else ">="
            met = "[green]yes[/]" if bar["met"] else "[red]no[/]"
            if machine["load_average_before"] > BUSY_LOAD:
                met += " (busy)"
            table.add_row(name, bar["name"], f"{bar['value']:.2f}", f"{sign} {bar['bar']:g}", met)
    console.print(table)
    if machine["load_average_before"] > BUSY_LOAD:
        console.print(
            f"The machine was busy before this run (load {machine['load_average_before']:.1f}): "
            "what polls or shares a core with others is worth little.",
            style="yellow",
        )
    for name, part in results["parts"].items():
        for figure, value in _figures(part):
            console.print(f"{name:<13} {figure:<34} {value}", markup=False)


def _figures(part: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """The single numbers of a part, flattened; lists of rounds stay in the JSON."""
    lines: list[tuple[str, str]] = []
    for name, value in part.items():
        if isinstance(value, dict):
            lines += _figures(value, f"{prefix}{name} ")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            lines.append((prefix + name, f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"))
        elif isinstance(value, str):
            lines.append((prefix + name, value))
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
