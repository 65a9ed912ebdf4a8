"""A model of a transport without buffers, on which deadlock is exact: every blocking operation goes through it.

A send completes only when its receive has been posted (and the other way round), a collective only when every member
has entered it; a thread that waits, waits here. One thread runs at a time and hands over at each operation to one that
can go on, chosen by a seed, so an interleaving is a function of the seed. When none can go on and not all have ended,
that is a deadlock, reported with the place of each thread.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from medha.engine import wire
from medha.parallel import control, kvp, mesh, spp, tp
from medha.worker import step
from tests.commands import LIMIT_S


class DeadlockError(AssertionError):
    """No thread can go on; says where each one is."""


class _Stopped(BaseException):
    """Ends a thread after a deadlock or the failure of another."""


class Group(NamedTuple):
    """What stands for a process group on one rank."""

    name: str
    rank: int
    members: tuple[int, ...]


_Channel = tuple[str, int, int, int]  # group, from, to, tag


@dataclass(eq=False)
class Work:
    """A send or receive; ``wait`` blocks until its peer is there too."""

    transport: Transport
    what: str
    tensor: torch.Tensor
    done: bool = False

    def wait(self) -> bool:
        self.transport.block(lambda: self.done, self.what)
        return True


@dataclass(eq=False)
class _Actor:
    name: str
    priority: float
    ready: Callable[[], bool] = lambda: True
    what: str = "starts"
    done: bool = False
    baton: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    thread: threading.Thread = field(init=False)


class Transport:
    """Threads that take turns in an interleaving that ``seed`` chooses, and what they send each other."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._is_fair = self._random.random() < 0.5  # else by priorities that change now and then: some starve long
        self._actors: list[_Actor] = []
        self._current: _Actor | None = None
        self._error: BaseException | None = None  # which ends all threads
        self._sends = defaultdict[_Channel, deque[Work]](deque)
        self._receives = defaultdict[_Channel, deque[Work]](deque)
        self._gathers = defaultdict[tuple[str, int], dict[int, tuple[Work, torch.Tensor]]](dict)
        self._num_entered: Counter[tuple[str, int]] = Counter()
        self.num_messages = 0
        self.operations: set[tuple[int, str, int]] = set()  # (rank, group, tag) of all sends, receives and collectives

    # -- threads -------------------------------------------------------------------------------------------------

    def spawn(self, name: str, function: Callable[[], None]) -> None:
        actor = _Actor(name, self._random.random())
        actor.thread = threading.Thread(target=self._live, args=(actor, function), name=name, daemon=True)
        self._actors.append(actor)
        actor.thread.start()

    def run(self) -> None:
        """Run every thread to its end; raises DeadlockError if they do not end, or what the first of them raised."""
        self._pass_on()
        for actor in self._actors:
            actor.thread.join(LIMIT_S)
            assert not actor.thread.is_alive(), "a thread of the model waits for something that is not of the model"
        if self._error is not None:
            raise self._error

    def block(self, ready: Callable[[], bool], what: str) -> None:
        """Let others run until ``ready()``; called by every operation, also by one that need not wait."""
        me = self._current
        assert me is not None and threading.current_thread() is me.thread, "one thread runs at a time"
        me.ready, me.what = ready, what
        if self._error is None:
            self._pass_on()
            me.baton.acquire()
        if self._error is not None:
            raise _Stopped

    def _live(self, actor: _Actor, function: Callable[[], None]) -> None:
        actor.baton.acquire()
        try:
            if self._error is None:
                function()
        except _Stopped:
            pass
        except BaseException as error:
            self._stop(error)
        actor.done = True
        if self._error is None:
            self._pass_on()

    def _pass_on(self) -> None:
        ready = [actor for actor in self._actors if not actor.done and actor.ready()]
        if ready:
            self._current = chosen = self._chosen(ready)
            chosen.baton.release()
        elif not all(actor.done for actor in self._actors):
            places = (f"  {actor.name}: {'has ended' if actor.done else actor.what}" for actor in self._actors)
            self._stop(DeadlockError("\n".join(["deadlock:", *places])))

    def _chosen(self, ready: list[_Actor]) -> _Actor:
        if self._is_fair:
            return self._random.choice(ready)
        chosen = max(ready, key=lambda actor: actor.priority)
        if self._random.random() < 0.05:
            chosen.priority = self._random.random()
        return chosen

    def _stop(self, error: BaseException) -> None:
        self._error = self._error or error
        for actor in self._actors:
            actor.baton.release()

    # -- operations ----------------------------------------------------------------------------------------------

    def isend(self, tensor: torch.Tensor, dst: int, group: Group, tag: int = 0) -> Work:
        """Post a send; the data is read when the receive is there, not before."""
        assert tensor.is_contiguous(), "gloo fails on the sender only"
        work = Work(self, f"sends to rank {dst} in {group.name}", tensor)
        return self._post(work, (group.name, group.rank, dst, tag), self._sends)

    def irecv(self, tensor: torch.Tensor, src: int, group: Group, tag: int = 0) -> Work:
        work = Work(self, f"receives from rank {src} in {group.name}", tensor)
        return self._post(work, (group.name, src, group.rank, tag), self._receives)

    def _post(self, work: Work, channel: _Channel, side: dict[_Channel, deque[Work]]) -> Work:
        self.block(lambda: True, work.what)
        name, source, target, tag = channel
        self.operations.add((source if side is self._sends else target, name, tag))
        side[channel].append(work)
        sends, receives = self._sends[channel], self._receives[channel]
        if sends and receives:
            send, receive = sends.popleft(), receives.popleft()
            size = send.tensor.numel()
            assert size <= receive.tensor.numel(), f"{channel}: {size} numbers for {receive.tensor.numel()}"
            receive.tensor.view(-1)[:size] = send.tensor.view(-1)
            send.done = receive.done = True
            self.num_messages += 1
        return work

    def all_reduce(self, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        """The sum over a group, once all its ranks are here."""
        everyone = tensor.new_empty(len(group.members), *tensor.shape)
        self.all_gather(everyone, tensor.contiguous(), group).wait()
        return everyone.sum(0).to(tensor.dtype)

    def all_gather(self, everyone: torch.Tensor, mine: torch.Tensor, group: Group) -> Work:
        """Begin an all-gather; data moves, in the order of the members, once all of them have begun it."""
        assert mine.is_contiguous() and everyone.is_contiguous()
        self.operations.add((group.rank, group.name, 0))
        self._num_entered[group.name, group.rank] += 1
        number = self._num_entered[group.name, group.rank]
        work = Work(self, f"in collective {number} of {group.name}", mine)
        self.block(lambda: True, work.what)
        entered = self._gathers[group.name, number]
        entered[group.rank] = work, everyone
        if len(entered) == len(group.members):
            sizes = {other.tensor.numel() for other, _ in entered.values()}
            assert len(sizes) == 1, f"{work.what}: sizes {sizes}"
            together = torch.cat([entered[rank][0].tensor.view(-1) for rank in group.members])
            for other, target in entered.values():
                target.view(-1).copy_(together)
                other.done = True
        return work

    # -- what the library sees -----------------------------------------------------------------------------------

    @contextmanager
    def installed(self, world_size: int) -> Iterator[None]:
        """Within, the library's transfers, queues and threads are those of this model."""
        dist = SimpleNamespace(
            isend=self.isend,
            irecv=self.irecv,
            send=lambda tensor, **to: self.isend(tensor, **to).wait(),
            P2POp=partial,
            batch_isend_irecv=lambda ops: [op() for op in ops],
            all_reduce=lambda tensor, *, group: tensor.copy_(self.all_reduce(tensor, group)),
            all_gather_into_tensor=lambda everyone, mine, *, group: self.all_gather(everyone, mine, group).wait(),
            get_world_size=lambda group: len(group.members),
            barrier=lambda *_, **__: self._barrier(world_size),
            destroy_process_group=lambda *_: None,
        )
        with pytest.MonkeyPatch.context() as patch:
            for module in (wire, control, kvp, mesh, spp, tp):
                patch.setattr(module, "dist", dist)
            for module in (control, step):
                patch.setattr(module, "threading", SimpleNamespace(Thread=self._thread))
                patch.setattr(module, "queue", SimpleNamespace(SimpleQueue=lambda: _Queue(self)))
            patch.setattr(step, "Future", lambda: _Future(self))
            yield

    def _thread(self, target: Callable[[], None], *, name: str, daemon: bool) -> Any:
        assert self._current is not None and daemon
        return SimpleNamespace(start=lambda owner=self._current.name: self.spawn(f"{owner}, {name}", target))

    def _barrier(self, world_size: int) -> None:
        assert self._current is not None
        rank = int(self._current.name.split()[1].rstrip(","))  # of "rank 1", or "rank 1, a thread of it"
        self.all_reduce(torch.zeros(()), Group("barrier", rank, tuple(range(world_size))))


class _Future(Future[Any]):
    """One whose result is waited for here."""

    def __init__(self, transport: Transport) -> None:
        super().__init__()
        self._transport = transport

    def result(self, timeout: float | None = None) -> Any:
        self._transport.block(self.done, "waits for another thread")
        return super().result(0)


class _Queue(deque[Any]):
    put, qsize = deque.append, deque.__len__

    def __init__(self, transport: Transport) -> None:
        super().__init__()
        self._transport = transport

    def get(self) -> Any:
        self._transport.block(lambda: len(self) > 0, "waits for something to do")
        return self.popleft()
