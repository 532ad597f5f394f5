"""Numbers that a host keeps on its device, known without asking the device.

Hosts of the rolling-dict lineage say in tensors of one element how far a cache is filled, and each layer reads them at each
call: the processor waits until the GPU has done all that was launched, and what is launched next finds the GPU idle. A
counter takes such a tensor's place. It is a tensor for all that asks, on the host's device, so that whatever moves
arguments to devices leaves it alone; its number stays where the processor reads it. Views of it are counters of the same
number, so that a write through one is seen through all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from quantwm_models.errors import HostError


class Counter(Tensor):
    """A tensor of one whole number that is written and read by the processor.

    ``item()``, ``int()`` and ``fill_()`` ask nobody. Any other operator gets, or changes, a tensor of the device. What would
    write past the number, as a view in another number format, is refused.

    Args:
        like: Shape and number format, one element.
        device: Where the host expects it.

    >>> counter = Counter(torch.empty(1, dtype=torch.long), torch.device("cpu"))
    >>> counter.fill_(7).item(), int(counter), counter + 1
    (7, 7, tensor([8]))
    >>> counter[0] = 5
    >>> counter.squeeze().add_(1)
    Counter(6, device='cpu')
    >>> counter
    Counter(6, device='cpu')
    """

    _shared: list[int]  # the number, which all views have

    def __new__(cls, like: Tensor, device: torch.device) -> Counter:
        """A counter at zero."""
        device = torch.empty(0, device=device).device  # with its number, as other tensors have it
        made: Counter = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=device)  # noqa: SLF001  # how torch lets a class be a tensor without memory
        made._shared = [0]
        return made

    # The documented way to have operators dispatched.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001

    @classmethod
    def serves(cls, tensor: Tensor) -> bool:
        """Whether a host's tensor is a number of this kind.

        >>> Counter.serves(torch.empty(1, dtype=torch.long)), Counter.serves(torch.empty(2, dtype=torch.long))
        (True, False)
        """
        return tensor.numel() == 1 and tensor.dtype in (torch.int32, torch.int64)

    @property
    def number(self) -> int:
        """As :meth:`item` returns it."""
        return self._shared[0]

    @number.setter
    def number(self, number: int) -> None:
        self._shared[0] = number

    def item(self) -> int:
        """The number."""
        return self.number

    def fill_(self, value: Any) -> Counter:
        """Have another number; a tensor of a GPU is waited for."""
        self.number = int(value)
        return self

    def tensor(self) -> Tensor:
        """A tensor of the device with the number."""
        return torch.full(self.shape, self.number, dtype=self.dtype, device=self.device)

    def tolist(self) -> Any:
        """As of a tensor."""
        return self.tensor().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """As of a tensor, but not to be written."""
        array = self.tensor().numpy(force=force)
        array.flags.writeable = False
        return array

    def _no_memory(self, *_: object, **__: object) -> NoReturn:
        raise HostError(f"{self!r} has no memory that others could write; clone() it first")

    __dlpack__ = apply_ = map_ = share_memory_ = storage = _no_memory  # what goes around operators

    @property
    def data(self) -> Counter:
        """Itself; set to a tensor of one, it has that number."""
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise HostError(f"{self!r} was given data of {tuple(value.shape)} {value.dtype}; need a tensor like it")
        self.fill_(value)

    def __deepcopy__(self, memo: object) -> Counter:
        return Counter(self, self.device).fill_(self.number)

    def __int__(self) -> int:
        return self.number

    __index__ = __int__

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]  # torch's returns Any
        return f"Counter({self.number}, device='{self.device}')"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch annotates the arguments without the operator
        cls, func: Callable[..., Any], types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Apply an operator to tensors of the device; what it changes is read back."""
        del types
        if func is torch.ops.aten.detach.default:
            return args[0]
        given: dict[int, tuple[Counter, Tensor]] = {}
        memory: dict[int, Tensor] = {}  # of each number; its views share it

        def plain(argument: Any) -> Any:
            if not isinstance(argument, Counter):
                return argument
            whole = memory.setdefault(id(argument._shared), argument.tensor())  # noqa: SLF001 - its own class
            return given.setdefault(id(argument), (argument, whole.view(argument.shape)))[1]

        made = func(*tree_map(plain, args), **tree_map(plain, dict(kwargs or {})))
        if func._schema.is_mutable:  # type: ignore[attr-defined]  # noqa: SLF001  # operators have a schema
            for counter, changed in given.values():
                counter._read_back(changed, func)  # noqa: SLF001 - its own class
                made = counter if made is changed else made
            return made
        return tree_map(lambda each: _followed(each, given.values(), func), made)

    def _read_back(self, changed: Tensor, func: object) -> None:
        """Have the number of what an operator changed."""
        if changed.shape != self.shape or changed.dtype != self.dtype:
            raise HostError(f"{func} made {tuple(changed.shape)} {changed.dtype} of {self!r}; clone() it first")
        self.number = int(changed.item())

    def _view(self, shape: Tensor) -> Counter:
        """The same number in another shape."""
        view = Counter(shape, self.device)
        view._shared = self._shared
        return view


def _followed(made: Any, given: Iterable[tuple[Counter, Tensor]], func: object) -> Any:
    """What an operator made; a view of a counter's tensor, which would not be seen when written, is one of the counter."""
    if not isinstance(made, Tensor) or not made.numel():
        return made
    for counter, tensor in given:
        if made.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            if made.numel() > 1 or made.dtype != counter.dtype:
                raise HostError(
                    f"{func} of {counter!r} gave {tuple(made.shape)} {made.dtype}, through which it could be written; "
                    "clone() it first"
                )
            return counter._view(made)  # noqa: SLF001 - its own class
    return made
