"""LMCache's second level on the card, for those who run vLLM with LMCache.

    lmcache server ... --l2-adapter '{"type": "plugin", "module_path": "xkv_lmcache_plugin",
        "class_name": "FusIOnXL2Adapter", "adapter_params": {"xkv_gateway_port": 5557}}'

LMCache's own package must be there; nothing else of this distribution needs it.
"""

from xkv_lmcache_plugin.adapter import FusIOnXL2Adapter

__all__ = ["FusIOnXL2Adapter"]
