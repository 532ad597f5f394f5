"""What every metric promises, for all of them, a third party's included."""

import importlib
import inspect
import math
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import numpy as np
import pytest

from quantwm_core import plugin
from quantwm_core.errors import StateError, UnknownNameError
from quantwm_eval import metrics
from quantwm_eval.evidence import CacheBytes, Evidence, LookAway, Recording, Seconds
from quantwm_eval.metric import Measurement, Metric, Quantity
from quantwm_eval.tally import Tally

EXPECTED = (
    "attention_kl",
    "drift",
    "excess_flicker",
    "latency",
    "logit_error",
    "lpips",
    "lpips_vgg",
    "memory",
    "object_permanence",
    "output_error",
    "peak_memory",
    "psnr",
    "query_energy",
    "reconstruction_error",
    "selection_shift",
    "ssim",
    "temporal_flickering",
    "warping_error",
)


@pytest.fixture(autouse=True)
def vgg(vgg_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTWM_LPIPS_VGG", str(vgg_file))


def evidence() -> Evidence:
    draw = np.random.default_rng(5)
    video, reference, truth = draw.integers(0, 256, (3, 4, 32, 32, 3), dtype=np.uint8)
    region = np.zeros((4, 32, 32), bool)
    region[3, 2:9, 2:9] = True
    queries = np.full((2, 3, 4), 8.0)
    some = queries[:, :, :2]
    tally = Tally(queries / 10, queries, some / 5, some, some / 4, some)
    whole = Tally(queries / 10, queries)
    spectrum = np.tile(np.arange(16.0, 0, -1), (2, 3, 1))
    recording = Recording(tally, tally, whole, whole, tally, tally, whole, spectrum)
    cache = (CacheBytes(300, 1600, 200, 1700, 64, 60), CacheBytes(310, 1600, 200, 1800, 64, 40))
    look_away, seconds = LookAway(truth, reference, region), Seconds(3.0, 1.0, 0.5)
    return Evidence(video, reference, look_away, recording, cache, seconds, truth, peak_bytes=1e6)


def test_the_family_is_complete() -> None:
    assert metrics.names() == EXPECTED


@pytest.mark.parametrize("name", metrics.names())
def test_name_quantities_and_ranges(name: str) -> None:
    metric = metrics.get(name)
    assert metric.name == name
    measured = metric.measure(evidence())
    assert [quantity.name for quantity in metric.quantities] == list(measured.values)
    for quantity in metric.quantities:
        assert quantity.label
        assert quantity.low <= measured.values[quantity.name] <= quantity.high
        assert type(measured.values[quantity.name]) is float
    assert {*measured.curves, *measured.maps, *measured.ages, *measured.positions} <= set(measured.values)
    assert all(np.allclose(curve, [0.2, 0.2]) for curve in measured.ages.values())
    assert all(np.allclose(curve, [0.25, 0.25]) for curve in measured.positions.values())
    assert all(curve.ndim == 1 for curve in measured.curves.values())
    assert all(grid.shape == (2, 3) for grid in measured.maps.values())


@pytest.mark.parametrize("name", metrics.names())
def test_a_docstring_states_range_direction_unit_and_source(name: str) -> None:
    module = importlib.import_module(f"quantwm_eval.metrics.{name}")
    own = [
        value for value in vars(module).values() if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    text = " ".join(" ".join((inspect.getdoc(value) or "").split()) for value in own)
    for word in ("ange ", " to ", " is better", "Source:"):
        assert word in text
    assert any(word in text for word in ("in dB", "no unit", "in grey levels", "in bytes", "in seconds", "in nats"))


@pytest.mark.parametrize("name", metrics.names())
def test_a_metric_needs_what_it_says(name: str) -> None:
    metric = metrics.get(name)
    whole = evidence()
    assert metric.applies(whole)
    metric.measure(Evidence(whole.video, **{part: getattr(whole, part) for part in metric.needs}))
    for part in metric.needs:
        rest = {other: getattr(whole, other) for other in metric.needs if other != part}
        lacking = Evidence(whole.video, **rest)
        assert not metric.applies(lacking)
        with pytest.raises(StateError, match=f"no {part}"):
            metric.measure(lacking)


def test_quantity_names_are_unique() -> None:
    found = [quantity.name for name in metrics.names() for quantity in metrics.get(name).quantities]
    assert len(found) == len(set(found))


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="unknown metric 'pnsr'; did you mean 'psnr'"):
        metrics.get("pnsr")


def test_third_parties_join_through_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = Metric(
        "loudness", (Quantity("loudness", "Loudness", "dB", "neither"),), (), lambda _: Measurement({"loudness": 0.0})
    )
    monkeypatch.setattr(EntryPoint, "load", lambda _: theirs)
    points = EntryPoints(EntryPoint(name, "theirs:METRIC", "quantwm.metrics") for name in ("loudness", "psnr"))
    monkeypatch.setattr(plugin, "entry_points", points.select)
    assert metrics.get("loudness") is metrics.loaded()["loudness"] is theirs
    assert metrics.get("psnr").quantities[0].unit == "dB"


def test_memory_by_hand() -> None:
    values = metrics.get("memory").measure(evidence()).values
    assert values["bits_per_element"] == pytest.approx(16 * 610 / 3200)
    assert values["own_bits_per_element"] == pytest.approx(16 * 510 / 3200)
    assert values["shared_bits_per_element"] == pytest.approx(16 * 100 / 3200)
    assert values["compression"] == pytest.approx(3200 / 610)
    assert values["compression_in_use"] == pytest.approx(3500 / 1010)
    assert values["cache_bytes"] == 510
    assert values["state_bytes"] == 64


def test_memory_is_unknown_where_nothing_was_sealed() -> None:
    only_active = Evidence(evidence().video, cache=(CacheBytes(0, 0, 100, 100, 0),))
    values = metrics.get("memory").measure(only_active).values
    assert math.isnan(values["bits_per_element"])
    assert math.isnan(values["compression"])
    assert values["compression_in_use"] == 1
