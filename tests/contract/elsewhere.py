"""A second device on a machine that has none: tensors there are ordinary ones that are remembered to be there.

What a real second device refuses is refused: an operation on tensors here and there, a draw there by a generator from
here, an array of a tensor that is there. All is computed on the CPU, so the bits are those of the CPU.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ELSEWHERE = torch.device("meta")  # a device that needs no hardware; nothing is ever really there
HERE = torch.device("cpu")
aten = torch.ops.aten
# These may look at both sides: copies, and indices that lie here.
ACROSS = {aten.copy_, aten._to_copy, aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class WrongDevice(AssertionError):
    """Tensors of two devices in one operation."""


@contextmanager
def elsewhere() -> Iterator[None]:
    """While this lasts, `.to(ELSEWHERE)` and `device=ELSEWHERE` work."""
    there = _There()
    with _Operations(there), _Calls(there):
        yield


class _There:
    """Which storages are on the other device; they are held, so that no other takes their place in memory."""

    def __init__(self) -> None:
        self._held: dict[int, torch.UntypedStorage] = {}
        self.calling = False  # whether what is made of nothing, in the call that runs, is there

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._held

    def take(self, made: Any) -> Any:
        for tensor in _tensors(made):
            storage = tensor.untyped_storage()
            self._held[storage.data_ptr()] = storage
        return made

    def side(self, what: object, tensors: Iterable[Tensor]) -> bool:
        """Whether an operation happens there; numbers without dimensions may come from here."""
        sides = {tensor in self for tensor in tensors if tensor.dim()}
        scalars = {tensor in self for tensor in tensors if not tensor.dim()}
        if sides == {True, False} or (sides == {False} and True in scalars):
            shapes = [f"{tuple(tensor.shape)} {'t' * (tensor in self)}here" for tensor in tensors]
            raise WrongDevice(f"{what} on tensors of two devices: {', '.join(shapes)}")
        return True in sides | scalars


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What is computed there stays there."""

    def __init__(self, there: _There) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.there = there

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors((args, kwargs))
        if not tensors:
            side = self.there.calling
        elif func.overloadpacket in ACROSS:
            side = tensors[0] in self.there
        else:
            side = self.there.side(func, tensors)
            if side and func._schema.is_mutable and tensors[0] not in self.there:
                raise WrongDevice(f"{func} writes here what is there")
        if kwargs.get("device") == ELSEWHERE:
            side, kwargs["device"] = True, HERE
        if side and isinstance(generator := kwargs.get("generator"), torch.Generator):
            raise WrongDevice(f"{func} draws there by a generator of {generator.device}")
        made = func(*args, **kwargs)
        return self.there.take(made) if side else made


class _Calls(TorchFunctionMode):
    """What is asked of a tensor without an operation, and where a call makes what it makes of nothing."""

    def __init__(self, there: _There) -> None:
        super().__init__()
        self.there = there

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is not None and first in self.there:
            if func == torch.Tensor.device.__get__:
                return ELSEWHERE
            if func == torch.Tensor.numpy:
                raise WrongDevice("an array of a tensor that is there")
            if func == torch.Tensor.to:
                return self._moved(first, *args[1:], **kwargs)
            if func in (torch.Tensor.__deepcopy__, torch.Tensor.new_tensor):  # without an operation
                return self.there.take(func(*args, **kwargs))
        before = self.there.calling
        self.there.calling = any(tensor in self.there for tensor in _tensors((args, kwargs)))
        try:
            return func(*args, **kwargs)
        finally:
            self.there.calling = before

    def _moved(self, tensor: Tensor, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        """`.to` of a tensor that is there: it comes here, or stays."""
        places = [word for word in (*args, device) if isinstance(word, str | torch.device)]
        dtypes = [word for word in args if isinstance(word, torch.dtype)]
        moved = tensor.to(dtypes[0] if dtypes else tensor.dtype, **kwargs)
        if any(torch.device(place) == HERE for place in places):
            return torch.empty(moved.shape, dtype=moved.dtype).copy_(moved)
        return moved


def _tensors(values: Any) -> list[Tensor]:
    """All tensors that hold anything."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.numel()]
