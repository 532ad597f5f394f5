"""What one layer's cache holds, and how that passes from one state to the next, whole or not at all."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from quantwm_core.errors import ParameterError, StateError
from quantwm_core.method import Scheme
from quantwm_core.stream import Span, Stream, is_whole
from quantwm_kernels.chunk import SealedChunk
from quantwm_models.causality import CausalQueries
from quantwm_models.confirmation import Confirmation
from quantwm_models.contents import Contents, Unit
from quantwm_models.errors import located
from quantwm_models.geometry import Geometry
from quantwm_models.learning import Learning
from quantwm_models.observer import CacheObserver
from quantwm_models.offload import Offload
from quantwm_models.ranks import checked_ranks
from quantwm_models.reads import Reads
from quantwm_models.report import CacheReport, held
from quantwm_models.scope import LayerScope
from quantwm_models.settling import Sealing, Unconfirmed, settle
from quantwm_models.workspace import Workspace


class Holding(ABC):
    """The contents of one layer, where they are kept, and who is told when they change.

    :class:`quantwm_models.LayerCache` is what a host calls.
    """

    scheme: Scheme
    observers: list[CacheObserver]
    _layer: int
    _workspace: Workspace
    _offload: Offload | None
    _settings: Stream
    _learning: Learning

    def __init__(self) -> None:
        """Hold nothing."""
        self.version = 0
        self._contents = self._nothing()
        self._geometry: Geometry | None = None
        self._reads = Reads(self.workspace)
        self._unconfirmed: tuple[Unconfirmed, Contents, Geometry | None] | None = None
        self._confirmation: Confirmation | None = None
        self._located = LayerScope(self.layer, _weakly(self._advice))

    @abstractmethod
    def _advice(self) -> str:
        """What would fit where memory ran out."""

    @abstractmethod
    def _tell(self, sealings: Sequence[Sealing], gone: Sequence[Span]) -> None:
        """Tell the observers what was sealed and what is not live any more."""

    @property
    def layer(self) -> int:
        """Number for messages, observers and files, for as long as the cache lives."""
        return self._layer

    @property
    def workspace(self) -> Workspace:
        """Memory for reads, for as long as the cache lives."""
        return self._workspace

    @property
    def offload(self) -> Offload | None:
        """Host memory that sealed units are in, which :meth:`store_in` changes; None where they are read from where they are."""
        return self._offload

    @property
    def ranks(self) -> int:
        """See :class:`quantwm_models.LayerCache`."""
        return self._located.ranks

    @ranks.setter
    def ranks(self, count: int) -> None:
        with located(f"layer {self.layer}"):
            self._located.ranks = checked_ranks(count)

    @property
    def tokens(self) -> int:
        """Live tokens."""
        return self._contents.stream.tokens

    @property
    def stream(self) -> Stream:
        """Where tokens are: absolute spans, units, the active chunk."""
        return self._contents.stream

    @property
    def contents(self) -> Contents:
        """All that is held, a value: what happens to the cache later does not change it; waits for units being sealed.

        Raises:
            DomainError: As :meth:`quantwm_models.LayerCache.append`, of a unit that a GPU could not seal.
        """
        self.confirm()
        return self._contents

    @property
    def geometry(self) -> Geometry | None:
        """What the chunks have in common; None before there are any."""
        return self._geometry

    @property
    def chunks(self) -> tuple[SealedChunk, ...]:
        """Sealed units that hold a live token, oldest first; waits for units being sealed, as :attr:`contents` does."""
        self.confirm()
        return tuple(self._contents.units[span].chunk for span in self._contents.stream.units)

    @property
    def queries(self) -> CausalQueries:
        """Query statistics."""
        return self._contents.queries

    def confirm(self) -> None:
        """Wait for what a GPU is sealing: of this layer, and of whichever shares the workspace in the calling thread.

        Raises:
            DomainError: As :meth:`quantwm_models.LayerCache.append`.
        """
        self._workspace.confirm()
        if self._unconfirmed is not None:  # another thread began it, and handed the cache over
            self._confirm(self._unconfirmed[0])

    def clear(self) -> None:
        """Forget everything, statistics and counters included; a new video begins."""
        self.hold(self._nothing(), None)

    def rewind(self) -> None:
        """Forget all tokens, but not what is known of the queries: the host builds its cache anew."""
        self.hold(self._rewound(), None)

    def hold(self, contents: Contents, geometry: Geometry | None) -> None:
        """Hold other contents than until now; observers are told that all tokens of before are gone.

        Args:
            contents: With their units where this cache keeps them.
            geometry: Of their chunks; None where there are none.
        """
        before = self.stream.live
        if self._unconfirmed is not None:
            if self.workspace.unconfirmed is self._confirmation:
                self.workspace.unconfirmed = None
            self._unconfirmed = self._confirmation = None
        self._contents, self._geometry = contents, geometry
        self._reads.restart()
        if self.offload is not None:
            self.offload.forget(self)
        self._expect(contents, self.offload, geometry)
        self.version += 1
        self._tell((), before)

    def _rewound(self) -> Contents:
        return self._nothing()._replace(queries=self._contents.queries.folded())

    def store_in(self, offload: Offload | None) -> None:
        """Keep sealed units in host memory from now on, those of before too; None brings them back.

        Raises:
            ParameterError: ``offload`` is neither.
            DomainError: On a GPU, as :meth:`quantwm_models.LayerCache.append`, of units sealed before.
            CacheMemoryError: There is no room for them; they stay where they are.
        """
        check_shared("offload", offload, Offload)
        if offload is self.offload:
            return
        self.confirm()
        with self._located:
            before, contents = self.offload, self._contents
            if self._geometry is not None:
                contents = self._moved(contents, offload, self._geometry.device)
            self._expect(contents, offload, self._geometry)
            self._offload, self._contents = offload, contents
            self._reads.forget()
            if before is not None:
                before.forget(self)

    def report(self) -> CacheReport:
        """What the cache holds and what it cost since it last began anew; on a GPU this waits for what was launched.

        Raises:
            DomainError: As :meth:`quantwm_models.LayerCache.append`, of a unit that a GPU could not seal.
        """
        return self._report(self.contents)

    def _report(self, contents: Contents) -> CacheReport:
        return replace(
            held(contents, self._geometry),
            staging_nbytes=0 if self.offload is None else self.offload.nbytes,
            workspace_nbytes=self.workspace.nbytes,
            decode_seconds=self._reads.seconds(),
        )

    def _nothing(self) -> Contents:
        return Contents(self._settings, CausalQueries(decay=self.scheme.decay), {})

    def _commit(self, contents: Contents, geometry: Geometry | None) -> None:
        """Seal what is due in ``contents``, make them the cache's, then tell the observers.

        What a GPU seals is read at once and believed later, when this cache or that of another layer changes: a wait for each
        layer would leave the GPU idle. Observers, and host memory, take what is certain.
        """
        before = self._contents
        certain = self.offload is not None or bool(self.observers)
        settled, sealings, unconfirmed = settle(contents, self.scheme, self._learning.frame, wait=certain)
        if geometry is not None:
            settled = self._moved(settled, self.offload, geometry.device)
            self._expect(settled, self.offload, geometry)
        if settled.units.keys() != before.units.keys():
            self._reads.forget()  # a plan keeps its units alive
        if unconfirmed is not None:
            self._unconfirmed = (unconfirmed, before, self._geometry)
            self.workspace.unconfirmed = self._confirmation = Confirmation(self.layer, unconfirmed, self._confirm)
        self._contents, self._geometry = settled, geometry
        self.version += 1
        if self.observers:
            self._tell(sealings, before.gone(settled))

    def _confirm(self, begun: Unconfirmed) -> None:
        """Wait for the units that are being sealed, unless others are by now.

        Raises:
            DomainError: One cannot be; the cache is what it was before the call that began to seal it.
        """
        if self._unconfirmed is None or self._unconfirmed[0] is not begun:
            return
        unconfirmed, before, geometry = self._unconfirmed
        with self._located:
            try:
                contents = unconfirmed.confirm(self._contents, keep=self._reads.captured)
            except Exception:
                self._contents, self._geometry = before, geometry
                self._unconfirmed = self._confirmation = None
                self._reads.forget()
                self.version += 1
                raise
        if any(contents.units[span] is not unit for span, unit in self._contents.units.items()):
            self._reads.forget()  # what is stored in another way now
        self._contents = contents
        self._unconfirmed = self._confirmation = None

    def _moved(self, contents: Contents, offload: Offload | None, device: torch.device) -> Contents:
        """The contents with their units where they are to be kept."""
        if offload is None:
            return contents.moved(lambda unit: unit if unit.block is None else Unit(unit.serial, unit.chunk.to(device)))
        return contents.moved(lambda unit: offload.take(unit, device))

    def _expect(self, contents: Contents, offload: Offload | None, geometry: Geometry | None) -> None:
        """Let host memory know which units reads need."""
        if offload is not None and geometry is not None:
            offload.expect(self, tuple(contents.units.values()), geometry.device)

    def _known(self) -> Geometry:
        if self._geometry is None:
            raise StateError("the cache is empty; append keys and values first")
        return self._geometry


def _weakly(advise: Callable[[], str]) -> Callable[[], str]:
    """The cache's own method, for what the cache holds and must not be kept alive by."""
    method = weakref.WeakMethod(advise)

    def advised() -> str:
        alive = method()
        return "" if alive is None else alive()

    return advised


def check_layer(layer: int) -> None:
    """Refuse what is no number of a layer, or one that files could not hold."""
    if not is_whole(layer) or not 0 <= layer < 2**63:
        raise ParameterError(f"layer {layer!r}: need a whole number from 0 to 2**63 - 1")


def check_shared(name: str, value: object, kind: type) -> None:
    """Refuse what layers cannot share."""
    if value is not None and not isinstance(value, kind):
        raise ParameterError(f"{name} {value!r}: need {kind.__name__}() or None; layers can share one")
