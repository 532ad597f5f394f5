import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quantwm_core import affine, clustered, codebook
from tests.core import strategies
from tests.core.compare import assert_arrays, assert_bits


def _encode(unit: np.ndarray) -> dict[str, np.ndarray]:
    table = codebook.fit(unit, 4, iterations=1)
    index = codebook.nearest(unit, table)[..., 0].astype(np.uint8)
    return clustered.encode(unit.astype(np.float32), table, index, affine.default_group_size(unit.shape[3]))


def test_gather_looks_up_every_stream_in_its_own_table() -> None:
    rng = np.random.default_rng(0)
    table = rng.standard_normal((2, 3, 5, 8)).astype("bfloat16")
    index = rng.integers(0, 5, (2, 3, 7)).astype(np.uint8)
    got = clustered.gather(table, index)
    for batch, head, token in np.ndindex(index.shape):
        np.testing.assert_array_equal(got[batch, head, token], table[batch, head, index[batch, head, token]])


@given(strategies.units())
def test_the_arrays_are_those_that_are_named(unit: np.ndarray) -> None:
    arrays = _encode(unit)
    assert set(arrays) == set(clustered.PARTS)
    assert_arrays("code", clustered.affine_arrays(clustered.affine_code(arrays)), {
        part: arrays[part] for part in clustered.AFFINE_PARTS
    })  # fmt: skip


@given(strategies.units(), st.data())
def test_a_range_is_centroid_plus_residual(unit: np.ndarray, data: st.DataObject) -> None:
    arrays = _encode(unit)
    start = data.draw(st.integers(0, unit.shape[2]))
    stop = data.draw(st.integers(start, unit.shape[2]))
    residual = affine.decode(clustered.affine_code(arrays))
    whole = clustered.gather(arrays["centroids"], arrays["index"]) + residual
    assert_bits("range", clustered.decode(arrays, start, stop), whole[:, :, start:stop])
