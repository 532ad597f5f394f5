"""One layer of a host whose attention runs twice, with two kinds of keys, and which builds its whole history anew.

It knows when its block runs, seals what the block made, and hands both kinds back on a read, also where one stream is
stored of which both are derived (:mod:`quantwm_models.two_kinds`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from quantwm_models.attention_hook import Replacement
from quantwm_models.cache import LayerCache
from quantwm_models.compiling import uncompiled
from quantwm_models.errors import HostError
from quantwm_models.handle import name_of
from quantwm_models.observer import Shown
from quantwm_models.rebuilt import Sealed, rebuild
from quantwm_models.settling import KeyFrame
from quantwm_models.two_kinds import Transforms, stored_once

# What a host's projection returns.
MADE = 4


class Seen(Replacement):
    """A transform of the host that notes, for the layer that runs, how it was called last."""

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Transform as the host does."""
        self.watching.note((args, kwargs))
        return self.original(*args, **kwargs)


class RebuiltLayer:
    """One layer of a model, and its caches by the prompt that they are for.

    Args:
        make: A cache for a branch.
        function: The host's attention, which is told when the layer runs.
        seen: Its transforms, if one stream is to be stored: the projection of keys and values, and the rotation if it is
            a function of its own.

    Attributes:
        rotation: What the host rotates keys by while the block runs, where no function tells.
        transforms: Of caches that store one stream.
    """

    def __init__(
        self, make: Callable[[str], LayerCache], function: Replacement, seen: Sequence[Replacement] = ()
    ) -> None:
        self.make = make
        self.function = function
        self.seen = seen
        self.rotation: Any = None
        self.transforms: weakref.WeakKeyDictionary[LayerCache, Transforms] = weakref.WeakKeyDictionary()
        self.prompts: list[tuple[weakref.ref[Tensor], LayerCache]] = []

    @contextmanager
    def around(self, block: nn.Module) -> Iterator[None]:
        """Know when the block runs."""
        with ExitStack() as stack:
            for each in (*self.seen, self.function):
                stack.callback(each.watching.forget, self)
            stack.callback(block.register_forward_pre_hook(self.enter, with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(self.leave, with_kwargs=True, always_call=True).remove)
            yield

    @uncompiled
    def enter(self, block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The block begins."""
        for each in self.seen:
            each.watching.enter(self, None)
        self.function.watching.enter(self, self)

    @uncompiled
    def leave(self, block: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """The block is done, or failed."""
        for each in (*self.seen, self.function):
            each.watching.leave(self)

    def build(self, cache: LayerCache, keys: Tensor, values: Tensor) -> tuple[Sealed, Sealed]:
        """Seal a cache of both kinds, ``[B, H, N, 2 D]``.

        Raises:
            QuantWMError: It cannot be sealed; the history of before is still there, and read as it was.
        """
        with self._transforms_kept(cache):
            stored = self._once(cache, keys, values)
            if stored is None:
                self._transform(cache, None, None)
            keys, values = (keys, values) if stored is None else stored
            return rebuild(cache, keys, values, None, [keys.shape[2]])

    def read(self, keys: Sealed, values: Sealed) -> tuple[Tensor, Tensor]:
        """A cache of both kinds, ``[B, H, N, 2 D]``."""
        return self.both(keys.cache, keys.tensor(), values.tensor())

    def both(self, cache: LayerCache, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Both kinds of what a cache stores."""
        transforms = self.transforms.get(cache)
        return (keys, values) if transforms is None else transforms.both(keys, values)

    def shown(self, cache: LayerCache) -> LayerCache:
        """A cache whose observers are told of both kinds; its history is one unit."""
        cache.observers[:] = [
            Shown(each, lambda _, keys, values: self.both(cache, keys, values)) for each in cache.observers
        ]
        return cache

    def _once(self, cache: LayerCache, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """What to store instead of both kinds, and how they are derived from it."""
        calls = [each.watching.innermost for each in self.seen]
        if not calls or None in calls:
            return None
        (_, *raw), settings = calls[0]
        rotate = self.rotation_of(calls, raw[0].shape[2])
        if rotate is None:
            return None
        project = _projecting(self.seen[0].original, settings)
        transforms = Transforms(rotate, project, settings["viewmats"].shape[1], raw[0].dtype)
        stored = stored_once(transforms, (raw[0], raw[1]), (keys, values))
        angles = None if stored is None else transforms.angles(stored[0].to(raw[0].dtype))
        if angles is None:
            return None
        self._transform(cache, transforms, lambda moment, span: transforms.frame(moment, angles[slice(*span)]))
        return stored

    def _transform(self, cache: LayerCache, transforms: Transforms | None, frame: KeyFrame | None) -> None:
        """Derive both kinds by these transforms from now on, or take what is stored for both."""
        if transforms is None:
            self.transforms.pop(cache, None)
        else:
            self.transforms[cache] = transforms
        cache.key_frame = frame

    @contextmanager
    def _transforms_kept(self, cache: LayerCache) -> Iterator[None]:
        """Leave a history its transforms where no other takes its place; observers are told when one has."""
        version, transforms, frame = cache.version, self.transforms.get(cache), cache.key_frame
        try:
            yield
        except BaseException:
            if cache.version == version:
                self._transform(cache, transforms, frame)
            raise

    def rotation_of(self, calls: Sequence[Any], tokens: int) -> Callable[[Tensor], Tensor] | None:
        """How the host rotated the keys of so many tokens, if that is known: the 8B model's function, called as it was."""
        (_, _, *more), settings = calls[1]
        original = self.seen[1].original

        def rotate(keys: Tensor) -> Tensor:
            by_token = keys.transpose(1, 2)
            result: Tensor = original(by_token, by_token, *more, **settings)[1]
            return result.transpose(1, 2)

        return rotate

    def cache(self, prompt: Tensor) -> LayerCache:
        """The cache for a prompt, known by its text cache, which lives as long as a video."""
        for known, cache in self.prompts:
            if known() is prompt:
                return cache
        others = [each for each in self.prompts if each[0]() is not None]
        cache = self.shown(self.make("uncond" if others else "cond"))
        self.prompts = [*others, (weakref.ref(prompt), cache)]
        return cache


def _projecting(original: Callable[..., Any], settings: Mapping[str, Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The host's projection of keys and values, by the cameras of a history."""

    def project(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        made = original(keys, keys, values, **settings)
        if not isinstance(made, tuple | list) or len(made) != MADE:
            came = f"{len(made)} values" if isinstance(made, tuple | list) else f"a {type(made).__name__}"
            raise HostError(
                f"{name_of(original)} returned {came}; need {MADE}: queries, keys, values and what brings the "
                "output back. This host's history cannot be stored once: leave that option off"
            )
        return made[1], made[2]

    return project
