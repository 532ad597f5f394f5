"""``quantwm bench true-shapes`` where memory runs out, and where it is ended early."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quantwm_core.errors import StateError
from quantwm_eval.cli import main
from quantwm_eval.experiment import MethodChoice
from quantwm_eval.true_shapes import measure, table
from quantwm_eval.true_shapes.longcat_video import LongCatVideoPipeline
from quantwm_eval.true_shapes.measure import AGAIN, HOST, run
from quantwm_eval.true_shapes.plan import Plan
from quantwm_eval.true_shapes.stack import Pass, Stack

QUICK = "quantwm:iterations=1"


class SmallCard:
    """In place of a pass: memory runs out in the whole stack, not in the stack of one layer, once that there is a cache."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *methods: str | None) -> None:
        self.inside: str | None = None
        whole, attached = LongCatVideoPipeline.chunk, measure._attached

        def chunk(stack: LongCatVideoPipeline, number: int, steps: int) -> Iterator[Pass]:
            yield from whole(stack, number, steps)
            if stack.layers > 1 and self.inside in methods:
                raise torch.OutOfMemoryError(
                    "CUDA out of memory. Tried 2 GiB. Process 7 has 780.00 MiB memory in use. If reserved but unallocated memory is large"
                )

        def attach_and_note(plan: Plan, stack: Stack, scheme: Any) -> Any:
            self.inside = None if scheme is None else scheme.keys.name
            return attached(plan, stack, scheme)

        monkeypatch.setattr(LongCatVideoPipeline, "chunk", chunk)
        monkeypatch.setattr(measure, "_attached", attach_and_note)


@pytest.mark.parametrize(
    ("lacking", "left"), [((None,), [HOST, "kivi", QUICK]), (("kivi",), [HOST, "kivi", QUICK, AGAIN])]
)
def test_what_does_not_fit_has_a_line_and_the_others_are_measured(
    lacking: tuple[str | None, ...],
    left: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    SmallCard(monkeypatch, *lacking)
    out = tmp_path / "lines.jsonl"
    command = ["bench", "true-shapes", "longcat_video", "--tiny", "--steps", "1", "--methods", f"kivi,{QUICK}"]
    assert main([*command, "--out", str(out)]) == 0
    lines = table.load(out)
    assert [line["method"] for line in lines] == left
    named = {HOST if each is None else each for each in lacking}
    assert {line["method"] for line in lines if not table.fits(line)} == named
    assert {line["does_not_fit"] for line in lines} == {"", "CUDA out of memory. Tried 2 GiB."}
    printed = capsys.readouterr()
    rows = {line["method"]: row for line, row in zip(lines, printed.out.splitlines()[-len(lines) :], strict=True)}
    assert {name for name, row in rows.items() if "does not fit" in row} == named
    assert all(f"{name}: does not fit: CUDA out of memory" in printed.err for name in named)
    assert ("x" in rows[QUICK].split(QUICK)[1]) == (HOST not in named)  # without the host there is no ratio


def test_a_run_that_ends_early_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "lines.jsonl"

    def interrupted(plan: Plan, stack: Stack, scheme: Any) -> Any:
        if stack.layers > 1 and scheme is not None:
            raise KeyboardInterrupt
        return attached(plan, stack, scheme)

    attached = measure._attached
    monkeypatch.setattr(measure, "_attached", interrupted)
    command = ["bench", "true-shapes", "matrix_game", "--tiny", "--steps", "1", "--methods", "kivi"]
    assert main([*command, "--out", str(out)]) == 130
    assert [line["method"] for line in table.load(out)] == [HOST]
    assert [each.name for each in tmp_path.iterdir()] == [out.name]
    before = out.read_bytes()

    def full(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("quantwm_core.tensor_file.os.fsync", full)
    monkeypatch.setattr(measure, "_attached", attached)
    capsys.readouterr()
    assert main([*command, "--out", str(out), "--overwrite"]) == 1
    told = capsys.readouterr()
    assert "Matrix-Game 2" in told.out
    assert f"--out {out}: cannot be written: no space left" in told.err
    assert out.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == [out.name]


def test_weights_that_do_not_fit_are_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(plan: Plan, layers: int | None = None) -> Stack:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Plan, "build", full)
    with pytest.raises(StateError, match="Matrix-Game 2: the weights do not fit: CUDA out of memory"):
        next(run(Plan("matrix_game", tiny=True), [MethodChoice("bf16")], lambda _: None))
