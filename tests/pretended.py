"""A GPU that is none: tensors that say they are on one, compute on the processor, and refuse to meet others there.

It shows that a run never mixes devices and that what it computes is the same; nothing of a GPU's speed or rounding.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

CUDA = torch.device("cuda")
# Positions may lie on the processor, as with a real GPU, and a copy may come from there.
_INDEX = "aten::index.Tensor"
_MIXING = {_INDEX, "aten::copy_", "aten::_to_copy"}


class OnGpu(Tensor):
    """A tensor on the pretended GPU; `inside` holds its values."""

    inside: Tensor

    @staticmethod
    def __new__(cls, inside: Tensor) -> "OnGpu":
        assert not isinstance(inside, OnGpu)
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inside.shape,
            strides=inside.stride(),
            storage_offset=inside.storage_offset(),
            dtype=inside.dtype,
            requires_grad=False,
        )
        made.inside = inside
        return made  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnGpu({self.inside})"

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert a tensor on a GPU to numpy")

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given, _ = tree_flatten((args, dict(kwargs or {})))
        strangers = [one for one in given if isinstance(one, Tensor) and not isinstance(one, OnGpu) and one.ndim]
        if strangers and not (func.name() in _MIXING and (isinstance(args[0], OnGpu) or func.name() != _INDEX)):
            shape = list(strangers[0].shape)
            raise RuntimeError(f"{func.name()}: a tensor on the GPU met one {shape} on the processor")
        within = tree_map(lambda one: one.inside if isinstance(one, OnGpu) else one, (args, dict(kwargs or {})))
        if "device" in within[1]:
            within[1]["device"] = torch.device("cpu")
        result = func(*within[0], **within[1])
        if func._schema.is_mutable:
            return args[0] if isinstance(result, Tensor) else result
        return tree_map(lambda one: OnGpu(one) if isinstance(one, Tensor) else one, result)


class _ToGpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return OnGpu(tensor.detach().clone(memory_format=torch.preserve_format))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return _FromGpu.apply(gradient)


class _FromGpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Tensor:
        return tensor.inside.clone(memory_format=torch.preserve_format)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _ToGpu.apply(gradient)


def _is_gpu(value: Any) -> bool:
    return isinstance(value, torch.device | str) and torch.device(value).type == "cuda"


class _Moves(TorchFunctionMode):
    """`to`, `cpu` and everything that is asked to make a tensor on a GPU."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is Tensor.to or func is Tensor.cpu:
            return self._moved(func, args, options)
        if func is Tensor.tolist and isinstance(args[0], OnGpu):
            return args[0].inside.tolist()
        if _is_gpu(options.get("device")):
            options["device"] = torch.device("cpu")
            return OnGpu(func(*args, **options))
        return func(*args, **options)

    def _moved(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
        tensor, *rest = args
        asked = [*rest, *options.values()]
        asked += [like for one in asked if isinstance(one, Tensor) for like in (one.device, one.dtype)]
        device = next((torch.device(one) for one in asked if isinstance(one, torch.device | str)), tensor.device)
        device = torch.device("cpu") if func is Tensor.cpu else device
        if isinstance(tensor, OnGpu) and device.type == "cpu":
            tensor = _FromGpu.apply(tensor)
        elif not isinstance(tensor, OnGpu) and device.type == "cuda":
            tensor = _ToGpu.apply(tensor)
        left = {name: value for name, value in options.items() if name in ("copy", "memory_format")}
        dtype = next((one for one in asked if isinstance(one, torch.dtype)), tensor.dtype)
        return tensor.to(dtype, **left)  # type: ignore[no-any-return]


@contextmanager
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, "cuda" is a device like any other."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # a network's tensors change their class
    try:
        with _Moves():
            yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
