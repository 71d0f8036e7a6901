"""Peers on other addresses, in two network namespaces joined by a cable: who is on loopback, who is not, who has which key.

server namespace: 10.98.0.1 -- veth -- client namespace: 10.98.0.2
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from xkv_gateway.keys.directory import KeyDirectory

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parents[2]
SERVER, CLIENT = "10.98.0.1", "10.98.0.2"
HANG_S: Final = 120
STARTS: Final = 200
STARTS_HANG_S: Final = 600

SERVE: Final = """
import asyncio, json, sys, time
from pathlib import Path
from tests.rpc.harness import DictService
from xkv_gateway.keys.directory import KeyDirectory
from xkv_gateway.keys.watch import KeyWatch
from xkv_rpc.doors import Admits, Door, Doorkeeper
from xkv_rpc.messages import Limits
from xkv_rpc.server import Server

async def main():
    service, doorkeeper = DictService(), Doorkeeper()
    watch = KeyWatch(KeyDirectory(Path(sys.argv[1])), doorkeeper)
    pair = watch.begin()
    watch.start()
    server = Server(service, Limits(), clock=time.monotonic_ns, doorkeeper=doorkeeper)
    doors = [Door("tcp://0.0.0.0:0", Admits.LOOPBACK), Door("tcp://0.0.0.0:0", Admits.KEYS, pair)]
    bound = await server.bind(doors)
    print(json.dumps([int(endpoint.rpartition(":")[2]) for endpoint in bound]), flush=True)
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, sys.stdin.readline)
    print(json.dumps([service.handled, doorkeeper.admitted, doorkeeper.refused]), flush=True)
    await watch.aclose()
    await server.aclose(grace_ms=10, linger_ms=10)

asyncio.run(main())
"""

ASK: Final = """
import json, sys, time
from xkv_rpc.client import Client, ClientOptions
from xkv_rpc.curve_files import read_client_keys
from xkv_rpc.errors import RpcError, XkvRpcError

def attempt(endpoint, keys, namespace):
    options = ClientOptions(
        timeout_ms=20_000, connect_timeout_ms=20_000, keys=keys and read_client_keys(keys)
    )
    try:
        with Client(endpoint, options) as client:
            client.lookup(namespace, b"", [b"key"])
        return "served"
    except RpcError as error:
        return error.code.value
    except XkvRpcError as error:
        return type(error).__name__

print(json.dumps([attempt(*arguments) for arguments in json.loads(sys.argv[1])]))
"""


START: Final = """
import json, sys
from tests.rpc.curve import Keyring
from tests.rpc.harness import RawClient, serving, wait_until
from tests.rpc.test_starts import Recorder, request
from xkv_rpc.doors import Admits, Door

opened, curve = (f"tcp://0.0.0.0:{port}" for port in sys.argv[2:])
service, keyring = Recorder(), Keyring()
keeper = keyring.doorkeeper
print("ready", flush=True)
sys.stdin.readline()
for start in range(int(sys.argv[1])):
    with RawClient(opened.replace("0.0.0.0", "127.0.0.1"), RECONNECT_IVL=1) as friend:
        friend.send(request(b"friend"))
        refused = keeper.refused
        doors = [Door(opened, Admits.LOOPBACK), keyring.door(curve)]
        with serving(service, endpoints=doors, doorkeeper=keeper):
            assert friend.receive()["ok"]
            wait_until(lambda: keeper.refused > refused, "somebody from elsewhere knocks")
print(json.dumps([set(service.seen) == {b"friend"}, len(service.seen)]), flush=True)
"""

KNOCK: Final = """
import itertools, socket, sys, time
from tests.rpc.test_starts import request
from xkv_rpc import zmtp

# All of it at once, from the first moment of a start on: nobody is waited for.
words = b"".join([zmtp.GREETING, zmtp.ready(b"DEALER"), *zmtp.message(request(b"stranger"), [])])
kept = []
for port in itertools.cycle([int(port) for port in sys.argv[2:]]):
    try:
        connection = socket.create_connection((sys.argv[1], port), timeout=5)
        connection.sendall(words)
        kept = [*kept[-20:], connection]
    except OSError:
        time.sleep(0.0005)
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=HANG_S)


@pytest.fixture
def cable() -> Iterator[tuple[str, str]]:
    """Two namespaces with a cable between them; nothing outside of them is touched."""
    if shutil.which("ip") is None:
        pytest.skip("iproute2 is not installed here")
    names = (f"xkv-s{os.getpid()}", f"xkv-c{os.getpid()}")
    try:
        for name in names:
            ip("netns", "add", name)
        ip(
            "-n",
            names[0],
            "link",
            "add",
            "cable0",
            "type",
            "veth",
            "peer",
            "name",
            "cable0",
            "netns",
            names[1],
        )
        for name, address in zip(names, (SERVER, CLIENT), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable0")
            ip("-n", name, "link", "set", "cable0", "up")
            ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        _remove(names)
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    yield names
    _remove(names)


def _remove(names: tuple[str, str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=HANG_S)


def inside(namespace: str, *arguments: str) -> list[str]:
    return ["ip", "netns", "exec", namespace, sys.executable, "-c", *arguments]


def ask(namespace: str, attempts: list[tuple[str, Path | None, str]]) -> list[str]:
    plain = [(endpoint, keys and str(keys), name) for endpoint, keys, name in attempts]
    done = subprocess.run(
        inside(namespace, ASK, json.dumps(plain)), check=True, capture_output=True, timeout=HANG_S, cwd=ROOT
    )
    answers: list[str] = json.loads(done.stdout)
    return answers


def test_who_comes_from_elsewhere_is_judged_by_where_from_and_by_key(
    cable: tuple[str, str], tmp_path: Path
) -> None:
    keys = KeyDirectory(tmp_path / "keys")
    keys.init()
    alice, bob = keys.new("alice", frozenset({"a"})), keys.new("bob", None)
    mallory = keys.new("mallory", None)
    keys.path.joinpath("mallory.key").unlink()  # she has a secret, and nobody knows her
    there, here = cable
    server = subprocess.Popen(
        inside(there, SERVE, str(keys.path)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert server.stdin is not None
        assert server.stdout is not None
        opened, curve = json.loads(server.stdout.readline())
        far_open, far_curve = f"tcp://{SERVER}:{opened}", f"tcp://{SERVER}:{curve}"
        answers = ask(
            here,
            [
                (far_open, None, "a"),  # a wildcard bind does not let him in
                (far_curve, None, "a"),
                (far_curve, mallory, "a"),
                (far_curve, alice, "a"),
                (far_curve, alice, "b"),
                (far_curve, bob, "b"),
            ],
        )
        assert answers[0] in {"BadReplyError", "GatewayUnreachableError"}
        assert answers[1] in {"BadReplyError", "GatewayUnreachableError"}
        assert answers[2:] == ["KeyRefusedError", "served", "forbidden", "served"]
        # From its own machine: by loopback without keys, but not by the address of the cable.
        local = ask(
            there,
            [
                (f"tcp://127.0.0.1:{opened}", None, "a"),
                (f"tcp://127.9.9.9:{opened}", None, "a"),
                (f"tcp://127.0.0.1:{curve}", None, "a"),
                (far_open, None, "a"),
            ],
        )
        assert local[:2] == ["served", "served"]
        assert local[2] in {"BadReplyError", "GatewayUnreachableError"}
        assert local[3] in {"BadReplyError", "GatewayUnreachableError"}
        server.stdin.write("\n")
        server.stdin.flush()
        counts: list[Any] = json.loads(server.stdout.readline())
        assert counts[0] == 4, "what was served, and nothing else, reached the handler"
        assert server.wait(HANG_S) == 0
    finally:
        server.kill()
        server.communicate()


def test_in_two_hundred_starts_nobody_from_elsewhere_is_ever_handled(cable: tuple[str, str]) -> None:
    there, here = cable
    ports = ("5001", "5002")  # of a network of its own
    server = subprocess.Popen(
        inside(there, START, str(STARTS), *ports),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    knocking = subprocess.Popen(inside(here, KNOCK, SERVER, *ports), cwd=ROOT)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        said, _ = server.communicate("\n", timeout=STARTS_HANG_S)
        assert knocking.poll() is None
        assert json.loads(said) == [True, STARTS]
    finally:
        for process in (server, knocking):
            process.kill()
            process.communicate()
