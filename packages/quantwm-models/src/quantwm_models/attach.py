"""Putting a compressed cache under a live world model, and taking it off again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from quantwm_core.errors import ParameterError, QuantWMError, StateError
from quantwm_core.method import Scheme, scheme
from quantwm_core.rotary import Turning
from quantwm_kernels.sealing import forget_recordings
from quantwm_models import adapters
from quantwm_models.cache import LayerCache
from quantwm_models.errors import HostError
from quantwm_models.made import Made, Place
from quantwm_models.observer import CacheObserver, checked_observers
from quantwm_models.offload import Offload
from quantwm_models.options import check_flag
from quantwm_models.report import CacheReport, total
from quantwm_models.workspace import Workspace

# Where a host is kept that nothing else knows to restore, for as long as it is there.
_ATTRIBUTE = "_quantwm_attachment"


class Attachment:
    """A host with caches under it; a context manager that restores the host on leaving, whatever happened inside.

    Attributes:
        scheme: How the caches are stored.
        offload: Host memory for sealed units, if they are to be kept there.
        adapter: Module in which ``attach`` of the adapter that knows the host is defined; snapshots go back to the same.
        detached: Whether the host was restored and makes its own caches again. What these hold can still be asked and saved;
            they are not loaded into any more, and whoever goes on needs another :func:`attach`.
    """

    def __init__(self, scheme: Scheme, observers: Sequence[CacheObserver] = (), offload: Offload | None = None) -> None:
        self.scheme = scheme
        self.offload = offload
        self.adapter = ""
        self.detached = False
        self._observers = checked_observers(observers)
        self._made = Made()
        self._undo: Callable[[], None] | None = None
        self._attributes: dict[str, Any] = {}

    @property
    def caches(self) -> tuple[LayerCache, ...]:
        """The caches that the host was given last, by branch and layer; they can still be asked after leaving.

        Where several threads run the host at once, a thread gets those of its own video, and one that made none those that
        were made last.
        """
        return tuple(self._caches.values())

    @property
    def layers(self) -> Mapping[Place, LayerCache]:
        """The same by branch and layer, in order."""
        return dict(sorted(self._caches.items()))

    @property
    def _caches(self) -> Mapping[Place, LayerCache]:
        return self._made.here()

    def __enter__(self) -> Self:
        if self.detached:
            raise StateError(
                "the host was restored already and would run without its caches; attach() again for this block"
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
        if error is None:
            self._confirm()

    def detach(self) -> None:
        """Restore the host; calling it twice does no harm.

        Raises:
            DomainError: The host is restored, but a GPU could not seal one of the last units, so what was read is not to be
                believed; leaving a block says so, too, if no other error ended it.
        """
        self._restore()
        self._confirm()

    def _restore(self) -> None:
        if self._undo is not None:
            undo, self._undo = self._undo, None
            self.detached = True
            if self._attributes.get(_ATTRIBUTE) is self:
                del self._attributes[_ATTRIBUTE]
            try:
                forget_recordings()  # which waits for the GPU, and so may raise what went wrong there
            finally:
                undo()

    def _confirm(self) -> None:
        for cache in self._made.everywhere():
            cache.confirm()

    def report(self) -> CacheReport:
        """Sum over all layers since their caches last began anew: the current video, or the last history of a host that rebuilds.

        Raises:
            DomainError: A GPU could not seal one of the last units.
        """
        caches = self.caches
        workspaces = {id(cache.workspace): cache.workspace.nbytes for cache in caches}
        offloads = {id(cache.offload): cache.offload.nbytes for cache in caches if cache.offload is not None}
        reports = (cache.report() for cache in caches)
        return total(reports, sum(workspaces.values()), sum(offloads.values()))

    def connect(self, adapter: adapters.Adapter, pipeline: object) -> None:
        """Let an adapter put caches under ``pipeline``.

        Raises:
            HostError: The adapter stumbled over the pipeline.
            ParameterError: The adapter does not say how the host is restored.
            StateError: A host was connected before.
        """
        if self.detached or self._undo is not None:
            raise StateError(
                f"{type(pipeline).__qualname__}: this attachment had a host before; attach() makes one for each"
            )
        function: object = adapter.attach
        while isinstance(function, partial):
            function = function.func
        self.adapter = getattr(function, "__module__", None) or type(adapter).__module__
        try:
            undo: object = adapter.attach(pipeline, self._make_cache)
        except QuantWMError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise HostError(
                f"{type(pipeline).__qualname__}: attach() of the adapter in {self.adapter} failed with {error!r}; it looks for "
                "what this object is not, or is at fault itself"
            ) from error
        if not callable(undo):
            raise ParameterError(
                f"adapter in {self.adapter}: its attach() returned {undo!r}, need a function that restores the host; what it "
                "changed before stays changed"
            )
        self._undo = undo
        attributes = getattr(pipeline, "__dict__", None)
        if isinstance(attributes, dict):  # past a host's own ways of setting them
            self._attributes = attributes
            attributes[_ATTRIBUTE] = self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A host that is copied is not the one that this restores: where it stood, the copy has None."""
        return type(None), ()

    def _make_cache(
        self,
        layer: int,
        *,
        branch: str = "",
        sink: int = 0,
        workspace: Workspace | None = None,
        rebuilt: bool = False,
        turning: Turning | None = None,
    ) -> LayerCache:
        scheme = replace(self.scheme, chunks_per_seal=1) if rebuilt else self.scheme
        if scheme.frames_ahead and scheme.uses_queries and turning is None:
            raise ParameterError(
                f"layer {layer}: frames_ahead {scheme.frames_ahead}: the adapter in {self.adapter} does not tell how positions turn this "
                "host's queries; leave it at 0"
            )
        cache = LayerCache(
            scheme,
            layer=layer,
            sink=sink,
            workspace=workspace,
            offload=self.offload,
            observers=self._observers,
            turning=turning,
        )
        self._made.add((branch, layer), cache)
        return cache


def attach(
    pipeline: object,
    method: str | Scheme = "quantwm",
    *,
    adapter: str | adapters.Adapter | None = None,
    observers: Sequence[CacheObserver] = (),
    offload: bool = False,
    **parameters: Any,
) -> Attachment:
    """Put a compressed cache under a live pipeline.

    Args:
        pipeline: The live object of a host.
        method: Name of a method, or a scheme.
        adapter: Name of the adapter, or the adapter; None finds it by what the pipeline is.
        observers: Told of what every layer's cache does.
        offload: Keep sealed units in host memory and bring each layer's to the device, packed, one layer ahead of its
            reads. A host that offloads its cache itself, as LongCat-Video can, need not be told.
        parameters: Settings when ``method`` is a name: ``rank=16``, ``values="bf16"``, ``chunks_per_seal=2``.

    Returns:
        A context manager. The host is changed at once and restored on leaving the block, or by ``detach()``.

    Raises:
        UnknownHostError: No adapter recognises the pipeline.
        UnknownNameError, ParameterError: No such adapter, method, parameter or observer, or ``offload`` is neither True nor
            False.
        HostError: The pipeline is not what the adapter expects.

    >>> attach(object())
    Traceback (most recent call last):
    ...
    quantwm_models.errors.UnknownHostError: no adapter recognises a builtins.object; known: ...
    """
    if isinstance(method, Scheme) and parameters:
        raise ParameterError(f"parameters {sorted(parameters)} beside a ready scheme; give them to scheme() instead")
    check_flag("offload", offload)
    chosen = adapters.find(pipeline) if adapter is None else adapters.chosen(adapter)
    chosen_scheme = method if isinstance(method, Scheme) else scheme(method, **parameters)
    attachment = Attachment(chosen_scheme, observers, Offload() if offload else None)
    attachment.connect(chosen, pipeline)
    return attachment


def attached(pipeline: object) -> Attachment | None:
    """What :func:`attach` returned for an object, as long as the host is not restored; None if there is nothing to restore.

    Args:
        pipeline: What ``attach`` was given. One that has no ``__dict__`` is not found.

    >>> attached(object()) is None
    True
    """
    found = getattr(pipeline, "__dict__", {}).get(_ATTRIBUTE)
    return found if isinstance(found, Attachment) and not found.detached else None
