"""(5) What the front end adds: latency over going to the upstream directly, streaming and not, at 1 and 64 clients; requests a
second; memory a stream. In turns with going directly and, where it is installed, with nginx as a plain reverse proxy.

The upstream is a stand-in that thinks for 100 to 300 ms, drawn anew for each request, which is taken off what is measured: 64
clients then ask some 300 times a second. (With the same time for all, clients that once got behind one another would stay together
for ever, and one would measure the queue that they form.) Without thinking, what is measured is the throughput of one process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import uvloop

from bench.harness import BenchError, CpuClock, accepts, at_most, child, free_port, wait_until, work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.harness import Child

ROUNDS: Final = 5
CLIENTS: Final = (1, 64)
THINK_MS: Final = (100, 300)
EVENTS: Final = 20
EVERY_MS: Final = 25
PROMPT_BYTES: Final = 4000
REQUESTS: Final = {1: 6, 64: 320}
"""Requests of a round, of all clients together."""
RATE_REQUESTS: Final = 1500
STREAMS: Final = 400
ADDED_P50_MS_MAX: Final = 2.0
STREAM_BYTES_MAX: Final = 1 << 20
LAST_CHUNK: Final = b"0\r\n\r\n"


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run it and return the results."""
    parser = argparse.ArgumentParser(prog="bench.frontend", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args(list(argv))
    with ExitStack() as stack:
        folder = stack.enter_context(work_folder())
        upstream_port = stack.enter_context(_upstream(folder))
        front_port, key, front = stack.enter_context(_front(folder, upstream_port))
        ports = {"direct": upstream_port, "front": front_port}
        if shutil.which("nginx"):
            ports["nginx"] = stack.enter_context(_nginx(folder, upstream_port))
        results = _latencies(ports, key, arguments.rounds)
        results |= _rates(ports, key, arguments.rounds, front)
        results["bytes_a_stream"] = uvloop.run(_memory(front_port, key, front))
    results["nginx"] = "measured" if "nginx" in ports else "not installed (Debian: apt-get install nginx)"
    added = results["added_ms"]["64 clients, whole"]["front"]
    results["bars"] = [
        at_most("added p50 at 64 clients, whole (ms)", added["p50"], ADDED_P50_MS_MAX),
        at_most(
            "added p50 of the first byte at 64 clients, streaming (ms)",
            results["added_ms"]["64 clients, streaming"]["front"]["p50"],
            ADDED_P50_MS_MAX,
        ),
        at_most("memory a stream (bytes)", results["bytes_a_stream"], STREAM_BYTES_MAX),
    ]
    return results


def _request(key: str, *, events: int, every_ms: int = EVERY_MS) -> bytes:
    prompt = f"think=000 events={events} every={every_ms} " + "x" * PROMPT_BYTES
    body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 20, "stream": events > 0}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes, events: int
) -> tuple[float, float]:
    """Return the milliseconds to the first byte of the body, and to the end of the answer."""
    began = time.perf_counter_ns()
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise BenchError(f"the answer is {head[:40]!r}")
    received = await reader.read(65536)
    first = time.perf_counter_ns()
    length = None
    if not events:
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
    while not (received.endswith(LAST_CHUNK) if length is None else len(received) >= length):
        piece = await reader.read(65536)
        if not piece:
            raise BenchError("an answer broke off")
        received += piece
    return (first - began) / 1e6, (time.perf_counter_ns() - began) / 1e6


async def _crowd(
    port: int, request: bytes, events: int, clients: int, requests: int, *, thinking: bool
) -> list[tuple[float, float]]:
    """All clients ask again and again, each on a connection of its own; times are without what the upstream thought."""
    left = requests
    lots = random.Random(port)
    found: list[tuple[float, float]] = []

    async def one(number: int) -> None:
        nonlocal left
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.sleep(THINK_MS[1] / 1e3 * number / clients if thinking else 0)
        while left > 0:
            left -= 1
            think_ms = lots.randint(*THINK_MS) if thinking else 0
            asked = request.replace(b"think=000", b"think=%03d" % think_ms, 1)
            first_ms, last_ms = await _ask(reader, writer, asked, events)
            found.append((first_ms - think_ms, last_ms - think_ms))
        writer.close()

    await asyncio.gather(*(one(number) for number in range(clients)))
    return found


def _latencies(ports: dict[str, int], key: str, rounds: int) -> dict[str, Any]:
    added: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    for clients in CLIENTS:
        for events, kind in ((0, "whole"), (EVENTS, "streaming")):
            request = _request(key, events=events)
            samples: dict[str, list[tuple[float, float]]] = {name: [] for name in ports}
            for number in range(rounds):
                for name in list(ports) if number % 2 == 0 else list(ports)[::-1]:
                    samples[name] += uvloop.run(
                        _crowd(ports[name], request, events, clients, REQUESTS[clients], thinking=True)
                    )
            of_name = {name: _quantiles([first for first, _ in times]) for name, times in samples.items()}
            label = f"{clients} client{'s' if clients > 1 else ''}, {kind}"
            plain[label] = of_name
            added[label] = {
                name: {part: of_name[name][part] - of_name["direct"][part] for part in ("p50", "p99")}
                for name in ports
                if name != "direct"
            }
    return {"first_byte_ms_beyond_thinking": plain, "added_ms": added}


def _quantiles(values: list[float]) -> dict[str, float]:
    return {"p50": statistics.median(values), "p99": statistics.quantiles(values, n=100)[98]}


def _rates(ports: dict[str, int], key: str, rounds: int, front: Child) -> dict[str, Any]:
    request = _request(key, events=0)
    rates: dict[str, list[float]] = {name: [] for name in ports}
    clock = CpuClock(front.process.pid)
    cpu_s = 0.0
    for number in range(rounds):
        for name in list(ports) if number % 2 == 0 else list(ports)[::-1]:
            before, began = clock.seconds(), time.perf_counter()
            uvloop.run(_crowd(ports[name], request, 0, 64, RATE_REQUESTS, thinking=False))
            rates[name].append(RATE_REQUESTS / (time.perf_counter() - began))
            cpu_s += clock.seconds() - before if name == "front" else 0
    return {
        "requests_a_second": {name: statistics.median(values) for name, values in rates.items()},
        "front_cpu_us_a_request": cpu_s * 1e6 / (RATE_REQUESTS * rounds),
    }


async def _memory(port: int, key: str, front: Child) -> float:
    """Bytes of resident memory that one more open stream costs the front end."""
    request = _request(key, events=100_000, every_ms=60_000)
    before = _resident_bytes(front.process.pid)
    open_streams = []
    for _ in range(STREAMS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        await reader.readuntil(b"data:")
        open_streams.append(writer)
    grown = _resident_bytes(front.process.pid) - before
    for writer in open_streams:
        writer.close()
    return max(0, grown) / STREAMS


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def _upstream(folder: Path) -> Iterator[int]:
    port = free_port()
    with child("upstream", [sys.executable, "-m", "bench.frontend_upstream", str(port)], folder) as process:
        wait_until(lambda: accepts(port), "listening", process)
        yield port


@contextmanager
def _front(folder: Path, upstream_port: int) -> Iterator[tuple[int, str, Child]]:
    command = [sys.executable, "-m", "xkv_frontend"]
    secret, keys, policy = folder / "secret", folder / "keys", folder / "policy.toml"
    policy.write_text("[default]\nconcurrency = 1000\n", encoding="utf-8")
    with child("secret", [*command, "secret", "new", str(secret)], folder) as made:
        made.process.wait(30)
    with child("key", [*command, "keys", "add", "bench", "--keys-file", str(keys)], folder) as added:
        added.process.wait(30)
    key = next(line for line in added.log.read_text(encoding="utf-8").splitlines() if line.startswith("xkv-"))
    port, metrics_port = free_port(), free_port()
    arguments = [
        "--upstream",
        f"http://127.0.0.1:{upstream_port}",
        "--port",
        str(port),
        "--deployment",
        "bench",
    ]
    arguments += ["--secret-file", str(secret), "--keys-file", str(keys), "--metrics-port", str(metrics_port)]
    arguments += ["--policy-file", str(policy)]
    with child("front", [*command, "serve", *arguments], folder) as process:
        wait_until(lambda: accepts(port), "listening", process)
        yield port, key, process


@contextmanager
def _nginx(folder: Path, upstream_port: int) -> Iterator[int]:
    port = free_port()
    config = folder / "nginx.conf"
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind}; " for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config.write_text(
        f"""daemon off; pid {folder}/nginx.pid; worker_processes 1; error_log {folder}/nginx-error.log;
events {{ worker_connections 4096; }}
http {{ access_log off; {temporary}
  upstream u {{ server 127.0.0.1:{upstream_port}; keepalive 128; }}
  server {{ listen 127.0.0.1:{port};
    location / {{ proxy_pass http://u; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; }} }} }}
""",
        encoding="utf-8",
    )
    with child("nginx", ["nginx", "-c", str(config), "-e", f"{folder}/nginx-error.log"], folder) as process:
        wait_until(lambda: accepts(port), "listening", process)
        yield port


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:]), indent=2))
