"""vLLM in processes of its own: an engine that is told what to do line by line, and the API server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import httpx

from tests.vllm.environment import interpreter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

HERE: Final = Path(__file__).parent
START_S: Final = 900.0
ANSWER_S: Final = 600.0
"""Nothing takes that long, even on a machine that is busy; it only keeps a hang from hanging the tests."""
SAME: Final = 1e-3
"""Log-probabilities that are this close are the same: another order of additions makes less of a difference, one token more."""


PATIENT: Final = {
    "lookup_timeout_ms": 10_000,
    "load_timeout_ms": 60_000,
    "store_timeout_ms": 60_000,
    "staging_bytes": 32 << 20,
}
"""Settings for a machine where several ranks share two cores with whatever else runs there."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one request asks."""

    tokens: list[int]
    salt: str | None = None
    store: bool | None = None
    """`xkv_store` in its transfer parameters; None: it has none."""

    def document(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request got."""

    tokens: list[int]
    logprobs: list[float]
    cached: int
    reason: str
    seconds: float
    """Of the whole batch."""
    cpu_seconds: float
    """Of all threads of the engine's process, for the whole batch."""

    def same_as(self, other: Answer) -> bool:
        """Whether the same was computed: tokens, and how likely each of them was."""
        return self.tokens == other.tokens and all(
            abs(one - two) < SAME for one, two in zip(self.logprobs, other.logprobs, strict=True)
        )


def tokens(count: int, seed: int = 0) -> list[int]:
    """Return a prompt that shares no block with that of another seed."""
    return random.Random(seed).choices(range(10, 500), k=count)


def transfer_config(port: int, **extra: Any) -> dict[str, Any]:
    """Return the connector's configuration as it is documented, for a gateway on `port`."""
    policy = extra.pop("kv_load_failure_policy", "recompute")
    return {
        "kv_connector": "FusIOnXConnector",
        "kv_connector_module_path": "xkv_vllm_connector.fusionx_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"xkv_gateway_port": port, **PATIENT, **extra},
    }


def environment(**extra: str) -> dict[str, str]:
    """Return the environment of a vLLM on a CPU, without a network."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XKV_", "VLLM_"))}
    return kept | {
        "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
        "TORCHDYNAMO_DISABLE": "1", # a compiler would be started for each engine
    } | extra  # fmt: skip


class Step(NamedTuple):
    """A step of an engine; seconds of the processor."""

    running: int
    engine_s: float
    """In the engine's thread."""
    calls_s: float
    """In what the engine calls of our connector, where that is in place, since the step before."""
    others_s: float
    """In all other threads, since the step before."""


def arguments(model: Path, transfer: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """Return an engine's arguments. GDN on a CPU takes bfloat16 only."""
    gdn = json.loads((model / "config.json").read_text())["model_type"] == "qwen3_next"
    return {
        "model": str(model), "dtype": "bfloat16" if gdn else "float32", "enforce_eager": True, "max_model_len": 4096,
        "enable_prefix_caching": True, "prefix_caching_hash_algo": "sha256_cbor", "disable_log_stats": False, "seed": 0,
        **({} if transfer is None else {"kv_transfer_config": transfer}),
    } | more  # fmt: skip


class Process:
    """A child whose standard error goes to a file."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def log_tail(self) -> str:
        return "\n".join(self.log_text.splitlines()[-40:])

    async def kill(self) -> None:
        """End it and all of its children, which are one group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()


class Engine(Process):
    """An engine that runs offline."""

    async def generate(self, *prompts: Prompt, max_tokens: int = 8) -> list[Answer]:
        """Run requests as one batch."""
        documents = [prompt.document() for prompt in prompts]
        found = await self.ask({"op": "generate", "prompts": documents, "max_tokens": max_tokens})
        return [Answer(**one) for one in found]

    async def one(self, prompt: Prompt, max_tokens: int = 8) -> Answer:
        return (await self.generate(prompt, max_tokens=max_tokens))[0]

    async def forget(self) -> None:
        """Empty the engine's own prefix cache, so that what is found comes from the card."""
        assert await self.ask({"op": "forget"}) is True

    async def steps(self) -> list[Step]:
        """Return the steps since the last call; at first, none."""
        return [Step(*each) for each in await self.ask({"op": "steps"})]

    async def plug(self, connector: Literal["none", "idle", "ours"]) -> None:
        """Take the connector out of the engine, put one in that does nothing, or put ours back. Nothing may be under way."""
        assert await self.ask({"op": "plug", "connector": connector}) is True

    async def metrics(self) -> dict[str, float]:
        return dict(await self.ask({"op": "metrics"}))

    async def ask(self, command: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        return await self.answer(ANSWER_S)

    async def answer(self, seconds: float) -> Any:
        assert self.process.stdout is not None
        async with asyncio.timeout(seconds):
            line = await self.process.stdout.readline()
        assert line, f"the engine has ended:\n{self.log_tail()}"
        return json.loads(line)


@contextlib.asynccontextmanager
async def engine(
    model: Path,
    log: Path,
    transfer: dict[str, Any] | None = None,
    variables: dict[str, str] | None = None,
    python: Path | None = None,
    **more: Any,
) -> AsyncIterator[Engine]:
    """Start an engine; end it in order at the end of the block, as far as it gets there."""
    given = json.dumps(arguments(model, transfer, **more))
    with log.open("ab") as file:
        process = await asyncio.create_subprocess_exec(
            str(python or interpreter()), str(HERE / "inside.py"), given,
            env=environment(**{"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | (variables or {})), start_new_session=True,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=file, limit=1 << 26,
        )  # fmt: skip
    one = Engine(process, log)
    try:
        assert await one.answer(START_S) == {"ready": True}
        yield one
        assert await one.ask({"op": "end"}) == {"ended": True}
        async with asyncio.timeout(ANSWER_S):
            await process.wait()
    finally:
        await one.kill()


class ApiServer(Process):
    """vLLM's API server, which can be restarted on its port."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, port: int, command: Sequence[str], env: dict[str, str]) -> None:  # fmt: skip
        super().__init__(process, log)
        self.port = port
        self.command = command
        self.env = env

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def ready(self) -> None:
        """Return once it is healthy."""
        async with asyncio.timeout(START_S), httpx.AsyncClient(trust_env=False) as client:
            while True:
                assert self.process.returncode is None, f"the API server has ended:\n{self.log_tail()}"
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(f"{self.url}/health")).status_code == httpx.codes.OK:
                        return
                await asyncio.sleep(0.1)

    async def stop(self) -> None:
        """End it as a service manager does, and everything that it started."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(60):
                    await self.process.wait()
        await self.kill()

    async def start(self) -> None:
        """Start it (again), without waiting until it is healthy."""
        self.process = await _spawn(self.command, self.log, self.env)

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def complete(self, prompt: str | list[int], salt: str | None = None, **more: Any) -> dict[str, Any]:
        """Ask for a completion; return vLLM's answer."""
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": 4,
            "temperature": 0,
            "logprobs": 0,
            "ignore_eos": True,
        }
        salted = {} if salt is None else {"cache_salt": salt}
        async with httpx.AsyncClient(trust_env=False, timeout=ANSWER_S) as client:
            answer = await client.post(f"{self.url}/v1/completions", json=body | salted | more)
        assert answer.status_code == httpx.codes.OK, answer.text
        return dict(answer.json())

    async def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        async with httpx.AsyncClient(trust_env=False, timeout=ANSWER_S) as client:
            page = (await client.get(f"{self.url}/metrics")).text
        rows = [line.split() for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(row[-1]) for row in rows)


def cached_tokens(answer: dict[str, Any]) -> int:
    """Return what the answer says of cached tokens."""
    details = answer["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"]) if details else 0


async def _spawn(command: Sequence[str], log: Path, env: dict[str, str]) -> asyncio.subprocess.Process:
    with log.open("ab") as file:
        return await asyncio.create_subprocess_exec(
            *command,
            env=env,
            start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )


@contextlib.asynccontextmanager
async def api_server(
    model: Path,
    log: Path,
    transfer: dict[str, Any] | None = None,
    variables: dict[str, str] | None = None,
    **more: Any,
) -> AsyncIterator[ApiServer]:
    """Start the API server on a free port and wait until it is healthy."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = arguments(model, transfer, **more)
    given.pop("disable_log_stats")
    command = [str(interpreter()), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]  # fmt: skip
    command += ["--served-model-name", "m", "--enable-prompt-tokens-details"]
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        command += [flag] if value is True else [flag, json.dumps(value) if isinstance(value, dict) else str(value)]  # fmt: skip
    env = environment(**(variables or {}))
    server = ApiServer(await _spawn(command, log, env), log, port, command, env)
    try:
        await server.ready()
        yield server
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def restarter(server: ApiServer) -> AsyncIterator[str]:
    """Yield a shell command that restarts the server: it knocks at a port of ours and waits until that is closed."""

    async def knock(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.restart()
        writer.close()

    door = await asyncio.start_server(knock, "127.0.0.1", 0)
    number = door.sockets[0].getsockname()[1]
    program = f"import socket; socket.create_connection(('127.0.0.1', {number})).recv(1)"
    try:
        yield f'"{interpreter()}" -I -c "{program}"'
    finally:
        door.close()
