"""What is launched under the interpreter is written down once, as a GPU would compile it, and what does not compile is reported."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from quantwm_core.errors import ShapeError
from quantwm_kernels import launch

# Not every Triton tells what it would look at in an argument.
pytest.importorskip("tests.parity.record_launches", exc_type=ImportError)

from quantwm_kernels.triton import codebook, packing
from tests.parity.record_launches import Recorder
from tests.parity.specialization import DEVICES, Specialization
from tests.parity.test_compilation import run

interpreted = pytest.mark.skipif(not launch.interpreted(), reason="needs TRITON_INTERPRET=1")

OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}
PACK = Specialization(
    "packing.pack_kernel",
    {"codes": "*u8:16", "packed": "*u8:16", "codes_per_row": "i32", "bytes_per_row": "i32", "total": "i32"},
    {"BLOCK": 1024},
    OPTIONS,
    90,
)


def recording(patch: pytest.MonkeyPatch, architecture: int = 90) -> Recorder:
    recorder = Recorder(architecture)
    recorder.install(patch)
    return recorder


def finished(recorder: Recorder, file: Path, **of_a_worker: Any) -> None:
    config = SimpleNamespace(getoption=lambda _: str(file), **of_a_worker)
    recorder.pytest_sessionfinish(cast("Any", SimpleNamespace(config=config)))


@interpreted
def test_each_specialization_is_noted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = recording(monkeypatch)
    for codes in (16, 32, 16):
        packing.pack(torch.zeros(2, codes, dtype=torch.uint8))
    assert list(map(Specialization.from_json, recorder.lines)) == [PACK]
    packing.pack(torch.zeros(17, dtype=torch.uint8)[1:])  # which lies at no multiple of 16
    unaligned = replace(PACK, types={**PACK.types, "codes": "*u8"})
    assert set(recorder.lines) == {PACK.to_json(), unaligned.to_json()}


@interpreted
@pytest.mark.parametrize(("architecture", "block"), [(90, 128), (86, 32)])
def test_launches_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch, architecture: int, block: int) -> None:
    recorder = recording(monkeypatch, architecture)
    monkeypatch.setattr(codebook, "shared_memory", launch.shared_memory)  # imported before
    values = torch.randn(1, 256, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    codebook.nearest(values, values)
    (ranked,) = (
        each for each in map(Specialization.from_json, recorder.lines) if each.kernel == "assignment.nearest_kernel"
    )
    assert (ranked.constants["BLOCK_K"], ranked.architecture) == (block, architecture)
    assert launch.processors(values.device) == DEVICES[architecture].processors


@interpreted
def test_what_operators_would_launch_is_noted_and_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, codes = recording(monkeypatch), torch.full((16,), 3, dtype=torch.uint8)
    made = []

    def kernels(codes: torch.Tensor) -> None:
        made.append(packing.pack(codes))
        raise ShapeError("zeros do not do")

    assert recorder.both(kernels, lambda _: "the reference's")(codes) == "the reference's"
    assert not made[0].any()
    assert list(map(Specialization.from_json, recorder.lines)) == [PACK]
    assert packing.pack(codes).all()


def test_operators_are_recorded_too(tmp_path: Path) -> None:
    file, test = tmp_path / "launches", "test_the_same_input_gives_the_same_bytes_twice[pack_codes-0]"
    plugin = ["-p", "tests.parity.record_launches", "--launches", str(file), "--architecture", "86"]
    run(["-m", "pytest", *plugin, f"tests/kernels/test_operators.py::{test}"], tmp_path, TRITON_INTERPRET="1")
    (line,) = file.read_text().splitlines()
    assert Specialization.from_json(line) == replace(PACK, architecture=86)
    run(["-m", "pytest", *plugin], tmp_path, expected=pytest.ExitCode.USAGE_ERROR)  # nothing is interpreted


def test_workers_hand_over_what_they_noted(tmp_path: Path) -> None:
    file, workers, controller = tmp_path / "launches", [Recorder(90), Recorder(90)], Recorder(90)
    for worker, lines in zip(workers, ({"a", "b"}, {"b", "c"}), strict=True):
        output: dict[str, list[str]] = {}
        worker.lines = lines
        finished(worker, file, workeroutput=output)
        controller.pytest_testnodedown(SimpleNamespace(workeroutput=output))
    controller.pytest_testnodedown(SimpleNamespace())  # a worker that has crashed
    assert not file.exists()
    for _ in range(2):
        finished(controller, file)
        assert file.read_text() == "a\nb\nc\n"


def test_what_does_not_compile_or_fit_is_reported(tmp_path: Path) -> None:
    file, program = tmp_path / "launches", ["-m", "tests.parity.compile_launches"]
    uneven = replace(PACK, constants={"BLOCK": 1000})
    elsewhere = replace(uneven, architecture=86)
    file.write_text("".join(f"{each.to_json()}\n" for each in (PACK, uneven, elsewhere)))
    reports = [run([*program, str(file), "--architectures", "90"], tmp_path / "cache", expected=1) for _ in range(2)]
    (line,) = map(json.loads, reports[0].splitlines())
    assert "power of 2" in line.pop("problem")
    assert line == asdict(uneven)
    assert reports[0] == reports[1]  # the second time from what was kept
    assert len((tmp_path / "launches.done").read_text().splitlines()) == 2
    assert run([*program, str(file), "--kernels", "packing.unpack_kernel"], tmp_path / "cache") == ""
