"""A transform code: mean, coefficients in a shared basis, as many bits a direction as its energy deserves.

``k^ = mean + sum_i (code_i + shift_i) W_i`` with ``W_i = bf16(step_i * row_i)``, summed in FP32 and rounded to BF16 once.
Of a stream, a unit stores its mean, the codes, and for each direction that gets bits its step and its place in the basis;
the basis is shared with other units. ``klt`` and ``kvtc`` are this code; they differ in metric and allocation.

Streams are coded one by one, in FP64 from a power of two, so neither scale nor company changes a bit of a code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import BFloat16, Float32, Float64, UInt8

from quantwm_core import allocation, basis, blocks, directions
from quantwm_core.arguments import explain_errors
from quantwm_core.basis import Basis
from quantwm_core.chunk import SealedTensor
from quantwm_core.domain import BF16
from quantwm_core.errors import ShapeError
from quantwm_core.transform_plan import Allocate, Plan, Source, in_basis, sources

PARTS = ("codes", "blocks", "order", "steps", "means", *basis.PARTS)
TILE = 64
"""Tokens that are reconstructed by one matrix product: the order of a sum depends on the shape of the product."""


def seal(
    values: BFloat16[np.ndarray, "batch heads tokens channels"],
    metrics: Float64[np.ndarray, "batch heads channels channels"],
    damp: float,
    allocate: Allocate,
    kept: Basis | None,
    lifetime: float,
) -> dict[str, np.ndarray]:
    """Arrays of a sealed tensor.

    Args:
        values: BF16, finite.
        metrics: What an error of each stream costs; zero counts as the identity.
        damp: Share of the identity that is added to a metric of mean 1.
        allocate: Gives bits.
        kept: Basis of the unit before, if there is one.
        lifetime: Units that are expected to share a new basis; 0 makes none beside ``kept``.

    Raises:
        ShapeError: The head dimension is no multiple of eight.
    """
    shape = (values.shape[0], values.shape[1])
    streams = sources(values, metrics, damp)
    shared, coded = in_basis(streams, allocate, kept, shape, lifetime * values.size)
    return encode(streams, coded, shared, shape)


def kept_basis(
    previous: SealedTensor | None,
    method: str,
    shape: tuple[int, int],
    channels: int,
    parts: Sequence[str] = basis.PARTS,
) -> Basis | None:
    """The basis of the unit before, if it is of the same method, whole and fits; its arrays are that unit's own.

    Args:
        previous: The unit before.
        method: Name of the method that asks.
        shape: Batch and heads.
        channels: Head dimension.
        parts: What the method shares: a unit that lacks some of it has nothing to share.
    """
    if previous is None or previous.method != method or not previous.arrays.keys() >= set(parts):
        return None
    kept = Basis.of(previous.arrays)
    return kept if kept.blocks.shape == shape and kept.rows.shape[1:] == (channels,) else None


def encode(
    streams: Sequence[Source], coded: Sequence[Plan], shared: Basis, shape: tuple[int, int]
) -> dict[str, np.ndarray]:
    """Arrays of a sealed tensor."""
    parts = [_encode(source, plan) for source, plan in zip(streams, coded, strict=True)]
    return {
        "codes": np.concatenate([codes.ravel() for codes, _ in parts]),
        "blocks": np.stack([plan.counts for plan in coded]).reshape(*shape, 3),
        "order": np.concatenate([plan.order for plan in coded]).astype(np.uint8),
        "steps": np.concatenate([steps for _, steps in parts]),
        "means": np.stack([source.mean for source in streams]).reshape(*shape, -1),
        **shared.arrays,
    }


def decode(
    arrays: Mapping[str, np.ndarray], shape: tuple[int, int, int, int], start: int, stop: int
) -> BFloat16[np.ndarray, "batch heads range channels"]:
    """Reconstruct tokens ``start`` to ``stop`` of a unit.

    Raises:
        ShapeError: The arrays do not fit together.
        IndexError: A direction is not in the basis.
    """
    batch, heads, tokens, channels = shape
    means = arrays["means"]
    if means.shape != (batch, heads, channels):
        raise ShapeError(f"means {means.shape} of a unit of {shape}")
    found = list(stored(arrays, tokens))  # which looks whether there are so many, before room is made for them
    decoded = np.empty((batch, heads, stop - start, channels), BF16)
    for place, counts, packed, matrix in found:
        decoded[place] = _decode(packed, counts, matrix, means[place], start, stop)
    return decoded


def matrices(arrays: Mapping[str, np.ndarray]) -> list[BFloat16[np.ndarray, "coded channels"]]:
    """``W`` of each stream: the rows of its directions times their steps, in BF16."""
    counts, order, steps = (arrays[name] for name in ("blocks", "order", "steps"))
    ends = np.cumsum([allocation.directions(each) for each in counts.reshape(-1, 3)])[:-1]
    made = []
    for (rows, scales), own, step in zip(
        Basis.of(arrays).streams(), np.split(order, ends), np.split(steps, ends), strict=True
    ):
        factor = step.astype(np.float32) * scales[own].astype(np.float32)
        made.append((factor[:, None] * rows[own].astype(np.float32)).astype(BF16))
    return made


def _encode(source: Source, plan: Plan) -> tuple[UInt8[np.ndarray, "tokens bytes"], BFloat16[np.ndarray, " coded"]]:
    forward = basis.projector(plan.rows, source.metric)
    coefficients = (source.residual @ forward.T).astype(np.float32)
    widths = allocation.widths(plan.counts)
    steps = directions.search_steps(coefficients, widths)
    codes = directions.quantize(coefficients, widths, steps)
    return blocks.pack(codes, plan.counts), np.ldexp(steps.astype(np.float32), source.exponent).astype(BF16)


def stored(
    arrays: Mapping[str, np.ndarray], tokens: int
) -> Iterator[tuple[tuple[int, ...], UInt8[np.ndarray, "3"], UInt8[np.ndarray, "tokens bytes"], np.ndarray]]:
    """Place, blocks, packed codes and matrix of each stream."""
    counts, codes = arrays["blocks"], arrays["codes"]
    sizes = [tokens * allocation.token_bytes(each) for each in counts.reshape(-1, 3)]
    if codes.shape != (sum(sizes),):
        raise ShapeError(
            f"codes {codes.shape}: need {sum(sizes)} bytes for {tokens} tokens of blocks {counts.tolist()}"
        )
    places, ends = list(np.ndindex(*counts.shape[:2])), np.cumsum(sizes)[:-1]
    for place, part, matrix in zip(places, np.split(codes, ends), matrices(arrays), strict=True):
        yield place, counts[place], part.reshape(tokens, allocation.token_bytes(counts[place])), matrix


def _decode(
    packed: UInt8[np.ndarray, "tokens bytes"],
    counts: UInt8[np.ndarray, "3"],
    matrix: BFloat16[np.ndarray, "coded channels"],
    mean: BFloat16[np.ndarray, " channels"],
    start: int,
    stop: int,
) -> Float32[np.ndarray, "range channels"]:
    """The tiles that a range touches, then the range."""
    begin, end = tiles_of(start, stop)
    numbers = np.zeros((end - begin, len(matrix)), np.float32)
    own = packed[begin : min(end, len(packed))]
    numbers[: len(own)] = directions.levels(blocks.unpack(own, counts), allocation.widths(counts))
    return product(numbers, matrix)[start - begin : stop - begin] + mean.astype(np.float32)


def product(
    numbers: Float32[np.ndarray, "tokens coded"], matrix: BFloat16[np.ndarray, "coded channels"]
) -> Float32[np.ndarray, "tokens channels"]:
    """``numbers @ matrix`` in FP32, whole tiles of :data:`TILE` tokens one by one.

    >>> product(np.ones((64, 2), np.float32), np.ones((2, 8), "bfloat16")).shape
    (64, 8)
    """
    tiles = numbers.reshape(len(numbers) // TILE, TILE, len(matrix)) @ matrix.astype(np.float32)
    return tiles.reshape(len(numbers), matrix.shape[1])


def tiles_of(start: int, stop: int) -> tuple[int, int]:
    """Whole tiles that hold tokens ``start`` to ``stop``.

    >>> tiles_of(3, 65)
    (0, 128)
    """
    return start // TILE * TILE, -(-stop // TILE) * TILE


explain_errors(globals())
