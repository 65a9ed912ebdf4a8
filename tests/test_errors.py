"""The tree of errors, and the exit code of each."""

import gc
import inspect
import pickle
import signal
import sys
import weakref
from functools import partial
from typing import Any

import pytest

from medha import errors
from medha.errors import EngineDeadError, MedhaError, exit_code, is_interrupt

CLASSES = [
    c for name, c in vars(errors).items() if inspect.isclass(c) and c.__module__ == errors.__name__ and name[0] != "_"
]
TREE = """\
1 MedhaError
2   ConfigError
2     ModelLoadError
2       UnsupportedModelError
2       WeightsError
2       TokenizerError
2       ChatTemplateError
2     ParallelConfigError
2   ValidationError
2     ContextLengthError
2     KVCapacityError
2     DeadlineError
2   UnsupportedFeatureError
2   PolicyError
1   RequestError
1     NonFiniteLogitsError
4   EngineDeadError
4     PlanDivergenceError
4     RankFailedError"""


def tree(root: type[BaseException], depth: int = 0) -> list[str]:
    lines = [f"{exit_code(root('message'))} {'  ' * depth}{root.__name__}"]
    for child in CLASSES:
        if root == next((base for base in child.__mro__[1:] if base in CLASSES), None):
            lines += tree(child, depth + 1)
    return lines


def test_tree_and_exit_codes() -> None:
    assert "\n".join(tree(MedhaError)) == TREE
    assert exit_code(KeyboardInterrupt()) == 130
    assert {exit_code(kind()) for kind in (ValueError, RuntimeError, MemoryError, SystemExit)} == {1}


@pytest.mark.parametrize("cls", CLASSES)
def test_each_error_is_a_value_error_or_a_runtime_error_and_survives_pickling(cls: type[BaseException]) -> None:
    if cls is not MedhaError:
        assert issubclass(cls, ValueError) != issubclass(cls, RuntimeError)
    assert cls.__doc__
    error = cls("what went wrong")
    if hasattr(error, "param"):
        assert (error.param, error.value, getattr(error, "index", None)) == (None, None, None)
        error = cls("what went wrong", param="seed", value=1, predicted_s=2.0)  # type: ignore[call-arg]
        assert (error.param, error.value, error.predicted_s) == ("seed", 1, 2.0)
    back = pickle.loads(pickle.dumps(error))  # a rank hands its error to rank 0
    assert type(back) is cls
    assert (str(back), vars(back)) == ("what went wrong", vars(error))


def late(_: Any, *__: Any) -> None:
    raise TimeoutError


class Late:
    def __call__(self, number: int, frame: Any) -> None:
        late(number)


@pytest.mark.parametrize("handler", [late, Late(), Late().__call__, partial(late, None), lambda *_: late(1), None])
def test_what_a_signal_handler_raises_is_an_interrupt(handler: Any) -> None:
    signal.signal(signal.SIGUSR1, handler or signal.SIG_IGN)
    with pytest.raises(TimeoutError) as caught:
        [signal.raise_signal(signal.SIGUSR1), late(sys._getframe().f_back)]  # a frame, but not that of its caller
    assert is_interrupt(caught.value) is (handler is not None)


def test_what_is_asked_whether_it_is_an_interrupt_holds_nothing() -> None:
    """Without a collection of garbage; and a name that was rebound is no harm."""

    def fails(*size: Any) -> None:
        held, size = Late(), 1  # type: ignore[assignment]
        kept.append(weakref.ref(held))
        raise ValueError(size)

    kept: list[Any] = []
    gc.disable()
    try:
        fails(3)
    except ValueError as error:
        kept.append(is_interrupt(error))
    assert (kept[0](), kept[1]) == (None, False)


def test_the_outputs_of_an_error_are_its_own() -> None:
    first, second = EngineDeadError("a"), EngineDeadError("b")
    first.outputs.append("output")
    assert (first.outputs, second.outputs) == (["output"], [])
