"""Bytes of tensors that are alive, on any device: what a GPU's allocator tells, for a machine without one."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storage that operators make inside, as long as it lives.

    Attributes:
        now: Bytes at this moment, those of before not counted.
        most: Most at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates none
        self.now = self.most = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {id(each.untyped_storage()) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor) and each.device.type != "meta":
                storage = each.untyped_storage()
                if id(storage) not in given and storage not in self._known:
                    self._add(storage)
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self._known.add(storage)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, size)

    def _gone(self, size: int) -> None:
        self.now -= size


class LiveMemory(LiveBytes):
    """In place of :class:`quantwm_eval.true_shapes.memory.DeviceMemory`, on a CPU; weights were made before."""

    before = 0

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        assert device.type == "cpu"
