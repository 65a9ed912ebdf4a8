"""The distributed pool of keys and values of LoongServe, and the groups that its instances form.

Source: LoongServe (Wu et al., arXiv:2404.09526): tokens of a request lie on any instances of its group, each anywhere.
Who is served when is the affair of :mod:`examples.reproduce.baselines.loongserve_manager`.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    kv: dict[int, int] = field(default_factory=dict)
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
    """Requests that decode together. One that is stopped waits for prefills on its instances."""

    instances: list[int]
    requests: list[Request]
    run: Run | None = None
    is_stopped: bool = False


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

    def running(self) -> list[Group]:
        """Groups that are not stopped."""
        return [group for group in self.groups if not group.is_stopped]

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

    def stop(self, group: Group) -> None:
        """Stop a group if a prefill has one of its instances; let it go on otherwise."""
        group.is_stopped = any(isinstance(self.owner[instance], Prefill) for instance in group.instances)

    def resume(self, group: Group) -> None:
        """Let a group go on if no prefill has an instance of it; it leaves those where it has nothing."""
        self.stop(group)
        for instance in list(group.instances):
            if isinstance(self.owner[instance], Prefill):
                continue
            if self.used[instance] == 0:
                self.drop(group, instance)
            else:
                self.owner[instance] = group

    def keep(self, prefill: Prefill, room: dict[int, int]) -> None:
        """Say where keys and values of prompts stay: on the fewest instances, the fullest first.

        Args:
            prefill: whose requests.
            room: tokens that each instance of it has room for.
        """
        order = sorted(prefill.instances, key=lambda instance: (-self.used[instance], instance))
        for request in prefill.requests:
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
        for instance in involved:
            self.ready_s[instance] = done_s

    def group_of(self, instance: int) -> Group:
        """The group that an instance is of."""
        owner = self.owner[instance]
        assert isinstance(owner, Group), f"instance {instance} is of no group"
        return owner

    def _shift(self, group: Group, source: int, target: int, amount: int) -> None:
        self.used[source] -= amount
        self.used[target] += amount
        for request in group.requests:
            moved = min(amount, request.kv.get(source, 0))
            if moved:
                request.kv[source] -= moved
                request.kv[target] = request.kv.get(target, 0) + moved
                amount -= moved

    def masters(self, group: Group) -> list[tuple[int, int]] | None:
        """Which instances keep the next tokens of how many requests, the fullest first; None where there is no room."""
        order = sorted(group.instances, key=lambda instance: (-self.used[instance], instance))
        order = [instance for instance in order if self.used[instance] < self.tokens]
        left, masters = len(group.requests), []
        for place, instance in enumerate(order):
            share = max(left // (len(order) - place), MASTER_REQUESTS)
            rows = min(left, self.tokens - self.used[instance], share)
            if rows:
                masters.append((instance, rows))
                left -= rows
        return None if left else masters
