"""The five models' stacks: the bytes of their true shapes, their hosts' protocols, and what is measured of them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quantwm_eval.experiment import MethodChoice
from quantwm_eval.true_shapes import measure, shape
from quantwm_eval.true_shapes.measure import Plan, run
from quantwm_eval.true_shapes.shape import Shape
from quantwm_eval.true_shapes.stack import Stack
from quantwm_models import attach
from tests.eval.live_bytes import LiveMemory

GIB = 2**30
QUICK = "quantwm:iterations=1"


def video(stack: Stack, method: str | None, **told: Any) -> tuple[list[Tensor], Any]:
    """Every pass of a video, and the report of the cache under it."""
    stack.forget()
    with torch.no_grad():
        if method is None:
            return [made for chunk in range(stack.chunks) for _, made in stack.chunk(chunk, 2)], None
        with attach(stack, MethodChoice.parse(method).scheme(stack.shape.per_seal), **told) as attachment:
            passes = [made for chunk in range(stack.chunks) for _, made in stack.chunk(chunk, 2)]
            return passes, attachment.report()


@pytest.mark.parametrize(
    ("name", "tokens", "gib"),
    [("longcat_video", 19 * 1560, 21.709), ("lingbot_world", 18 * 1560, 21.42), ("causal_forcing", 24 * 1560, 6.43)],
)
def test_bf16_caches_take_what_the_paper_states(name: str, tokens: int, gib: float) -> None:
    model = Shape.load(name)
    assert model.cached(model.latents(93)) * model.frame_tokens() == tokens
    assert tokens * model.token_nbytes() / GIB == pytest.approx(gib, abs=0.005)


@pytest.mark.parametrize("name", shape.names())
def test_a_stack_takes_the_bytes_and_has_the_weights_of_its_shape(name: str) -> None:
    plan = Plan(name, tiny=True)
    stack, model = plan.build(), plan.shape
    video(stack, None)
    assert stack.own_nbytes() == model.cached(24) * 16 * model.token_nbytes()
    assert stack.weight_nbytes == 2 * model.layers * model.layer_parameters


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("name", shape.names())
def test_a_cache_without_compression_gives_the_hosts_bits(name: str, offload: bool) -> None:
    stack = Plan(name, tiny=True, offload=offload).build()
    expected, _ = video(stack, None)
    found, _ = video(stack, "bf16", offload=offload)
    assert len(found) == len(expected) > stack.chunks
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    coarse, report = video(stack, QUICK, offload=offload)
    assert all(each.isfinite().all() for each in coarse)
    assert not torch.equal(coarse[-1], expected[-1])
    assert report.sealed_tokens > 0
    assert (report.host_nbytes == report.sealed_nbytes) == offload
    again, _ = video(stack, None)
    assert all(torch.equal(one, other) for one, other in zip(again, expected, strict=True))


@pytest.mark.parametrize("name", shape.names())
def test_the_peak_is_the_byte_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = shape.tiny
    monkeypatch.setattr(measure, "tiny", lambda each: replace(small(each), layers=5))
    monkeypatch.setattr(measure, "DeviceMemory", LiveMemory)
    plan = Plan(name, tiny=True, steps=1)
    _, ours, _ = run(plan, [MethodChoice.parse(QUICK)], lambda _: None)
    # A history that is dense in more than one layer would add a twentieth for each, and more.
    assert ours["peak_nbytes"] == pytest.approx(ours["model_nbytes"], rel=0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("name", "offload"), [*((name, False) for name in shape.names()), ("longcat_video", True)])
def test_the_peak_on_a_gpu_is_within_the_byte_model(name: str, offload: bool) -> None:
    plan = Plan(name, layers=3, steps=1, device="cuda", offload=offload)
    methods = [MethodChoice.parse(each) for each in ("quantwm", "qvg:iterations=2")]
    host, *ours, _ = run(plan, methods, lambda _: None)
    for line in ours:
        # With so few layers, what sealing takes for a unit of one of them counts.
        assert line["peak_nbytes"] <= 1.03 * (line["model_nbytes"] + line["unit_nbytes"]), line
    if plan.shape.host != "rolling" and not offload:
        dense = 2 * host["own_nbytes"]
        assert host["peak_nbytes"] >= host["before_nbytes"] + dense
        assert ours[0]["peak_nbytes"] <= host["peak_nbytes"] - dense / 2
