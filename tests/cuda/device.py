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

What tensors do is in :mod:`tests.cuda.tensors`. Host waits are counted by place: ``syncs`` for all of a stream,
``stalls`` for an event with no work launched behind it. Collectives over gloo are work of a stream of their own, as
NCCL's. Numerics, memory limits and speed are the CPU's.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
import traceback
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

CUDA = torch.device("cuda", 0)
Clock = Counter[Any]
"""By stream, how many of its operations are known to have ended; ``|`` is what either of two clocks knows."""

_IDLE_S = 5e-3  # of the host, after which the device runs on by itself where other ranks may wait for it


class DeviceError(AssertionError):
    """Something that no device would promise to do right."""


@dataclass(slots=True)
class Access:
    """A use of bytes [start, end) of some memory; ``tick`` is its number on its stream, ``clock`` what comes before."""

    name: str
    start: int
    end: int
    writes: bool
    stream: Any = None
    tick: int = 0
    clock: Clock | None = None


class Memory:
    """An allocation of the device, or pinned, and who used it."""

    def __init__(self, raw: torch.Tensor, graph: Graph | None = None) -> None:
        self.raw = raw
        self.graph = graph
        self.accesses: list[Access] = []


@dataclass(eq=False, slots=True)
class Op:
    """What a stream runs: a kernel; or it waits for ``until``; or it marks the end of what ``clock`` tells."""

    name: str
    kernel: Callable[[], Any] | None = None
    uses: list[tuple[Memory, Access]] = field(default_factory=list)
    until: Op | None = None
    elsewhere: bool = False
    running: Future[None] | None = None
    clock: Clock = field(default_factory=Counter)
    is_done: bool = False
    late: Callable[[], Iterable[tuple[Any, int, int, bool]]] = (
        tuple  # more uses, known when it runs: bytes, and if it writes
    )

    @property
    def is_ready(self) -> bool:
        return (self.until is None or self.until.is_done) and (self.running is None or self.running.done())


def garble_(raw: torch.Tensor) -> None:
    """Fill memory with what nobody may use."""
    is_int = not raw.dtype.is_floating_point and raw.dtype != torch.bool
    raw.fill_(torch.iinfo(raw.dtype).max // 3 if is_int else float("nan"))


def extent(raw: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor spans."""
    if not raw.numel():
        return 0, 0
    last = sum((n - 1) * stride for n, stride in zip(raw.shape, raw.stride(), strict=True))
    first = raw.storage_offset()
    return first * raw.element_size(), (first + last + 1) * raw.element_size()


class Device:
    """The emulated device, one at a time; ``seed`` is of the order in which streams run.

    ``faults`` tell by kind what was wrong; ``syncs``, ``stalls``, ``launches`` how often, by place or by name.
    """

    def __init__(self, seed: int = 0, num_sms: int = 16) -> None:
        _devices[:] = [self]
        self.num_sms = num_sms
        self.allocated = self.most_allocated = self.reserved = 0  # bytes
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.pool = ThreadPoolExecutor(64)  # of what runs elsewhere, one of a stream at a time
        self.streams: list[Stream] = []
        self.host: Clock = Counter()
        self.pinned: dict[int, Memory] = {}
        self.faults: list[str] = []
        self.syncs: Counter[str] = Counter()
        self.stalls: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self.works: list[Any] = []  # torch's own handle does not keep them alive
        self.host_s = time.monotonic()  # when the host last launched something or waited
        self.capturing: Graph | None = None
        self.comm = defaultdict[str, Stream](Stream)  # of communicators
        self.default = Stream()
        self.capture_stream = Stream()
        self.own_current = threading.local()

    @property
    def current(self) -> Stream:
        """The current stream of this thread."""
        return getattr(self.own_current, "stream", self.default)

    def fault(self, kind: str, text: str) -> None:
        """Note and raise a fault."""
        self.faults.append(f"{kind}: {text}, at {_place()}")
        raise DeviceError(self.faults[-1])

    def reported(self) -> list[str]:
        """The faults so far, which the test expects."""
        found, self.faults[:] = self.faults[:], []
        return found

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

    def push(self, op: Op, stream: Stream | None = None) -> Op:
        """Put an operation behind those of a stream, by default the current one, or into the graph that captures it."""
        self.host_s = time.monotonic()
        with self.lock:
            graph, stream = self.capturing, stream or self.current
            if graph is not None and stream in graph.streams:
                graph.take(op, stream)
                return op
            stream.launched += 1
            if op.kernel is not None:
                self.launches[op.name] += 1
                stream.last_kernel = stream.launched
            stream.clock |= self.host
            stream.clock[stream] = stream.launched
            op.clock = stream.clock.copy()
            stream.queue.append(op)
            for memory, use in op.uses:
                self._note(memory.accesses, replace(use, stream=stream, tick=stream.launched, clock=op.clock), op.clock)
            op.uses = []  # which would keep the memory
        return op

    def _note(self, accesses: list[Access], new: Access, clock: Clock) -> None:
        """Note a use of some memory, which every conflicting one must come before, or behind if it was noted late."""
        kept = []
        for old in accesses:
            meets, is_before = old.start < new.end and new.start < old.end, clock[old.stream] >= old.tick
            is_behind = None not in (old.clock, new.clock) and old.clock[new.stream] >= new.tick
            if meets and (old.writes or new.writes) and not (is_before or is_behind):
                who = new.name if new.stream is None else f"{new.name} on {new.stream}"
                self.fault("race", f"{who} does not wait for {old.name} on {old.stream}")
            covered = new.start <= old.start and old.end <= new.end and not is_behind
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
        if tensor.is_cuda:
            return tensor.memory, tensor.raw  # type: ignore[attr-defined]
        return self.pinned.get(tensor.untyped_storage().data_ptr()), tensor

    def is_used(self, tensor: torch.Tensor, *, by_writes: bool) -> bool:
        """Whether operations that the host has not waited for write pinned memory, or read it."""
        memory, _ = self._memory_of(tensor)
        first, last = extent(tensor)
        return memory is not None and any(
            use.start < last and first < use.end and use.writes == by_writes
            for use in memory.accesses
            if self.host[use.stream] < use.tick
        )

    def step(self) -> bool:
        """Run the next operation of some stream; returns whether there was one."""
        with self.lock:
            ready = [stream for stream in self.streams if stream.queue and stream.queue[0].is_ready]
            if not ready:
                return False
            stream = self.random.choice(ready)
            op = stream.queue[0]
            if op.elsewhere and op.running is None:
                op.running = self.pool.submit(op.kernel)
                return True
            stream.queue.popleft()
            if op.running is not None:
                op.running.result()
            elif op.kernel is not None:
                with torch._C._DisableTorchDispatch(), torch.inference_mode():
                    for tensor, *its in op.late():
                        use = Access(op.name, *its, stream, op.clock[stream], op.clock)
                        self._note(tensor.memory.accesses, use, op.clock)
                    op.kernel()
            op.is_done = True
            return True

    def wait(self, marker: Op) -> None:
        """Let the host wait for a point in a stream: what has been launched runs until it is reached."""
        while not marker.is_done:
            self.host_s = time.monotonic()
            with self.lock:
                has_run = self.step()
                is_running = any(s.queue and s.queue[0].running is not None for s in self.streams)
                if not (has_run or is_running or marker.is_done):
                    self.fault("race", "every stream waits for another")
            if not has_run:
                time.sleep(1e-4)
        with self.lock:
            self.host |= marker.clock

    def sync(self, what: str, *streams: Stream) -> None:
        """Let the host wait for all that streams have been given, by default the current one."""
        if self.capturing is not None:
            self.fault("capture", f"{what} makes the host wait")
        self.syncs[f"{what} at {_place()}"] += 1
        for stream in streams or (self.current,):
            self.wait(stream.mark())

    def own(self, raw: torch.Tensor) -> Memory:
        """New memory of the current stream, or of the graph that is captured; freed with the returned object."""
        memory = Memory(raw, self.capturing)
        self.allocated += raw.untyped_storage().nbytes()
        self.most_allocated = max(self.allocated, self.most_allocated)
        self.reserved = max(self.allocated, self.reserved)
        if self.capturing is not None:
            self.capturing.owned.append(weakref.ref(memory))
        weakref.finalize(memory, self._freed, raw, self.current, memory.accesses, self.capturing)
        return memory

    def _freed(self, raw: Any, stream: Stream, accesses: list[Access], graph: Any) -> None:
        """Memory nobody refers to is used again in the order of the stream that it was allocated on."""
        if sys.is_finalizing():
            return
        self.allocated -= raw.untyped_storage().nbytes()
        op = Op("free", partial(garble_, raw))
        if graph is not None:
            if self.capturing is graph:
                graph.ops.append(op)
            else:
                graph.dropped.append((len(graph.members), raw))
            return
        with self.lock:
            stream.launched += 1
            clock = stream.clock | self.host
            stream.queue.append(op)
            with contextlib.suppress(DeviceError):  # raised, it would be lost
                clock[stream] = stream.launched
                self._note(accesses, Access("freeing its memory", 0, sys.maxsize, True), clock)

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
        self.device = CUDA
        self.queue: deque[Op] = deque()
        self.clock: Clock = Counter()
        self.launched = self.last_kernel = 0  # how many operations, and which of them
        self.cuda_stream = len(now().streams)
        now().streams.append(self)

    def __repr__(self) -> str:
        return f"stream {self.cuda_stream}"

    def mark(self) -> Op:
        """A point behind all that has been launched here."""
        return now().push(Op("mark"), self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        graph, marker = now().capturing, event.marker
        if graph is not None and (self in graph.streams or event.graph is graph):
            graph.join(self, event)
        elif marker is not None:
            with now().lock:
                self.clock |= marker.clock
                now().push(Op("wait", until=marker), self)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        now().sync("Stream.synchronize", self)


class Event:
    """``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.marker: Op | None = None
        self.graph: Graph | None = None
        self.stream: Stream | None = None
        self.is_timed = enable_timing

    def record(self, stream: Stream | None = None) -> None:
        graph, self.stream = now().capturing, stream or now().current
        self.graph = graph if graph is not None and self.stream in graph.streams else None
        self.marker = None if self.graph else self.stream.mark()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or now().current).wait_event(self)

    def synchronize(self) -> None:
        device = now()
        if self.graph is not None or device.capturing is not None:
            device.fault("capture", "Event.synchronize makes the host wait")
        if self.marker is not None:
            if not self.marker.is_done and self.stream.last_kernel < self.marker.clock[self.stream]:
                device.stalls[f"Event.synchronize at {_place()}"] += 1
            device.wait(self.marker)

    def elapsed_time(self, end: Event) -> float:
        assert self.is_timed and end.is_timed and self.marker is not None and end.marker is not None
        if not (self.marker.is_done and end.marker.is_done):
            now().fault("race", "elapsed_time asks for an event that has not passed")
        return 1.0


class Graph:
    """``torch.cuda.CUDAGraph``: operations with the addresses that they were captured with.

    Graphs of one pool keep their results where those captured before them keep what they free: a replay of one garbles
    the results of those captured after it. They may use each other's memory when nobody refers to it any more, until
    one is replayed that was captured after it was freed.
    """

    def __init__(self, keep_graph: bool = False) -> None:
        self.ops: list[Op] = []
        # with whether the memory is of another graph of the pool
        self.uses: dict[tuple[weakref.ref[Memory], int, int, bool], tuple[Access, bool]] = {}
        self.owned: list[weakref.ref[Memory]] = []
        # results of this that were freed behind its capture, and how many graphs the pool had then
        self.dropped: list[tuple[int, torch.Tensor]] = []
        self.streams: set[Stream] = set()
        self.unjoined: set[Stream] = set()
        self.members: list[weakref.ref[Graph]] = []
        self.is_reset = False
        # of each wrapper of its attention, how often it has been planned, and had been at the last replay
        self.num_plans: dict[int, tuple[list[int], list[int]]] = {}

    def pool(self) -> Any:
        return self.members

    def take(self, op: Op, stream: Stream) -> None:
        """Capture an operation."""
        if op.kernel is None:
            return
        self.unjoined.add(stream)
        for memory, use in op.uses:
            if memory.graph is not self:
                is_of_pool = memory.graph is not None and memory.graph.members is self.members
                self.uses[weakref.ref(memory), use.start, use.end, use.writes] = use, is_of_pool
        self.ops.append(Op(op.name, op.kernel, elsewhere=op.elsewhere, late=op.late))

    def join(self, stream: Stream, event: Event) -> None:
        """Let a captured stream wait for another, which the capture then includes."""
        if event.graph is not self:
            if event.marker is not None and not event.marker.is_done:
                now().fault("capture", "a captured stream waits for work outside of the graph")
            return
        self.streams.add(stream)
        self.unjoined.discard(event.stream)  # type: ignore[arg-type]

    def replay(self) -> None:
        device = now()
        if self.is_reset:
            device.fault("freed", "a graph is replayed that has been reset")
        for num_plans, seen in self.num_plans.values():
            if num_plans == seen:
                device.fault("plan", "a graph is replayed without a new plan of its attention")
            seen[:] = num_plans
        uses = []
        for (ref, *_), (use, is_of_pool) in self.uses.items():
            memory = ref()
            if memory is not None:
                uses.append((memory, use))
            elif not is_of_pool:
                device.fault("freed", f"{use.name} of a graph uses memory that has been freed")
        members = [ref() for ref in self.members]
        number = members.index(self)
        garbled = [raw for graph in filter(None, members) for num_graphs, raw in graph.dropped if num_graphs <= number]
        for graph in filter(None, members[number:]):
            results = [*filter(None, (ref() for ref in graph.owned))]
            uses += [(result, Access("a graph's replay", 0, result.raw.nbytes, True)) for result in results]
            garbled += [result.raw for result in results if graph is not self]
        for raw in garbled:
            device.push(Op("overwrite", partial(garble_, raw)))
        device.push(Op("replay", lambda: None, uses))
        for op in self.ops:
            device.push(Op(op.name, op.kernel, elsewhere=op.elsewhere, late=op.late))

    def reset(self) -> None:
        self.ops, self.is_reset = [], True

    def capture_end(self) -> None:
        if unjoined := self.unjoined - {now().current}:
            now().fault("capture", f"{unjoined} had not been joined when it ended")
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
        graph.members = graph.members if pool is None else pool
        graph.members.append(weakref.ref(graph))
        graph.streams, device.capturing = {device.current}, graph
        try:
            yield
        finally:
            device.capturing = None
        graph.capture_end()


@contextlib.contextmanager
def stream_of(stream: Stream | None) -> Iterator[None]:
    """``torch.cuda.stream``."""
    device = now()
    before = device.current
    device.own_current.stream = stream or before
    try:
        yield
    finally:
        device.own_current.stream = before


_devices: list[Device] = []


def now() -> Device:
    """The device there is."""
    return _devices[-1]


def _place() -> str:
    """The line of medha's, or else FlashInfer's or a test's, that runs."""
    ours = ("cuda/device.py", "cuda/tensors.py", "cuda/kernels.py")
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.endswith(ours)]
    for part in ("/medha/", "/flashinfer/", "/tests/"):
        found = [f for f in frames if part in f.filename]
        if found:
            return f"{part[1:]}{found[-1].filename.rpartition(part)[2]}:{found[-1].lineno}"
    return "?"


# -- torch.cuda ------------------------------------------------------------------------------------------------


def install(
    patch: pytest.MonkeyPatch, *, capability: tuple[int, int] = (8, 0), memory: int = 8 << 30, **options: int
) -> Device:
    """Put an emulated device, with ``options``, in place of ``torch.cuda`` until ``patch`` is undone."""
    device = Device(**options)
    properties = SimpleNamespace(multi_processor_count=device.num_sms, total_memory=memory, name="emulated")
    properties.major, properties.minor = capability
    names: dict[str, Any] = {
        "Stream": Stream, "Event": Event, "stream": stream_of, "CUDAGraph": Graph, "graph": capture,
        "graph_pool_handle": list,
        "_lazy_init": lambda: None, "is_initialized": lambda: True,
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "set_device": lambda device: None, "device": lambda at: contextlib.nullcontext(),
        "current_stream": lambda at=None: device.current,
        "default_stream": lambda at=None: device.default,
        "empty_cache": lambda: setattr(device, "reserved", device.allocated),
        "reset_peak_memory_stats": lambda at=None: setattr(device, "most_allocated", device.allocated),
        "synchronize": lambda at=None: device.sync("torch.cuda.synchronize", *device.streams),
        "is_current_stream_capturing": lambda: device.capturing is not None,
        "mem_get_info": lambda at=None: (memory - device.reserved, memory),
        "memory_allocated": lambda at=None: device.allocated,
        "max_memory_allocated": lambda at=None: device.most_allocated,
        "get_device_capability": lambda at=None: capability,
        "get_device_properties": lambda at=None: properties,
    }  # fmt: skip
    for name, value in names.items():
        patch.setattr(torch.cuda, name, value)
    return device
