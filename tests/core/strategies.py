"""What the properties are tried on: units of tokens of every nasty kind, small enough that hundreds take seconds.

A unit is drawn as a kind and a seed and then made by NumPy, because drawing ten thousand numbers one by one takes
longer than all that is done with them. Groups and scales, which are small, are drawn number by number.
"""

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn

from quantwm_core.domain import BF16
from quantwm_core.statistics import QueryMoment, second_moment

HEAD_DIMENSIONS = (32, 64, 80, 96, 128, 256)
# One token, fewer tokens than centroids, a ragged byte of zero-points, both sides of a count of 64 tokens.
TOKENS = (1, 2, 3, 5, 16, 17, 33, 64, 65, 70)
# The smallest normal BF16 magnitude, below which a power of two no longer scales a mantissa unchanged, is 2**-126.
SUBNORMAL = 2.0**-133

KINDS = (
    "normal", "clusters", "constant", "ties", "zeros", "one", "offset", "channels", "wide", "huge", "tiny", "denormal",
)  # fmt: skip
# Kinds whose magnitudes stay between 2**-40 and 2**40, so that there is room to scale them.
MODERATE = ("normal", "clusters", "constant", "ties", "zeros", "one", "offset", "channels")


def fp32(numbers: object) -> np.ndarray:
    """Nested lists of numbers as an FP32 array."""
    return np.array(numbers, np.float32)


def stream(kind: str, rng: np.random.Generator, tokens: int, channels: int) -> np.ndarray:
    """FP32 ``[tokens, channels]`` of a kind, exact in BF16."""
    normal = rng.standard_normal((tokens, channels))
    values: np.ndarray
    match kind:
        case "clusters":  # tight around a few points, as tokens of one surface are
            values = rng.standard_normal((4, channels))[rng.integers(0, 4, tokens)] + 0.1 * normal
        case "constant":
            values = np.broadcast_to(rng.standard_normal(channels), normal.shape)
        case "ties":  # every distance and every rounding is a tie sooner or later
            values = rng.integers(-3, 4, normal.shape) / 2
        case "zeros":
            values = np.zeros(normal.shape)
        case "one":  # a single non-zero number
            values = np.zeros(normal.shape)
            values[rng.integers(tokens), rng.integers(channels)] = rng.standard_normal()
        case "offset":  # channel means far larger than the spread
            values = 30 * rng.standard_normal(channels) + normal
        case "channels":  # outlier channels, as keys have them
            values = normal * np.exp(2 * rng.standard_normal(channels))
        case "wide":  # magnitudes from 2**-60 to 2**60 in one unit
            values = np.sign(normal) * np.exp2(rng.uniform(-60, 60, normal.shape))
        case "huge":
            values = np.clip(normal, -1, 1) * 2.0**60
        case "tiny":
            values = np.sign(normal) * np.exp2(rng.uniform(-60, -58, normal.shape))
        case "denormal":  # below the domain in which scaling is promised, yet nothing may break
            values = rng.integers(-3, 4, normal.shape) * SUBNORMAL
        case _:
            values = normal
    return values.astype(np.float32).astype(BF16).astype(np.float32)


def unit(kinds: tuple[str, ...], seed: int, tokens: int, channels: int, batch: int = 1) -> np.ndarray:
    """BF16 ``[batch, len(kinds), tokens, channels]``, a kind per head."""
    rng = np.random.default_rng(seed)
    streams = [[stream(kind, rng, tokens, channels) for kind in kinds] for _ in range(batch)]
    return np.array(streams, np.float32).astype(BF16)


def units(
    kinds: tuple[str, ...] = KINDS,
    head_dimensions: tuple[int, ...] = HEAD_DIMENSIONS,
    tokens: tuple[int, ...] = TOKENS,
    heads: int = 2,
) -> st.SearchStrategy[np.ndarray]:
    """BF16 ``[1, 1 to heads, tokens, channels]``; each head is of its own kind."""
    return st.builds(
        unit,
        st.lists(st.sampled_from(kinds), min_size=1, max_size=heads).map(tuple),
        st.integers(0, 2**32 - 1),
        st.sampled_from(tokens),
        st.sampled_from(head_dimensions),
    )


def small_units(kinds: tuple[str, ...] = KINDS, heads: int = 2) -> st.SearchStrategy[np.ndarray]:
    """Units for what is slow: never more than 64 tokens of 80 channels."""
    return units(kinds, (32, 80), (1, 2, 5, 17, 33, 64), heads)


def moment(seed: int, heads: int, channels: int, rank: int | None = None, batch: int = 1) -> QueryMoment:
    """Moment of queries that span ``rank`` directions (all of them by default), uneven over the channels."""
    rng = np.random.default_rng(seed)
    directions = channels if rank is None else rank
    mix = rng.standard_normal((batch, heads, directions, channels)) * np.exp(rng.standard_normal(channels))
    queries = rng.standard_normal((batch, heads, 48, directions)) @ mix / max(directions, 1)
    return second_moment(queries.astype(np.float32), heads)


def bf16_numbers(largest: float = 2.0**60, smallest: float = 0.0) -> st.SearchStrategy[float]:
    """Zero, and BF16 numbers of a magnitude between the limits; with ties and equal numbers more often than by chance."""
    top = int(np.array(largest, BF16).view(np.uint16))
    bottom = int(np.array(smallest, BF16).view(np.uint16))
    magnitudes = st.integers(bottom, top).map(lambda bits: float(np.array(bits, np.uint16).view(BF16)))
    halves = st.integers(0, 12).map(lambda count: count / 2)
    positive = st.one_of(magnitudes, halves.filter(lambda half: half == 0 or smallest <= half <= largest))
    return st.builds(lambda sign, magnitude: sign * magnitude, st.sampled_from((-1.0, 1.0)), positive)


def groups(
    group_size: int = 4, largest: float = 2.0**60, smallest: float = 0.0, tokens: int = 5
) -> st.SearchStrategy[np.ndarray]:
    """FP32 ``[1, tokens, 2 * group_size]`` of BF16 numbers drawn one by one."""
    return st.integers(1, tokens).flatmap(
        lambda count: stn.arrays(np.float32, (1, count, 2 * group_size), elements=bf16_numbers(largest, smallest))
    )


def steps() -> st.SearchStrategy[np.ndarray]:
    """FP32 ``[streams, rows, groups]`` scales, finite and not negative, subnormal ones included."""
    number = st.integers(0, int(np.float32(2.0**62).view(np.uint32))).map(lambda bits: np.uint32(bits).view(np.float32))
    small = st.sampled_from([0.0, 1.0, 448.0, 2.0**-9, 2.0**-10, 2.0**-126, 2.0**-149, 2.0**60])
    shapes = stn.array_shapes(min_dims=3, max_dims=3, max_side=4)
    return stn.arrays(np.float32, shapes, elements=st.one_of(number.map(float), small))


def codes(max_codes: int = 40) -> st.SearchStrategy[np.ndarray]:
    """uint8 codes 0 to 3 of up to three axes, the last of them of any length."""
    shapes = st.tuples(
        st.lists(st.integers(1, 3), max_size=2).map(tuple), st.integers(0, max_codes).map(lambda count: (count,))
    ).map(lambda parts: parts[0] + parts[1])
    return stn.arrays(np.uint8, shapes, elements=st.integers(0, 3))


def all_bf16() -> np.ndarray:
    """Every finite BF16 number up to 2**60."""
    every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    wide = every.astype(np.float32)
    return np.asarray(every[np.abs(wide) <= 2.0**60])
