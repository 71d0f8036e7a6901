"""LMCache's second level on the card, for those who run vLLM with LMCache.

    lmcache server ... --l2-adapter '{"type": "plugin", "module_path": "xkv_lmcache_plugin",
        "class_name": "FusIOnXL2Adapter", "adapter_params": {"xkv_gateway_port": 5557}}'

LMCache's own package must be there; nothing else of this distribution needs it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["FusIOnXL2Adapter"]


def __getattr__(name: str) -> Any:
    """Load the class when LMCache asks for it: the rest of this package does without LMCache."""
    if name == "FusIOnXL2Adapter":
        from xkv_lmcache_plugin.adapter import FusIOnXL2Adapter  # noqa: PLC0415 - see above

        return FusIOnXL2Adapter
    raise AttributeError(name)
