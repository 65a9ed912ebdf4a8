"""A CUDA device emulated on the CPU, for tests of what a device changes: order, lifetime, waits and captures.

Tensors on it say ``cuda:0`` and hold memory of the host. Whatever is launched waits on its stream until the host waits
for it, and streams then run in any order that their events allow. Memory is garbage until a kernel has written it and
again once it is freed. What is wrong on a device for any timing is a :class:`DeviceError`, raised where it is noticed:

- race: two streams, or a stream and the host, use the same bytes and nothing orders them (vector clocks, as in
  ``torch.cuda._sanitizer``, over ranges of bytes; the host is seen reading pinned memory by its torch operations,
  ``tolist`` and ``numpy``);
- pinned: a copy finds other values in its pinned source than there were when it was launched;
- capture: a wait, a copy from pageable memory or another thing that cannot be captured, or a stream left unjoined;
- freed: a graph is replayed that is gone, or whose kernels use memory that is;
- plan: FlashInfer's, see :mod:`tests.cuda.kernels`.

Host waits are counted by place: ``syncs`` for all of a stream, ``stalls`` for an event with no work launched behind it.
Collectives over gloo are work of a stream of their own, as NCCL's. Numerics, memory limits and speed are the CPU's.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
import threading
import time
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
Clock = dict[Any, int]
"""By stream, how many of its operations are known to have ended."""

_STAGED_BYTES = 1 << 16  # the driver takes along so much of pageable memory without a wait


_IDLE_S = 5e-3


class DeviceError(AssertionError):
    """Something that no device would promise to do right."""


@dataclass(slots=True)
class Access:
    """An operation's use of the bytes [start, end) of some memory; ``tick`` is its number on its stream."""

    name: str
    start: int
    end: int
    writes: bool
    stream: Any = None
    tick: int = 0


class Memory:
    """An allocation of the device, or pinned: who used it, and on which other streams it may be used until it goes."""

    def __init__(self, raw: torch.Tensor, graph: Graph | None = None) -> None:
        self.raw = raw
        self.graph = graph
        self.accesses: list[Access] = []
        self.recorded: list[Stream] = []
        self.num_plans = [0]


@dataclass(slots=True)
class Op:
    """What a stream runs: a kernel, or with ``marker`` the end of all before; or it waits for ``until``."""

    name: str
    kernel: Callable[[], Any] | None = None
    uses: list[tuple[Memory, Access]] = field(default_factory=list)
    marker: Marker | None = None
    until: Marker | None = None
    elsewhere: bool = False
    running: Future[None] | None = None


@dataclass(eq=False, slots=True)
class Marker:
    """A point in a stream."""

    clock: Clock
    stream: Stream
    kernels: int = 0
    is_done: bool = False


def garble_(raw: torch.Tensor) -> None:
    """Fill memory with what nobody may use."""
    if raw.dtype.is_floating_point:
        raw.fill_(float("nan"))
    elif raw.dtype in (torch.bool, torch.uint8):
        raw.fill_(0xAB)
    else:
        raw.fill_(int.from_bytes(b"\xab" * raw.element_size(), "little", signed=True))


def extent(raw: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor spans."""
    if not raw.numel():
        return 0, 0
    last = sum((n - 1) * stride for n, stride in zip(raw.shape, raw.stride(), strict=True))
    first = raw.storage_offset()
    return first * raw.element_size(), (first + last + 1) * raw.element_size()


class Device:
    """The emulated device, one at a time.

    Args:
        seed: of the order in which streams run.

    Attributes:
        faults: what was wrong, by kind and in words.
        syncs, stalls, launches: how often, by place or by name.
    """

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.streams: list[Stream] = []
        self.host: Clock = {}
        self.pinned: dict[int, Memory] = {}
        self.faults: list[str] = []
        self.syncs: Counter[str] = Counter()
        self.stalls: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self.works: list[EmulatedWork] = []  # torch's own handle does not keep them alive
        self.host_s = time.monotonic()  # when the host last launched something or waited
        self.capturing: Graph | None = None
        self.comm: dict[str, tuple[Stream, ThreadPoolExecutor]] = {}
        self.default = self.current = Stream(self)
        self.capture_stream = Stream(self)

    def fault(self, kind: str, text: str) -> None:
        """Note and raise a fault."""
        self.faults.append(f"{kind}: {text}, at {_place()}")
        raise DeviceError(self.faults[-1])

    def launch(
        self, name: str, kernel: Callable[[], Any], reads: Iterable[Any] = (), writes: Iterable[Any] = (), **how: Any
    ) -> None:
        """Let the current stream run a kernel, which uses these tensors (of the device, or pinned)."""
        uses = [
            (memory, Access(name, *extent(raw), is_write))
            for tensors, is_write in ((reads, False), (writes, True))
            for memory, raw in map(self._memory_of, tensors)
            if memory is not None
        ]
        self.push(Op(name, kernel, uses, **how))

    def push(self, op: Op) -> None:
        """Put an operation behind those of the current stream, or into the graph that it is captured in."""
        self.host_s = time.monotonic()
        with self.lock:
            graph, stream = self.capturing, self.current
            if graph is not None and stream in graph.streams:
                graph.take(op, stream)
                return
            if op.kernel is not None:
                self.launches[op.name] += 1
                stream.kernels += 1
            stream.launched += 1
            _merge(stream.clock, self.host)
            stream.clock[stream] = stream.launched
            if op.marker is not None:
                op.marker.clock, op.marker.kernels = dict(stream.clock), stream.kernels
            stream.queue.append(op)
            for memory, use in op.uses:
                self._note(memory.accesses, replace(use, stream=stream, tick=stream.launched), stream.clock)
            op.uses = []  # which would keep the memory

    def _note(self, accesses: list[Access], new: Access, clock: Clock) -> None:
        """Note a use of some memory, which every conflicting one must come before."""
        kept = []
        for old in accesses:
            meets = old.start < new.end and new.start < old.end
            if meets and (old.writes or new.writes) and clock.get(old.stream, 0) < old.tick:
                who = new.name if new.stream is None else f"{new.name} on {new.stream}"
                self.fault("race", f"{who} does not wait for {old.name} on {old.stream}")
            covered = new.start <= old.start and old.end <= new.end
            if not (covered and (new.writes or (old.stream is new.stream and not old.writes))):
                kept.append(old)
        if new.stream is not None:  # the host is done at once
            accesses[:] = [*kept, new]

    def on_host(self, tensor: torch.Tensor, *, writes: bool) -> None:
        """Check that the host may use pinned memory now."""
        memory = self.pinned.get(tensor.untyped_storage().data_ptr()) if self.pinned else None
        if memory is not None and memory.accesses:
            self._note(memory.accesses, Access("the host", *extent(tensor), writes), self.host)

    def _memory_of(self, tensor: torch.Tensor) -> tuple[Memory | None, torch.Tensor]:
        if isinstance(tensor, Emulated):
            return tensor.memory, tensor.raw
        return self.pinned.get(tensor.untyped_storage().data_ptr()), tensor

    def is_used(self, tensor: torch.Tensor, *, by_writes: bool) -> bool:
        """Whether operations that the host has not waited for write pinned memory, or read it."""
        memory, _ = self._memory_of(tensor)
        first, last = extent(tensor)
        return memory is not None and any(
            use.start < last and first < use.end and use.writes == by_writes
            for use in memory.accesses
            if self.host.get(use.stream, 0) < use.tick
        )

    def _ready(self) -> list[Stream]:
        return [
            s for s in self.streams
            if s.queue and not (s.queue[0].until is not None and not s.queue[0].until.is_done)
            and not (s.queue[0].running is not None and not s.queue[0].running.done())
        ]  # fmt: skip

    def step(self) -> bool:
        """Run the next operation of some stream; returns whether there was one."""
        with self.lock:
            ready = self._ready()
            if not ready:
                return False
            stream = self.random.choice(ready)
            op = stream.queue[0]
            if op.elsewhere and op.running is None:
                assert op.kernel is not None
                op.running = stream.pool.submit(op.kernel)
                return True
            stream.queue.popleft()
            if op.running is not None:
                op.running.result()
            elif op.kernel is not None:
                with torch._C._DisableTorchDispatch(), torch.inference_mode():
                    op.kernel()
            if op.marker is not None:
                op.marker.is_done = True
            return True

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Run what has been launched until something is so."""
        while not is_done():
            self.host_s = time.monotonic()
            if not self.step():
                with self.lock:
                    waits = any(s.queue and s.queue[0].running is not None for s in self.streams)
                if not waits and not is_done() and not self._ready():
                    self.fault("race", "every stream waits for another")
                time.sleep(1e-4)

    def wait(self, marker: Marker) -> None:
        """Let the host wait for a point in a stream."""
        self.run_until(lambda: marker.is_done)
        _merge(self.host, marker.clock)

    def sync(self, what: str, *streams: Stream) -> None:
        """Let the host wait for all that streams have been given, by default the current one."""
        if self.capturing is not None:
            self.fault("capture", f"{what} makes the host wait")
        self.syncs[f"{what} at {_place()}"] += 1
        for stream in streams or (self.current,):
            self.wait(stream.mark())

    def allocate(self, like: torch.Tensor) -> Emulated:
        """Garbage of the shape, strides and dtype of a tensor."""
        raw = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
        garble_(raw)
        memory = Memory(raw, self.capturing)
        if self.capturing is not None:
            self.capturing.owned.append(weakref.ref(memory))
        weakref.finalize(memory, self._freed, raw, self.current, memory.accesses, memory.recorded, self.capturing)
        return Emulated(raw, memory)

    def _freed(self, raw: Any, stream: Stream, accesses: list[Access], recorded: list[Stream], graph: Any) -> None:
        """Memory nobody refers to is used again in the order of the stream that it was allocated on."""
        if sys.is_finalizing():
            return
        op = Op("free", lambda: garble_(raw))
        if graph is not None:
            if self.capturing is graph:
                graph.ops.append(op)
            return
        with self.lock:
            stream.launched += 1
            clock = dict(stream.clock)
            for other in (self.host, *(s.clock for s in recorded)):
                _merge(clock, other)
            stream.queue.append(op)
            with contextlib.suppress(DeviceError):  # raised, it would be lost
                self._note(
                    accesses, Access("freeing its memory", 0, sys.maxsize, True, None), clock | {stream: 1 << 60}
                )

    def pin(self, raw: torch.Tensor) -> torch.Tensor:
        """Take memory of the host as pinned; it is kept, so that none lies at its address later."""
        if self.capturing is not None:
            self.fault("capture", "pinned memory is allocated")
        self.pinned[raw.untyped_storage().data_ptr()] = Memory(raw)
        return raw

    def progress(self) -> None:
        """Run what is launched even while the host does not wait: other ranks may wait for it."""

        def run() -> None:
            while now() is self:
                time.sleep(_IDLE_S)
                with contextlib.suppress(DeviceError):
                    while time.monotonic() - self.host_s > _IDLE_S and self.step():
                        pass

        threading.Thread(target=run, daemon=True).start()


class Stream:
    """``torch.cuda.Stream``."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.owner = device if isinstance(device, Device) else now()
        self.device = CUDA
        self.queue: deque[Op] = deque()
        self.clock: Clock = {}
        self.launched = self.kernels = 0
        self.pool: ThreadPoolExecutor
        self.cuda_stream = len(self.owner.streams)
        self.owner.streams.append(self)

    def __repr__(self) -> str:
        return f"stream {self.cuda_stream}"

    def mark(self) -> Marker:
        """A point behind all that has been launched here."""
        marker = Marker({}, self)
        with stream_of(self):
            self.owner.push(Op("mark", marker=marker))
        return marker

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        graph, marker = self.owner.capturing, event.marker
        if graph is not None and (self in graph.streams or event.graph is graph):
            graph.join(self, event)
        elif marker is not None:
            with stream_of(self):
                _merge(self.clock, marker.clock)
                self.owner.push(Op("wait", until=marker))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.owner.sync("Stream.synchronize", self)

    def query(self) -> bool:
        self.owner.step()
        return not self.queue


class Event:
    """``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.marker: Marker | None = None
        self.graph: Graph | None = None
        self.stream: Stream | None = None
        self.is_timed = enable_timing

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or now().current
        graph = now().capturing
        self.stream, self.graph, self.marker = stream, None, None
        if graph is not None and stream in graph.streams:
            self.graph = graph
        else:
            self.marker = stream.mark()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or now().current).wait_event(self)

    def synchronize(self) -> None:
        device = now()
        if self.graph is not None or device.capturing is not None:
            device.fault("capture", "Event.synchronize makes the host wait")
        if self.marker is not None:
            if not self.marker.is_done and self.marker.kernels == self.marker.stream.kernels:
                device.stalls[f"Event.synchronize at {_place()}"] += 1
            device.wait(self.marker)

    def query(self) -> bool:
        if self.marker is None:
            return True
        now().step()
        if self.marker.is_done:
            _merge(now().host, self.marker.clock)
        return self.marker.is_done

    def elapsed_time(self, end: Event) -> float:
        assert self.is_timed and end.is_timed and self.marker is not None and end.marker is not None
        if not (self.marker.is_done and end.marker.is_done):
            now().fault("race", "elapsed_time asks for an event that has not passed")
        return 1.0


class Graph:
    """``torch.cuda.CUDAGraph``: operations with the addresses that they were captured with.

    Graphs of one pool keep their results where those captured before them keep what they free: a replay of one garbles
    the results of those captured after it.
    """

    def __init__(self, keep_graph: bool = False) -> None:
        self.device = now()
        self.ops: list[Op] = []
        self.uses: dict[tuple[weakref.ref[Memory], int, int, bool], Access] = {}
        self.owned: list[weakref.ref[Memory]] = []
        self.streams: set[Stream] = set()
        self.unjoined: set[Stream] = set()
        self.members: list[weakref.ref[Graph]] = []
        self.is_reset = False
        self.before_replay: dict[int, Callable[[], None]] = {}

    def pool(self) -> Any:
        return self.members

    def take(self, op: Op, stream: Stream) -> None:
        """Capture an operation."""
        if op.marker is not None or op.until is not None:
            return
        self.unjoined |= {stream} & (self.streams - {self.device.capture_stream})
        for memory, use in op.uses:
            if memory.graph is not self:
                self.uses[weakref.ref(memory), use.start, use.end, use.writes] = use
        self.ops.append(Op(op.name, op.kernel, elsewhere=op.elsewhere))

    def join(self, stream: Stream, event: Event) -> None:
        """Let a captured stream wait for another, which the capture then includes."""
        if event.graph is not self:
            if event.marker is not None and not event.marker.is_done:
                self.device.fault("capture", "a captured stream waits for work outside of the graph")
            return
        self.streams.add(stream)
        self.unjoined.discard(event.stream)  # type: ignore[arg-type]

    def replay(self) -> None:
        device = self.device
        if self.is_reset:
            device.fault("freed", "a graph is replayed that has been reset")
        for check in self.before_replay.values():
            check()
        uses = []
        for (ref, *_), use in self.uses.items():
            memory = ref()
            if memory is None:
                device.fault("freed", f"{use.name} of a graph uses memory that has been freed")
            uses.append((memory, use))
        members = [ref() for ref in self.members]
        later = (graph for graph in members[members.index(self) + 1 :] if graph is not None)
        for graph in (self, *later):
            for result in filter(None, (ref() for ref in graph.owned)):
                uses.append((result, Access("a graph's replay", 0, result.raw.nbytes, True)))
                if graph is not self:
                    device.push(Op("overwrite", lambda raw=result.raw: garble_(raw)))
        device.push(Op("replay", lambda: None, uses))
        for op in self.ops:
            device.push(Op(op.name, op.kernel, elsewhere=op.elsewhere))

    def reset(self) -> None:
        self.ops, self.is_reset = [], True

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        if pool is not None:
            self.members = pool
        self.members.append(weakref.ref(self))
        self.streams, self.device.capturing = {self.device.current}, self

    def capture_end(self) -> None:
        self.device.capturing = None
        if self.unjoined:
            self.device.fault("capture", f"{self.unjoined} had not been joined when it ended")
        for memory in (ref() for ref in self.owned):
            if memory is not None:
                garble_(memory.raw)


@contextlib.contextmanager
def capture(graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
    """``torch.cuda.graph``."""
    device = now()
    for each in device.streams:
        device.wait(each.mark())
    with stream_of(stream or device.capture_stream):
        graph.capture_begin(pool)
        try:
            yield
        except BaseException:
            device.capturing = None
            raise
        graph.capture_end()


@contextlib.contextmanager
def stream_of(stream: Stream | None) -> Iterator[None]:
    """``torch.cuda.stream``."""
    device = now()
    before, device.current = device.current, stream or device.current
    try:
        yield
    finally:
        device.current = before


_devices: list[Device] = []


def now() -> Device:
    """The device there is."""
    return _devices[-1]


def _merge(clock: Clock, other: Clock) -> None:
    for stream, tick in list(other.items()):
        clock[stream] = max(clock.get(stream, 0), tick)


def _place() -> str:
    """The line of medha's, or else FlashInfer's or a test's, that runs."""
    frames = [f for f in traceback.extract_stack() if not f.filename.endswith(("cuda/device.py", "cuda/kernels.py"))]
    for part in ("/medha/", "/flashinfer/", "/tests/"):
        found = [f for f in frames if part in f.filename]
        if found:
            return f"{part[1:]}{found[-1].filename.rpartition(part)[2]}:{found[-1].lineno}"
    return "?"


# ---------------------------------------------------------------------------------------------------------------------
# Tensors


class Emulated(torch.Tensor):
    """A tensor on the device: ``raw`` is the same on the host, where its bytes are."""

    raw: torch.Tensor
    memory: Memory
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: torch.Tensor, memory: Memory) -> Emulated:
        with torch.inference_mode(False):
            made = torch.Tensor._make_wrapper_subclass(
                cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype, device=CUDA
            )
        made.raw, made.memory = raw, memory
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def record_stream(self, stream: Any) -> None:
        self.memory.recorded.append(stream)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Emulated({tuple(self.shape)}, {self.dtype})"


class Everywhere(TorchDispatchMode):
    """Brings also the calls without a tensor of the device here, but for those of subclasses such as DTensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not {torch.Tensor, torch.nn.Parameter, Emulated}.issuperset(types):
            return NotImplemented
        return dispatch(func, args, kwargs or {})


MODE = Everywhere()
_WAITING = {"_local_scalar_dense", "nonzero", "_unique2", "masked_select", "equal", "is_nonzero", "bincount"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
_shapes: dict[Any, Any] = {}


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """Any operation of torch."""
    device = now()
    flat, spec = tree_flatten((args, kwargs))
    name = func._schema.name.partition("::")[2]
    here = [x for x in flat if isinstance(x, Emulated)]
    host = [x for x in flat if isinstance(x, torch.Tensor) and not isinstance(x, Emulated)]
    makes_here = any(isinstance(x, torch.device) and x.type == "cuda" for x in flat)
    written = [a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments]
    if not here and not makes_here:
        return _on_host(device, func, name, args, kwargs, host)
    if func.namespace == "c10d":
        return _collective(device, func, name, args, kwargs)
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        with MODE:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    if name == "copy_":
        return _copy(device, args[0], args[1], kwargs.get("non_blocking", len(args) > 2 and args[2]))
    if name == "_to_copy":
        source, dtype = args[0], kwargs.get("dtype") or args[0].dtype
        shape = torch.empty_like(_meta(source), dtype=dtype)
        if makes_here or "device" not in kwargs or kwargs["device"] is None:
            out: torch.Tensor = device.allocate(shape)
            source = source if isinstance(source, Emulated) or source.dtype == dtype else source.to(dtype)
        else:
            out = torch.empty(shape.shape, dtype=dtype)
        return _copy(device, out, source, kwargs.get("non_blocking", False))
    if name == "is_pinned":
        return False
    for tensor in host if here else ():
        if tensor.dim() and name in _INDEXING:
            device.sync("indexing by a tensor of the host")
        elif tensor.dim() and tensor.device.type == "cpu":
            raise RuntimeError(f"Expected all tensors to be on the same device: {func} with one of the host")
    raws = [x.raw if isinstance(x, Emulated) else x.clone() if isinstance(x, torch.Tensor) else x for x in flat]
    raws = [torch.device("cpu") if isinstance(x, torch.device) else x for x in raws]
    raw_args, raw_kwargs = tree_unflatten(raws, spec)
    returns = func._schema.returns
    if here and any(r.alias_info is not None and not r.alias_info.is_write for r in returns):
        views = func(*raw_args, **raw_kwargs)
        return tree_map(lambda raw: Emulated(raw, here[0].memory) if isinstance(raw, torch.Tensor) else raw, views)
    is_mask = name in _INDEXING and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    if name in _WAITING or is_mask:
        device.sync(name)
    if any(written) and all(r.alias_info is not None for r in returns):  # in place, or with out=
        outs = [
            args[i] if i < len(args) else kwargs[func._schema.arguments[i].name]
            for i, is_written in enumerate(written)
            if is_written
        ]
        device.launch(name, lambda: func(*raw_args, **raw_kwargs), here, tree_flatten(outs)[0])
        return None if not returns else outs[0] if len(returns) == 1 else tuple(outs)
    if name in _WAITING:
        return tree_map(lambda t: _given(device, name, t) if isinstance(t, torch.Tensor) else t,
                        func(*raw_args, **raw_kwargs))  # fmt: skip
    if not here and not name.startswith(("empty", "new_empty")):
        return _given(device, name, func(*raw_args, **raw_kwargs))
    shapes, shape_spec = _shapes_of(func, name, flat, spec)
    made = [device.allocate(s) if isinstance(s, torch.Tensor) else s for s in shapes]
    outs = [x for x in made if isinstance(x, Emulated)]
    if not name.startswith(("empty", "new_empty")):
        targets = [x.raw for x in outs]

        def kernel() -> None:
            found = [x for x in tree_flatten(func(*raw_args, **raw_kwargs))[0] if isinstance(x, torch.Tensor)]
            for target, result in zip(targets, found, strict=True):
                target.copy_(result)

        device.launch(name, kernel, here, outs)
    return tree_unflatten(made, shape_spec)


def _on_host(device: Device, func: Any, name: str, args: Any, kwargs: Any, host: list[torch.Tensor]) -> Any:
    """An operation without the device, which may use pinned memory."""
    if name in ("pin_memory", "_pin_memory"):
        return device.pin(args[0].clone())
    if name == "is_pinned":
        return args[0].untyped_storage().data_ptr() in device.pinned
    if kwargs.get("pin_memory"):
        raw = func(*args, **{**kwargs, "pin_memory": False})
        garble_(raw)
        return device.pin(raw)
    if host and device.pinned and not any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns):
        for argument, value in zip(func._schema.arguments, args, strict=False):
            for tensor in (value,) if isinstance(value, torch.Tensor) else ():
                device.on_host(tensor, writes=argument.alias_info is not None and argument.alias_info.is_write)
    return func(*args, **kwargs)


def _given(device: Device, name: str, value: torch.Tensor) -> Emulated:
    """A tensor of the device that gets values known to the host."""
    out = device.allocate(value)
    raw = out.raw
    device.launch(name, lambda: raw.copy_(value), (), (out,))
    return out


def _copy(device: Device, out: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    """``copy_`` where either is on the device."""
    to, start = (x.raw if isinstance(x, Emulated) else x for x in (out, source))
    if isinstance(out, Emulated) and isinstance(source, Emulated):
        device.launch("copy_", lambda: to.copy_(start), (source,), (out,))
        return out
    host = source if isinstance(out, Emulated) else out
    is_pinned = host.untyped_storage().data_ptr() in device.pinned
    if isinstance(out, Emulated):
        if not is_pinned and device.capturing is not None:
            device.fault("capture", "a copy from pageable memory")
        seen, late = start.clone(), is_pinned and non_blocking
        is_known = late and not device.is_used(host, by_writes=True)

        def kernel() -> None:
            if is_known:
                unchanged(device, seen, start)
            to.copy_(start if late else seen)

        device.launch("to device", kernel, (source,), (out,))
        if not late and (not non_blocking or start.nbytes > _STAGED_BYTES):
            device.sync("copy from the host")
        return out
    late = is_pinned and non_blocking
    if late and not device.is_used(host, by_writes=False):
        garble_(to)
    device.launch("to host", lambda: to.copy_(start), (source,), (out,))
    if not late:
        device.sync("copy to the host")
    return out


def unchanged(device: Device, seen: torch.Tensor, source: torch.Tensor) -> None:
    """Check, when a copy from pinned memory runs, that its source still holds what it did when it was launched."""
    same = torch.equal(seen, source) or torch.equal(
        seen.contiguous().view(torch.uint8), source.contiguous().view(torch.uint8)
    )
    if not same:
        device.fault("pinned", "memory was overwritten before the copy from it had run")


def _collective(device: Device, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """A collective or transfer over gloo, on a stream of its group's."""
    (group,) = (
        dist.ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x)
    )
    if group.group_name not in device.comm:
        stream = Stream(device)
        stream.pool = ThreadPoolExecutor(1)
        device.comm[group.group_name] = stream, stream.pool
    stream, _ = device.comm[group.group_name]
    raw_args = tree_map(lambda x: x.raw if isinstance(x, Emulated) else x, args)
    first, *rest = ([x for x in tree_flatten(arg)[0] if isinstance(x, Emulated)] for arg in args)
    others = [x for part in rest for x in part]
    reads, writes = (first, ()) if name == "send" else (others, first)
    stream.wait_stream(device.current)

    def run() -> None:
        with torch.inference_mode():
            found = func(*raw_args, **kwargs)
            dist.Work.unbox(found[-1] if isinstance(found, tuple) else found).wait()

    with stream_of(stream):
        device.launch(name, run, reads, writes, elsewhere=True)
    device.works.append(EmulatedWork(stream.record_event()))
    work = device.works[-1].boxed()
    results = len(func._schema.returns)
    return work if results == 1 else (args[0], work)


class EmulatedWork(dist.Work):
    """What a collective returns: to wait is the current stream's, not the host's."""

    def __init__(self, event: Event) -> None:
        super().__init__()
        self.event = event

    def wait(self, timeout: Any = None) -> bool:
        self.event.wait()
        return True

    def is_completed(self) -> bool:
        return self.event.query()


def _meta(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
    return torch.device("meta") if isinstance(x, torch.device) else x


def _shapes_of(func: Any, name: str, flat: list[Any], spec: Any) -> tuple[list[Any], Any]:
    """What an operation returns, without memory."""
    key = func, spec, *((x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else (type(x), x) for x in flat)
    try:
        return _shapes[key]  # type: ignore[no-any-return]
    except KeyError:
        meta_args, meta_kwargs = tree_unflatten([_meta(x) for x in flat], spec)
        _shapes[key] = found = tree_flatten(func(*meta_args, **meta_kwargs))
        return found


# ---------------------------------------------------------------------------------------------------------------------
# torch.cuda


def _allow_guards() -> None:
    """Let torch's C++ switch to a device of CUDA, which does nothing: a build without CUDA gets the switch of ``meta``.

    FakeTensorMode has the same need and meets it only in builds with CUDA (``c10::impl::ensureCUDADeviceGuardSet``).
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = (ctypes.c_void_p * 16).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14  # c10/core/DeviceType.h
    registry[cuda] = registry[cuda] or registry[meta]


def install(
    patch: pytest.MonkeyPatch, *, seed: int = 0, num_sms: int = 4, capability: tuple[int, int] = (8, 0)
) -> Device:
    """Put an emulated device in place of CUDA until ``patch`` is undone and the returned device's mode is left."""
    _allow_guards()
    device = Device.__new__(Device)
    _devices[:] = [device]
    device.__init__(seed)  # type: ignore[misc]
    gib = 1 << 30
    properties = SimpleNamespace(
        multi_processor_count=num_sms, major=capability[0], minor=capability[1], total_memory=8 * gib, name="emulated"
    )
    names: dict[str, Any] = {
        "Stream": Stream, "Event": Event, "stream": stream_of, "CUDAGraph": Graph, "graph": capture,
        "graph_pool_handle": list, "_lazy_init": lambda: None, "is_initialized": lambda: True,
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "set_device": lambda device: None, "current_stream": lambda at=None: device.current,
        "default_stream": lambda at=None: device.default, "empty_cache": lambda: None,
        "synchronize": lambda at=None: device.sync("torch.cuda.synchronize", *device.streams),
        "is_current_stream_capturing": lambda: device.capturing is not None,
        "mem_get_info": lambda at=None: (8 * gib, 8 * gib), "get_device_capability": lambda at=None: capability,
        "get_device_properties": lambda at=None: properties, "memory_allocated": lambda at=None: 0,
        "max_memory_allocated": lambda at=None: 0, "reset_peak_memory_stats": lambda at=None: None,
    }  # fmt: skip
    for name, value in names.items():
        patch.setattr(torch.cuda, name, value)
    tensor, tolist, numpy = torch.tensor, torch.Tensor.tolist, torch.Tensor.numpy

    def make(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        is_here = device is not None and torch.device(device).type == "cuda"
        made = tensor(data, *args, **kwargs) if is_here else tensor(data, *args, device=device, **kwargs)
        return made.to(CUDA) if is_here else made

    def read(method: Callable[..., Any]) -> Callable[..., Any]:
        def checked(self: torch.Tensor, **kwargs: Any) -> Any:
            if isinstance(self, Emulated):
                self = self.cpu()
            else:
                device.on_host(self, writes=False)
            return method(self, **kwargs)

        return checked

    patch.setattr(torch, "tensor", make)
    patch.setattr(torch.Tensor, "tolist", read(tolist))
    patch.setattr(torch.Tensor, "numpy", read(numpy))
    init, new_group = dist.init_process_group, dist.new_group
    patch.setattr(dist, "init_process_group", lambda backend=None, **kwargs: init("gloo", **kwargs))
    patch.setattr(dist, "new_group", lambda *args, **kwargs: new_group(*args, **{**kwargs, "backend": "gloo"}))
    return device
