"""What a cache method is, and how two of them form a scheme for keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import BFloat16, Float

from quantwm_core import domain, methods, statistics
from quantwm_core.arguments import explain_errors
from quantwm_core.chunk import Kind, Parameter, SealedChunk, SealedTensor
from quantwm_core.errors import FormatError, ParameterError, ShapeError, lookup, meant
from quantwm_core.rotary import Turning
from quantwm_core.statistics import QueryMoment

_PAPER: dict[str, Parameter] = {
    "centroids": 256, "group_size": 64, "candidates": 4, "rank": 8, "iterations": 10, "chunks_per_seal": 2,
}  # fmt: skip

PRESETS: dict[str, dict[str, Parameter]] = {
    "paper": _PAPER,
    "fast": {**_PAPER, "iterations": 5, "relaxation": 1.5},
    "sharp": {
        "group_size": 32, "metric": "uniform", "candidates": 1, "rank": 16, "coefficient_bits": 4, "centroid_bits": 4,
        "scale_candidates": 3, "rounding": "feedback", "iterations": 10, "chunks_per_seal": 2,
    },
}  # fmt: skip
"""Named settings of :func:`scheme`.

``paper`` is what the QuantWM paper measures with, ``fast`` seals in half of its rounds of k-means with the same logit error, and
``sharp`` is what lost least here.
"""

WHOLE = ("fast", "sharp")
"""Presets that are refused where a method beside ``bf16`` would take a part of them: a rival with half of it is no rival."""

OF_ALL = ("chunks_per_seal", "decay", "frames_ahead", "keys", "preset", "values")
"""What :func:`scheme` takes beside the settings of methods."""

MOST_FRAMES_AHEAD = 4096
"""Largest ``frames_ahead`` of a :class:`Scheme`: minutes of video, and a few MiB of angles."""


@runtime_checkable
class Method(Protocol):
    """One way to store a tensor of a unit. Implementations are frozen dataclasses; their fields are the parameters."""

    @property
    def name(self) -> str:
        """Public name, the name of the file that implements it."""

    @property
    def recent_tokens(self) -> int:
        """Newest completed tokens that stay BF16 in the cache."""

    def uses_queries(self, kind: Kind) -> bool:
        """Whether :meth:`seal` makes anything of ``moment``; a cache gathers no statistics that nobody uses."""

    def array_names(self, kind: Kind) -> tuple[str, ...]:
        """Every array that :meth:`seal` may write for ``kind``, in a fixed order."""

    def seal(
        self,
        kind: Kind,
        values: BFloat16[np.ndarray, "batch heads tokens channels"],
        moment: QueryMoment | None = None,
        previous: SealedTensor | None = None,
    ) -> SealedTensor:
        """Encode a unit's keys or values.

        Args:
            kind: ``"keys"`` or ``"values"``.
            values: BF16, finite.
            moment: Queries seen before the unit began, or None.
            previous: The same tensor of the unit before, for warm starts, and for arrays that both have. Those are named
                ``shared_...``, and the very arrays of ``previous`` are returned.
        """

    def decode(
        self, sealed: SealedTensor, start: int = 0, stop: int | None = None
    ) -> BFloat16[np.ndarray, "batch heads tokens channels"]:
        """Reconstruct tokens ``start`` to ``stop`` of the unit."""

    def nbytes(self, kind: Kind, shape: tuple[int, int, int, int], first: bool) -> int:
        """Bytes by formula, shared arrays included; ``first``: no query statistics yet.

        Where the size depends on the content, the largest possible: parts that may be stored sparse count as dense.

        Raises:
            ParameterError, ShapeError: :meth:`seal` would refuse so many channels; caches ask before a video begins.
        """


@dataclass(frozen=True)
class Scheme:
    """How a cache is stored: a method for keys, one for values, and when units are sealed.

    Attributes:
        keys, values: Methods.
        chunks_per_seal: Chunks that form a sealed unit.
        decay: Forgetting of query statistics at each seal; None counts all queries equally.
        frames_ahead: Frames to come that query statistics are turned to, see :mod:`quantwm_core.rotary`, up to
            :data:`MOST_FRAMES_AHEAD`; 0 takes queries as they were asked. Needs to know how the host's positions turn queries.

    Raises:
        ParameterError: A setting is no number of its kind, or out of range.
    """

    keys: Method
    values: Method
    chunks_per_seal: int = 1
    decay: float | None = None
    frames_ahead: int = 0

    def __post_init__(self) -> None:
        per_seal: object = self.chunks_per_seal  # what came may be no number at all
        if not isinstance(per_seal, int) or isinstance(per_seal, bool) or per_seal < 1:
            raise ParameterError(f"chunks_per_seal {per_seal!r}: need a whole number of at least 1")
        ahead: object = self.frames_ahead
        if not isinstance(ahead, int) or isinstance(ahead, bool) or not 0 <= ahead <= MOST_FRAMES_AHEAD:
            raise ParameterError(f"frames_ahead {ahead!r}: need a whole number from 0 to {MOST_FRAMES_AHEAD}")
        statistics.check_decay(self.decay)

    @property
    def recent_tokens(self) -> int:
        """Newest completed tokens that stay BF16."""
        return max(self.keys.recent_tokens, self.values.recent_tokens)

    @property
    def uses_queries(self) -> bool:
        """Whether either method makes anything of query statistics."""
        return self.keys.uses_queries("keys") or self.values.uses_queries("values")

    @property
    def warm_starts(self) -> bool:
        """Whether either method begins with what the unit before was sealed with, a parameter called ``warm_start``."""
        return any(getattr(method, "warm_start", False) for method in (self.keys, self.values))

    def check_channels(self, key_channels: int, value_channels: int) -> None:
        """Raise what sealing would, where a method cannot store heads of so many channels.

        Raises:
            ParameterError, ShapeError: A setting, or the method, does not fit the head dimension.

        >>> scheme("quantwm", rank=100).check_channels(64, 64)
        Traceback (most recent call last):
        ...
        quantwm_core.errors.ParameterError: quantwm rank 100: need at most 64, the head dimension
        """
        self.keys.nbytes("keys", (1, 1, 1, key_channels), first=False)
        self.values.nbytes("values", (1, 1, 1, value_channels), first=False)

    def check_turning(self, turning: Turning | None) -> None:
        """Raise :class:`ParameterError` for what is no turning, or where one is needed to look ahead and nobody gives it."""
        if not isinstance(turning, Turning | None):
            raise ParameterError(f"turning {turning!r}: need a quantwm_core.rotary.Turning, or None")
        if self.frames_ahead and self.uses_queries and turning is None:
            raise ParameterError(
                f"frames_ahead {self.frames_ahead}: nothing is known here of how positions turn queries; give a turning, or "
                "leave frames_ahead at 0"
            )

    @property
    def name(self) -> str:
        """``method``, or ``keys+values`` where they differ."""
        names = dict.fromkeys((self.keys.name, self.values.name))
        return "+".join(names)

    def seal(
        self,
        keys: Float[np.ndarray, "batch heads tokens channels"],
        values: Float[np.ndarray, "batch heads tokens value_channels"],
        moment: QueryMoment | None = None,
        previous: SealedChunk | None = None,
        start: int = 0,
        label: str = "",
    ) -> SealedChunk:
        """Encode one unit.

        Args:
            keys, values: BF16, FP16 or FP32 ``[B, H, N, D]``; rounded to BF16 first. Values may have another ``D``.
            moment: Queries seen before the unit began.
            previous: The unit before, for warm starts.
            start: Absolute position of its first token.
            label: Where it belongs, for messages: ``"layer 3, chunk 7"``.

        Raises:
            DtypeError, ShapeError, DomainError: The input cannot be sealed; the message names ``label`` and tensor.
            ParameterError: ``moment`` or ``previous`` is not what it should be.

        >>> ones = np.ones((1, 2, 32, 64), np.float32)
        >>> chunk = scheme("quantwm").seal(ones, ones)
        >>> chunk.bf16_nbytes, chunk.nbytes
        (16384, 3376)
        """
        prefix = f"{label}, " if label else ""
        exact = [domain.to_bf16(tensor, prefix + kind, rank=4) for kind, tensor in (("keys", keys), ("values", values))]
        if exact[0].shape[:3] != exact[1].shape[:3]:
            raise ShapeError(f"{prefix}keys {exact[0].shape} and values {exact[1].shape}: need the same B, H and N")
        batch, heads, _, channels = exact[0].shape
        _check_is("moment", moment, QueryMoment | None, "a QueryMoment as second_moment() makes it, or None")
        _check_is("previous", previous, SealedChunk | None, "a SealedChunk, or None")
        if moment is not None:
            if moment.mean.shape != (batch, heads, channels, channels):
                raise ShapeError(f"{prefix}query moment {moment.mean.shape} does not fit keys {exact[0].shape}")
            statistics.check_moment(moment.mean, f"{prefix}query moment")
        before = (None, None) if previous is None else (previous.keys, previous.values)
        sealed_keys = self.keys.seal("keys", exact[0], moment, before[0])
        return SealedChunk(sealed_keys, self.values.seal("values", exact[1], moment, before[1]), start)

    def decode(
        self, chunk: SealedChunk, start: int = 0, stop: int | None = None
    ) -> tuple[BFloat16[np.ndarray, "..."], BFloat16[np.ndarray, "..."]]:
        """Reconstruct tokens ``start`` to ``stop`` of a unit, BF16 ``[B, H, n, D]`` keys and values.

        Raises:
            QuantWMError: As :func:`decode`.
        """
        return decode(chunk, start, stop)


def decode(
    chunk: SealedChunk, start: int = 0, stop: int | None = None
) -> tuple[BFloat16[np.ndarray, "..."], BFloat16[np.ndarray, "..."]]:
    """Reconstruct part of a sealed chunk; a chunk knows its methods.

    Raises:
        ParameterError: It is none.
        RangeError, UnknownNameError, FormatError: As :func:`decode_tensor`.
    """
    _check_is("chunk", chunk, SealedChunk, "a SealedChunk, as seal() returns it")
    return decode_tensor(chunk.keys, start, stop), decode_tensor(chunk.values, start, stop)


def decode_tensor(sealed: SealedTensor, start: int = 0, stop: int | None = None) -> BFloat16[np.ndarray, "..."]:
    """Reconstruct tokens ``start`` to ``stop`` of keys or values, BF16 ``[B, H, n, D]``.

    Raises:
        RangeError: The range does not lie inside the unit.
        UnknownNameError: The method that wrote it is not installed.
        FormatError: A parameter is none of the method's, an array is missing, or the arrays do not fit together.
    """
    first, last = sealed.token_range(start, stop)
    batch, heads, _, channels = sealed.shape
    try:
        method = methods.get(sealed.method, **sealed.parameters)
    except ParameterError as error:
        raise FormatError(
            f"a unit cannot have been sealed as it says: {error}; it is damaged, or of a later release"
        ) from error
    try:
        decoded = method.decode(sealed, first, last)
    except KeyError as error:
        raise FormatError(f"a unit sealed with {sealed.method} lacks its array {error}; the file is damaged") from error
    except (ArithmeticError, IndexError, TypeError, ValueError) as error:
        raise FormatError(f"the arrays of a unit sealed with {sealed.method} do not fit together ({error})") from error
    if decoded.shape != (batch, heads, last - first, channels):
        raise FormatError(f"a unit sealed with {sealed.method} decodes to {decoded.shape} and claims {sealed.shape}")
    return decoded


def _check_is(name: str, value: object, kind: Any, needed: str) -> None:
    """Raise :class:`ParameterError` unless an argument is of a class."""
    if not isinstance(value, kind):
        raise ParameterError(f"{name}: got a {type(value).__name__}, need {needed}")


def scheme(
    method: str = "quantwm",
    *,
    keys: str | None = None,
    values: str | None = None,
    preset: str | None = None,
    chunks_per_seal: int | None = None,
    decay: float | None = None,
    frames_ahead: int = 0,
    **parameters: Parameter,
) -> Scheme:
    """Choose how a cache is stored.

    Args:
        method: Method of both tensors: ``"quantwm"``, ``"qvg"``, ``"kivi"``, ``"rtn"``, ``"bf16"``, or a registered one.
        keys, values: Another method for one tensor; ``scheme("quantwm", values="bf16")`` is the paper's K2V16.
        preset: Named settings, see :data:`PRESETS`; what is given explicitly wins.
        chunks_per_seal: Chunks per sealed unit; 1 unless the preset says otherwise.
        decay, frames_ahead: See :class:`Scheme`.
        parameters: Settings of the methods, such as ``rank=16``; each goes to the methods that know it.

    Raises:
        UnknownNameError: No such method or preset.
        ParameterError: A method is no name, no chosen method knows a parameter, a value is out of range, or a method would
            take only a part of a preset that is whole or nothing.

    >>> scheme("quantwm", values="bf16", rank=16).name
    'quantwm+bf16'
    >>> scheme("quantwm", preset="paper").chunks_per_seal
    2
    """
    names = (method if keys is None else keys, method if values is None else values)
    for name in names:
        if not isinstance(name, str):
            raise ParameterError(f"method {name!r}: need the name of one, as 'quantwm'")
    known = [methods.parameter_names(name) for name in names]
    for parameter in parameters:
        if not any(parameter in own for own in known):
            choices = sorted(set().union(*known))
            raise ParameterError(
                f"{'+'.join(dict.fromkeys(names))} has no parameter {parameter!r};{meant(parameter, (*choices, *OF_ALL))} "
                f"known: {', '.join(choices) or 'none'}; of every scheme: {', '.join(OF_ALL)}"
            )
    settings: dict[str, Any] = dict(PRESETS[lookup("preset", preset, PRESETS)]) if preset is not None else {}
    preset_per_seal = settings.pop("chunks_per_seal", 1)
    for name, own in zip(names, known, strict=True):
        lacking = sorted(settings.keys() - set(own))
        if preset in WHOLE and lacking and name != "bf16":
            raise ParameterError(
                f"preset {preset!r}: {name} has no {', '.join(lacking)}, and parts of the preset are not taken; it is one of quantwm"
            )
    per_seal = preset_per_seal if chunks_per_seal is None else chunks_per_seal
    settings |= parameters
    pair = [
        methods.get(name, **{key: value for key, value in settings.items() if key in own})
        for name, own in zip(names, known, strict=True)
    ]
    return Scheme(pair[0], pair[1], per_seal, decay, frames_ahead)


explain_errors(globals())
