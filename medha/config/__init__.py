"""Frozen configuration: what a model is (:class:`ModelConfig`), and how an engine is to run it (:class:`EngineConfig`).

Plain data, standard library only. Every dataclass checks itself when it is built, so an object that exists is valid.
"""

from medha.config.engine_config import ATTENTION_BACKENDS, EngineConfig, whole_blocks
from medha.config.model_config import DTYPES, ModelConfig, RopeConfig
from medha.config.sections import CDSP, SCHEDULERS, CacheConfig, ParallelConfig, SchedulerConfig

__all__ = [
    "ATTENTION_BACKENDS",
    "CDSP",
    "DTYPES",
    "SCHEDULERS",
    "CacheConfig",
    "EngineConfig",
    "ModelConfig",
    "ParallelConfig",
    "RopeConfig",
    "SchedulerConfig",
    "whole_blocks",
]
