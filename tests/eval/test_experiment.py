"""Experiments as values: what can be written down, and what is refused."""

from typing import Any

import pytest

from quantwm_core.errors import ParameterError, UnknownNameError
from quantwm_eval.experiment import Experiment, MethodChoice, with_control
from quantwm_eval.run import count_chunks, run
from tests.eval.fake_host import FakeHost

BF16 = MethodChoice("bf16")


def test_a_choice_is_read_back_from_its_label() -> None:
    for text in (
        "kivi",
        "quantwm:rank=16",
        "quantwm:values=bf16:threshold=0.5:warm_start=True",
        "quantwm:centroids=None",
        "bf16:window=1",
    ):
        assert MethodChoice.parse(text).label == text
        assert MethodChoice.parse(MethodChoice.parse(text).label) == MethodChoice.parse(text)


@pytest.mark.parametrize("text", ["bf16:window=0", "bf16:window=all", "bf16:window=1.5", "bf16:window=True"])
def test_a_window_that_is_no_number_of_chunks_is_refused(text: str) -> None:
    with pytest.raises(ParameterError, match="whole number of chunks"):
        _ = MethodChoice.parse(text).window


@pytest.mark.parametrize("text", ["quantwm:rank", "quantwm:=3", "quantwm:rank=", "quantwm:rank=1:rank=2"])
def test_a_choice_that_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(ParameterError, match="quantwm"):
        MethodChoice.parse(text)


@pytest.mark.parametrize("setting", [{"methods": (BF16, MethodChoice("qgv"))}, {"metrics": ("lpisp",)}])
def test_what_is_not_there_is_refused_before_anything_is_run(setting: dict[str, Any]) -> None:
    plain: dict[str, Any] = {"methods": (BF16,), "scenes": (0,), "kinds": ("walk",), "frames": 8}
    wanted = Experiment(**plain | setting)
    for begin in (lambda: count_chunks(wanted, FakeHost()), lambda: next(run(wanted, FakeHost()))):
        with pytest.raises(UnknownNameError, match="did you mean"):
            begin()


def test_options_reach_the_scheme() -> None:
    made = MethodChoice.parse("quantwm:rank=4:values=bf16:decay=0.5").scheme(chunks_per_seal=3)
    assert (made.name, made.chunks_per_seal, made.decay) == ("quantwm+bf16", 3, 0.5)
    assert MethodChoice.parse("quantwm:chunks_per_seal=1").scheme(3).chunks_per_seal == 1
    assert MethodChoice.parse("quantwm:preset=paper").scheme(3).chunks_per_seal == 2


@pytest.mark.parametrize(
    ("methods", "error", "message"),
    [
        ((BF16, MethodChoice("qgv")), UnknownNameError, "did you mean 'qvg'"),
        ((BF16, MethodChoice("quantwm", (("rnk", 3),))), ParameterError, "no parameter 'rnk'"),
        ((BF16, MethodChoice("quantwm", (("rank", "high"),))), ParameterError, "rank 'high'"),
        ((BF16, MethodChoice("quantwm", (("rank", -1),))), ParameterError, "rank -1"),
        ((MethodChoice("kivi"),), ParameterError, "control"),
        ((BF16, MethodChoice("kivi"), MethodChoice("kivi")), ParameterError, "methods: got 'kivi' twice"),
        ((), ParameterError, "at least one"),
    ],
)
def test_methods_that_cannot_be_are_refused(
    methods: tuple[MethodChoice, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Experiment(methods, scenes=(0,)).check()


def test_other_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ParameterError, match="frames 0"):
        Experiment((BF16,), (0,), frames=0)
    with pytest.raises(ParameterError, match="scenes"):
        Experiment((BF16,), (0, 0))
    with pytest.raises(UnknownNameError, match="unknown metric"):
        Experiment((BF16,), (0,), metrics=("lpisp",)).check()


def test_the_control_comes_first_and_once() -> None:
    kivi = MethodChoice("kivi")
    assert with_control((kivi,)) == (BF16, kivi)
    assert with_control((kivi, BF16)) == (BF16, kivi)


def test_an_experiment_survives_json() -> None:
    wanted = Experiment((BF16, MethodChoice.parse("quantwm:rank=2")), (0, 3), frames=8, seeds=(1, 2))
    assert Experiment.from_json(wanted.to_json()) == wanted


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="look-away"):
        Experiment(methods=(BF16,), scenes=(0,), kinds=("look-awry",))
