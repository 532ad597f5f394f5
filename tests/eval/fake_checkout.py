"""A checkout of Causal-Forcing in small, written to disk: its pipeline by its names, its configuration, and weights."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

LATENT, PIXELS = (16, 4, 4), (32, 32)

PIPELINE = '''
import torch
from torch import nn
from torch.nn.functional import interpolate

from tests.models.causal_forcing_host import rewind
from tests.models.wan_host import FRAME, WIDTH, Model, SelfAttention, entry


class Generator(nn.Module):
    """Calls its model by keyword, as the host's wrapper is called."""

    def __init__(self):
        super().__init__()
        self.model = Model([SelfAttention(seed) for seed in range(2)])

    def forward(self, noisy_image_or_video, kv_cache, current_start):
        return self.model(noisy_image_or_video, kv_cache, current_start)


class CausalInferencePipeline(nn.Module):
    def __init__(self, args, device):
        super().__init__()
        self.generator, self.vae = Generator(), nn.Identity()
        self.frame_seq_length, self.num_frame_per_block = FRAME, args.num_frame_per_block
        self.steps, self.local_attn_size, self.kv_cache1 = len(args.denoising_step_list), -1, None

    def _initialize_kv_cache(self, batch_size, dtype, device):
        self.kv_cache1 = [entry(batch_size, 21 * FRAME, device, dtype) for _ in self.generator.model.blocks]

    def inference(self, noise, text_prompts):
        assert noise.dtype == torch.bfloat16 and len(text_prompts) == 1
        if self.kv_cache1 is None:
            self._initialize_kv_cache(1, noise.dtype, noise.device)
            self.crossattn_cache = [{"is_init": False}]
        else:
            rewind(self.kv_cache1)
        size, chunks = self.num_frame_per_block * FRAME, []
        shift = sum(map(ord, text_prompts[0])) % 7 / 7
        for number, x in enumerate(noise.reshape(1, -1, WIDTH).split(size, dim=1)):
            for _ in range(self.steps):
                x = 0.5 * x + 0.5 * self.generator(x + shift, kv_cache=self.kv_cache1, current_start=number * size)
                x = x + 0.1 * torch.randn_like(x)
            self.generator(x, kv_cache=self.kv_cache1, current_start=number * size)
            chunks.append(x)
        latents = torch.cat(chunks, 1).reshape(noise.shape)[0, :, :3].float().sigmoid()
        frames = torch.cat([latents[:1], latents[1:].repeat_interleave(4, 0)])
        return interpolate(frames, (32, 32)).unsqueeze(0)
'''

OMEGACONF = """
from pathlib import Path
from types import SimpleNamespace


class OmegaConf:
    @staticmethod
    def load(path):
        lines = [line.partition(": ") for line in Path(path).read_text("utf-8").splitlines()]
        if lines[0][0].startswith("- "):
            return [key for key, _, _ in lines]
        return {key: eval(value) for key, _, value in lines}

    @staticmethod
    def merge(*parts):
        return SimpleNamespace(**{key: value for part in parts for key, value in part.items()})
"""


def write(folder: Path) -> Path:
    """A checkout; what its requirements install lies in it, too."""
    for name, text in {
        "pipeline/__init__.py": PIPELINE,
        "omegaconf.py": OMEGACONF,
        "configs/default_config.yaml": "num_frame_per_block: 1\n",
        "configs/causal_forcing_dmd_chunkwise.yaml": "num_frame_per_block: 3\ndenoising_step_list: [1000, 500]\n",
        "configs/many_steps.yaml": "num_frame_per_block: 3\n",
        "configs/list.yaml": "- 1000\n",
        "prompts.txt": "a door\n\na window\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "configs" / "torn.yaml").write_bytes(b"\xff\xfe")
    with imported(folder):
        generator = importlib.import_module("pipeline").Generator()
    state = {
        f"generator.{name}".removeprefix("generator."): x.contiguous() for name, x in generator.state_dict().items()
    }
    save_file({name: torch.flip(x, [0]).contiguous() for name, x in state.items()}, folder / "weights.safetensors")
    return folder


@contextmanager
def imported(folder: Path) -> Iterator[None]:
    """Its modules while inside, and none of them afterwards."""
    before = sys.path.copy()
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = before
        for name in ("pipeline", "omegaconf"):
            sys.modules.pop(name, None)
