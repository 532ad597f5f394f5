"""The gate lets through what is equal and stops what is not."""

from functools import partial

import pytest
import torch

from tests.parity.gate import (
    TOLERANCES,
    Tolerance,
    assert_close,
    assert_equal,
    declared_operators,
    missing_tests,
    poison,
)

DTYPES = [torch.uint8, torch.int8, torch.int32, torch.bfloat16, torch.float8_e4m3fn, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_flipped_bit_is_seen_and_named(dtype: torch.dtype) -> None:
    reference = torch.arange(24).view(2, 3, 4).to(dtype)
    assert_equal("codes", reference.clone(), reference)
    result = reference.clone()
    result.view(torch.uint8).view(-1)[7 * result.itemsize] ^= 1
    with pytest.raises(AssertionError, match=r"codes: 1 of 24 .* first at \(0, 1, 3\).*maximum .*RMS"):
        assert_equal("codes", result, reference)


def test_equal_numbers_of_other_bits_are_seen() -> None:
    with pytest.raises(AssertionError, match="first at"):
        assert_equal("zero", torch.tensor([-0.0]), torch.tensor([0.0]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_unwritten_element_is_seen(dtype: torch.dtype) -> None:
    reference = torch.ones(2, 5).to(dtype)
    result = poison(2, 5, dtype=dtype)
    result[:, :4] = reference[:, :4]
    with pytest.raises(AssertionError, match=r"2 of 10 .* first at \(0, 4\)"):
        assert_equal("scales", result, reference)


def test_another_shape_or_format_is_seen() -> None:
    for result in (torch.zeros(3), torch.zeros(2, dtype=torch.float64)):
        for check in (assert_equal, partial(assert_close, tolerance=Tolerance("any", absolute=9.0))):
            with pytest.raises(AssertionError, match="the reference has"):
                check("moment", result, torch.zeros(2))


def test_a_tolerance_is_kept_to() -> None:
    reference = torch.tensor([0.0, 1.0, 100.0])
    tolerance = Tolerance("example", relative=0.01, absolute=0.1)
    assert_close("logits", reference + torch.tensor([0.09, 0.1, 1.0]), reference, tolerance)
    for offset in ([0.2, 0.0, 0.0], [0.0, 0.0, -1.2], [0.0, float("nan"), 0.0]):
        with pytest.raises(AssertionError, match="logits: 1 of 3"):
            assert_close("logits", reference + torch.tensor(offset), reference, tolerance)


def test_a_share_may_lie_outside() -> None:
    reference = torch.zeros(1000)
    result = reference.clone()
    result[:2] = 5.0
    assert_close("steps", result, reference, Tolerance("ties", absolute=1.0, share=2e-3))
    with pytest.raises(AssertionError, match="2 of 1000"):
        assert_close("steps", result, reference, Tolerance("ties", absolute=1.0, share=1e-3))


def test_every_tolerance_has_its_reason() -> None:
    assert all(tolerance.reason for tolerance in TOLERANCES.values())


def test_a_kernel_without_a_parity_test_is_named() -> None:
    kernels = [("packing", "pack_codes"), ("packing", "unpack_codes"), ("psac", "encode_psac")]
    assert missing_tests(kernels, {"packing": ("pack_codes",)}) == ["packing: unpack_codes", "psac: encode_psac"]
    assert missing_tests(kernels[:1], {"packing": ("pack_codes",)}) == []


def test_to_mention_an_operator_is_not_to_declare_it() -> None:
    mention = "import unpack_codes  # seal\n\n\ndef test_pack_codes(): ...\n"
    assert declared_operators(mention) == ()
    assert declared_operators(f'OPERATORS = ("pack_codes",)\n{mention}') == ("pack_codes",)
