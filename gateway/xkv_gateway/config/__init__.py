"""Configuration: one typed, frozen value, made once from file, environment and flags."""

from __future__ import annotations

from xkv_gateway.config.fabric import FabricConfig
from xkv_gateway.config.load import Loaded, load_config
from xkv_gateway.config.model import (
    AdminConfig,
    CardConfig,
    Config,
    ControlConfig,
    CurveConfig,
    EvictionConfig,
    LimitsConfig,
    LogConfig,
    MetricsConfig,
    NvmeConfig,
)
from xkv_gateway.config.sample import sample_text
from xkv_gateway.config.target import TargetConfig

__all__ = [
    "AdminConfig",
    "CardConfig",
    "Config",
    "ControlConfig",
    "CurveConfig",
    "EvictionConfig",
    "FabricConfig",
    "LimitsConfig",
    "Loaded",
    "LogConfig",
    "MetricsConfig",
    "NvmeConfig",
    "TargetConfig",
    "load_config",
    "sample_text",
]
