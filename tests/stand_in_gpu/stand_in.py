"""A stand-in for cuda:0 where there is none: values lie on the CPU, the rules of devices are CUDA's.

An operation on tensors of both devices fails, as it would on a GPU; what branches on a tensor's device takes
its GPU branch. Kernels, speed and memory are the CPU's: none of these is tried here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

GPU, CPU = torch.device("cuda:0"), torch.device("cpu")
aten = torch.ops.aten
BETWEEN_DEVICES = {aten._to_copy.default, aten.copy_.default} | {  # indices may lie on the CPU
    *(aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default)
}


class DeviceMismatch(RuntimeError):
    """Tensors of both devices in one operation."""


class OnGpu(torch.Tensor):
    """A tensor that says it lies on cuda:0; ``inner`` is the tensor on the CPU that has its values."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnGpu:
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        made = Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype, device=GPU, **layout)
        made.inner = inner
        return made

    def __init__(self, inner: Tensor): ...

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # Two that make a list or a tensor without an operation that could be seen below.
        if function is Tensor.tolist:
            return args[0].detach().inner.tolist()
        if function is Tensor.new_tensor:
            data = tree_map(lambda x: x.item() if isinstance(x, Tensor) else x, args[1])
            return OnGpu(args[0].detach().inner.new_tensor(data, **kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})

    def __deepcopy__(self, memo: dict) -> Tensor:
        copied = OnGpu(self.detach().inner.clone())
        if isinstance(self, torch.nn.Parameter):
            return torch.nn.Parameter(copied, self.requires_grad)
        return copied.requires_grad_(self.requires_grad)


def run(function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The operation, with CUDA's rules; its results lie where they would."""
    if function is aten._fused_sdp_choice.default:
        return 0  # attention by plain products: the CPU's own kernel would refuse a GPU's tensors
    flat, spec = tree_flatten((args, kwargs))
    there = [x for x in flat if isinstance(x, OnGpu)]
    here = [x for x in flat if isinstance(x, Tensor) and not isinstance(x, OnGpu) and x.dim()]
    if there and here and function not in BETWEEN_DEVICES:
        raise DeviceMismatch(f"{function} has tensors on cuda:0 and on the CPU")
    if function is aten.index.Tensor and there and not isinstance(args[0], OnGpu):
        raise DeviceMismatch("a tensor on the CPU is indexed by one on cuda:0")
    asked = kwargs.get("device")
    to_gpu = bool(there) if asked is None else torch.device(asked).type == "cuda"
    if function is aten.copy_.default:
        to_gpu = isinstance(args[0], OnGpu)

    def plain(x: Any) -> Any:
        if isinstance(x, OnGpu):
            return x.inner
        return CPU if isinstance(x, torch.device) and x.type == "cuda" else x

    plain_args, plain_kwargs = tree_unflatten([plain(x) for x in flat], spec)
    if "pin_memory" in kwargs:
        plain_kwargs["pin_memory"] = False
    found = function(*plain_args, **plain_kwargs)
    known = {id(x.inner): x for x in there}  # of an operation in place

    def placed(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return known[id(x)] if id(x) in known else OnGpu(x) if to_gpu else x

    return tree_map(placed, found)


class _Everywhere(TorchDispatchMode):
    """Also operations that make a tensor of nothing."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})


class _FromNumbers(TorchFunctionMode):
    """What makes a tensor of something else without an operation that could be seen."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        makes = function in (torch.tensor, torch.as_tensor, torch.asarray) and not isinstance(args[0], Tensor)
        if makes and torch.device(kwargs.get("device") or "cpu").type == "cuda":
            return OnGpu(function(*args, **{**kwargs, "device": CPU}))
        return function(*args, **kwargs)


@contextlib.contextmanager
def stand_in_gpu() -> Iterator[None]:
    """Inside, ``device="cuda"`` is the stand-in; ``guard.cpp`` has to be loaded before torch is imported."""
    overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.cuda._lazy_init = lambda: None
    torch.cuda.synchronize = lambda device=None: None
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with _Everywhere(), _FromNumbers():
            yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
