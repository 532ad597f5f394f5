"""Checkouts of four hosts in small, written to disk: their modules by name, released weights, scenes to ask for.

The classes stand here; the files of a checkout hand them on, so that what loads a host finds them where it looks.
"""

import importlib
import json
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import interpolate

from tests.eval.fake_checkout import OMEGACONF
from tests.models import hy_world_host, lingbot_world_host, longcat_host, matrix_game_host, wan_host

SIDE = 32
WEIGHTS = "model.safetensors"


def pixels(latents: Tensor) -> Tensor:
    """Frames ``[F, 3, 32, 32]`` from 0 to 1 of latent frames, each of the same numbers; the first is one frame, others four."""
    grey = latents.float().reshape(len(latents), -1)[:, : 16 * 16].reshape(len(latents), 1, 16, 16).sigmoid()
    repeated = torch.cat([grey[:1], grey[1:].repeat_interleave(4, 0)])
    return interpolate(repeated, (SIDE, SIDE)).repeat(1, 3, 1, 1)


def seen(*given: Any) -> float:
    """A number that depends on all that a host was given."""
    total = 0.0
    for each in given:
        if isinstance(each, str):
            total += sum(map(ord, each)) % 13
        elif each is not None:
            total += float(np.abs(np.asarray(each, np.float64)).mean())
    return total % 3 / 3


class Released(nn.Module):
    """What loads itself from a folder."""

    @classmethod
    def from_pretrained(cls, path: str, subfolder: str = "", **_: Any) -> Any:
        """As the hosts' libraries do."""
        made = cls()
        if list(made.parameters()):
            made.load_state_dict(load_file(Path(path, subfolder, WEIGHTS)))
        return made


class WanI2VCausal(lingbot_world_host.WanI2VCausal):
    """LingBot-World's."""

    def __init__(self, config: Any, checkpoint_dir: str, device_id: int, rank: int, **settings: Any) -> None:
        super().__init__(
            settings["local_attn_size"], settings["sink_size"], guided=settings["infer_mode"] != "causal_fast"
        )
        self.device, self.config = torch.device("cpu"), config
        assert (device_id, rank) == (0, 0)
        self.model.load_state_dict(load_file(Path(checkpoint_dir, config.fast_checkpoint, WEIGHTS)))

    def _model(self, x: Tensor, cache: Any, start: int, **options: Any) -> Any:
        return self.model(x, kv_cache=cache, current_start=start, **options)

    def generate(self, prompt: str, image: Any, action_path: str, **settings: Any) -> Any:  # type: ignore[override]
        """A video ``[3, F, H, W]`` from -1 to 1."""
        assert (settings["chunk_size"], settings["shift"], settings["offload_model"]) == (4, 10.0, False)
        poses, intrinsics = (np.load(Path(action_path, f"{name}.npy")) for name in ("poses", "intrinsics"))
        generator = torch.Generator().manual_seed(settings["seed"])
        latents = (settings["frame_num"] - 1) // 4 + 1
        noise = torch.randn(1, latents * wan_host.FRAME, wan_host.WIDTH, generator=generator).bfloat16()
        given = seen(prompt, image, poses[: settings["frame_num"]], intrinsics)
        made = super().generate(noise + given)
        return pixels(made.reshape(latents, -1)).transpose(0, 1) * 2 - 1


class WanDiffusionWrapper(nn.Module):
    """Matrix-Game's."""

    def __init__(self, model_config: str, timestep_shift: float, is_causal: bool) -> None:
        super().__init__()
        assert (model_config, timestep_shift, is_causal) == ("configs/distilled_model/universal", 5.0, True)
        self.model = matrix_game_host.CausalInferencePipeline(6, spare=0).generator.model
        self.model.action_config = {"keyboard_dim_in": 4, "mouse_dim_in": 2, "enable_mouse": True}

    def forward(self, x: Tensor, caches: Sequence[Any], current_start: int) -> Tensor:
        """One call on a chunk."""
        for block, (cache, mouse, keyboard) in zip(self.model.blocks, caches, strict=True):
            x = block.self_attn(x, kv_cache=cache, current_start=current_start)
            x = x if block.action_model is None else block.action_model(x, current_start, mouse, keyboard)
        return x


class CausalInferencePipeline(matrix_game_host.CausalInferencePipeline):
    """Matrix-Game's."""

    def __init__(self, args: Any, device: str = "cuda", generator: Any = None, vae_decoder: Any = None) -> None:
        super().__init__(6, spare=0)
        self.args, self.vae_decoder = args, vae_decoder
        self.num_frame_per_block = args.num_frame_per_block
        del self.generator
        self.generator = generator

    def inference(self, noise: Tensor, conditional_dict: Any, mode: str) -> Any:  # type: ignore[override]
        """Videos of the chunks, ``[1, F, 3, H, W]`` from -1 to 1."""
        print("a host that talks")  # noqa: T201  # hosts do
        assert (mode, noise.shape[1], *noise.shape[3:]) == ("universal", 16, 44, 80)
        actions = [conditional_dict[f"{name}_cond"].float() for name in ("mouse", "keyboard")]
        assert [tuple(each.shape) for each in actions] == [(1, 4 * noise.shape[2] - 3, size) for size in (2, 4)]
        given = seen(conditional_dict["cond_concat"].float(), conditional_dict["visual_context"].float(), *actions)
        tokens = noise.transpose(1, 2).reshape(1, noise.shape[2], -1)[:, :, : wan_host.FRAME * wan_host.WIDTH]
        made = super().inference(tokens.reshape(1, -1, wan_host.WIDTH) + given)
        return [pixels(made.reshape(noise.shape[2], -1))[None] * 2 - 1]

    def _model(self, x: Tensor, start: int) -> Tensor:
        caches = zip(self.kv_cache1 or [], self.kv_cache_mouse or [], self.kv_cache_keyboard or [], strict=True)
        generator: Any = self.generator
        made: Tensor = generator(x, list(caches), current_start=start)
        return made


class VAEDecoderWrapper(nn.Module):
    """Matrix-Game's decoder, whose weights are those of the whole VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder, self.conv2 = nn.Linear(2, 2), nn.Linear(1, 1)


def get_wanx_vae_wrapper(path: str, dtype: torch.dtype) -> Any:
    """Matrix-Game's encoder."""
    assert Path(path).is_dir()
    assert dtype == torch.float16
    whole = VAEDecoderWrapper()
    whole.encoder = nn.Linear(1, 1)

    def encode(video: Tensor, device: Any, tiled: bool, tile_size: Any, tile_stride: Any) -> Tensor:
        assert video.shape[3:] == (352, 640)
        assert tiled
        return video[:, :1, ::4, ::8, ::8].repeat(1, 16, 1, 1, 1)

    clip = SimpleNamespace(encode_video=lambda image: image.mean((3, 4)))
    made: Any = SimpleNamespace(vae=SimpleNamespace(model=whole), clip=clip, encode=encode)
    made.to = lambda *_: made
    return made


def Bench_actions_universal(frames: int) -> dict[str, Tensor]:  # noqa: N802  # the host's name
    """Actions that are drawn from Python's own generator."""
    keys = [[random.random() for _ in range(4)] for _ in range(frames)]  # noqa: S311  # as the host
    return {"keyboard_condition": torch.tensor(keys), "mouse_condition": torch.zeros(frames, 2)}


class WanTransformer3DModel(Released):
    """HY-World's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = hy_world_host.WanPipeline().transformer.blocks

    def add_discrete_action_parameters(self) -> None:
        """What the trained weights have beside the base model's."""
        self.action = nn.Parameter(torch.zeros(1), requires_grad=False)


class MyVAE(Released):
    """HY-World's."""


class WanPipeline(hy_world_host.WanPipeline):
    """HY-World's, a call a chunk."""

    @classmethod
    def from_pretrained(cls, path: str, vae: MyVAE, transformer: None, **_: Any) -> Any:  # noqa: ARG003  # by name
        """As Diffusers does."""
        assert Path(path).is_dir()
        assert transformer is None
        return cls(memory=16)

    def to(self, _: Any) -> Any:
        """Where it runs."""
        return self

    def __call__(self, **given: Any) -> tuple[list[Tensor], None]:
        """A chunk's frames, ``[F, H, W, 3]`` from 0 to 1."""
        size, chunk = 4 * hy_world_host.FRAME, given["chunk_i"]
        assert (given["height"], given["width"], given["guidance_scale"]) == (704, 1280, 1.0)
        assert tuple(given["viewmats"].shape) == (1, 4, 4, 4)
        if chunk == 0:
            shape = (1, (given["num_frames"] + 3) // 4 * hy_world_host.FRAME, hy_world_host.WIDTH)
            self.latents = torch.randn(shape, generator=given["generator"]).bfloat16()
            self.init_kv_cache()
        picture = None if given["image_path"] is None else PIL.Image.open(given["image_path"])
        shift = seen(given["prompt"], picture, given["viewmats"], given["action"])
        place, past = slice(chunk * size, (chunk + 1) * size), min(4 * chunk, self.memory)
        if chunk:
            self._kv_cache = self._model(
                self.latents[:, place.start - past * hy_world_host.FRAME : place.start], 0, True
            )
        x = self.latents[:, place] + shift
        for _ in range(2):
            x = 0.5 * x + 0.5 * self._model(x, past, False)
        self.latents[:, place] = x
        frames = pixels(x.reshape(4, -1)).movedim(1, -1)
        return [frames if chunk == 0 else frames.repeat_interleave(2, 0)[:16]], None


def pose_string_to_json(words: str) -> dict[str, Any]:
    """HY-World's cameras, from words."""
    steps = [word.strip().split("-") for word in words.split(",")]
    if any(len(step) != 2 for step in steps):
        raise ValueError(f"Invalid pose command: {words}")
    count = 1 + sum(int(number) for _, number in steps)
    return {str(frame): {"extrinsic": [[frame] * 4] * 4, "K": [[1.0] * 3] * 3} for frame in range(count)}


def pose_to_input(cameras: dict[str, Any], latents: int) -> tuple[Tensor, Tensor, Tensor]:
    """View matrices, intrinsics and actions."""
    assert len(cameras) == latents
    views, intrinsics = (torch.tensor([each[key] for each in cameras.values()]) for key in ("extrinsic", "K"))
    return views, intrinsics, torch.zeros(latents)


class LongCatVideoTransformer3DModel(longcat_host.LongCatVideoTransformer3DModel, Released):
    """LongCat-Video's."""


class Part(Released):
    """Of LongCat-Video, what a test has no use for."""


class LongCatVideoPipeline(longcat_host.LongCatVideoPipeline):
    """LongCat-Video's."""

    def __init__(self, tokenizer: Part, text_encoder: Part, vae: Part, scheduler: Part, dit: Any) -> None:
        super().__init__(guided=True)
        self.dit, self.vae, self.text_encoder = dit, vae, text_encoder

    def to(self, device: Any) -> None:
        """Where it runs."""

    def generate_t2v(self, prompt: str, generator: torch.Generator, num_frames: int, **_: Any) -> Any:
        """A beginning from words, ``[1, F, H, W, 3]`` from 0 to 1."""
        noise = torch.rand(1, num_frames, 1, 1, 1, generator=generator) + seen(prompt)
        return (noise.sigmoid().expand(-1, -1, SIDE, SIDE, 3)).numpy()

    def generate_i2v(self, image: Any, prompt: str, resolution: str, **given: Any) -> Any:
        """A beginning from a picture."""
        return self.generate_t2v(prompt=prompt + str(round(10 * seen(image))), **given)

    def generate_vc(self, video: Any, prompt: str, num_cond_frames: int, num_frames: int, **given: Any) -> Any:  # type: ignore[override]
        """A segment, its history first."""
        assert given["resolution"] == "480p"
        latents = [(num_cond_frames + 3) // 4, (num_frames - num_cond_frames) // 4]
        past = torch.from_numpy(np.stack([np.asarray(frame) for frame in video])[-num_cond_frames:]) / 255
        history = past[::4, ::2, ::2, 0].reshape(1, latents[0] * longcat_host.TOKENS, -1)
        noise = torch.randn(1, latents[1] * longcat_host.TOKENS, longcat_host.WIDTH, generator=given["generator"])
        made = super().generate_vc(history.bfloat16(), (noise + seen(prompt)).bfloat16())
        new = pixels(made.reshape(latents[1], -1)).repeat_interleave(4, 0)[: num_frames - num_cond_frames]
        return torch.cat([past, new.movedim(1, -1)])[None].numpy()


UNIVERSAL = """denoising_step_list: [1000, 666]
num_frame_per_block: 3
mode: "universal"
model_kwargs: {"timestep_shift": 5.0, "model_config": "configs/distilled_model/universal"}
"""
CONFIGS = """
from types import SimpleNamespace
WAN_CONFIGS = {"i2v-A14B": SimpleNamespace(sample_shift=10.0, fast_checkpoint="transformers", causal_checkpoint="causal")}
MAX_AREA_CONFIGS = {"480*832": 480 * 832, "720*1280": 720 * 1280}
"""


def handing_on(*names: str) -> str:
    """A module that has names from here, and says something as it is imported."""
    return f"from tests.eval.fake_hosts import {', '.join(names)}\nprint('a host that talks')\n"


FILES: dict[str, dict[str, str]] = {
    "lingbot_world": {"wan/__init__.py": handing_on("WanI2VCausal"), "wan/configs/__init__.py": CONFIGS},
    "matrix_game": {
        "omegaconf.py": OMEGACONF,
        "configs/inference_yaml/inference_universal.yaml": UNIVERSAL,
        "configs/inference_yaml/inference_gta_drive.yaml": UNIVERSAL.replace(
            '"universal"\nmodel', '"gta_drive"\nmodel'
        ),
        "utils/wan_wrapper.py": handing_on("WanDiffusionWrapper"),
        "utils/conditions.py": handing_on("Bench_actions_universal"),
        "wan/vae/wanx_vae.py": handing_on("get_wanx_vae_wrapper"),
        "demo_utils/vae_block3.py": handing_on("VAEDecoderWrapper"),
        "pipeline/__init__.py": handing_on("CausalInferencePipeline"),
    },
    "hy_world": {
        "wan/__init__.py": "",
        "wan/inference/pipeline_wan_w_mem_relative_rope.py": handing_on("WanPipeline"),
        "wan/inference/helper.py": handing_on("MyVAE"),
        "wan/models/dits/arwan_w_action_w_mem_relative_rope.py": handing_on("WanTransformer3DModel"),
        "hyvideo/generate.py": handing_on("pose_string_to_json", "pose_to_input"),
    },
    "longcat_video": {
        "transformers.py": handing_on("Part as AutoTokenizer", "Part as UMT5EncoderModel"),
        "longcat_video/pipeline_longcat_video.py": handing_on("LongCatVideoPipeline"),
        "longcat_video/modules/autoencoder_kl_wan.py": handing_on("Part as AutoencoderKLWan"),
        "longcat_video/modules/scheduling_flow_match_euler_discrete.py": handing_on(
            "Part as FlowMatchEulerDiscreteScheduler"
        ),
        "longcat_video/modules/longcat_video_dit.py": handing_on("LongCatVideoTransformer3DModel"),
    },
}


def write(host: str, folder: Path) -> Path:
    """A checkout; released weights lie in its ``weights``, scenes in its ``scenes``."""
    for name, text in FILES[host].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        for package in list((folder / name).relative_to(folder).parents)[:-1]:
            (folder / package / "__init__.py").touch()
    for name, state in _weights(host).items():
        (folder / "weights" / name).parent.mkdir(parents=True, exist_ok=True)
        save_file({key: torch.flip(x, [0]).contiguous() for key, x in state.items()}, folder / "weights" / name)
    for number in range(2):
        _write_scene(host, folder / "scenes", number)
    return folder


def _weights(host: str) -> dict[str, dict[str, Tensor]]:
    """State dicts by file."""
    if host == "lingbot_world":
        return {f"transformers/{WEIGHTS}": lingbot_world_host.WanI2VCausal(18, 6).model.state_dict()}
    if host == "matrix_game":
        wrapper = WanDiffusionWrapper("configs/distilled_model/universal", 5.0, True)
        return {"base_distilled_model/base_distill.safetensors": wrapper.state_dict()}
    if host == "hy_world":
        model = WanTransformer3DModel()
        plain = dict(model.state_dict())
        trained = {f"model._fsdp_wrapped_module.{name}": x for name, x in plain.items()} | {
            "model.action": torch.ones(1)
        }
        base = {f"Wan2.2-TI2V-5B-Diffusers/{WEIGHTS}": {"x": torch.zeros(1)}}
        return base | {f"wan_transformer/{WEIGHTS}": plain, f"wan_distilled_model/{WEIGHTS}": trained}
    parts = {f"{name}/{WEIGHTS}": {"x": torch.zeros(1)} for name in ("tokenizer", "text_encoder", "vae", "scheduler")}
    return parts | {f"dit/{WEIGHTS}": LongCatVideoTransformer3DModel().state_dict()}


def _write_scene(host: str, scenes: Path, number: int) -> None:
    draw = np.random.default_rng(number)
    image = PIL.Image.fromarray(draw.integers(0, 256, (24, 40, 3), dtype=np.uint8))
    if host == "matrix_game":
        scenes.mkdir(exist_ok=True)
        image.save(scenes / f"{number:04d}.png")
        return
    folder = scenes / f"{number:02d}"
    folder.mkdir(parents=True)
    (folder / "prompt.txt").write_text(f"room {number}\n")
    if host == "lingbot_world":
        image.save(folder / "image.jpg")
        np.save(folder / "poses.npy", np.tile(np.eye(4), (200, 1, 1)) * (1 + number))
        np.save(folder / "intrinsics.npy", np.ones((200, 4)))
    if host == "hy_world" and number == 1:
        (folder / "pose.json").write_text(json.dumps(pose_string_to_json("w-3, left-28")))


@contextmanager
def imported(folder: Path) -> Iterator[None]:
    """Its modules while inside, and none of them afterwards."""
    path, modules = sys.path.copy(), set(sys.modules)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            places = (getattr(sys.modules[name], "__file__", None), *getattr(sys.modules[name], "__path__", ()))
            if any(place and Path(place).is_relative_to(folder) for place in places):
                del sys.modules[name]
