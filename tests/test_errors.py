"""The tree of errors, and the exit code of each."""

from __future__ import annotations

import inspect
import pickle

import pytest

from medha import errors
from medha.errors import (
    ChatTemplateError,
    ConfigError,
    ContextLengthError,
    DeadlineError,
    EngineDeadError,
    KVCapacityError,
    MedhaError,
    ModelLoadError,
    NonFiniteLogitsError,
    ParallelConfigError,
    PlanDivergenceError,
    PolicyError,
    RankFailedError,
    RequestError,
    TokenizerError,
    UnsupportedFeatureError,
    UnsupportedModelError,
    ValidationError,
    WeightsError,
    exit_code,
)

CLASSES = [c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, BaseException)]


def tree(root: type[BaseException], depth: int = 0) -> list[str]:
    lines = ["  " * depth + root.__name__]
    for child in CLASSES:
        if root in child.__bases__:
            lines += tree(child, depth + 1)
    return lines


def test_tree() -> None:
    assert (
        "\n".join(tree(MedhaError))
        == """\
MedhaError
  ConfigError
    ModelLoadError
      UnsupportedModelError
      WeightsError
      TokenizerError
      ChatTemplateError
    ParallelConfigError
  ValidationError
    ContextLengthError
    KVCapacityError
    DeadlineError
  UnsupportedFeatureError
  RequestError
    NonFiniteLogitsError
  EngineDeadError
    PlanDivergenceError
    RankFailedError
  PolicyError"""
    )


@pytest.mark.parametrize("cls", CLASSES)
def test_each_error_is_a_value_error_or_a_runtime_error(cls: type[BaseException]) -> None:
    if cls is not MedhaError:
        assert issubclass(cls, ValueError) != issubclass(cls, RuntimeError)
    assert cls.__doc__
    assert str(cls("what went wrong")) == "what went wrong"


EXIT_CODES = {
    ConfigError: 2,
    ModelLoadError: 2,
    UnsupportedModelError: 2,
    WeightsError: 2,
    TokenizerError: 2,
    ChatTemplateError: 2,
    ValidationError: 2,
    ContextLengthError: 2,
    KVCapacityError: 2,
    DeadlineError: 2,
    UnsupportedFeatureError: 2,
    PolicyError: 2,
    ParallelConfigError: 2,
    EngineDeadError: 4,
    PlanDivergenceError: 4,
    RankFailedError: 4,
    RequestError: 1,
    NonFiniteLogitsError: 1,
    MedhaError: 1,
    KeyboardInterrupt: 130,
    ValueError: 1,
    RuntimeError: 1,
    MemoryError: 1,
    SystemExit: 1,
}


@pytest.mark.parametrize(("cls", "code"), EXIT_CODES.items(), ids=lambda x: getattr(x, "__name__", str(x)))
def test_exit_code(cls: type[BaseException], code: int) -> None:
    assert exit_code(cls("message")) == code


def test_every_error_has_an_exit_code_here() -> None:
    assert set(CLASSES) <= set(EXIT_CODES)


@pytest.mark.parametrize("cls", [ValidationError, ContextLengthError, KVCapacityError, DeadlineError])
def test_validation_error_says_what_and_where(cls: type[ValidationError]) -> None:
    bare = cls("message")
    assert (bare.param, bare.value, bare.index) == (None, None, None)
    full = cls("message", param="top_p", value=3, index=7)
    assert (str(full), full.param, full.value, full.index) == ("message", "top_p", 3, 7)


def test_deadline_error_carries_both_times() -> None:
    error = DeadlineError("message", predicted_s=2.0, objective_s=1.5, param="slo.ttft_s", value=1.5)
    assert (error.predicted_s, error.objective_s, error.param, error.value) == (2.0, 1.5, "slo.ttft_s", 1.5)


def test_unsupported_feature_error_names_the_field() -> None:
    error = UnsupportedFeatureError("message", param="n", value=2)
    assert (str(error), error.param, error.value) == ("message", "n", 2)


def test_engine_dead_error_carries_outputs_of_its_own() -> None:
    first, second = EngineDeadError("a"), EngineDeadError("b")
    first.outputs.append("output")
    assert (first.outputs, second.outputs) == (["output"], [])


@pytest.mark.parametrize("cls", CLASSES)
def test_errors_survive_pickling(cls: type[BaseException]) -> None:
    # A rank hands its error to rank 0.
    error = cls("message")
    if isinstance(error, ValidationError):
        error = cls("message", param="seed", value=1, index=2)  # type: ignore[call-arg]
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is cls
    assert (str(back), vars(back)) == (str(error), vars(error))
