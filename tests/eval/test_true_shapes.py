"""The models' stacks: the bytes of their true shapes, their hosts' protocols, and what is measured of them."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantwm_core.chunk import KINDS
from quantwm_core.errors import FormatError, ShapeError
from quantwm_core.method import scheme
from quantwm_core.stream import Stream
from quantwm_eval.experiment import MethodChoice
from quantwm_eval.latents import frames_of
from quantwm_eval.true_shapes import budget, budget_table, measure, shape, table
from quantwm_eval.true_shapes import plan as plan_of
from quantwm_eval.true_shapes.measure import AGAIN, HOST, run
from quantwm_eval.true_shapes.plan import Plan
from quantwm_eval.true_shapes.rebuilding import Rebuilding
from quantwm_eval.true_shapes.shape import BF16_NBYTES, Shape
from quantwm_eval.true_shapes.stack import Stack
from quantwm_eval.true_shapes.timing import timed
from quantwm_models import attach
from tests.eval.live_bytes import LiveMemory

GIB = 2**30
LIVE = Path(__file__).parents[2] / "benchmarks" / "results" / "hosts.jsonl"
QUICK = "quantwm:iterations=1"
BF16 = MethodChoice("bf16")


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
    [
        ("longcat_video", 19 * 1560, 21.709),
        ("lingbot_world", 18 * 1560, 21.42),
        ("causal_forcing", 24 * 1560, 6.43),
        ("hy_world_8b", 20 * 1560, 25.71),
    ],
)
def test_bf16_caches_take_what_the_paper_or_the_host_states(name: str, tokens: int, gib: float) -> None:
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


@pytest.mark.parametrize("name", ["hy_world", "hy_world_8b"])
def test_two_encodings_of_one_are_half_the_bytes(name: str) -> None:
    both, once = (
        list(run(Plan(name, tiny=True, steps=1, once=each), [BF16], lambda _: None)) for each in (False, True)
    )
    assert 2 * once[1]["sealed_nbytes"] == both[1]["sealed_nbytes"] == both[0]["own_nbytes"]
    assert "stored once" in table.title(once[1])


@pytest.mark.parametrize("name", ["hy_world", "hy_world_8b"])
def test_a_history_that_is_made_anew_is_new_but_for_its_first_layer(name: str) -> None:
    stack = Plan(name, tiny=True, frames=61).build()
    assert isinstance(stack, Rebuilding)
    made = []
    with torch.no_grad():
        for number in range(stack.chunks):
            passes = [each for each, _ in stack.chunk(number, 1)]
            made += [[entry[stack.made[0]].clone() for entry in stack._kv_cache]] if "build" in passes else []
    assert len(made) > 2
    for before, after in pairwise(made):
        first, later = (torch.equal(old, new[..., : old.shape[-2], :]) for old, new in zip(before, after, strict=True))
        assert first
        assert not later  # for the old frames have seen the new ones


@pytest.mark.parametrize(("name", "once"), [*((name, False) for name in shape.names()), ("hy_world", True)])
def test_the_peak_is_the_byte_models(name: str, once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    small = shape.tiny
    monkeypatch.setattr(plan_of, "tiny", lambda each: replace(small(each), layers=4))
    monkeypatch.setattr(measure, "DeviceMemory", LiveMemory)
    plan = Plan(name, tiny=True, steps=1, frames=69, once=once)
    _, ours, _ = run(plan, [MethodChoice.parse(QUICK)], lambda _: None)
    # A history that is dense in more than one layer would add a twentieth for each, and more.
    assert ours["peak_nbytes"] == pytest.approx(ours["model_nbytes"], rel=0.05)


@pytest.mark.parametrize("per_seal", [1, 2])
@pytest.mark.parametrize("name", shape.names())
def test_the_budget_is_what_a_cache_holds(name: str, per_seal: int) -> None:
    plan = Plan(name, tiny=True, steps=1, alone=True)
    method = MethodChoice.parse(f"{QUICK}:chunks_per_seal={per_seal}")
    (line,) = run(plan, [method], lambda _: None)
    budgeted = budget.cache_nbytes(plan.shape, 16, 24, method.scheme(per_seal))
    assert budgeted.total - budgeted.workspace == line["held_nbytes"]
    # A workspace that has grown has room for more.
    assert budgeted.workspace <= line["workspace_nbytes"] <= 1.25 * budgeted.workspace


@pytest.mark.parametrize(
    ("name", "frames", "unit", "gib"),
    [
        ("causal_forcing", 24, 6, 1.17),
        ("lingbot_world", 18, 4, 4.20),
        ("hy_world", 16, 16, 1.58),
        ("hy_world_8b", 20, 20, 3.93),
        ("longcat_video", 19, 19, 3.54),
    ],
)
def test_sealed_units_take_what_is_stated_of_them(name: str, frames: int, unit: int, gib: float) -> None:
    model, chosen = Shape.load(name), scheme("quantwm", preset="paper")
    sizes = (1, model.heads, unit * model.frame_tokens(), model.kinds * model.channels)
    each = sum(
        method.nbytes(kind, sizes, False) for kind, method in zip(KINDS, (chosen.keys, chosen.values), strict=True)
    )
    assert model.layers * each * frames / unit / GIB == pytest.approx(gib, abs=0.005)


def test_a_window_of_two_chunks_is_half_bf16() -> None:
    held = budget.cache_nbytes(Shape.load("matrix_game"), 880, 24, scheme("quantwm"))
    assert (held.stored + held.exact) / 2**20 == pytest.approx(559, abs=1)


def test_a_pass_is_the_most_that_a_live_host_took_in_any_case() -> None:
    lines = map(json.loads, LIVE.read_text(encoding="utf-8").splitlines())
    ours = [line for line in lines if not line["case"].startswith("host")]
    assert {line["host"] for line in ours} == {name for name in shape.names() if Shape.load(name).pass_measured}
    for name in {line["host"] for line in ours}:
        model = Shape.load(name)
        weights = model.layers * model.layer_parameters * BF16_NBYTES
        most = max(line["peak_nbytes"] - weights - line["cache_nbytes"] for line in ours if line["host"] == name)
        assert most <= model.pass_nbytes <= 1.001 * most


def test_what_the_allocator_may_lose_stands_between_what_fits_and_what_does_not() -> None:
    head, *rows = budget_table.fitting(("longcat_video",))
    row = dict(zip(head, next(row for row in rows if row[1:3] == ("2 bits", "FP8")), strict=True))
    assert 29 < float(row["in all"]) < 32
    assert [row[f"{card} GB"] for card in budget_table.SMALL_CARDS] == ["-", "tight", "yes"]
    needs = budget.process(Shape.load("longcat_video"), "480p", 24, scheme("quantwm"), fp8=True)
    assert row["measured"] == f"{100 * Shape.load('longcat_video').pass_nbytes / needs.total:.0f} %"
    head, *rows = budget_table.lengths(("longcat_video",))
    least, most = dict(zip(head, rows[0], strict=True))["48 GB, 2 bits"].split("-")
    for memory, frames in ((48 * GIB - budget.PIECES_NBYTES, least), (48 * GIB, most)):
        held = budget.longest(Shape.load("longcat_video"), "480p", memory, scheme("quantwm", chunks_per_seal=2))
        assert int(frames) == frames_of(held)


def test_a_longer_history_fits_and_one_more_chunk_does_not() -> None:
    for name in shape.names():
        model, packed = Shape.load(name), scheme("quantwm", chunks_per_seal=2)
        resolution, more = model.resolutions[0], 1 if model.host == "segments" else model.chunk
        for method in (None, packed):
            most = budget.longest(model, resolution, 80 * GIB, method)
            whole = budget.unbounded(model)
            assert budget.process(whole, resolution, most, method).total <= 80 * GIB
            assert budget.process(whole, resolution, most + more, method).total > 80 * GIB
    assert budget.longest(Shape.load("lingbot_world"), "480p", 24 * GIB) == 0


def test_bytes_of_many_chunks_are_those_of_one_after_the_other() -> None:
    model, method = (
        replace(shape.tiny(Shape.load("causal_forcing")), tokens={"480p": 48}),
        scheme("quantwm", chunks_per_seal=2),
    )
    stream, held = Stream(chunks_per_seal=2), []
    for _ in range(13):
        stream = stream.append(144).sealed()
        held.append(stream)
    last = list(budget._streams(model, 48, 39, method))
    assert last == held[-len(last) :]


def test_the_command_prints_a_table_and_writes_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from quantwm_eval.cli import main

    out = tmp_path / "lines.jsonl"
    command = ["bench", "true-shapes", "longcat_video", "--tiny", "--steps", "2", "--methods", f"kivi,{QUICK}"]
    assert main([*command, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "LongCat-Video, 480p, 93 frames, extrapolated from 2 of 4 steps, in small: no figure of the model" in printed
    lines = table.load(out)
    assert [line["method"] for line in lines] == [HOST, "kivi", QUICK, AGAIN]
    assert table.render(lines) == printed.rstrip("\n")
    ours = lines[2]
    assert len(ours["chunks"]) == len(ours["seal_seconds"]) == 2
    assert [len(chunk["step"]) for chunk in ours["chunks"]] == [2, 2]
    assert min(table.shares(ours)) > 0
    assert sum(table.shares(ours)) < 1
    assert main([*command, "--out", str(out)]) == 2
    assert "exists" in capsys.readouterr().err
    assert "0.000 GiB" not in printed
    assert main(["bench", "budget", "hy_world", "hy_world"]) == 0
    rows = capsys.readouterr().out.split("\n\n")
    assert [rows[0], rows[2]] == [budget_table.FITTING, budget_table.LENGTHS]
    assert [part.count("HY-World 1.5, 5B, 704p") for part in rows] == [0, 6, 0, 2]
    assert [len(part.splitlines()) for part in (rows[1], rows[3])] == [2 + 6, 2 + 2]


def test_captions_of_the_budget_explain_its_heads_and_entries() -> None:
    for caption, made in (
        (budget_table.FITTING, budget_table.fitting(shape.names())),
        (budget_table.LENGTHS, budget_table.lengths(shape.names())),
    ):
        told = {line.partition(":")[0] for line in caption.replace("; ", "\n").splitlines()}
        unlike = {head for head in made[0] if not head.endswith((" GiB", " GB", " bits", " BF16"))} - {"model"}
        assert unlike - {"weights"} <= told
        entries = {re.sub(r"^up to \d+$", "up to N", entry) for row in made[1:] for entry in row}
        assert {"yes", "tight", "up to N", "-"} & entries <= told
        assert not any(entry.startswith("0-") for entry in entries)
        assert max(map(len, caption.splitlines())) <= 120


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (["hy_world", "--resolution", "480p"], "unknown resolution of HY-World 1.5, 5B '480p'; known: 704p"),
        (["lingbot_world", "--window", "9"], "--window 9: LingBot-World-v2 needs at least 10, its sink and a chunk"),
        (["causal_forcing", "--window", "9"], "--window 9: Causal-Forcing has no window"),
        (["longcat_video", "--frames", "17"], "--frames 17: LongCat-Video needs 6 latent frames, 21 of video"),
        (["longcat_video", "--once"], "--once: LongCat-Video has one encoding, which is stored once"),
        (["longcat_video", "--frames", "94"], "--frames 94: LongCat-Video makes 93 or 97, whole chunks"),
        (["hy_world", "--frames", "94"], "--frames 94: HY-World 1.5, 5B makes 93 or 109, whole chunks"),
        (["hy_world", "--window", "21"], "of 93 frames HY-World 1.5, 5B caches 20 latent frames; need at most 20"),
        (["lingbot_world", "--window", "25"], "of 93 frames LingBot-World-v2 caches 24 latent frames; need at most 24"),
        (["causal_forcing", "--layers", "999"], "--layers 999: Causal-Forcing has 30 layers; need 1 to 30"),
        (["causal_forcing", "--steps", "5"], "--steps 5: Causal-Forcing has 4 steps; need 1 to 4"),
        (["longcat_video", "--tiny", "--layers", "3"], "--layers 3: LongCat-Video in small has 2 layers; need 1 to 2"),
        (["matrix_game", "--memory", "4"], "--memory 4: needs --device cuda"),
        (
            ["matrix_game", "--methods", "kivi,quantwm:frames_ahead=12"],
            "quantwm:frames_ahead=12: a stack has no table of",
        ),
        (["matrix_game", "--device", "tpu"], "--device tpu: need cpu, cuda or cuda:N"),
        (["matrix_game", "--device", "cpu:7"], "--device cpu:7: need cpu, cuda or cuda:N"),
    ],
)
def test_what_cannot_be_run_is_refused_before_it_is_begun(
    told: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from quantwm_eval.cli import main

    assert main(["bench", "true-shapes", *told]) == 2
    assert said in capsys.readouterr().err


def test_a_method_that_is_named_twice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from quantwm_eval.cli import main

    with pytest.raises(SystemExit, match="2"):
        main(["bench", "true-shapes", "matrix_game", "--tiny", "--methods", "bf16,kivi,bf16"])
    assert "argument --methods: got 'bf16' twice, need each method once" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["hy_world", "hy_world_8b"])
def test_a_video_of_one_chunk_leaves_no_history_to_compare(name: str) -> None:
    lines = list(run(Plan(name, tiny=True, steps=1, frames=13), [BF16, MethodChoice.parse(QUICK)], lambda _: None))
    assert [table.at_rest(line) > 0 for line in lines] == [False, False, True, False]  # statistics of queries
    assert [row[table.HEAD.index("ratio")] for row in table._rows(lines)] == ["-"] * len(lines)


@pytest.mark.parametrize("name", ["causal_forcing", "hy_world"])
def test_presets_run_in_small_and_a_method_that_is_not_for_a_shape_has_its_line(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from quantwm_eval.cli import main

    methods = ["quantwm:preset=paper:iterations=1", "qvg:group_size=48", "quantwm:preset=sharp:iterations=1"]
    command = ["bench", "true-shapes", name, "--tiny", "--frames", "45", "--steps", "1", "--methods", ",".join(methods)]
    assert main(command) == 0
    printed = capsys.readouterr()
    rows = [next(row for row in printed.out.splitlines() if row.startswith(each)) for each in methods]
    assert ["x  " in row for row in rows] == [True, False, True]
    assert "not for this shape" in rows[1]
    assert "qvg:group_size=48: not for this shape: " in printed.err
    assert "group size 48 does not fit head dimension 64" in printed.err


def test_an_error_after_the_first_sealed_unit_is_none_of_the_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan("causal_forcing", tiny=True, steps=1, frames=45)

    def broken(stack: Stack, number: int, *told: Any, **more: Any) -> dict[str, list[float]]:
        if number == fails:
            raise ShapeError("broken")
        return timed(stack, number, *told, **more)

    monkeypatch.setattr(measure, "timed", broken)
    fails = 0
    assert measure._tried(plan, plan.build(), "bf16", scheme("bf16")).refused == "broken"
    fails = 3
    with pytest.raises(ShapeError, match="broken"):
        measure._tried(plan, plan.build(), "bf16", scheme("bf16"))


def test_lines_of_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    for text in ("no JSON", '{"benchmark": "decode"}', "[1]"):
        path.write_text(f"{text}\n", encoding="utf-8")
        with pytest.raises(FormatError, match="line 1"):
            table.load(path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("name", "offload"), [*((name, False) for name in shape.names()), ("longcat_video", True)])
def test_the_peak_on_a_gpu_is_within_the_byte_model(name: str, offload: bool) -> None:
    plan = Plan(name, layers=3, steps=1, device="cuda", offload=offload)
    methods = [MethodChoice.parse(each) for each in ("quantwm", "qvg:iterations=2")]
    host, *ours, _ = run(plan, methods, lambda _: None)
    for line in ours:
        # With so few layers, the unit that is being sealed counts, and the one that was and is not confirmed.
        assert line["peak_nbytes"] <= 1.03 * (line["model_nbytes"] + 2 * line["unit_nbytes"]), line
    if plan.shape.host != "rolling" and not offload:
        # The untouched host holds two histories; ours none, but what a layer seals and what its reads share.
        assert host["peak_nbytes"] >= host["before_nbytes"] + 2 * host["own_nbytes"]
        assert ours[0]["peak_nbytes"] <= host["peak_nbytes"] - host["own_nbytes"] + 2 * ours[0]["unit_nbytes"]
