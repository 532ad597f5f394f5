"""The mathematics once more, one number at a time: what the vectorised code is held against.

Nothing here is taken from the package. Numbers are FP32 scalars, so that every operation rounds as it would there;
``round`` of a Python float is half-to-even. Where only an order of distances matters, they are FP64.
"""

from collections.abc import Sequence
from itertools import chain, pairwise

import ml_dtypes
import numpy as np

F32 = np.float32
Matrix = Sequence[Sequence[float]] | np.ndarray


def bf16(value: float) -> float:
    """Nearest BF16 number, ties to even."""
    return float(np.asarray(value, np.float32).astype(ml_dtypes.bfloat16))


def e4m3_value(code: int) -> float:
    """Number that an E4M3 code below 127 stands for."""
    exponent, mantissa = code >> 3, code & 7
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


def e4m3_code(value: float) -> int:
    """Nearest finite E4M3 code of a number from 0 to 448, ties to the even code."""
    for low, high in pairwise(range(127)):
        middle = (e4m3_value(low) + e4m3_value(high)) / 2
        if value < middle or (value == middle and low % 2 == 0):
            return low
    return 126


def store_scales(steps: Sequence[float]) -> tuple[list[int], np.float32, list[np.float32]]:
    """E4M3 codes, super-scale and stored scales of one stream."""
    super_scale = max(F32(max(steps)) / F32(448), F32(2.0**-126))
    codes = [e4m3_code(float(min(F32(step) / super_scale, F32(448)))) for step in steps]
    codes = [1 if step > 0 and code == 0 else code for step, code in zip(steps, codes, strict=True)]
    return codes, super_scale, [F32(e4m3_value(code)) * super_scale for code in codes]


def affine(
    values: Matrix, group_size: int
) -> tuple[list[list[int]], list[list[int]], list[int], np.float32, list[list[np.float32]]]:
    """One stream: codes by token and channel, zero-points by token and group, E4M3 codes, super-scale, decoded values."""
    width = len(values[0]) // group_size
    flat = [
        [F32(value) for value in row[i * group_size : (i + 1) * group_size]] for row in values for i in range(width)
    ]
    ranges = [(F32(min(0.0, *map(float, group))), F32(max(0.0, *map(float, group)))) for group in flat]
    stored, super_scale, scales = store_scales([float((high - low) / F32(3)) for low, high in ranges])
    codes, zero_points, decoded = [], [], []
    for group, (low, _), scale in zip(flat, ranges, scales, strict=True):
        zero_point = 0 if scale == 0 else min(max(round(float(-low / scale)), 0), 3)
        levels = [0 if scale == 0 else round(float(value / scale)) for value in group]
        own = [min(max(level + zero_point, 0), 3) for level in levels]
        codes.append(own)
        zero_points.append(zero_point)
        decoded.append([F32(code - zero_point) * scale for code in own])
    return (
        [list(chain(*codes[row * width : (row + 1) * width])) for row in range(len(values))],
        [zero_points[row * width : (row + 1) * width] for row in range(len(values))],
        stored,
        super_scale,
        [list(chain(*decoded[row * width : (row + 1) * width])) for row in range(len(values))],
    )


def symmetric(values: Matrix, group_size: int) -> tuple[list[list[int]], list[list[int]], list[list[float]]]:
    """One stream: stored codes, E4M3 codes, decoded values."""
    codes, scales, decoded = [], [], []
    for row in values:
        row_codes, row_scales, row_decoded = [], [], []
        for begin in range(0, len(row), group_size):
            group = [F32(value) for value in row[begin : begin + group_size]]
            stored = e4m3_code(float(min(max(abs(value) for value in group), F32(448))))
            scale = F32(e4m3_value(stored))
            levels = [0 if scale == 0 else min(max(round(float(value / scale)), -1), 1) for value in group]
            row_scales.append(stored)
            row_codes += [level + 1 for level in levels]
            row_decoded += [float(F32(level) * scale) for level in levels]
        codes.append(row_codes)
        scales.append(row_scales)
        decoded.append(row_decoded)
    return codes, scales, decoded


def minmax(values: Sequence[float], group_size: int) -> tuple[list[int], list[float], list[float], list[float]]:
    """One row: codes, scales, minima, decoded values; the last group may be short."""
    codes, scales, minima, decoded = [], [], [], []
    for begin in range(0, len(values), group_size):
        group = [F32(value) for value in values[begin : begin + group_size]]
        low = F32(bf16(float(min(group))))
        scale = F32(bf16(float((max(group) - low) / F32(3))))
        own = [0 if scale == 0 else min(max(round(float((value - low) / scale)), 0), 3) for value in group]
        codes += own
        scales.append(float(scale))
        minima.append(float(low))
        decoded += [float(low + F32(code) * scale) for code in own]
    return codes, scales, minima, decoded


def pack(codes: Sequence[int]) -> list[int]:
    """Four codes a byte, the first in the lowest bits."""
    packed = [0] * ((len(codes) + 3) // 4)
    for position, code in enumerate(codes):
        packed[position // 4] += code * 4 ** (position % 4)
    return packed


def distance(token: Sequence[float], centroid: Sequence[float], metric: np.ndarray | None) -> float:
    """Distance in FP64 under no, a diagonal or a full metric."""
    error = [float(a) - float(b) for a, b in zip(token, centroid, strict=True)]
    if metric is None:
        return sum(e * e for e in error)
    if metric.ndim == 1:
        return sum(float(w) * e * e for w, e in zip(metric, error, strict=True))
    wide = metric.tolist()
    return sum(a * wide[i][j] * b for i, a in enumerate(error) for j, b in enumerate(error))


def nearest(tokens: Matrix, centroids: Matrix, metric: np.ndarray | None = None) -> list[int]:
    """Index of the nearest centroid of every token, ties to the lowest."""
    index = []
    for token in tokens:
        distances = [distance(token, centroid, metric) for centroid in centroids]
        index.append(distances.index(min(distances)))
    return index


def lloyd(
    tokens: Matrix,
    size: int,
    iterations: int,
    initial: Matrix | None = None,
    metric: np.ndarray | None = None,
    relaxation: float = 1.0,
) -> list[list[float]]:
    """Centroids of one stream, BF16; sums in FP32 and in the order of the tokens."""
    count = len(tokens)
    size = min(size, count)
    start = [tokens[int((i + 0.5) * count / size)] for i in range(size)] if initial is None else initial
    table = [[F32(value) for value in row] for row in start]
    for number in range(iterations):
        index = nearest(tokens, np.array(table), metric)
        for centroid in range(size):
            members = [tokens[token] for token in range(count) if index[token] == centroid]
            if not members:
                continue
            for channel in range(len(tokens[0])):
                total = F32(0)
                for member in members:
                    total = total + F32(member[channel])
                mean = total / F32(len(members))
                if relaxation != 1 and number < iterations - 1:
                    before = table[centroid][channel]
                    mean = before + F32(relaxation) * (mean - before)
                table[centroid][channel] = mean
    return [[bf16(float(value)) for value in row] for row in table]


def qsac_cost(token: Sequence[float], centroid: Sequence[float], weights: Sequence[float], group_size: int) -> float:
    """Summed weight of each group times its squared range, zero included, FP64."""
    cost = 0.0
    for begin in range(0, len(token), group_size):
        channels = range(begin, begin + group_size)
        residual = [float(token[j]) - float(centroid[j]) for j in channels]
        span = max(0.0, *residual) - min(0.0, *residual)
        cost += sum(float(weights[j]) for j in channels) * span * span
    return cost


def sparse_coefficient(
    bitmap: np.ndarray, values: np.ndarray, counts: np.ndarray, rank: int, token: int, direction: int
) -> int:
    """One coefficient of one sparse stream, as a kernel finds it: a count, then the bits of at most 64 tokens.

    Args:
        bitmap: The stream's bytes.
        values: The values of all streams of the unit.
        counts: The stream's running counts, one per 64 tokens.
    """

    def bit(position: int) -> int:
        return int(bitmap[position // 8]) >> (position % 8) & 1

    position = token * rank + direction
    if not bit(position):
        return 0
    block = token // 64
    before = sum(bit(other) for other in range(block * 64 * rank, position))
    return int(values[int(counts[block]) + before])
