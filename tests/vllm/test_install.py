"""What this distribution does to an environment with vLLM, and whether the front end's tables know that vLLM."""

from __future__ import annotations

import json
import subprocess
import tomllib
from typing import Any, Final

import pytest
from packaging.requirements import Requirement

from tests.vllm.environment import ROOT, interpreter, normal, pins
from tests.vllm.harness import environment
from xkv_frontend.core.fields import BODIES
from xkv_frontend.core.routes import RouteName

IMPORT_MS_MAX: Final = 150
ROUNDS: Final = 3
DEADLINE_S: Final = 900

VERSIONS: Final = """
import importlib.metadata, json
print(json.dumps({one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}))
"""
IMPORT: Final = """
import json, sys, time
from vllm.distributed.kv_transfer.kv_connector.v1 import base, metrics
from vllm.v1.core import kv_cache_utils
from vllm import sampling_params, version
before = set(sys.modules)
began = time.process_time_ns()
import xkv_vllm_connector.fusionx_connector
spent = time.process_time_ns() - began
print(json.dumps({"ms": spent / 1e6, "new": sorted({name.partition(".")[0] for name in set(sys.modules) - before})}))
"""
FIELDS: Final = """
import json
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.pooling.embed.protocol import EmbeddingChatRequest, EmbeddingCompletionRequest
from vllm.entrypoints.pooling.pooling.protocol import PoolingChatRequest, PoolingCompletionRequest
kinds = {
    "chat": [ChatCompletionRequest], "completions": [CompletionRequest], "responses": [ResponsesRequest],
    "messages": [AnthropicMessagesRequest], "embeddings": [EmbeddingCompletionRequest, EmbeddingChatRequest],
    "pooling": [PoolingCompletionRequest, PoolingChatRequest],
}
print(json.dumps({route: sorted({name for kind in all for name in kind.model_fields}) for route, all in kinds.items()}))
"""


def ask(program: str) -> Any:
    """Run a program where vLLM is; return the JSON that it prints last."""
    done = subprocess.run(
        [interpreter(), "-c", program],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_our_ranges_hold_what_vllm_is_installed_with() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = [Requirement(text) for text in project["dependencies"]]
    both = [one for one in ranges if normal(one.name) in pins()]
    assert len(both) > 5
    assert not [str(one) for one in both if not one.specifier.contains(pins()[normal(one.name)])]


@pytest.mark.vllm
@pytest.mark.smoke
def test_installing_this_beside_vllm_changes_nothing_of_what_was_there() -> None:
    found = {normal(name): version for name, version in ask(VERSIONS).items()}
    assert "xkv-gateway" in found
    assert {name: found.get(name) for name in pins()} == pins()


@pytest.mark.vllm
def test_the_connector_is_light_beside_vllm() -> None:
    rounds = [ask(IMPORT) for _ in range(ROUNDS)]
    assert min(one["ms"] for one in rounds) <= IMPORT_MS_MAX
    ours = {name for name in rounds[0]["new"] if not name.startswith(("xkv_", "_"))}
    standard = ask("import json, sys; print(json.dumps(sorted(sys.stdlib_module_names)))")
    assert ours - set(standard) <= {"zmq", "msgpack"}


@pytest.mark.vllm
def test_every_field_of_vllms_requests_has_a_place_in_the_front_ends_tables() -> None:
    fields = ask(FIELDS)
    assert fields.keys() == {route.value for route in BODIES}
    for route, names in fields.items():
        table = BODIES[RouteName(route)]
        assert "cache_salt" in names
        assert not [name for name in names if name not in table], route
