"""FastVideo's modules from a folder that holds the package ``fastvideo``, on a CPU, in one process."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hosts import checkout

BARE = (
    "fastvideo",
    "fastvideo.pipelines",
    "fastvideo.pipelines.basic.lingbotworld2",
    "fastvideo.pipelines.stages",
    "fastvideo.models",
    "fastvideo.models.dits",
)
# What modules take from packages that are entered so; of the stages they are derived from one, the others they only hold.
STAGES = ("ConditioningStage", "DecodingStage", "InputValidationStage", "TextEncodingStage")
NEEDS = ("cloudpickle", "remote_pdb", "av", "imageio", "triton", "einops", "diffusers")


@contextmanager
def importing(root: Path) -> Iterator[Callable[[str], Any]]:
    """Import its modules by name while inside, past the packages that start servers and load pipelines."""
    for name in NEEDS:
        pytest.importorskip(name)
    pytest.importorskip("transformers").PreTrainedModel  # noqa: B018  # it asks for torchvision, and must not find the stub
    # The settings import the pipelines, which import the settings; nothing here needs more of them than the names.
    settings = dict.fromkeys(("FastVideoArgs", "TrainingArgs", "ExecutionMode", "WorkloadType"), object)
    stubs: dict[str, dict[str, object]] = {
        "torchvision": {},
        "torchvision.utils": {"make_grid": None},
        "torchvision.transforms": {},
        "torchvision.transforms.functional": {},
        "fastvideo.fastvideo_args": dict(settings),
    }
    with (
        pytest.MonkeyPatch.context() as patch,
        checkout.importing(root, bare=BARE, stubs=stubs, within="fastvideo") as load,
    ):
        vars(load("fastvideo.pipelines")).update({"ComposedPipelineBase": Composed, "LoRAPipeline": Adapted})
        vars(load("fastvideo.pipelines.stages")).update(dict.fromkeys(STAGES, object))
        cpu = load("fastvideo.platforms.cpu").CpuPlatform
        dense = "fastvideo.attention.backends.sdpa.SDPABackend"
        patch.setattr(cpu, "get_attn_backend_cls", classmethod(lambda *_, **__: dense))
        alone(load, patch)
        yield load


class Composed:
    """Stands for what pipelines are derived from."""


class Adapted:
    """The same."""


def alone(load: Callable[[str], Any], patch: pytest.MonkeyPatch) -> None:
    """A group of one for sequence parallelism, without starting any."""
    for module in ("fastvideo.attention.layer", "fastvideo.distributed.parallel_state"):
        patch.setattr(load(module), "get_sp_world_size", lambda: 1)
        patch.setattr(load(module), "get_sp_parallel_rank", lambda: 0, raising=False)
    layer = load("fastvideo.attention.layer")
    patch.setattr(layer, "sequence_model_parallel_all_to_all_4D", lambda x, **_: x)
    patch.setattr(layer, "sequence_model_parallel_all_gather", lambda x, **_: x)
    patch.setattr(layer, "get_compute_dtype", lambda: torch.bfloat16)


def calling(load: Callable[[str], Any]) -> AbstractContextManager[Any]:
    """What the package's pipelines put around a call of a transformer."""
    context: AbstractContextManager[Any] = load("fastvideo.forward_context").set_forward_context(
        current_timestep=0, attn_metadata=None
    )
    return context
