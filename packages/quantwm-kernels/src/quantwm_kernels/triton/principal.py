"""Principal directions of symmetric matrices: subspace iteration and one Rayleigh-Ritz step, a program per matrix.

A library's eigensolver finds all directions and makes the host wait to hear whether it converged. A few of them come
cheaper: a block of ``WIDTH`` columns, at least twice as many as are asked for, is multiplied by the matrix and made
orthonormal over and over; what is left is a small symmetric matrix, which rotations make diagonal (Jacobi), all pairs
``i, i ^ m`` of a round at once. The wanted subspace improves in each round by the ratio of the first eigenvalue outside of
the block to the last one wanted.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantwm_kernels.triton.arithmetic import frexp_exponent, magnitude_bits, product, scaled
from quantwm_kernels.triton.domain import to_bf16
from quantwm_kernels.triton.kernel import kernel

INFINITE_BITS: tl.constexpr = tl.constexpr(0x7F800000)
# Lengthens a column by so much of itself, so that columns that hardly differ can be told apart by division.
RELATIVE_SHIFT: tl.constexpr = tl.constexpr(1e-6)
# A pair whose products differ by more is not rotated; the square of this is finite.
STEEP: tl.constexpr = tl.constexpr(1e15)
# Directions with less than this share of the largest eigenvalue are noise of FP32.
NEGLIGIBLE: tl.constexpr = tl.constexpr(1e-6)
# Rotations end where products beside the diagonal are this share of its geometric mean, or noise of its largest entry.
SETTLED: tl.constexpr = tl.constexpr(2.0**-16)
NOISE: tl.constexpr = tl.constexpr(2.0**-24)
# A round that filters is worth as many that multiply; before the first and behind the last of them some multiply only.
WORTH: tl.constexpr = tl.constexpr(4)
FIRST_ROUNDS: tl.constexpr = tl.constexpr(2)
LAST_ROUNDS: tl.constexpr = tl.constexpr(2)
# Squares of eigenvalues of a block that is filtered differ by no more: two products in FP32 tell them apart.
LEVEL: tl.constexpr = tl.constexpr(1e-6)


@triton.jit
def thirds(number):
    """Three BF16 numbers that add up to an FP32 number, largest first."""
    first = to_bf16(number)
    rest = number - first.to(tl.float32)
    second = to_bf16(rest)
    return first, second, to_bf16(rest - second.to(tl.float32))


@triton.jit
def exact(left, right):
    """Product of FP32 matrices that come in thirds, but for roundings of FP32."""
    total = product(left[2], right[0], tl.zeros((left[0].shape[0], right[0].shape[1]), tl.float32))
    total = product(left[0], right[2], total)
    total = product(left[1], right[1], total)
    total = product(left[1], right[0], total)
    total = product(left[0], right[1], total)
    return product(left[0], right[0], total)


@triton.jit
def multiplied(matrix, resident, columns, place, scratch, usable, shift, CHANNELS: tl.constexpr, BLOCK_D: tl.constexpr,
               WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """``M V 2**-shift`` of a matrix that is kept, or else read anew, and columns ``[BLOCK_D, WIDTH]``."""
    if BLOCK_K == BLOCK_D:
        total = exact(resident, thirds(columns))
    else:
        tl.debug_barrier()
        tl.store(place, columns)
        tl.debug_barrier()
        channel, column = tl.arange(0, BLOCK_D), tl.arange(0, WIDTH)
        total = tl.zeros((BLOCK_D, WIDTH), tl.float32)
        for start in range(0, BLOCK_D, BLOCK_K):
            number = block_of(matrix, channel, start, usable, shift, CHANNELS, BLOCK_K)
            factor = tl.load(scratch + (start + tl.arange(0, BLOCK_K))[:, None] * WIDTH + column[None, :])
            total += tl.dot(number, factor, input_precision="tf32x3")
    return total


@triton.jit
def across(left, right):
    """Products of the columns of two matrices that come in thirds."""
    return exact((tl.trans(left[0]), tl.trans(left[1]), tl.trans(left[2])), right)


@triton.jit
def block_of(matrix, channel, start, usable, shift, CHANNELS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns from ``start`` of ``M 2**-shift``, zero where it is not usable."""
    other = start + tl.arange(0, BLOCK_K)
    inside = (channel[:, None] < CHANNELS) & (other[None, :] < CHANNELS) & usable
    return scaled(tl.load(matrix + channel[:, None] * CHANNELS + other[None, :], mask=inside, other=0.0), -shift)


@triton.jit
def orthonormal(block, WIDTH: tl.constexpr):
    """Columns that span what those of ``block`` do, in order: ``G = L D L^T`` of their products, ``V L^-T D^-1/2``.

    Also the largest and the smallest entry of ``D``.
    """
    row, column = tl.arange(0, WIDTH)[:, None], tl.arange(0, WIDTH)[None, :]
    parts = thirds(block)
    gram = across(parts, parts)
    gram = tl.where(row == column, gram * (1 + RELATIVE_SHIFT), gram)
    inverse = tl.where(row == column, 1.0, 0.0)
    for pivot in range(WIDTH):
        here = row == pivot
        own = tl.sum(tl.where(here, gram, 0.0), axis=0)[None, :]
        head = tl.sum(tl.where(column == pivot, own, 0.0), axis=1)[:, None]
        factor = tl.sum(tl.where(column == pivot, gram, 0.0), axis=1)[:, None]
        factor = tl.where((row > pivot) & (head > 0), factor / tl.where(head > 0, head, 1.0), 0.0)
        gram -= factor * own
        inverse -= factor * tl.sum(tl.where(here, inverse, 0.0), axis=0)[None, :]
    size = tl.sum(tl.where(row == column, gram, 0.0), axis=0)[None, :]
    length = tl.where(size > 0, 1.0 / tl.sqrt(tl.where(size > 0, size, 1.0)), 0.0)
    return exact(parts, thirds(tl.trans(inverse) * length)), tl.max(size), tl.min(size)


@triton.jit
def rotated(small, turn, mask, WIDTH: tl.constexpr):
    """One round of Jacobi on a symmetric matrix: rotate every pair ``i, i ^ mask`` so that its product vanishes."""
    row, column = tl.arange(0, WIDTH)[:, None], tl.arange(0, WIDTH)[None, :]
    partner = column ^ mask
    diagonal = tl.sum(tl.where(row == column, small, 0.0), axis=1)[:, None]
    mine = tl.sum(tl.where(row == column, small, 0.0), axis=0)[None, :]
    theirs = tl.sum(tl.where(row == partner, diagonal, 0.0), axis=0)[None, :]
    between = tl.sum(tl.where(row == partner, small, 0.0), axis=0)[None, :]
    some = between != 0
    ratio = tl.clamp((theirs - mine) / tl.where(some, 2 * between, 1.0), -STEEP, STEEP)
    sign = tl.where(ratio > 0, 1.0, tl.where(ratio < 0, -1.0, tl.where(column < partner, 1.0, -1.0)))
    tangent = sign / (tl.abs(ratio) + tl.sqrt(1 + ratio * ratio))
    tangent = tl.where(some, tangent, 0.0)
    cosine = 1.0 / tl.sqrt(1 + tangent * tangent)
    sine = tangent * cosine
    across = partner + tl.zeros((WIDTH, WIDTH), tl.int32)
    small = cosine * small - sine * tl.gather(small, across, 1)
    turn = cosine * turn - sine * tl.gather(turn, across, 1)
    small = tl.trans(small)
    small = cosine * small - sine * tl.gather(small, across, 1)
    return small, turn


@triton.jit
def unsettled(small, WIDTH: tl.constexpr):
    """Whether a symmetric matrix has products beside its diagonal that are more than noise."""
    row, column = tl.arange(0, WIDTH)[:, None], tl.arange(0, WIDTH)[None, :]
    mine = tl.sum(tl.where(row == column, tl.abs(small), 0.0), axis=0)[None, :]
    theirs = tl.sum(tl.where(row == column, tl.abs(small), 0.0), axis=1)[:, None]
    noise = tl.max(mine) * NOISE
    beside = tl.where(row == column, 0.0, small)
    return tl.max(beside * beside - (mine * SETTLED) * (theirs * SETTLED) - noise * noise) > 0


@triton.jit
def subspace(matrix, resident, place, scratch, usable, shift, channel, column, CHANNELS: tl.constexpr, BLOCK_D: tl.constexpr,
             WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, ROUNDS: tl.constexpr):  # fmt: skip
    """Orthonormal columns ``[BLOCK_D, WIDTH]`` that nearly span the first eigenvectors of ``M``.

    Where the eigenvalues of the block are of one size, a round multiplies twice and takes ``M^2 - b M + b^2 / 8``: a Chebyshev
    polynomial, small up to the bound ``b``, about the last of these eigenvalues, and growing steeply beyond it.
    """
    # Any block will do that is not at right angles to a direction; this one mixes the bits of its places.
    mixed = (channel * WIDTH + column + 1) * 73244475
    mixed = ((mixed >> 15) ^ mixed) * 73244475
    columns = tl.where(channel < CHANNELS, ((mixed >> 9) & 1023).to(tl.float32) / 1024 - 0.5, 0.0)
    done, bound = 0, tl.zeros((), tl.float32)
    while done < ROUNDS:
        ahead = multiplied(matrix, resident, columns, place, scratch, usable, shift, CHANNELS, BLOCK_D, WIDTH, BLOCK_K)
        filters = (bound > 0) & (done < ROUNDS - LAST_ROUNDS)
        if filters:
            twice = multiplied(
                matrix, resident, ahead, place, scratch, usable, shift, CHANNELS, BLOCK_D, WIDTH, BLOCK_K
            )
            ahead = twice - bound * ahead + (bound * bound * 0.125) * columns
        columns, most, least = orthonormal(ahead, WIDTH)
        done += tl.where(filters, WORTH, 1)
        if (done == FIRST_ROUNDS) & (least > most * LEVEL):
            bound = tl.sqrt(least)
    return columns


@triton.jit
def in_order(columns, turn, mine, theirs, channel, row, column, BLOCK_D: tl.constexpr):
    """Columns turned into eigenvectors of length 1, largest eigenvalue first, and these; zero where there is no energy."""
    ahead = (theirs > mine) | ((theirs == mine) & (row < column))
    rank = tl.sum(ahead.to(tl.int32), axis=0)
    chosen = tl.where(rank[:, None] == column, 1.0, 0.0)
    turn = tl.dot(turn, chosen, input_precision="tf32x3")
    energy = tl.maximum(tl.sum(chosen * theirs, axis=0), 0.0)
    columns = tl.dot(columns, turn, input_precision="tf32x3")
    length = tl.sqrt(tl.sum(columns * columns, axis=0))
    peak = tl.max(tl.abs(columns), axis=0)
    first = tl.min(tl.where(tl.abs(columns) == peak[None, :], channel, BLOCK_D), axis=0)
    sign = tl.where(tl.sum(tl.where(channel == first[None, :], columns, 0.0), axis=0) < 0, -1.0, 1.0)
    real = (energy > tl.max(energy) * NEGLIGIBLE) & (length > 0)
    columns = tl.where(real[None, :], columns * (sign / tl.where(length > 0, length, 1.0))[None, :], 0.0)
    return columns, energy


@kernel()
def principal_kernel(
    mean, block, basis, energies,
    CHANNELS: tl.constexpr, RANK: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr,
    ROUNDS: tl.constexpr, SWEEPS: tl.constexpr,
):  # fmt: skip
    """The ``RANK`` principal directions of a matrix, BF16, largest first, and their eigenvalues."""
    stream = tl.program_id(0).to(tl.int64)
    matrix, scratch = mean + stream * CHANNELS * CHANNELS, block + stream * BLOCK_D * WIDTH
    channel, column = tl.arange(0, BLOCK_D)[:, None], tl.arange(0, WIDTH)[None, :]
    place = scratch + channel * WIDTH + column
    bits = 0
    for start in range(0, CHANNELS, BLOCK_K):
        other = start + tl.arange(0, BLOCK_K)[None, :]
        inside = (channel < CHANNELS) & (other < CHANNELS)
        number = tl.load(matrix + channel * CHANNELS + other, mask=inside, other=0.0)
        bits = tl.maximum(bits, tl.max(magnitude_bits(number)))
    usable = (bits > 0) & (bits < INFINITE_BITS)
    shift = tl.where(usable, frexp_exponent(bits), 0)
    resident = 0.0
    if BLOCK_K == BLOCK_D:
        resident = thirds(block_of(matrix, tl.arange(0, BLOCK_D), 0, usable, shift, CHANNELS, BLOCK_K))
    if WIDTH == BLOCK_D:
        columns = tl.where(channel == column, 1.0, 0.0)
    else:
        columns = subspace(
            matrix, resident, place, scratch, usable, shift, channel, column, CHANNELS, BLOCK_D, WIDTH, BLOCK_K, ROUNDS
        )
    ahead = multiplied(matrix, resident, columns, place, scratch, usable, shift, CHANNELS, BLOCK_D, WIDTH, BLOCK_K)
    small = across(thirds(columns), thirds(ahead))
    small = 0.5 * (small + tl.trans(small))
    row = tl.arange(0, WIDTH)[:, None]
    turn = tl.where(row == column, 1.0, 0.0)
    sweep = 0
    while (sweep < SWEEPS) & unsettled(small, WIDTH):
        for mask in range(1, WIDTH):
            small, turn = rotated(small, turn, mask, WIDTH)
        sweep += 1
    mine = tl.sum(tl.where(row == column, small, 0.0), axis=0)[None, :]
    theirs = tl.sum(tl.where(row == column, small, 0.0), axis=1)[:, None]
    columns, energy = in_order(columns, turn, mine, theirs, channel, row, column, BLOCK_D)
    inside = (channel < CHANNELS) & (column < RANK)
    tl.store(basis + (stream * CHANNELS + channel) * RANK + column, to_bf16(columns), mask=inside)
    direction = tl.arange(0, WIDTH)
    largest = scaled(energy, shift)
    tl.store(energies + stream * RANK + direction, largest, mask=direction < RANK)
