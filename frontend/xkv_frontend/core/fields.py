"""The allow-lists of bodies, as tables: which members a request may have, and what each is.

What stands in no table is unknown: refused, or dropped where the operator has said so. `DROP` is what would steer the
cache or the server, or what the server ignores; a client that sends it out of habit goes on working. `REFUSE` is what
cannot be dropped without changing what the request means.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from xkv_frontend.core.routes import RouteName

if TYPE_CHECKING:
    from collections.abc import Mapping


class Kind(Enum):
    """What a member is, and so which function checks it (`rewrite.HANDLERS`, `content.HANDLERS`)."""

    SCALAR = auto()
    """A string, number, boolean or null."""
    FLAG = auto()
    """A boolean or null."""
    TEXT = auto()
    """A string or null."""
    TEXTS = auto()
    """A string, a list of strings, or null."""
    NUMBERS = auto()
    """A list of numbers, or null."""
    DATA = auto()
    """JSON data without a meaning for the cache; members named like control fields are dropped wherever they nest."""
    SCHEMA = auto()
    """JSON data that describes data (schemas, arguments): passed as it is, since names in it are the client's own."""
    OPTIONS = auto()
    """An object of scalars, without the names that steer the template engine."""
    PROMPT = auto()
    """Text, texts, token ids, or lists of token ids."""
    MESSAGES = auto()
    SYSTEM = auto()
    RESPONSES_INPUT = auto()
    BLOCKS = auto()
    TOOLS = auto()
    CLAUDE_TOOLS = auto()
    NARROW = auto()
    """`xkv_scope`: ours, never passed on."""
    STORE = auto()
    """`xkv_store`: ours, never passed on."""
    DROP = auto()
    REFUSE = auto()


CONTROL_NAMES: Final = frozenset(
    {
        "cache_salt", "kv_transfer_params", "ec_transfer_params", "vllm_xargs", "extra_args", "extra_body", "priority",
        "request_id", "session_id", "multi_modal_uuids", "mm_hashes", "uuid", "data_parallel_rank",
    }
)  # fmt: skip
"""Members that steer the cache, the transfer or the scheduler."""

TEMPLATE_NAMES_REFUSED: Final = frozenset(
    {"chat_template", "tokenize", "messages", "conversation", "return_dict"}
)

_ALWAYS: Final[dict[str, Kind]] = {
    "model": Kind.TEXT, "user": Kind.TEXT, "xkv_scope": Kind.NARROW, "xkv_store": Kind.STORE,
    "cache_salt": Kind.DROP, "kv_transfer_params": Kind.DROP, "ec_transfer_params": Kind.DROP, "vllm_xargs": Kind.DROP,
    "priority": Kind.DROP, "request_id": Kind.DROP, "session_id": Kind.DROP, "multi_modal_uuids": Kind.DROP,
    "prompt_cache_key": Kind.DROP, "prompt_cache_retention": Kind.DROP, "safety_identifier": Kind.DROP,
    "metadata": Kind.DROP, "service_tier": Kind.DROP, "store": Kind.DROP,
    "prompt_embeds": Kind.REFUSE, "return_token_ids": Kind.REFUSE, "logits_processors": Kind.REFUSE,
    "mm_processor_kwargs": Kind.REFUSE, "media_io_kwargs": Kind.REFUSE, "chat_template": Kind.REFUSE,
    # These count on the routes that render prompts only, which are not on the list of routes.
    "mm_payload": Kind.DROP, "return_mm_kwargs": Kind.DROP, "return_token_offsets": Kind.DROP,
}  # fmt: skip

_SAMPLING: Final[dict[str, Kind]] = dict.fromkeys(
    (
        "frequency_penalty", "presence_penalty", "repetition_penalty", "length_penalty", "temperature", "top_p", "top_k",
        "min_p", "min_tokens", "max_tokens", "n", "best_of", "seed", "logprobs", "echo", "ignore_eos", "use_beam_search",
        "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens",
        "truncation_side", "prompt_logprobs", "add_special_tokens", "return_tokens_as_token_ids",
        "thinking_token_budget", "stream_interval", "watermarking", "routed_experts_prompt_start",
    ),
    Kind.SCALAR,
) | {
    "stream": Kind.FLAG, "stream_options": Kind.DATA, "stop": Kind.TEXTS, "bad_words": Kind.TEXTS,
    "stop_token_ids": Kind.NUMBERS, "allowed_token_ids": Kind.NUMBERS, "logprob_token_ids": Kind.NUMBERS,
    "logit_bias": Kind.DATA, "response_format": Kind.SCHEMA, "structured_outputs": Kind.SCHEMA,
    "guided_json": Kind.SCHEMA, "guided_regex": Kind.TEXT, "guided_choice": Kind.TEXTS, "guided_grammar": Kind.TEXT,
    "repetition_detection": Kind.DATA,
}  # fmt: skip

_TEMPLATE: Final[dict[str, Kind]] = {
    "add_generation_prompt": Kind.FLAG, "continue_final_message": Kind.FLAG, "chat_template_kwargs": Kind.OPTIONS,
}  # fmt: skip

CHAT: Final = _ALWAYS | _SAMPLING | _TEMPLATE | {
    "messages": Kind.MESSAGES, "max_completion_tokens": Kind.SCALAR, "top_logprobs": Kind.SCALAR,
    "tools": Kind.TOOLS, "tool_choice": Kind.SCHEMA, "parallel_tool_calls": Kind.FLAG, "documents": Kind.DATA,
    "reasoning_effort": Kind.TEXT, "include_reasoning": Kind.FLAG, "return_prompt_text": Kind.REFUSE,
}  # fmt: skip

COMPLETIONS: Final = _ALWAYS | _SAMPLING | {"prompt": Kind.PROMPT, "suffix": Kind.TEXT}

RESPONSES: Final = _ALWAYS | {
    "input": Kind.RESPONSES_INPUT, "instructions": Kind.TEXT, "max_output_tokens": Kind.SCALAR,
    "max_tool_calls": Kind.SCALAR, "logit_bias": Kind.DATA, "parallel_tool_calls": Kind.FLAG, "reasoning": Kind.DATA,
    "stream": Kind.FLAG, "temperature": Kind.SCALAR, "text": Kind.SCHEMA, "tool_choice": Kind.SCHEMA,
    "tools": Kind.TOOLS, "top_logprobs": Kind.SCALAR, "top_p": Kind.SCALAR, "top_k": Kind.SCALAR,
    "truncation": Kind.TEXT, "skip_special_tokens": Kind.FLAG, "include_stop_str_in_output": Kind.FLAG,
    "include": Kind.TEXTS, "structured_outputs": Kind.SCHEMA, "repetition_penalty": Kind.SCALAR, "seed": Kind.SCALAR,
    "stop": Kind.TEXTS, "ignore_eos": Kind.FLAG, "stop_token_ids": Kind.NUMBERS, "min_p": Kind.SCALAR,
    "presence_penalty": Kind.SCALAR, "frequency_penalty": Kind.SCALAR, "watermarking": Kind.FLAG,
    "include_reasoning": Kind.FLAG, "chat_template_kwargs": Kind.OPTIONS, "enable_response_messages": Kind.REFUSE,
    # What the server keeps between requests is found by an id that does not say whose it is.
    "previous_response_id": Kind.REFUSE, "previous_response": Kind.REFUSE, "previous_input_messages": Kind.REFUSE,
    "conversation": Kind.REFUSE, "background": Kind.REFUSE, "prompt": Kind.REFUSE,
}  # fmt: skip

MESSAGES: Final = _ALWAYS | {
    "messages": Kind.BLOCKS, "system": Kind.SYSTEM, "max_tokens": Kind.SCALAR, "stop_sequences": Kind.TEXTS,
    "stream": Kind.FLAG, "temperature": Kind.SCALAR, "top_k": Kind.SCALAR, "top_p": Kind.SCALAR,
    "tools": Kind.CLAUDE_TOOLS, "tool_choice": Kind.SCHEMA, "output_config": Kind.SCHEMA,
    "thinking": Kind.DROP, "betas": Kind.DROP, "context_management": Kind.DROP, "container": Kind.REFUSE,
    "mcp_servers": Kind.REFUSE, "chat_template_kwargs": Kind.OPTIONS, "watermarking": Kind.FLAG,
}  # fmt: skip

_EMBED: Final = _ALWAYS | _TEMPLATE | {
    "input": Kind.PROMPT, "messages": Kind.MESSAGES, "encoding_format": Kind.TEXT, "dimensions": Kind.SCALAR,
    "truncate_prompt_tokens": Kind.SCALAR, "truncation_side": Kind.TEXT, "add_special_tokens": Kind.FLAG,
    "use_activation": Kind.FLAG, "embed_dtype": Kind.TEXT, "endianness": Kind.TEXT, "padding": Kind.TEXT,
}  # fmt: skip

BODIES: Final[Mapping[RouteName, Mapping[str, Kind]]] = {
    RouteName.CHAT: CHAT,
    RouteName.COMPLETIONS: COMPLETIONS,
    RouteName.RESPONSES: RESPONSES,
    RouteName.MESSAGES: MESSAGES,
    RouteName.EMBEDDINGS: _EMBED,
    RouteName.POOLING: _EMBED | {"task": Kind.TEXT},
}

REQUIRED: Final[Mapping[RouteName, tuple[str, ...]]] = {
    RouteName.CHAT: ("messages",),
    RouteName.COMPLETIONS: ("prompt",),
    RouteName.RESPONSES: ("input",),
    RouteName.MESSAGES: ("messages",),
    RouteName.EMBEDDINGS: ("input", "messages"),
    RouteName.POOLING: ("input", "messages"),
}
"""One of these must be there: what the request is about."""

HARMLESS: Final[Mapping[str, tuple[object, ...]]] = {
    "return_token_ids": (False,),
    "return_prompt_text": (False,),
    "enable_response_messages": (False,),
    "background": (False,),
}
"""Values with which a refused member says what holds anyway; null always does."""

CHAT_MESSAGE: Final[Mapping[str, Kind]] = {
    "role": Kind.TEXT, "content": Kind.BLOCKS, "name": Kind.TEXT, "refusal": Kind.TEXT, "reasoning": Kind.TEXT,
    "reasoning_content": Kind.TEXT, "tool_call_id": Kind.TEXT, "tool_calls": Kind.TOOLS, "uuid": Kind.DROP,
    "cache_salt": Kind.DROP, "annotations": Kind.DROP, "audio": Kind.REFUSE, "function_call": Kind.REFUSE,
}  # fmt: skip
