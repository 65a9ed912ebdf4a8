"""The distributed pool of keys and values of LoongServe, and the groups that its instances form.

Source: LoongServe (Wu et al., arXiv:2404.09526): tokens of a request lie on any instances of its group, each anywhere.
Who is served when is the affair of :mod:`examples.reproduce.baselines.loongserve_manager`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from examples.reproduce.baselines.loongserve_plan import Pending

MASTER_REQUESTS = 128
"""Requests of a master from which a group takes another instance: ``min_comp_bound_decoding_batch_size``."""


@dataclass(slots=True, eq=False)
class Request:
    """One that was dispatched: tokens it produced and has left, and its cached tokens by instance."""

    pending: Pending
    left: int
    done: int = 1
    kv: Counter[int] = field(default_factory=Counter)
    last_s: float = 0.0

    @property
    def length(self) -> int:
        return self.pending.prompt_tokens + self.done


@dataclass(slots=True, eq=False)
class Run:
    """Steps of one length that a group does one after the other; ``masters`` keep the tokens of so many requests."""

    start_s: float
    step_s: float
    num_steps: int
    masters: list[tuple[int, int]]

    def end_s(self, num_steps: int) -> float:
        return self.start_s + num_steps * self.step_s


@dataclass(slots=True, eq=False)
class Group:
    """Requests that decode together."""

    instances: list[int]
    requests: list[Request]
    run: Run | None = None


@dataclass(slots=True, eq=False)
class Prefill:
    """Prompts that are prefilled together; ``is_filling`` where others, begun before, end later."""

    instances: list[int]
    requests: list[Request]
    start_s: float
    end_s: float
    activations: float
    is_filling: bool


class KvPool:
    """What instances hold, and whose they are.

    Args:
        instances: their numbers.
        tokens: that each has room for.

    Attributes:
        used: cached tokens by instance, those that a run of steps will add included.
        ready_s: by instance, when it is done with what it does.
        owner: by instance; None for an idle one.
        groups: all, stopped or not.
    """

    def __init__(self, instances: range, tokens: int) -> None:
        self.tokens = tokens
        self.used = dict.fromkeys(instances, 0)
        self.ready_s = dict.fromkeys(instances, 0.0)
        self.owner: dict[int, Group | Prefill | None] = dict.fromkeys(instances)
        self.groups: list[Group] = []

    def idle(self) -> list[int]:
        """Instances of nobody."""
        return [instance for instance, owner in self.owner.items() if owner is None]

    def is_stopped(self, group: Group) -> bool:
        """Whether a group waits for prefills on its instances."""
        return any(isinstance(self.owner[instance], Prefill) for instance in group.instances)

    def running(self) -> list[Group]:
        """Groups that are not stopped."""
        return [group for group in self.groups if not self.is_stopped(group)]

    def room(self, group: Group) -> int:
        """Tokens that the instances of a group have room for."""
        return sum(self.tokens - self.used[instance] for instance in group.instances)

    def join(self, group: Group, instance: int) -> None:
        """Give a group an instance."""
        group.instances.append(instance)
        self.owner[instance] = group

    def drop(self, group: Group, instance: int) -> None:
        """Make an instance of a group idle."""
        group.instances.remove(instance)
        self.owner[instance] = None

    def merge(self, group: Group, other: Group) -> None:
        """Make another group part of a group; neither has a run."""
        if group is other:
            return
        group.requests = group.requests + other.requests
        for instance in other.instances:
            self.join(group, instance)
        self.groups.remove(other)

    def settle(self, group: Group) -> None:
        """Make a group the owner of its instances that no prefill has; it leaves those where it has nothing."""
        for instance in [one for one in group.instances if not isinstance(self.owner[one], Prefill)]:
            if self.used[instance]:
                self.owner[instance] = group
            else:
                self.drop(group, instance)

    def keep(self, requests: Sequence[Request], room: dict[int, int]) -> None:
        """Say where keys and values of prompts stay: on the fewest instances, the fullest first.

        Args:
            requests: that are prefilled together.
            room: tokens that each instance of the prefill has room for.
        """
        order = self._fullest_first(room)
        for request in requests:
            left = request.pending.prompt_tokens
            for instance in order:
                if amount := min(left, room[instance]):
                    request.kv[instance] = amount
                    self.used[instance] += amount
                    room[instance] -= amount
                    left -= amount
            assert not left, "a prefill was planned with room for its keys and values"

    def free(self, request: Request) -> None:
        """Let go of what a request has cached."""
        for instance, tokens in request.kv.items():
            self.used[instance] -= tokens

    def move(self, source: int, others: Sequence[int], seconds: float) -> None:
        """Move what an instance holds to others, in turn, that then are of one group with it; it becomes idle.

        Args:
            source: of a group, as are the others.
            others: with room for it together.
            seconds: that the move takes.
        """
        involved = [source]
        for other in others:
            if amount := min(self.used[source], self.tokens - self.used[other]):
                self.merge(self.group_of(other), self.group_of(source))
                self._shift(self.group_of(other), source, other, amount)
                involved.append(other)
        self.drop(self.group_of(source), source)
        done_s = max(self.ready_s[instance] for instance in involved) + seconds
        self.ready_s.update(dict.fromkeys(involved, done_s))

    def group_of(self, instance: int) -> Group:
        """The group that an instance is of."""
        owner = self.owner[instance]
        assert isinstance(owner, Group), f"instance {instance} is of no group"
        return owner

    def _shift(self, group: Group, source: int, target: int, amount: int) -> None:
        self.used[source] -= amount
        self.used[target] += amount
        for request in group.requests:
            if moved := min(amount, request.kv[source]):
                request.kv[source] -= moved
                request.kv[target] += moved
                amount -= moved

    def _fullest_first(self, instances: Iterable[int]) -> list[int]:
        return sorted(instances, key=lambda instance: (-self.used[instance], instance))

    def masters(self, group: Group) -> list[tuple[int, int]] | None:
        """Which instances keep the next tokens of how many requests, the fullest first; None where there is no room."""
        order = self._fullest_first(one for one in group.instances if self.used[one] < self.tokens)
        left, masters = len(group.requests), []
        for place, instance in enumerate(order):
            share = max(left // (len(order) - place), MASTER_REQUESTS)
            if rows := min(left, self.tokens - self.used[instance], share):
                masters.append((instance, rows))
                left -= rows
        return None if left else masters
