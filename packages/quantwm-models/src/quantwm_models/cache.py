"""The streaming compressed cache of one attention layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from quantwm_core.errors import ParameterError, lookup
from quantwm_core.method import Scheme
from quantwm_core.method import scheme as make_scheme
from quantwm_core.rotary import Turning
from quantwm_core.stream import Span, Stream
from quantwm_models.answering import Answering
from quantwm_models.attending import AttentionPath
from quantwm_models.errors import located
from quantwm_models.geometry import Geometry, exact_chunk
from quantwm_models.history import History
from quantwm_models.holding import check_layer, check_shared
from quantwm_models.learning import Learning
from quantwm_models.memory import advice, free_nbytes
from quantwm_models.observer import CacheObserver, checked_observers
from quantwm_models.offload import Offload
from quantwm_models.settling import Sealing
from quantwm_models.workspace import Workspace


class LayerCache(Answering):
    """Keys and values of one layer: the active chunk in BF16, completed ones sealed, a window that may slide.

    Tokens are named in *window coordinates*: 0 is the oldest live token. A call that fails leaves the cache as it was. Threads may
    have a cache each, of one workspace too, and hand one on between two calls; two threads are not to use one cache at once.

    Args:
        scheme: Method name, or a :class:`quantwm_core.method.Scheme`.
        layer: Number for messages, observers and files.
        sink: First tokens that the window never evicts; sealed units are cut there.
        window: Live tokens at most, sink and active chunk included; None keeps all.
        workspace: Memory for reads; pass one to all layers, or each gets its own.
        offload: Keep sealed units in host memory, of which all layers share one; None keeps them where they are read.
        observers: See :class:`quantwm_models.observer.CacheObserver`.
        attention: How :meth:`attend` attends. ``"packed"`` reconstructs keys and values tile by tile and needs no workspace;
            ``"rotated"`` likewise, but rotates queries into the basis of keys that are a transform code, which are never made;
            ``"decoded"`` reads them and calls torch's attention; ``"auto"`` takes what is faster.
        turning: How the host's positions turn queries, for schemes that look ahead (``frames_ahead``).
        parameters: Settings of the scheme when ``scheme`` is a name: ``rank=16``, ``values="bf16"``, ``decay=0.9``.

    Attributes:
        scheme: How units are sealed.
        version: Counts what changed keys or values: two reads of a range at one version give the same.
        observers: Who is told, in order; the list may be changed between calls.
        attention: See above; it may be set between calls.
        expected: What the chunks of a host will be like, where the cache stands under one that says so beforehand.
        ranks: Of how many ranks each holds as many of the layer's heads; sums on a GPU then round as if this one held all, and
            the bytes are those of a single device.
        half_written: Whether a host wrote keys or values whose other half is still to come.

    >>> import torch
    >>> generator = torch.Generator().manual_seed(0)
    >>> cache = LayerCache("quantwm", window=1024)
    >>> for chunk in range(5):
    ...     keys, values, queries = torch.randn(3, 1, 2, 256, 64, generator=generator)
    ...     cache.append(keys, values)
    ...     output = cache.attend(queries)
    >>> tuple(output.shape), cache.tokens
    ((1, 2, 256, 64), 1024)
    >>> report = cache.report()
    >>> report.chunks_sealed, report.chunks_evicted, round(report.ratio, 1)
    (4, 1, 4.0)
    """

    def __init__(
        self,
        scheme: Scheme | str = "quantwm",
        *,
        layer: int = 0,
        sink: int = 0,
        window: int | None = None,
        workspace: Workspace | None = None,
        offload: Offload | None = None,
        observers: Sequence[CacheObserver] = (),
        attention: AttentionPath = "auto",
        turning: Turning | None = None,
        **parameters: Any,
    ) -> None:
        lookup("attention", attention, get_args(AttentionPath))
        if isinstance(scheme, Scheme) and parameters:
            raise ParameterError(
                f"parameters {sorted(parameters)} beside a ready scheme; give them to scheme() instead"
            )
        check_layer(layer)
        check_shared("workspace", workspace, Workspace)
        check_shared("offload", offload, Offload)
        self.scheme = scheme if isinstance(scheme, Scheme) else make_scheme(scheme, **parameters)
        with located(f"layer {layer}"):
            self._learning = Learning(self.scheme, turning)
            self.observers = list(checked_observers(observers))
        self._settings = Stream(self.scheme.chunks_per_seal, self.scheme.recent_tokens, sink, window)
        self._layer = layer
        self.attention = attention
        self._workspace = Workspace() if workspace is None else workspace
        self._workspace.reserve(window or 0)
        self._offload = offload
        self.expected: Geometry | None = None
        self.half_written = False
        super().__init__()

    def append(
        self,
        keys: Float[Tensor, "batch heads tokens key_channels"],
        values: Float[Tensor, "batch heads tokens value_channels"],
        *,
        copy: bool = True,
    ) -> None:
        """Begin a chunk; the one before it is complete from now on, and units that are due are sealed.

        Args:
            keys, values: BF16, FP16 or FP32 ``[B, H, N, D]`` of any strides; rounded to BF16.
            copy: False hands tensors over that are BF16 already: nobody may write them any more.

        Raises:
            ShapeError, DtypeError: The tensors do not fit each other, or the chunks or queries before.
            ParameterError: The first chunk has heads that the scheme cannot store: a ``rank`` or a ``group_size`` does not fit.
            RangeError: The chunk is longer than the window allows.
            DomainError: An older chunk that is due holds NaN, Inf or numbers beyond 2**60. On a GPU the call after this one may
                be the one that raises it, of whichever layer shares the workspace; the cache at fault, which the message
                names, is then what it was before this call.
            StateError, DeviceError: A tensor requires grad, or lives where no implementation serves it, or apart from the queries
                before.
        """
        self.confirm()
        with self._located:
            exact_keys, exact_values, geometry = exact_chunk(keys, values, self._geometry, copy=copy)
            if self._geometry is None:
                self.scheme.check_channels(geometry.key_channels, geometry.value_channels)
                self._learning.check_foreseen(self._contents, geometry)
            self._commit(self._contents.append(exact_keys, exact_values), geometry)

    def restart(
        self,
        keys: Float[Tensor, "batch heads tokens key_channels"],
        values: Float[Tensor, "batch heads tokens value_channels"],
        *,
        copy: bool = True,
    ) -> None:
        """:meth:`clear`, then :meth:`append`, in one step: a new video begins with this chunk.

        Raises:
            QuantWMError: As :meth:`append`; the cache is still what it was then.
        """
        self.confirm()
        with self._located:
            exact_keys, exact_values, geometry = exact_chunk(keys, values, None, copy=copy)
            self.scheme.check_channels(geometry.key_channels, geometry.value_channels)
            self.hold(self._nothing().append(exact_keys, exact_values), geometry)

    def rebuild(
        self,
        keys: Float[Tensor, "batch heads tokens key_channels"],
        values: Float[Tensor, "batch heads tokens value_channels"],
        queries: Float[Tensor, "batch query_heads tokens channels"] | None,
        tokens: Sequence[int],
    ) -> None:
        """:meth:`rewind`, then seal a history in one step, each unit with the queries of those before it.

        Until it succeeds, the sealed units of before are kept beside the new ones; the newest of them is to the first new one
        what the unit before is to others, a warm start. That needs the same streams and channels, and as many centroids:
        otherwise k-means begins from nothing.

        Args:
            keys, values: BF16, FP16 or FP32 ``[B, H, N, D]``.
            queries: What the history asked while it was built, if anybody wants to know.
            tokens: Tokens of each chunk, ``N`` in all.

        Raises:
            ShapeError: The tensors are not of so many tokens, or those are no whole numbers above 0.
            QuantWMError: As :meth:`append` and :meth:`observe`; the cache is still what it was then.
        """
        self.confirm()
        with self._located:
            told = bool(self.observers)
            history = History(self._rewound(), self._contents, self.scheme, self._learning, told=told)
            history.grow(keys, values, queries, tokens)
            made = history.contents.owned()
            if history.geometry is not None:
                made = self._moved(made, self.offload, history.geometry.device)
            self.hold(made, history.geometry)
            for each in history.heard:
                self._tell(*each)

    def overwrite(
        self,
        keys: Float[Tensor, "batch heads tokens key_channels"],
        values: Float[Tensor, "batch heads tokens value_channels"],
        *,
        copy: bool = True,
    ) -> None:
        """Rewrite the active chunk, as every denoising step does.

        Raises:
            StateError: No chunk is active, or a tensor requires grad.
            ShapeError, DtypeError: The tensors are not what the active chunk holds.
            DomainError: On a GPU, as :meth:`append`, of units that an earlier call began to seal.
        """
        self.confirm()
        with self._located:
            exact_keys, exact_values, _ = exact_chunk(keys, values, self._geometry, copy=copy)
            self._contents = self._contents.overwrite(exact_keys, exact_values)
            self.version += 1

    def seal(self) -> None:
        """The active chunk is complete now: seal what is due without waiting for the next chunk.

        Raises:
            DomainError: A chunk that is due holds NaN, Inf or numbers beyond 2**60.
        """
        self.confirm()
        with self._located:
            self._commit(self._contents.complete(), self._geometry)

    def evict(self, start: int, stop: int) -> None:
        """Drop window tokens ``start`` to ``stop``; those behind move up.

        An active chunk that loses tokens is complete from then on.

        Raises:
            RangeError: The range lies outside the window.
            DomainError: A chunk that is due holds NaN, Inf or numbers beyond 2**60.
        """
        self.confirm()
        with self._located:
            self._commit(self._contents.evict(start, stop), self._geometry)

    def tell_attended(
        self, queries: Tensor, keys: Tensor, values: Tensor, start: int | None = None, stop: int | None = None
    ) -> None:
        """Tell the observers of an attention call that was computed outside, over a read of ``start`` to ``stop``."""
        if self.observers:
            spans = [piece.span for piece in self.stream.read(*self._range(start, stop))]
            for observer in self.observers:
                observer.attended(self, queries, keys, values, spans)

    def _tell(self, sealings: Sequence[Sealing], gone: Sequence[Span]) -> None:
        """Tell the observers what was sealed and what is not live any more."""
        for observer in self.observers:
            for sealing in sealings:
                observer.sealed(self, *sealing)
            for span in gone:
                observer.evicted(self, *span)

    def _advice(self) -> str:
        # What is being sealed is not waited for: its error would be taken for this one.
        token, device = 0, torch.device("cpu")
        if self._geometry is not None:
            token, device = self._geometry.token_nbytes, self._geometry.device
        return advice(self._report(self._contents), token, free_nbytes(device), offloaded=self.offload is not None)
