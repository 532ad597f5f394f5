import numpy as np
import pytest

from quantwm_core import codebook, methods
from quantwm_core.domain import BF16
from quantwm_core.method import decode_tensor
from tests.core import scalar, strategies
from tests.core.compare import assert_bits


@pytest.mark.parametrize("quantizer", ["symmetric", "affine"])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stages_cluster_what_the_stage_before_left(quantizer: str, stages: int) -> None:
    unit = strategies.unit(("clusters",), 0, 40, 32)
    sealed = methods.get("qvg", quantizer=quantizer, stages=stages, centroids=4).seal("values", unit)
    residual = unit.astype(np.float32)
    tables = []
    for stage in range(1, stages + 1):
        suffix = "" if stage == 1 else f"_{stage}"
        table, index = sealed.arrays[f"centroids{suffix}"], sealed.arrays[f"index{suffix}"]
        assert_bits(f"stage {stage}", table, codebook.fit(residual, 4))
        chosen = np.take_along_axis(table.astype(np.float32), index[..., None].astype(np.int64), axis=2)
        assert index[0, 0].tolist() == scalar.nearest(residual[0, 0], table[0, 0].astype(np.float32))
        residual = residual - chosen
        tables.append(chosen)
    rows = residual[0, 0].tolist()
    coded = scalar.symmetric(rows, 32)[2] if quantizer == "symmetric" else scalar.affine(rows, 32)[4]
    total = np.array(coded, np.float32)
    for chosen in reversed(tables):
        total = total + chosen[0, 0]
    assert_bits("decoded", decode_tensor(sealed)[0, 0], total.astype(BF16))


def test_keys_and_values_are_treated_alike() -> None:
    unit = strategies.unit(("normal",), 0, 40, 32)
    method = methods.get("qvg")
    moment = strategies.moment(0, 1, 32)
    for name, array in method.seal("keys", unit, moment).arrays.items():
        assert_bits(name, array, method.seal("values", unit).arrays[name])


def test_more_stages_leave_less() -> None:
    unit = strategies.unit(("normal",), 0, 200, 32)
    errors = []
    for stages in (1, 2, 4):
        decoded = decode_tensor(methods.get("qvg", stages=stages).seal("keys", unit))
        errors.append(float(np.square(decoded.astype(float) - unit.astype(float)).mean()))
    assert errors[0] > errors[1] > errors[2]


def test_four_levels_leave_less_than_three() -> None:
    unit = strategies.unit(("normal",), 0, 200, 32)
    errors = {}
    for quantizer in ("symmetric", "affine"):
        decoded = decode_tensor(methods.get("qvg", quantizer=quantizer).seal("keys", unit))
        errors[quantizer] = float(np.square(decoded.astype(float) - unit.astype(float)).mean())
    assert errors["affine"] < errors["symmetric"]
