"""Numbers that a host keeps on its device, known without asking the device.

Hosts of the rolling-dict lineage say in tensors of one element how far a cache is filled, and each layer reads them at each
call: the processor waits until the GPU has done all that was launched, and what is launched next finds the GPU idle. A
counter takes such a tensor's place. It is a tensor for all that asks, on the host's device, so that whatever moves
arguments to devices leaves it alone; its number stays where the processor reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class Counter(Tensor):
    """A tensor of one whole number that is written and read by the processor.

    ``item()``, ``int()`` and ``fill_()`` ask nobody. Any other operator gets, or changes, a tensor of the device.

    Args:
        like: Shape and number format, one element.
        device: Where the host expects it.

    >>> counter = Counter(torch.empty(1, dtype=torch.long), torch.device("cpu"))
    >>> counter.fill_(7).item(), int(counter), counter + 1
    (7, 7, tensor([8]))
    """

    number: int

    def __new__(cls, like: Tensor, device: torch.device) -> Counter:
        """A counter at zero."""
        device = torch.empty(0, device=device).device  # with its number, as other tensors have it
        made: Counter = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=device)  # noqa: SLF001  # how torch lets a class be a tensor without memory
        made.number = 0
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
        """As of a tensor."""
        return self.tensor().numpy(force=force)

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

        def plain(argument: Any) -> Any:
            if not isinstance(argument, Counter):
                return argument
            return given.setdefault(id(argument), (argument, argument.tensor()))[1]

        made = func(*tree_map(plain, args), **tree_map(plain, dict(kwargs or {})))
        if func._schema.is_mutable:  # type: ignore[attr-defined]  # noqa: SLF001  # operators have a schema
            for counter, changed in given.values():
                counter.number = int(changed.item())
                made = counter if made is changed else made
        return made
