"""Comparisons whose failure says where: the tensor, the first bad index, the largest and the RMS difference."""

import numpy as np


def assert_bits(name: str, got: np.ndarray, want: np.ndarray) -> None:
    """Same dtype, same shape, same bytes."""
    assert got.dtype == want.dtype, f"{name}: dtype {got.dtype}, not {want.dtype}"
    assert got.shape == want.shape, f"{name}: shape {got.shape}, not {want.shape}"
    if np.ascontiguousarray(got).tobytes() == np.ascontiguousarray(want).tobytes():
        return
    flat = [np.ascontiguousarray(array)[..., None].view(np.uint8) for array in (got, want)]
    bad = (flat[0] != flat[1]).any(axis=-1)
    raise AssertionError(_report(name, got, want, bad))


def assert_within(name: str, got: np.ndarray, want: np.ndarray, allowed: np.ndarray | float) -> None:
    """No element farther from ``want`` than ``allowed``; NaN is far from everything."""
    assert got.shape == want.shape, f"{name}: shape {got.shape}, not {want.shape}"
    difference = np.abs(got.astype(np.float64) - want.astype(np.float64))
    bad = ~(difference <= np.broadcast_to(np.asarray(allowed, np.float64), difference.shape))
    if bad.any():
        raise AssertionError(_report(name, got, want, bad))


def assert_arrays(name: str, got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    """Same names, and the same bytes under each."""
    assert sorted(got) == sorted(want), f"{name}: arrays {sorted(got)}, not {sorted(want)}"
    for part, array in want.items():
        assert_bits(f"{name} {part}", got[part], array)


def _report(name: str, got: np.ndarray, want: np.ndarray, bad: np.ndarray) -> str:
    first = tuple(int(index) for index in np.argwhere(bad)[0])
    difference = np.abs(got.astype(np.float64) - want.astype(np.float64))
    return (
        f"{name}: {int(bad.sum())} of {bad.size} differ, first at {first}: got {got[first]}, want {want[first]}; "
        f"largest difference {difference.max():.6g}, RMS {np.sqrt(np.square(difference).mean()):.6g}"
    )
