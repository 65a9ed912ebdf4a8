"""Frozen configuration: what a model is (:class:`ModelConfig`), and how an engine is to run it (:class:`EngineConfig`).

Plain data, standard library only. Every dataclass checks itself when it is built, so an object that exists is valid.
"""

from medha.config.engine_config import ATTENTION_BACKENDS, OPTION_ALIASES, EngineConfig, whole_blocks
from medha.config.fields import OptionField, option_of, parse_size
from medha.config.model_config import DTYPES, ModelConfig, RopeConfig, RopeType
from medha.config.sections import ADMISSIONS, CDSP, SCHEDULERS, CacheConfig, ParallelConfig, SchedulerConfig

__all__ = [
    "ADMISSIONS",
    "ATTENTION_BACKENDS",
    "CDSP",
    "DTYPES",
    "OPTION_ALIASES",
    "SCHEDULERS",
    "CacheConfig",
    "EngineConfig",
    "ModelConfig",
    "OptionField",
    "ParallelConfig",
    "RopeConfig",
    "RopeType",
    "SchedulerConfig",
    "option_of",
    "parse_size",
    "whole_blocks",
]
