import pytest

from quantwm_core import errors


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.ShapeError, ValueError),
        (errors.DtypeError, TypeError),
        (errors.DomainError, ValueError),
        (errors.ParameterError, ValueError),
        (errors.RangeError, IndexError),
        (errors.StateError, RuntimeError),
        (errors.DeviceError, RuntimeError),
        (errors.FormatError, ValueError),
        (errors.UnknownNameError, LookupError),
    ],
)
def test_an_error_is_ours_and_of_the_builtin_kind(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, errors.QuantWMError)
    assert issubclass(error, builtin)


def test_a_name_close_by_is_proposed() -> None:
    with pytest.raises(errors.UnknownNameError, match=r"unknown method 'qvq'; did you mean 'qvg'\? known: kivi, qvg"):
        errors.lookup("method", "qvq", ("qvg", "kivi"))


def test_a_name_like_no_other_gets_the_list_alone() -> None:
    with pytest.raises(errors.UnknownNameError, match=r"^unknown metric 'xxxxxx'; known: psnr, ssim$"):
        errors.lookup("metric", "xxxxxx", ("ssim", "psnr"))
