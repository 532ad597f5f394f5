"""Tasks over processes, and through an engine that behaves as Ray does."""

import dataclasses
import sys
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quantwm_core.errors import QuantWMError, StateError, UnknownNameError
from quantwm_eval import cli, launch, provenance, results, resume
from quantwm_eval.evaluate import append, evaluate
from quantwm_eval.experiment import Experiment, MethodChoice
from quantwm_eval.hosts import Setup
from quantwm_eval.results import Cell, Results
from tests.distributions import install
from tests.eval.fake_host import FakeHost

METHODS = (MethodChoice("bf16"), MethodChoice("rtn"))
WANTED = Experiment(
    METHODS,
    scenes=(0, 1, 2),
    frames=6,
    batch=2,
    chunks_per_seal=1,
    seeds=(0, 4),
    metrics=("psnr", "selection_shift"),
)
SOURCE = dataclasses.replace(provenance.collect(["eval"]), threads=1)
FRESH = Results(WANTED, SOURCE, ())


def figures(cells: tuple[Cell, ...]) -> dict[Any, dict[str, float]]:
    """Figures by cell, without times."""
    return {
        cell.key: {name: value for name, value in cell.measurement.values.items() if "seconds" not in name}
        for cell in cells
    }


class RayTaskError(Exception):
    """As Ray wraps what a task raises."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class FakeRay:
    """Tasks are done, and fail, where their results are asked for."""

    exceptions = SimpleNamespace(RayTaskError=RayTaskError)

    def __init__(self) -> None:
        self.begun = self.most = 0
        self.options: list[dict[str, Any]] = []
        self.cancelled: list[Any] = []

    def is_initialized(self) -> bool:
        return False

    def init(self, **_options: Any) -> None:
        self.begun += 1

    def remote(self, work: Callable[[Any], Any]) -> Any:
        def options(**wanted: Any) -> Any:
            self.options.append(wanted)
            return SimpleNamespace(remote=lambda task: (work, task))

        return SimpleNamespace(options=options)

    def wait(self, waiting: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        self.most = max(self.most, len(waiting))
        return waiting[-num_returns:], waiting[:-num_returns]

    def get(self, done: list[Any]) -> list[Any]:
        try:
            return [work(task) for work, task in done]
        except QuantWMError as error:
            raise RayTaskError(error) from error

    def cancel(self, reference: Any) -> None:
        self.cancelled.append(reference[1])


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    launch._loaded.cache_clear()
    monkeypatch.setattr("quantwm_eval.hosts.demo.LOAD", lambda _setup: FakeHost())
    monkeypatch.setattr(launch, "_warm", set())
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


def test_tasks_are_the_batches_that_are_not_done() -> None:
    every = launch.tasks(FRESH, Setup())
    assert [(t.experiment.kinds, t.experiment.seeds, t.experiment.scenes) for t in every[:3]] == [
        (("walk",), (0,), (0, 1)),
        (("look-away",), (0,), (0, 1)),
        (("walk",), (0,), (2,)),
    ]
    assert len(every) == 8
    assert sorted(key for task in every for key in [*task.experiment.keys()]) == sorted(WANTED.keys())


def test_through_ray_the_figures_are_those_of_one_process(ray: FakeRay, tmp_path: Path) -> None:
    path = tmp_path / "alone.jsonl"
    alone = evaluate(WANTED, FakeHost(), resume.begin(path, WANTED, SOURCE), path)
    path = tmp_path / "ray.jsonl"
    begun = resume.begin(path, WANTED, SOURCE)
    append(begun, path, [cell for cell in alone.cells if cell.key[1] == 0 and cell.method == "bf16"])
    begun = resume.begin(path, WANTED, SOURCE)
    assert len(begun.cells) == 4
    tasks = launch.tasks(begun, Setup())
    found = append(begun, path, (cell for done in launch.on_ray(tasks, 3) for cell in done))
    assert found.missing == 0
    assert figures(found.cells) == figures(alone.cells)
    assert figures(results.load(path).cells) == figures(alone.cells)
    assert (ray.begun, ray.most) == (1, 3)
    assert ray.options == [{"num_gpus": 0, "num_cpus": 1}] * len(tasks)
    assert ray.cancelled == []


def test_a_task_that_fails_says_what_it_would_say_here(ray: FakeRay) -> None:
    task = dataclasses.replace(launch.tasks(FRESH, Setup())[0])
    bad = dataclasses.replace(task, experiment=dataclasses.replace(WANTED, model="demos"))
    with pytest.raises(UnknownNameError, match="did you mean 'demo'"):
        list(launch.on_ray([bad], 1))


def test_what_waits_is_cancelled_where_a_task_fails(ray: FakeRay) -> None:
    given = launch.tasks(FRESH, Setup())
    given[2] = dataclasses.replace(given[2], experiment=dataclasses.replace(WANTED, model="demos"))
    with pytest.raises(UnknownNameError):
        list(launch.on_ray(given, 3))  # the one that was asked for last is done first
    assert ray.cancelled == given[:2]


def test_what_waits_is_cancelled_where_nobody_wants_more(ray: FakeRay) -> None:
    given = launch.tasks(FRESH, Setup())
    begun = launch.on_ray(given, 3)
    next(begun)
    assert isinstance(begun, Generator)
    begun.close()
    assert ray.cancelled == given[:2]


def test_a_worker_computes_with_the_threads_of_the_file(ray: FakeRay) -> None:
    source = dataclasses.replace(SOURCE, threads=2)
    task = launch.tasks(dataclasses.replace(FRESH, provenance=source), Setup())[0]
    torch.set_num_threads(1)
    list(launch.on_ray([task], 1))
    assert torch.get_num_threads() == 2
    assert ray.options == [{"num_gpus": 0, "num_cpus": 2}]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"versions": {**SOURCE.versions, "numpy": "1.0"}}, r"numpy 1\.0 there, .* here"),
        ({"platform": "Plan9 mips"}, "platform Plan9 mips there"),
        ({"device": "GPU"}, "device GPU there, cpu here"),
        ({"host": {"inputs": "sha256:12"}}, "--inputs sha256:12 there, not given here; .* the same files"),
    ],
)
def test_a_worker_that_is_not_as_the_file_says_refuses(ray: FakeRay, other: dict[str, Any], message: str) -> None:
    source = dataclasses.replace(SOURCE, **other)
    task = launch.tasks(dataclasses.replace(FRESH, provenance=source), Setup())[0]
    with pytest.raises(StateError, match=message):
        list(launch.on_ray([task], 1))


def test_a_worker_with_another_version_of_a_metric_refuses(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "mine-for-worlds", "quantwm.metrics", {"mine": "quantwm_eval.metrics.psnr:METRIC"}, "0.2")
    wanted = dataclasses.replace(WANTED, metrics=("mine",))
    for version, message in (("0.1", "mine-for-worlds 0.1 there, 0.2 here"), ("0.2", "")):
        source = dataclasses.replace(SOURCE, versions={**SOURCE.versions, "mine-for-worlds": version})
        task = launch.tasks(Results(wanted, source, ()), Setup())[0]
        with pytest.raises(StateError, match=message) if message else nullcontext():
            list(launch.on_ray([task], 1))


def test_a_worker_with_other_cores_works(ray: FakeRay) -> None:
    source = dataclasses.replace(SOURCE, cores=SOURCE.cores + 1)
    task = launch.tasks(dataclasses.replace(FRESH, provenance=source), Setup())[0]
    assert len(list(launch.on_ray([task], 1))) == 1


def test_ray_asks_for_a_gpu_where_tasks_run_on_one(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "GPU")
    task = dataclasses.replace(launch.tasks(FRESH, Setup())[0], setup=Setup("cuda"))
    with pytest.raises(StateError, match="device cpu there, GPU here"):  # what the file was begun with is no GPU
        list(launch.on_ray([task], 1))
    on_gpu = dataclasses.replace(task, source=dataclasses.replace(SOURCE, device="GPU"))
    assert len(list(launch.on_ray([on_gpu], 1))) == 1
    assert ray.options == [{"num_gpus": 1, "num_cpus": 0}] * 2


def test_processes_are_dealt_out_over_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(launch, "_device", [3])
    assert launch._placed(Setup("cuda")).device == "cuda:1"
    assert launch._placed(Setup("cuda:0")).device == "cuda:0"
    assert launch._placed(Setup("cpu")).device == "cpu"


def test_without_ray_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(StateError, match=r"pip install 'packages/quantwm-eval\[ray\]'"):
        list(launch.on_ray([], 1))
    with pytest.raises(UnknownNameError, match="unknown launcher"):
        launch.get("slurm")


def test_processes_of_this_machine_give_the_figures_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "eval",
        "--methods",
        "rtn",
        "--scenes",
        "0,1",
        "--kinds",
        "walk",
        "--frames",
        "8",
        "--chunks-per-seal",
        "1",
    ]
    given += ["--metrics", "psnr,selection_shift,memory", "--videos", "1", "--threads", "1"]
    for name, jobs in (("apart", "2"), ("alone", "1")):
        assert cli.main([*given, "--jobs", jobs, "--out", str(tmp_path / name)]) == 0
    apart, alone = (results.load(tmp_path / name / "results.jsonl") for name in ("apart", "alone"))
    assert figures(apart.cells) == figures(alone.cells)
    kept = [sorted(path.name for path in (tmp_path / name / "videos").iterdir()) for name in ("apart", "alone")]
    assert kept[0] == kept[1] != []
    capsys.readouterr()
    assert cli.main([*given, "--jobs", "2", "--out", str(tmp_path / "apart")]) == 0
    assert "4 of 4 cells are there" in capsys.readouterr().err


SHORT = ["eval", "--methods", "rtn", "--scenes", "0", "--kinds", "walk", "--frames", "4", "--metrics", "psnr"]


@pytest.mark.parametrize(
    ("typed", "cores", "threads"),
    [
        (["--jobs", "3"], 8, 2),
        (["--jobs", "9"], 8, 1),
        (["--jobs", "2", "--threads", "3"], 8, 3),
        (["--jobs", "2"], 64, 4),
        ([], 2, 4),
    ],
)
def test_processes_share_the_cores_unless_threads_are_typed(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: list[str], cores: int, threads: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    torch.set_num_threads(4)
    assert cli.main([*SHORT, "--launcher", "ray", *typed, "--out", str(tmp_path)]) == 0
    assert results.load(tmp_path / "results.jsonl").provenance.threads == threads
    assert torch.get_num_threads() == threads


def test_the_host_is_let_go_of_before_workers_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[FakeHost]] = []
    emptied: list[FakeHost | None] = []  # what of the host was left when the GPU's memory was given back

    def load(_setup: Setup) -> FakeHost:
        host = FakeHost()
        host.itself = host  # type: ignore[attr-defined]  # as a model's hooks refer to it
        made.append(weakref.ref(host))
        return host

    def start(given: Sequence[launch.Task], jobs: int) -> Iterator[tuple[Cell, ...]]:
        assert (len(given), jobs, made[0](), emptied) == (1, 2, None, [None])
        yield ()

    monkeypatch.setattr("quantwm_eval.hosts.demo.LOAD", load)
    monkeypatch.setattr(launch, "LAUNCHERS", {"local": start})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(made[0]()))
    assert cli.main([*SHORT, "--jobs", "2", "--out", str(tmp_path)]) == 0
    assert len(made) == 1
