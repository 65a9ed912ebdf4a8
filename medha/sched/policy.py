"""Who goes first: the policies, smallest key first, and the order that follows from one.

A policy is a function of read-only columns (one row a waiting or partly read request) and the time, which is when
whoever is passed over now could have a first token: some batches ahead. Keys are computed anew at each step, as those
of different requests change at different rates. What becomes of the order is the packer's.

Source: arXiv:2409.17264, v5 section 4.1 (FCFS, EDF, LRS, LARS) and v4 eq. 7 (ILRS). Under overload by short requests
LARS, too, starves a long one: the slack of a late short request falls faster, relative to its work.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from medha.errors import ConfigError, PolicyError, hint, is_interrupt

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]
RowNumbers: TypeAlias = NDArray[np.intp]

# Shorter works and deadlines count as this long where something is divided by them.
SHORTEST_S = 1e-9
# So many rows are sorted at once; of more, about so many values are looked at to find where the smallest end.
_FEW, _SAMPLE = 192, 512


@dataclass(frozen=True, slots=True)
class Columns:
    """What a policy sees: one row a request whose prefill is not done. Arrays are 1-D, equally long, read-only views.

    A policy reads them during the call; the arrays behind the views change later.

    Attributes:
        arrival_s: when it arrived, seconds of the scheduler's clock.
        deadline_s: seconds from arrival to when its first token is due (a length, as in the paper), above 0; inf is
            no deadline.
        work_total_s: predicted seconds of its whole prefill beside the present decodes, at least 0.
        work_left_s: predicted seconds of the part not yet scheduled; tokens in flight count as done.
        num_prompt_tokens: of its prompt, those that it computes itself: others may have computed its beginning.
        num_computed_tokens: of these, what is done in every stage.
        priority: class; 0 realtime, 1 high, 2 normal, 3 low.
    """

    arrival_s: Floats
    deadline_s: Floats
    work_total_s: Floats
    work_left_s: Floats
    num_prompt_tokens: Ints
    num_computed_tokens: Ints
    priority: Ints

    def __post_init__(self) -> None:
        for name in COLUMN_NAMES:
            view = getattr(self, name).view()
            view.flags.writeable = False
            object.__setattr__(self, name, view)

    def __len__(self) -> int:
        return self.arrival_s.size

    if not TYPE_CHECKING:  # a type checker knows the columns

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"no column {name!r}; accepted: {', '.join(COLUMN_NAMES)}", name=name, obj=self)


COLUMN_NAMES = tuple(field.name for field in fields(Columns))

# A key for each request at a time in seconds; the smallest is served first, and inf is last.
Policy: TypeAlias = Callable[[Columns, float], Floats]


# ---------------------------------------------------------------------------------------------------------------------
# The policies


def fcfs(columns: Columns, now_s: float) -> Floats:
    """First come, first served: by arrival (v5 section 4.1, the first straw man)."""
    return columns.arrival_s


def sjf(columns: Columns, now_s: float) -> Floats:
    """Shortest job first: by total work, seconds (classical; not in the paper)."""
    return columns.work_total_s


def srpt(columns: Columns, now_s: float) -> Floats:
    """Shortest remaining processing time first: by work left, seconds (classical; not in the paper)."""
    return columns.work_left_s


def edf(columns: Columns, now_s: float) -> Floats:
    """Earliest deadline first: by the time at which the deadline falls (v5 section 4.1, the second straw man)."""
    return columns.arrival_s + columns.deadline_s


def lrs(columns: Columns, now_s: float) -> Floats:
    """Least remaining slack first: seconds that a request can still wait and be in time (v5 section 4.1)."""
    slack_s = columns.arrival_s + columns.deadline_s
    slack_s -= now_s
    slack_s -= columns.work_left_s
    return slack_s


def ilrs(columns: Columns, now_s: float) -> Floats:
    """Least slack first, as a fraction of the deadline's length (v4 eq. 7).

    Written as 1 - (waited + work left) / deadline: the same number, and 1 where there is no deadline.
    """
    spent_s = now_s - columns.arrival_s + columns.work_left_s
    return 1.0 - spent_s / np.maximum(columns.deadline_s, SHORTEST_S)


def lars(columns: Columns, now_s: float) -> Floats:
    """Length-aware relative slack: least slack per second of total work first, the paper's rho (v5 section 4.1).

    Below 0 for a request that cannot be in time. A work of 0 counts as one of 1 ns.
    """
    key = lrs(columns, now_s)
    with np.errstate(over="ignore"):  # a huge deadline over a tiny work is inf, which is a key
        key /= np.maximum(columns.work_total_s, SHORTEST_S)
    return key


BUILT_IN: dict[str, Policy] = {one.__name__: one for one in (fcfs, sjf, srpt, edf, lrs, ilrs, lars)}
CLASS_FIRST = DEFAULT_POLICY = "priority"
_ACCEPTED = f"{', '.join(sorted(BUILT_IN))}, {CLASS_FIRST}, {CLASS_FIRST}:NAME or package.module:name"


# ---------------------------------------------------------------------------------------------------------------------
# The order


@dataclass(frozen=True, slots=True)
class Ranking:
    """A policy under its name; with ``by_class`` the priority class, which is not in the paper, goes before its key."""

    name: str
    key: Policy
    by_class: bool = False


def sort_rows(by: Sequence[Floats | Ints], *, first: int | None = None, among: Bools | None = None) -> RowNumbers:
    """Row numbers in ascending order of ``by``, the most significant column first; no value is NaN."""
    rows = _near(by, by[0].size if first is None else first, among)
    return rows[np.lexsort([column[rows] for column in reversed(by)])][:first]


def _near(by: Sequence[Floats | Ints], count: int, among: Bools | None) -> RowNumbers:
    """Rows, few if there are many, with the ``count`` first of ``among`` (None is all) in the order of ``by``.

    A sample says below which value they are; where that is too low, a partition does. Many that are tied at it, as of a
    class, are told apart by the next column.
    """
    values, num_rows = by[0], by[0].size if among is None else int(np.count_nonzero(among))
    if num_rows <= max(count, _FEW):
        return np.arange(values.size) if among is None else np.flatnonzero(among)
    step = -(-num_rows // _SAMPLE)
    sample, place = values[::step] if among is None else values[::step][among[::step]], 2 * count // step + 8
    last = np.partition(sample, place)[place] if place < sample.size else values.max()
    is_near = values <= last if among is None else among & (values <= last)
    if (num_near := np.count_nonzero(is_near)) < count:
        last = np.partition(values if among is None else values[among], count - 1)[count - 1]
        is_near = values <= last if among is None else among & (values <= last)
    if num_near > max(count, _FEW) and len(by) > 1:
        is_tied = is_near & (values == last)
        is_near ^= is_tied
        if (num_before := int(np.count_nonzero(is_near))) < count:
            return np.concatenate((np.flatnonzero(is_near), _near(by[1:], count - num_before, is_tied)))
    return np.flatnonzero(is_near)


def keys_of(ranking: Ranking, columns: Columns, now_s: float) -> Floats:
    """The policy's keys, checked; PolicyError where it raised, or returned something else than a number for each."""
    try:
        keys = ranking.key(columns, now_s)
        if fault := _fault(keys, len(columns)):
            raise fault
        if np.isnan(keys.min()):  # as where any is
            raise ValueError(f"{np.count_nonzero(np.isnan(keys))} of {len(keys)} keys are NaN")
    except Exception as error:
        if is_interrupt(error):
            raise
        raise PolicyError(f"policy {ranking.name}: {type(error).__name__}: {error}", policy=ranking.name) from error
    return keys


def _fault(keys: Any, count: int) -> TypeError | None:
    if isinstance(keys, np.ndarray) and keys.dtype == np.float64 and keys.shape == (count,):
        return None
    kind = f"{keys.dtype} of shape {keys.shape}" if isinstance(keys, np.ndarray) else type(keys).__name__
    return TypeError(f"returned {kind}; accepted: float64 of shape ({count},)")


# ---------------------------------------------------------------------------------------------------------------------
# By name


def load_policy(spec: str | Policy) -> Ranking:
    """The policy that a user asks for.

    Args:
        spec: a built-in name; ``priority`` (class first, then SRPT) or ``priority:SPEC`` (class first, then another);
            ``package.module:name``; or the function itself.
    """
    if not isinstance(spec, str):
        if not callable(spec):
            raise ConfigError(f"policy={spec!r}; accepted: {_ACCEPTED}, or a function of (columns, now_s)")
        name = f"{getattr(spec, '__module__', '?')}:{getattr(spec, '__qualname__', type(spec).__qualname__)}"
        return Ranking(name, _tried(spec, name))
    if spec in BUILT_IN:
        return Ranking(spec, BUILT_IN[spec])
    head, colon, rest = spec.partition(":")
    if head == CLASS_FIRST:
        inner = load_policy(rest if colon else "srpt")
        if inner.by_class:
            raise ConfigError(f"policy={spec!r}; accepted: {CLASS_FIRST} once")
        return Ranking(f"{CLASS_FIRST}:{inner.name}", inner.key, by_class=True)
    if colon:
        return Ranking(spec, _tried(_import_policy(spec, module_name=head, function_name=rest), spec))
    raise ConfigError(f"policy={spec!r}; accepted: {_ACCEPTED}{hint(spec.lower(), [*BUILT_IN, CLASS_FIRST])}")


def _import_policy(spec: str, *, module_name: str, function_name: str) -> Policy:
    is_safe = os.environ.get("MEDHA_SAFE_PATH", sys.flags.safe_path)  # of whoever has started this process
    is_here = not is_safe and "" not in sys.path
    sys.path += [""] * is_here  # the current folder, which an installed command, unlike ``python -m``, has not
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(f"policy={spec!r}: cannot import {module_name!r}: {type(error).__name__}: {error}") from error
    finally:
        if is_here:
            sys.path.remove("")
    policy: Policy | None = getattr(module, function_name, None)
    if not callable(policy):
        near = hint(function_name, [name for name, value in vars(module).items() if callable(value)])
        raise ConfigError(f"policy={spec!r}: {module_name} has no function {function_name!r}{near} ({module!r})")
    return policy


def _tried(policy: Policy, name: str) -> Policy:
    """A user's policy, asked about one request: columns that there are not, or a wrong type, are found before it."""
    one, count = np.ones(1), np.ones(1, np.int64)
    try:
        fault: Exception | None = _fault(policy(Columns(one, one, one, one, count, count, count), 0.0), 1)
    except Exception as error:  # another may hold for this request alone; of a real one it is a PolicyError
        fault = error if isinstance(error, AttributeError) and isinstance(error.obj, Columns) else None
    if fault:
        raise ConfigError(f"policy {name}: {fault}") from fault
    return policy
