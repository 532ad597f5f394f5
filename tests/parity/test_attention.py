"""attend, attention_logits, logit_error, selection_shift and attention_kl of CUDA tensors, against the reference."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantwm_core import attention as core
from quantwm_core.errors import ParameterError, ShapeError
from quantwm_kernels import dense_attention as dense
from tests.parity.gate import TOLERANCES, assert_close
from tests.parity.settings import EXAMPLES

OPERATORS = ("attend", "attention_logits", "logit_error", "selection_shift", "attention_kl")

CLOSE = TOLERANCES["dense_attention"]


@pytest.fixture
def anywhere() -> torch.device:
    """The GPU if there is one; plain torch runs on the CPU as well."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)


@settings(EXAMPLES)
@given(
    seed=st.integers(0, 999),
    heads=st.sampled_from(((1, 1), (2, 2), (4, 2), (3, 1))),
    queries=st.integers(1, 6),
    tokens=st.integers(1, 40),
)
def test_attend_and_attention_logits(
    anywhere: torch.device, seed: int, heads: tuple[int, int], queries: int, tokens: int
) -> None:
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((2, heads[0], queries, 16), np.float32)
    k = rng.standard_normal((2, heads[1], tokens, 16), np.float32)
    v = rng.standard_normal((2, heads[1], tokens, 8), np.float32)
    ours = [tensor(array, anywhere) for array in (q, k, v)]
    assert_close("logits", dense.dense_logits(*ours[:2]), torch.from_numpy(core.logits(q, k)), CLOSE)
    assert_close("attention", dense.dense_attend(*ours), torch.from_numpy(core.attend(q, k, v)), CLOSE)


@settings(EXAMPLES)
@given(
    seed=st.integers(0, 999), queries=st.integers(1, 6), tokens=st.integers(2, 40), ties=st.booleans(), data=st.data()
)
def test_logit_error_selection_shift_and_attention_kl(
    anywhere: torch.device, seed: int, queries: int, tokens: int, ties: bool, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    exact, other = rng.standard_normal((2, 2, 3, queries, tokens), np.float32)
    if ties:
        exact, other = np.round(exact), np.round(other)
    ours = tensor(exact, anywhere), tensor(other, anywhere)
    assert_close("error", dense.dense_logit_error(*ours), torch.from_numpy(core.logit_error(exact, other)), CLOSE)
    assert_close(
        "divergence", dense.dense_attention_kl(*ours), torch.from_numpy(core.attention_kl(exact, other)), CLOSE
    )
    top = data.draw(st.integers(1, tokens))
    expected = torch.from_numpy(core.selection_shift(exact, other, top))
    assert_close("shift", dense.dense_selection_shift(*ours, top), expected, CLOSE)


def test_equal_logits_have_no_error(anywhere: torch.device) -> None:
    flat = torch.full((2, 3, 4), 7.0, device=anywhere)
    assert dense.dense_logit_error(flat, flat + 1).tolist() == [0.0, 0.0]


def test_products_are_not_rounded_to_tf32(anywhere: torch.device) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        fine = torch.full((1, 1, 1, 64), 1 + 2.0**-15, device=anywhere)
        assert dense.dense_logits(fine, torch.ones_like(fine)).item() == 8 * (1 + 2.0**-15)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_what_does_not_fit_is_refused(anywhere: torch.device) -> None:
    one = torch.ones(1, 2, 3, 4, device=anywhere)
    with pytest.raises(ShapeError, match="Hq a multiple"):
        dense.dense_logits(one[:, :1], one)
    with pytest.raises(ShapeError, match="same B, H and N"):
        dense.dense_attend(one, one, one[:, :, :2])
    for top in (0, 5):
        with pytest.raises(ParameterError, match="need 1 to 4"):
            dense.dense_selection_shift(one, one, top)
    measures: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
        dense.dense_logit_error,
        partial(dense.dense_selection_shift, top=1),
        dense.dense_attention_kl,
    )
    for measure in measures:
        with pytest.raises(ShapeError, match=r"exact logits \(1, 2, 3, 4\) and approximate ones \(1, 2, 3, 3\)"):
            measure(one, one[..., :3])
