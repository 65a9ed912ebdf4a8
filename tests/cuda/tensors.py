"""Tensors of the emulated device: what torch is asked for becomes kernels that :mod:`tests.cuda.device` runs late."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from itertools import compress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tests.cuda import device as cuda
from tests.cuda.device import CUDA, Device, Event, Memory, Stream, garble_, now, stream_of

_STAGED_BYTES = 1 << 16  # the driver takes along so much of pageable memory without a wait


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

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Emulated({tuple(self.shape)}, {self.dtype})"


class Everywhere(TorchDispatchMode):
    """Brings also the calls without a tensor of the device here, but for those of subclasses such as DTensor.

    Where DTensor asks a FakeTensorMode for shapes this mode is asked first and leaves the call to it: memory made of
    its answer would have no bytes, and to garble that when it is freed is a segmentation fault.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:  # type: ignore[attr-defined]
            return func(*args, **(kwargs or {}))
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
    returns = func._schema.returns
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    if not here and not makes_here:
        return _on_host(device, func, name, args, kwargs, () if is_view else zip(args, written, strict=False))
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
            out: torch.Tensor = allocate(device, shape)
            source = source if isinstance(source, Emulated) or source.dtype == dtype else source.to(dtype)
        else:
            out = torch.empty(shape.shape, dtype=dtype)
            out = device.pin(out) if kwargs.get("non_blocking") else out  # as torch does
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
    if here and is_view:
        views = func(*raw_args, **raw_kwargs)
        return tree_map(lambda raw: Emulated(raw, here[0].memory) if isinstance(raw, torch.Tensor) else raw, views)
    is_mask = name in _INDEXING and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    if name in _WAITING or is_mask:
        device.sync(name)
    if any(written) and all(r.alias_info is not None for r in returns):  # in place, or with out=
        given = [*args, *(kwargs.get(argument.name) for argument in func._schema.arguments[len(args) :])]
        outs = list(compress(given, written))
        device.launch(name, lambda: func(*raw_args, **raw_kwargs), here, tree_flatten(outs)[0])
        return None if not returns else outs[0] if len(returns) == 1 else tuple(outs)
    is_empty = name.startswith(("empty", "new_empty"))
    if name in _WAITING or not (here or is_empty):  # the host knows what comes out
        known = func(*raw_args, **raw_kwargs)
        return tree_map(lambda t: _given(device, name, t) if isinstance(t, torch.Tensor) else t, known)
    shapes, shape_spec = _shapes_of(func, flat, spec)
    made = [allocate(device, s) if isinstance(s, torch.Tensor) else s for s in shapes]
    outs = [x for x in made if isinstance(x, Emulated)]
    if not is_empty:
        targets = [x.raw for x in outs]

        def kernel() -> None:
            found = [x for x in tree_flatten(func(*raw_args, **raw_kwargs))[0] if isinstance(x, torch.Tensor)]
            for target, result in zip(targets, found, strict=True):
                target.copy_(result)

        device.launch(name, kernel, here, outs)
    return tree_unflatten(made, shape_spec)


def allocate(device: Device, like: torch.Tensor) -> Emulated:
    """Garbage of the shape, strides and dtype of a tensor."""
    raw = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
    garble_(raw)
    return Emulated(raw, device.own(raw))


def _on_host(device: Device, func: Any, name: str, args: Any, kwargs: Any, uses: Iterable[tuple[Any, bool]]) -> Any:
    """An operation without the device, which ``uses`` these, and writes some, of what may be pinned memory."""
    if name in ("pin_memory", "_pin_memory"):
        return device.pin(args[0].clone())
    if name == "is_pinned":
        return args[0].untyped_storage().data_ptr() in device.pinned
    if kwargs.get("pin_memory"):
        raw = func(*args, **{**kwargs, "pin_memory": False})
        garble_(raw)
        return device.pin(raw)
    for value, writes in uses:
        if isinstance(value, torch.Tensor):
            device.on_host(value, writes=writes)
    return func(*args, **kwargs)


def _given(device: Device, name: str, value: torch.Tensor) -> Emulated:
    """A tensor of the device that gets values known to the host."""
    out = allocate(device, value)
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
    late = is_pinned and non_blocking
    if isinstance(out, Emulated):
        if not is_pinned and device.capturing is not None:
            device.fault("capture", "a copy from pageable memory")
        seen = start.clone()
        is_known = late and not device.is_used(host, by_writes=True)

        def kernel() -> None:
            if is_known:
                unchanged(device, seen, start)
            to.copy_(start if late else seen)

        device.launch("to device", kernel, (source,), (out,))
        if not late and (not non_blocking or start.nbytes > _STAGED_BYTES):
            device.sync("copy from the host")
        return out
    if late and not device.is_used(host, by_writes=False):
        garble_(to)
    device.launch("to host", lambda: to.copy_(start), (source,), (out,))
    if not late:
        device.sync("copy to the host")
    return out


def unchanged(device: Device, seen: torch.Tensor, source: torch.Tensor) -> None:
    """Check, when a copy from pinned memory runs, that its source still holds what it did when it was launched."""
    if not torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (seen, source))):
        device.fault("pinned", "memory was overwritten before the copy from it had run")


def _batch_of_transfers(device: Device, on_host: Callable[..., Any], ops: list[Any]) -> list[Any]:
    """``dist.batch_isend_irecv``: one kernel on a stream of the group's, which ends when all transfers have."""
    raws = [dist.P2POp(op.op, op.tensor.raw, group=op.group, group_peer=op.group_peer) for op in ops]

    def run() -> None:
        with torch.inference_mode():
            for work in on_host(raws):
                work.wait()

    sent, received = ([op.tensor for op in ops if op.op is kind] for kind in (dist.isend, dist.irecv))
    stream = device.comm[ops[0].group.group_name]
    return [launch_beside(device, stream, "transfers", run, sent, received, elsewhere=True)]


def _collective(device: Device, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """A collective or transfer over gloo, on a stream of its group's."""
    (group,) = (
        dist.ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x)
    )
    # As NCCL's: each pair of ranks has a stream of its own, where it is not one of several transfers of a batch.
    stream = device.comm[f"{group.group_name} {args[2] if name in ('send', 'recv_') else ''}"]
    raw_args = tree_map(lambda x: x.raw if isinstance(x, Emulated) else x, args)
    first, *rest = ([x for x in tree_flatten(arg)[0] if isinstance(x, Emulated)] for arg in args)
    others = [x for part in rest for x in part]
    reads, writes = (first, ()) if name == "send" else (others, first)

    def run() -> None:
        with torch.inference_mode():
            found = func(*raw_args, **kwargs)
            dist.Work.unbox(found[-1] if isinstance(found, tuple) else found).wait()

    work = launch_beside(device, stream, name, run, reads, writes, elsewhere=True).boxed()
    return work if len(func._schema.returns) == 1 else (args[0], work)


def launch_beside(device: Device, stream: Stream, *kernel: Any, **how: Any) -> EmulatedWork:
    """Launch a kernel, as :meth:`Device.launch`, on a stream that waits for the current one."""
    stream.wait_stream(device.current)
    with stream_of(stream):
        device.launch(*kernel, **how)
    work = EmulatedWork(stream.record_event())
    device.works.append(work)
    return work


class EmulatedWork(dist.Work):
    """What a collective returns: to wait is the current stream's, not the host's."""

    def __init__(self, event: Event) -> None:
        super().__init__()
        self.event = event

    def wait(self, timeout: Any = None) -> bool:
        self.event.wait()
        return True


def _meta(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
    return torch.device("meta") if isinstance(x, torch.device) else x


def _shapes_of(func: Any, flat: list[Any], spec: Any) -> tuple[list[Any], Any]:
    """What an operation returns, without memory."""
    key = func, spec, *((x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else (type(x), x) for x in flat)
    if key not in _shapes:
        meta_args, meta_kwargs = tree_unflatten([_meta(x) for x in flat], spec)
        _shapes[key] = tree_flatten(func(*meta_args, **meta_kwargs))
    return _shapes[key]  # type: ignore[no-any-return]


def _allow_guards() -> None:
    """Let torch's C++ switch to a device of CUDA, which does nothing: a build without CUDA gets the switch of ``meta``.

    FakeTensorMode has the same need and meets it only in builds with CUDA (``c10::impl::ensureCUDADeviceGuardSet``).
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = (ctypes.c_void_p * 16).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14  # c10/core/DeviceType.h
    registry[cuda] = registry[cuda] or registry[meta]


def install(patch: pytest.MonkeyPatch, **options: Any) -> Device:
    """An emulated device (:func:`tests.cuda.device.install`) and its tensors; the caller enters :data:`MODE`."""
    _allow_guards()
    made = cuda.install(patch, **options)
    tensor, tolist, numpy = torch.tensor, torch.Tensor.tolist, torch.Tensor.numpy

    def make(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        is_here = device is not None and torch.device(device).type == "cuda"
        return tensor(data, *args, **kwargs).to(CUDA) if is_here else tensor(data, *args, device=device, **kwargs)

    def read(method: Callable[..., Any]) -> Callable[..., Any]:
        def checked(self: torch.Tensor, **kwargs: Any) -> Any:
            if isinstance(self, Emulated):
                self = self.cpu()
            else:
                made.on_host(self, writes=False)
            return method(self, **kwargs)

        return checked

    patch.setattr(torch, "tensor", make)
    patch.setattr(torch.Tensor, "tolist", read(tolist))
    patch.setattr(torch.Tensor, "numpy", read(numpy))
    batched = dist.batch_isend_irecv

    def batch(ops: list[Any]) -> list[Any]:
        return _batch_of_transfers(made, batched, ops) if isinstance(ops[0].tensor, Emulated) else batched(ops)

    patch.setattr(dist, "batch_isend_irecv", batch)
    init, new_group = dist.init_process_group, dist.new_group
    patch.setattr(dist, "init_process_group", lambda backend=None, **kwargs: init("gloo", **kwargs))
    patch.setattr(dist, "new_group", lambda *args, **kwargs: new_group(*args, **{**kwargs, "backend": "gloo"}))
    return made
