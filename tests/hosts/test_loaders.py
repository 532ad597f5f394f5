"""Hosts that experiments load, from unmodified checkouts: random weights as they were released, a scene, and results out.

Run with ``nox -s hosts -- --checkout lingbot_world=PATH`` and so on.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.hosts import causal_forcing, longcat_video, released
from tests.hosts import checkout as checkouts
from tests.hosts.hy_world import heads_first
from tests.hosts.live import randomise, sdpa, smaller
from tests.hosts.stand_ins import Decoder, OnCpu, decode, decoded, encode, encoder, vae_of

pytest.importorskip("quantwm_eval")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from quantwm_core.method import scheme
from quantwm_eval import hosts
from quantwm_eval.experiment import CONTROL, Experiment, MethodChoice
from quantwm_eval.hosts import Setup
from quantwm_eval.run import run

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]  # the hosts have warnings of their own
METRICS = ("psnr", "memory", "latency", "reconstruction_error", "selection_shift", "logit_error", "attention_kl",
           "output_error", "query_energy")  # fmt: skip


@pytest.fixture
def root(request: pytest.FixtureRequest) -> Path:
    name = request.function.__name__.removeprefix("test_")
    found = checkouts.checkouts(request.config).get(name)
    if found is None:
        pytest.skip(f"no checkout {name} was named")
    return found


def prove(host: Any, frames: int, chunks_per_seal: int = 1) -> None:
    """An experiment of one scene: the control is exact, and every metric of queries has a figure."""
    methods = tuple(map(MethodChoice.parse, (CONTROL, "rtn", "quantwm")))
    wanted = Experiment(methods, (0,), ("prompt",), frames, batch=1, model=host.name, metrics=METRICS,
                        chunks_per_seal=chunks_per_seal)  # fmt: skip
    outcomes = list(run(wanted, host))
    assert len(outcomes) == 3
    assert outcomes[0].video.shape[::3] == (frames, 3)
    assert outcomes[0].video.std() > 1
    for outcome in outcomes:
        values = outcome.cell.measurement.values
        assert outcome.cell.valid
        assert all(np.isfinite(value) for name, value in values.items() if name != "psnr"), values
    errors = [outcome.cell.measurement.values["logit_error"] for outcome in outcomes]
    assert errors[0] == 0 < errors[2] < errors[1]


def test_causal_forcing(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("omegaconf")
    size = causal_forcing.Size(text=(512, 4096))  # which no configuration keeps
    (tmp_path / "prompts.txt").write_text("a street at night\n")
    with causal_forcing.importing(root) as load:
        pipelines, wrappers = load("pipeline.causal_inference"), load("utils.wan_wrapper")
        load("pipeline").CausalInferencePipeline = pipelines.CausalInferencePipeline
        wrapper = causal_forcing.wrapped(load, size)
        released.generator(wrapper, tmp_path / "weights.safetensors")
        kind = type(wrapper.model)
        config = {name: value for name, value in wrapper.model.config.items() if not name.startswith("_")}
        monkeypatch.setattr(kind, "from_pretrained", lambda _path, **given: kind(**config | given))
        text = torch.randn(1, *size.text, generator=torch.Generator().manual_seed(1)).bfloat16()
        monkeypatch.setattr(pipelines, "WanTextEncoder", lambda: lambda **_: {"prompt_embeds": text})
        monkeypatch.setattr(pipelines, "WanVAEWrapper", lambda: SimpleNamespace(decode_to_pixel=decoded))
        assert wrappers.WanDiffusionWrapper is pipelines.WanDiffusionWrapper
        monkeypatch.setattr("quantwm_eval.hosts.causal_forcing.LATENT", (16, size.height, size.width))
        host: Any = hosts.get("causal_forcing")(
            Setup(
                checkout=root,
                weights=tmp_path / "weights.safetensors",
                inputs=tmp_path / "prompts.txt",
                config=few(root),
            )
        )
        host.pipeline.num_transformer_blocks, host.pipeline.frame_seq_length = size.layers, size.frame
        smaller(host.pipeline, "_initialize_kv_cache", size.slots, size.heads, size.head_dim)
        prove(host, 45)


def few(root: Path) -> Path | None:
    """Self-Forcing's configuration; the other's own is the default."""
    other = root / "configs" / "self_forcing_dmd.yaml"
    return other if other.exists() and not (root / "configs" / "causal_forcing_dmd_chunkwise.yaml").exists() else None


def test_lingbot_world(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vision: dict[str, object] = {"to_tensor": lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255}
    stubs: dict[str, dict[str, object]] = {
        "torchvision": {},
        "torchvision.transforms": {},
        "torchvision.transforms.functional": vision,
    }
    poses = np.tile(np.eye(4), (61, 1, 1))
    poses[:, 0, 3] = np.linspace(0, 4, 61)
    scenes = released.scene(
        tmp_path / "scenes" / "00", poses=poses, intrinsics=np.tile([400.0, 400, 416, 240], (61, 1))
    )
    with checkouts.importing(root, stubs=stubs) as load:
        pipelines = load("wan.image2video")
        released.lingbot(load, tmp_path / "weights")
        for name in ("attention", "flash_attention"):
            monkeypatch.setattr(load("wan.modules.model_fast"), name, sdpa)
        monkeypatch.setattr(pipelines, "torch", OnCpu())
        monkeypatch.setattr(pipelines, "T5EncoderModel", lambda **_: encoder)
        monkeypatch.setattr(pipelines, "Wan2_1_VAE", lambda **_: SimpleNamespace(encode=encode, decode=decode))
        monkeypatch.setattr("quantwm_eval.hosts.lingbot_world.gpu", lambda _: 0)
        host: Any = hosts.get("lingbot_world")(Setup(checkout=root, weights=tmp_path / "weights", inputs=scenes))
        host._area = 64 * 64
        host.pipeline.model.float()  # CUDA's autocast would cast
        host.pipeline.param_dtype = torch.float32
        prove(host, 61)


def test_matrix_game(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("omegaconf")
    stubs: dict[str, dict[str, object]] = {
        "flash_attn": {"flash_attn_func": sdpa},
        "utils.visualize": {"process_video": None},
        "wan.vae.wanx_vae": {"get_wanx_vae_wrapper": vae_of, "__file__": str(root / "wan" / "vae" / "wanx_vae.py")},
        "demo_utils.vae_block3": {"VAEDecoderWrapper": Decoder, "__file__": str(root / "demo_utils" / "vae_block3.py")},
    }
    packages = ("wan", "wan.modules", "utils")
    small = {"dim": 64, "num_heads": 2, "num_layers": 2, "ffn_dim": 64, "freq_dim": 32}
    device = torch.device("cpu")
    with checkouts.importing(root, bare=packages, stubs=stubs, device=device) as load:
        load("wan.modules.attention").FLASH_ATTN_2_AVAILABLE = False
        load("wan.modules.model").flash_attention = sdpa
        kind = load("wan.modules.causal_model").CausalWanModel
        configured = kind.from_config

        def from_config(path: Any, **_: Any) -> Any:
            config = kind.load_config(path)
            sizes = {"hidden_size": 32, "mouse_hidden_dim": 128, "keyboard_hidden_dim": 128}
            actions = config["action_config"] | sizes | {"blocks": [0], "img_hidden_size": 64, "heads_num": 2}
            return configured({**config, **small, "action_config": actions})

        monkeypatch.setattr(kind, "from_config", from_config)
        load("pipeline.causal_inference").ZERO_VAE_CACHE = [None]
        with contextlib.chdir(root):
            wrapper = load("utils.wan_wrapper").WanDiffusionWrapper("configs/distilled_model/universal")
        randomise(wrapper)
        released.generator(wrapper, tmp_path / "weights" / "base_distilled_model" / "base_distill.safetensors")
        image = released.scene(tmp_path / "scenes" / "00") / "00" / "image.png"
        pictures = tmp_path / "pictures"
        pictures.mkdir()
        image.rename(pictures / "0000.png")
        host: Any = hosts.get("matrix_game")(Setup(checkout=root, weights=tmp_path / "weights", inputs=pictures))
        host.pipeline.num_transformer_blocks = 2
        smaller(host.pipeline, "_initialize_kv_cache", 6 * 880, 2, 32)
        smaller(host.pipeline, "_initialize_kv_cache_mouse_and_keyboard", 6, 2, 64)
        prove(host, 33, chunks_per_seal=host.chunks_per_seal)


def test_hy_world(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {"get_sp_world_size": lambda: 1, "get_sp_parallel_rank": lambda: 0, "get_sp_parallel_local_rank": lambda: 0}
    stubs: dict[str, dict[str, object]] = {
        "sageattention": {"sageattn": heads_first},
        "distributed": {},
        "distributed.communication_op": dict.fromkeys(("all_to_all_sp", "sequence_model_parallel_all_gather")),
        "distributed.parallel_state": dict(alone),
        "models.par_vae.tools": dict.fromkeys(("distribute_data_to_gpus", "gather_results")),
        "imageio": {},
        "moviepy": {},
        "moviepy.editor": dict.fromkeys(("VideoFileClip", "VideoClip")),
        "hyvideo.pipelines.worldplay_video_pipeline": {"HunyuanVideo_1_5_Pipeline": None},
        "hyvideo.commons.parallel_states": {"initialize_parallel_state": lambda **_: None},
        "hyvideo.commons.infer_state": {"initialize_infer_state": None},
    }
    monkeypatch.setattr(torch, "compile", lambda function=None, **_: function or (lambda each: each))
    for name in ("range_push", "range_pop"):
        monkeypatch.setattr(torch.cuda.nvtx, name, lambda *_: None)
    for name in ("synchronize", "set_device"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    scenes = released.scene(tmp_path / "scenes" / "00")
    (scenes / "00" / "pose.txt").write_text("w-3, right-1, d-3")
    with checkouts.importing(root, stubs=stubs, bare=("hyvideo", "hyvideo.pipelines", "hyvideo.commons")) as load:
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(root / "wan"))
            patch.setenv("WORLD_SIZE", "0")
            released.hy(load, tmp_path / "weights")
        host: Any = hosts.get("hy_world")(Setup(checkout=root, weights=tmp_path / "weights", inputs=scenes))
        prove(host, 29)


def test_longcat_video(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = longcat_video.SMALL
    scenes = released.scene(tmp_path / "scenes" / "00")
    with longcat_video.importing(root) as load:
        released.longcat(load, tmp_path / "weights", size)
        module = load("quantwm_eval.hosts.longcat_video")
        for name, value in (("SEGMENT", 21), ("GIVEN", 13), ("STEPS", 3)):
            monkeypatch.setattr(module, name, value)
        host: Any = hosts.get("longcat_video")(Setup(checkout=root, weights=tmp_path / "weights", inputs=scenes))
        host.pipeline.get_condition_shape = lambda *_, **__: (size.height, size.width)
        for part in (host.pipeline.dit, host.pipeline.vae):
            part.float()  # CUDA's autocast would cast
        for block in host.pipeline.dit.blocks:
            for part in (block.attn.qkv, block.attn.k_norm):
                part.register_forward_hook(lambda _, __, output: output.bfloat16().float())
        prove(host, 16)
        with host.attach(scheme("quantwm"), []) as attached:
            host.generate(host.episodes("prompt", (0,), 8, 0), [0], lambda: None)
        assert attached.use().stored.sealed > 0


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Hosts set these when they are imported."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
