"""Recipe and row of a sealed tensor, its arrays held against the shapes that they must have.

A kernel follows addresses: what is checked here cannot lead it out of an array.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from quantwm_core import allocation, methods
from quantwm_core.allocation import BLOCK, token_bytes
from quantwm_core.chunk import Parameter
from quantwm_core.clustered import TABLE_SCALES
from quantwm_core.errors import DeviceError, FormatError, StateError
from quantwm_core.integer_table import EXACT_BITS
from quantwm_core.method import Method
from quantwm_core.methods.bf16 import BF16Method
from quantwm_core.methods.kivi import Kivi
from quantwm_core.methods.oscar import Oscar
from quantwm_core.methods.quantwm import PSAC_PARTS, SPARSE_PARTS, QuantWM
from quantwm_core.methods.qvg import QVG
from quantwm_core.methods.rtn import RoundToNearest
from quantwm_core.packing import CODES_PER_BYTE
from quantwm_kernels.array_shapes import check_array, expected_arrays, stage_suffix
from quantwm_kernels.recipe import (
    FEWEST_DIGITS,
    FEWEST_DIRECTIONS,
    READABLE,
    TRANSFORMS,
    VECTOR_NBYTES,
    WORDS_PER_STAGE,
    Field,
    Form,
    Place,
    Recipe,
    Row,
    Steps,
)

_MOST_KNOWN = 256
_READ_AS_VECTORS = ("exact", "codes", "scales", "centroid", "coefficients", "shared_basis")
# Fields named after the arrays that they point to.
_PSAC_FIELDS = {part: Field[part.upper()] for part in PSAC_PARTS}
_OTHER_FIELDS = {
    "exact": Field.CODES, "codes": Field.CODES, "scales": Field.SCALES, "channel_scales": Field.SCALES,
    "zero_points": Field.ZERO_POINTS, "minima": Field.ZERO_POINTS, "channel_minima": Field.ZERO_POINTS,
    "super_scale": Field.SUPER_SCALE, "steps": Field.STEPS, "means": Field.MEANS, "order": Field.ORDER,
    "shared_basis": Field.SHARED_BASIS, "shared_basis_scales": Field.SHARED_BASIS_SCALES,
}  # fmt: skip


def describe(
    method: str, parameters: Mapping[str, Parameter], shape: tuple[int, int, int, int], arrays: Mapping[str, Tensor]
) -> Row:
    """Recipe and row of a sealed tensor, after holding every array against the shape it must have.

    Args:
        method: Name of the method that wrote it.
        parameters: Its settings.
        shape: ``(B, H, N, D)``.
        arrays: Storage by name.

    Raises:
        DeviceError: No kernel understands the method.
        FormatError: An array is missing, or the arrays do not fit together.
        DtypeError, StateError: An array has another number format, or is not contiguous, or begins where no kernel reads it.
        ParameterError: The method has no such setting.

    >>> row = describe("bf16", {}, (1, 2, 3, 8), {"exact": torch.zeros(1, 2, 3, 8, dtype=torch.bfloat16)})
    >>> row.recipe.form, row.words[Field.TOKENS], row.streams
    (<Form.EXACT: 0>, 3, (1, 2))
    """
    if method not in READABLE:
        raise DeviceError(
            f"method {method!r}: the kernels read {', '.join(READABLE)}; move the cache of another method to the CPU"
        )
    pattern = _pattern(method, parameters, shape, arrays)
    words = list(pattern.words)
    for place, name in pattern.addresses:
        words[place] = arrays[name].data_ptr()
    devices = {arrays[name].device for name in pattern.names}
    if len(devices) > 1:
        raise DeviceError(f"a unit sealed with {method} is spread over {sorted(map(str, devices))}; move it to one")
    aligned = all(arrays[name].data_ptr() % VECTOR_NBYTES == 0 for name in pattern.vectors)
    return Row(pattern.recipe, shape[:2], tuple(words), aligned, devices.pop())


class _Pattern(NamedTuple):
    """What the rows of tensors have in common whose arrays are alike.

    Attributes:
        recipe: Of the tensors.
        words: Of their rows, 0 in place of addresses.
        addresses: Which words those are, each with the name of its array.
        names: Arrays that are read.
        vectors: Those of them that may be read as vectors.
    """

    recipe: Recipe
    words: tuple[int, ...]
    addresses: tuple[tuple[int, str], ...]
    names: tuple[str, ...]
    vectors: tuple[str, ...]


_known: dict[Hashable, _Pattern] = {}


def _pattern(
    method: str, parameters: Mapping[str, Parameter], shape: tuple[int, int, int, int], arrays: Mapping[str, Tensor]
) -> _Pattern:
    """The pattern of a tensor; looked up where shapes and number formats say all, as they do but for a transform code."""
    if method in TRANSFORMS:
        return _found(method, parameters, shape, arrays)
    layout = tuple([(name, each.shape, each.dtype, each.is_contiguous()) for name, each in arrays.items()])
    # As text: a setting of another type is refused, though it may equal this one.
    key = (method, str(dict(parameters)), tuple(shape), layout)
    pattern = _known.get(key)
    if pattern is None:
        pattern = _found(method, parameters, shape, arrays)
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = pattern
    return pattern


def _found(
    method: str, parameters: Mapping[str, Parameter], shape: tuple[int, int, int, int], arrays: Mapping[str, Tensor]
) -> _Pattern:
    """The pattern of a tensor, every array held against the shape it must have."""
    places: tuple[int, ...] = ()
    try:
        if method in TRANSFORMS:
            places, digits = _places(method, shape, arrays)
            recipe = Recipe(
                Form.TRANSFORM, shape[3], _bytes_together(arrays["codes"], places), rank=_padded(digits, FEWEST_DIGITS)
            )
        else:
            recipe = _recipe(methods.get(method, **parameters), shape[3], arrays)
        expected = expected_arrays(recipe, shape, arrays)
        for name, (tensor_shape, dtype) in expected.items():
            check_array(f"{method} array {name!r}", arrays[name], tensor_shape, dtype)
    except KeyError as error:
        raise FormatError(f"a unit sealed with {method} lacks its array {error}; the file is damaged") from error
    except IndexError as error:
        raise FormatError(f"the arrays of a unit sealed with {method} do not fit together ({error})") from error
    words = [0] * (Field.STAGES + WORDS_PER_STAGE * recipe.stages) + list(places)
    words[Field.TOKENS] = shape[2]
    counted = (
        ("coefficients", Field.DENSE_STREAMS),
        ("bitmap", Field.SPARSE_STREAMS),
        ("sparse_values", Field.SPARSE_SIZE),
    )
    for name, place in counted:
        words[place] = len(arrays[name]) if name in expected else 0
    addresses = [(int(place), name) for name, place in (_OTHER_FIELDS | _PSAC_FIELDS).items() if name in expected]
    for stage in range(recipe.stages):
        begin, suffix = Field.STAGES + WORDS_PER_STAGE * stage, stage_suffix(stage)
        addresses += [(begin, f"index{suffix}"), (begin + 1, f"centroids{suffix}")]
        words[begin + 2] = arrays[f"centroids{suffix}"].shape[2]
        if TABLE_SCALES in expected:
            addresses.append((begin + 3, TABLE_SCALES))
    vectors = tuple(name for name in expected if name.startswith(_READ_AS_VECTORS))
    return _Pattern(recipe, tuple(words), tuple(addresses), tuple(expected), vectors)


def _recipe(method: Method, channels: int, arrays: Mapping[str, Tensor]) -> Recipe:
    """Of a tensor that is no transform code; what the method's name says, no absent array may change."""
    match method:
        case BF16Method():
            return Recipe(Form.EXACT, channels)
        case Oscar(group_size=size):
            return Recipe(Form.ROTATED, channels, size or channels, rank=_padded(channels))
        case Kivi(group_size=size):
            by_channel = arrays.keys().isdisjoint(method.array_names("values")[1:])
            return Recipe(Form.CHANNEL_MINMAX if by_channel else Form.MINMAX, channels, size)
        case RoundToNearest(granularity="channel"):
            return Recipe(Form.CHANNEL_AFFINE, channels, method.group(channels))
    return _grouped(method, channels, arrays)


def _grouped(method: Method, channels: int, arrays: Mapping[str, Tensor]) -> Recipe:
    """Of a tensor whose scales say how many channels share one."""
    groups = arrays["scales"].shape[-1]
    if groups == 0 or channels % groups:
        raise FormatError(f"a unit sealed with {method.name} has {groups} groups for {channels} channels")
    size = channels // groups
    match method:
        case QVG(quantizer=quantizer, stages=stages):
            return Recipe(Form.AFFINE if quantizer == "affine" else Form.SYMMETRIC, channels, size, stages)
        case QuantWM():
            rank = 0 if arrays.keys().isdisjoint(PSAC_PARTS) else arrays["basis"].shape[-1]
            return Recipe(Form.AFFINE, channels, size, 1, rank, _steps(arrays), _centroid_bits(arrays))
    return Recipe(Form.AFFINE, channels, size)


def _steps(arrays: Mapping[str, Tensor]) -> Steps:
    """How the coefficients are stored, if there are any."""
    if "coefficients" in arrays and arrays["coefficients"].dtype is torch.uint8:
        return Steps.NIBBLES
    return Steps.DENSE if arrays.keys().isdisjoint(SPARSE_PARTS) else Steps.EITHER


def _centroid_bits(arrays: Mapping[str, Tensor]) -> int:
    """Bits of an entry of the codebook."""
    return {torch.uint8: 4, torch.int8: 8}.get(arrays["centroids"].dtype, EXACT_BITS)


def _places(method: str, shape: tuple[int, int, int, int], arrays: Mapping[str, Tensor]) -> tuple[tuple[int, ...], int]:
    """Words of :class:`Place` of every stream, and the most digits of two bits that a token has.

    What decides about addresses is read from the arrays here, for which a GPU is waited for.
    """
    batch, heads, tokens, _ = shape
    for name, expected in (("blocks", (batch, heads, 3)), ("shared_basis_blocks", (batch, heads))):
        check_array(f"{method} array {name!r}", arrays[name], expected, torch.uint8)
    counts, basis = arrays["blocks"].cpu(), arrays["shared_basis_blocks"].cpu()
    words: list[int] = []
    byte, direction, row, most = 0, 0, 0, 0
    for own, blocks in zip(counts.view(-1, 3).tolist(), basis.flatten().tolist(), strict=True):
        words += (byte, direction, row, BLOCK * blocks, *own)
        coded = allocation.directions(own)
        byte, direction, row = byte + tokens * token_bytes(own), direction + coded, row + BLOCK * blocks
        most = max(most, CODES_PER_BYTE * token_bytes(own))
        if coded > BLOCK * blocks:
            raise FormatError(f"a unit sealed with {method} codes {coded} directions in a basis of {BLOCK * blocks}")
    sizes = [arrays[name].shape[0] for name in ("codes", "order", "shared_basis")]
    if sizes != [byte, direction, row]:
        raise FormatError(
            f"a unit sealed with {method} has {sizes} codes, directions, rows; need {[byte, direction, row]}"
        )
    return tuple(words), most


def _bytes_together(codes: Tensor, places: tuple[int, ...]) -> int:
    """Bytes of a token that are aligned as a whole, 2 to 16."""
    if codes.is_cuda and codes.data_ptr() % 2:
        raise StateError("codes begin at an odd address, where no kernel reads a transform code; clone its codes")
    sizes = [token_bytes(places[end - 3 : end]) for end in range(len(Place), len(places) + 1, len(Place))]
    return max(2, gcd(codes.data_ptr(), VECTOR_NBYTES, *sizes))


def _padded(count: int, least: int = FEWEST_DIRECTIONS) -> int:
    """Power of two that a matrix unit takes as many directions or digits as."""
    return max(least, 1 << (count - 1).bit_length())
