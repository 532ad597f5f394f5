"""Shape and number format that every array of a sealed tensor must have for a kernel to read it."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from quantwm_core import packing, psac
from quantwm_core.clustered import TABLE_SCALES
from quantwm_core.errors import DtypeError, FormatError, StateError
from quantwm_core.integer_table import EXACT_BITS
from quantwm_kernels.recipe import Form, Recipe, Steps

Expected = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and number format of arrays by name."""


def stage_suffix(stage: int) -> str:
    """What the name of a stage's array ends with; the first bears none.

    >>> [f"index{stage_suffix(stage)}" for stage in range(2)]
    ['index', 'index_2']
    """
    return f"_{stage + 1}" if stage else ""


def expected_arrays(recipe: Recipe, shape: tuple[int, int, int, int], arrays: Mapping[str, Tensor]) -> Expected:
    """Shape and number format of every array that a recipe reads.

    Args:
        recipe: Of the sealed tensor.
        shape: ``(B, H, N, D)``.
        arrays: Storage by name, of which only what decides about the shape of others is looked at.

    Raises:
        KeyError, IndexError: Such an array is missing, or has fewer axes than it must.

    >>> expected_arrays(Recipe(Form.EXACT, 8), (1, 2, 3, 8), {})
    {'exact': ((1, 2, 3, 8), torch.bfloat16)}
    """
    batch, heads, tokens, channels = shape
    streams = (batch, heads)
    if recipe.form is Form.EXACT:
        return {"exact": (shape, torch.bfloat16)}
    if recipe.form is Form.TRANSFORM:
        return _expected_transform(shape, arrays)
    codes: Expected = {"codes": ((*streams, tokens, packing.packed_size(channels)), torch.uint8)}
    by_token, by_channel = -(-tokens // recipe.group), -(-channels // recipe.group)
    match recipe.form:
        case Form.ROTATED:
            rows = batch * heads * channels
            rotation: Expected = {
                "shared_basis": ((rows, channels), torch.int8),
                "shared_basis_scales": ((rows,), torch.bfloat16),
                **dict.fromkeys(("shared_basis_blocks", "shared_fitted"), (streams, torch.uint8)),
            }
            pair = dict.fromkeys(("scales", "minima"), ((*streams, tokens, by_channel), torch.bfloat16))
            return codes | pair | rotation
        case Form.MINMAX:
            return codes | dict.fromkeys(("scales", "minima"), ((*streams, tokens, by_channel), torch.bfloat16))
        case Form.CHANNEL_MINMAX:
            names = ("channel_scales", "channel_minima")
            return codes | dict.fromkeys(names, ((*streams, channels, by_token), torch.bfloat16))
    grid = (by_token, channels) if recipe.form is Form.CHANNEL_AFFINE else (tokens, by_channel)
    expected: Expected = codes | {"scales": ((*streams, *grid), torch.float8_e4m3fn)}
    if recipe.form is not Form.SYMMETRIC:
        expected["zero_points"] = ((*streams, packing.packed_size(prod(grid))), torch.uint8)
        expected["super_scale"] = (streams, torch.float32)
    for stage in range(recipe.stages):
        count = arrays[f"centroids{stage_suffix(stage)}"].shape[-2]
        expected[f"index{stage_suffix(stage)}"] = ((*streams, tokens), torch.uint8)
        expected[f"centroids{stage_suffix(stage)}"] = _expected_table(recipe, (*streams, max(count, 1)))
    if recipe.stages and recipe.centroid_bits != EXACT_BITS:
        expected[TABLE_SCALES] = ((*streams, channels), torch.bfloat16)
    return expected | _expected_psac(recipe, shape, arrays)


def _expected_transform(shape: tuple[int, int, int, int], arrays: Mapping[str, Tensor]) -> Expected:
    """Of arrays whose lengths :mod:`quantwm_kernels.description` has held against each other."""
    batch, heads, _, channels = shape
    coded, rows = (arrays[name].shape[:1] for name in ("order", "shared_basis"))
    return {
        "codes": (tuple(arrays["codes"].shape[:1]), torch.uint8),
        "order": (tuple(coded), torch.uint8),
        "steps": (tuple(coded), torch.bfloat16),
        "means": ((batch, heads, channels), torch.bfloat16),
        "shared_basis": ((*rows, channels), torch.int8),
        "shared_basis_scales": (tuple(rows), torch.bfloat16),
    }


def _expected_table(recipe: Recipe, rows: tuple[int, ...]) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and number format of centroids."""
    match recipe.centroid_bits:
        case 4:
            return (*rows, packing.nibble_size(recipe.channels)), torch.uint8
        case 8:
            return (*rows, recipe.channels), torch.int8
    return (*rows, recipe.channels), torch.bfloat16


def _expected_psac(recipe: Recipe, shape: tuple[int, int, int, int], arrays: Mapping[str, Tensor]) -> Expected:
    batch, heads, tokens, channels = shape
    if not recipe.rank:
        return {}
    sparse = arrays["bitmap"].shape[0] if recipe.steps is Steps.EITHER else 0
    nibbles = recipe.steps is Steps.NIBBLES
    steps = packing.nibble_size(recipe.rank) if nibbles else recipe.rank
    expected: Expected = {
        "basis": ((batch, heads, channels, recipe.rank), torch.bfloat16),
        "coefficient_scales": ((batch, heads, recipe.rank), torch.bfloat16),
        "coefficients": ((batch * heads - sparse, tokens, steps), torch.uint8 if nibbles else torch.int8),
    }
    if recipe.steps is Steps.EITHER:
        flags = arrays["layout"].shape  # flat, or by batch and head
        expected["layout"] = (tuple(flags) if prod(flags) == batch * heads else (batch, heads), torch.uint8)
        expected["bitmap"] = ((sparse, -(-tokens * recipe.rank // 8)), torch.uint8)
        expected["sparse_counts"] = ((sparse, -(-tokens // psac.TOKENS_PER_COUNT)), torch.int32)
        if "sparse_values" in arrays:
            expected["sparse_values"] = ((arrays["sparse_values"].numel(),), torch.int8)
    return expected


def check_array(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse an array that a kernel would misread.

    Raises:
        FormatError, DtypeError, StateError: Its shape or number format is another, or it is not contiguous.

    >>> check_array("codes", torch.zeros(3), (3,), torch.uint8)
    Traceback (most recent call last):
    ...
    quantwm_core.errors.DtypeError: codes: got torch.float32, need torch.uint8
    """
    if tuple(tensor.shape) != shape:
        raise FormatError(f"{name}: got shape {tuple(tensor.shape)}, need {shape}")
    if tensor.dtype != dtype:
        raise DtypeError(f"{name}: got {tensor.dtype}, need {dtype}")
    if not tensor.is_contiguous():
        raise StateError(f"{name}: a kernel reads contiguous arrays only; pass the sealed tensor through .to(device)")
