"""Builds small models with random weights, in an interpreter that has vLLM: `python models.py KIND FOLDER`.

The weights are large enough for every token to depend on those before it: over a wrong cache the log-probabilities differ.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY: Final = 512
SPREAD: Final = 0.12
"""Standard deviation of the weights."""
SHARPENED: Final = ("q_proj.weight", "k_proj.weight", "o_proj.weight", "out_proj.weight")
SHARPER: Final = 4.0
"""Attention of random weights is nearly an average; this makes it choose."""

_COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY, "max_position_embeddings": 65536, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None, "initializer_range": SPREAD, "tie_word_embeddings": False,
}  # fmt: skip
_TINY: Final = _COMMON | {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
_SLIDING: Final = _TINY | {
    "num_hidden_layers": 4, "sliding_window": 64, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}  # fmt: skip
# The narrowest heads that vLLM's GDN kernel for the CPU takes; the wide attention keeps the common block small.
_GDN: Final = _TINY | {
    "num_hidden_layers": 4, "full_attention_interval": 4, "num_key_value_heads": 4, "head_dim": 64,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
}  # fmt: skip
# Its prefill of 3,000 tokens takes more than a second on one core.
_HEAVY: Final = _COMMON | {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 12,
    "num_key_value_heads": 2, "head_dim": 64, "initializer_range": 0.03,
}  # fmt: skip
KINDS: Final = {
    "llama": ("Llama", _TINY),
    "gemma": ("Gemma3", _SLIDING),
    "qwen3next": ("Qwen3Next", _GDN),
    "heavy": ("Llama", _HEAVY),
}


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer that loses nothing (bytes) and has tokens of their own for the words of our prompts."""
    text = Tokenizer(models.BPE())
    text.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    lines = [
        f"Line {n}: a private document of tenant A. Second document, number Run\n" for n in range(1000, 2000)
    ]
    text.train_from_iterator(lines, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=text, bos_token="<s>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    fast.save_pretrained(folder)


def build(kind: str, folder: Path) -> None:
    """Write configuration, weights and tokenizer."""
    family, settings = KINDS[kind]
    configure = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(configure(**settings)).to(torch.float32)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name.endswith(SHARPENED):
                weights.mul_(SHARPER)
    model.save_pretrained(folder)
    # What equals the library's default is left out there, and vLLM has defaults of its own.
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings, indent=1))
    write_tokenizer(folder)


if __name__ == "__main__":
    build(sys.argv[1], Path(sys.argv[2]))
