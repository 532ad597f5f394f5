"""Random weights of small models, saved as the hosts' own were released, and scenes as their examples lie."""

from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from safetensors.torch import save_file

from tests.hosts.live import randomise
from tests.hosts.longcat_video import Load, Size, transformer


def scene(folder: Path, **arrays: np.ndarray) -> Path:
    """A scene with a picture, a prompt and arrays."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    PIL.Image.fromarray(draw.integers(0, 256, (48, 80, 3), dtype=np.uint8)).save(folder / "image.png")
    (folder / "prompt.txt").write_text("a street at night\n")
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return folder.parent


def lingbot(load: Load, folder: Path) -> None:
    """The distilled model, as Diffusers saves one."""
    model = load("wan.modules.model_fast").WanModelFast(
        model_type="i2v", in_dim=36, dim=128, ffn_dim=64, freq_dim=32, num_heads=4, num_layers=2,
        local_attn_size=18, sink_size=6,
    )  # fmt: skip
    randomise(model)
    model.to(torch.bfloat16).save_pretrained(folder / "transformers")


def generator(wrapper: torch.nn.Module, path: Path) -> None:
    """A wrapper's state dict."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: x.to(torch.bfloat16).contiguous() for name, x in wrapper.state_dict().items()}, path)


def hy(load: Load, folder: Path) -> None:
    """The base model by Diffusers, the transformer's configuration, and the trained weights with their prefix."""
    diffusers = load("diffusers")
    base = folder / "Wan2.2-TI2V-5B-Diffusers"
    vae = diffusers.AutoencoderKLWan(
        base_dim=2, decoder_base_dim=2, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, is_residual=True, in_channels=12,
        out_channels=12, patch_size=2, scale_factor_temporal=4, scale_factor_spatial=16, latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4, temperal_downsample=[False, True, True],
    )  # fmt: skip
    kind = load("wan.inference.pipeline_wan_w_mem_relative_rope").WanPipeline
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipeline = kind(tokenizer=tokenizer(load), text_encoder=encoder(load, 24), vae=vae, scheduler=scheduler)
    pipeline.save_pretrained(base)
    model = load("wan.models.dits.arwan_w_action_w_mem_relative_rope").WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=24,
        freq_dim=32, ffn_dim=32, num_layers=2, rope_max_seq_len=64,
    )  # fmt: skip
    model.save_pretrained(folder / "wan_transformer")
    model.add_discrete_action_parameters()
    randomise(model)
    (folder / "wan_distilled_model").mkdir()
    trained = {f"model._fsdp_wrapped_module.{name}": x.contiguous() for name, x in model.state_dict().items()}
    save_file(trained, folder / "wan_distilled_model" / "model.safetensors")


def longcat(load: Load, folder: Path, size: Size) -> None:
    """Five folders, each as its library saves it."""
    vae = load("longcat_video.modules.autoencoder_kl_wan").AutoencoderKLWan(
        base_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1
    )
    scheduler = load("longcat_video.modules.scheduling_flow_match_euler_discrete").FlowMatchEulerDiscreteScheduler()
    parts = {
        "tokenizer": tokenizer(load),
        "text_encoder": encoder(load, size.text[1]),
        "vae": vae,
        "scheduler": scheduler,
    }
    for name, each in {**parts, "dit": transformer(load, size)}.items():
        each.save_pretrained(folder / name)


def encoder(load: Load, channels: int) -> Any:
    """A text encoder."""
    library = load("transformers")
    sizes = {"vocab_size": 32, "d_model": channels, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    return library.UMT5EncoderModel(library.UMT5Config(**sizes))


def tokenizer(load: Load) -> Any:
    """One of a few words."""
    library, special = load("tokenizers"), {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    words = (*special.values(), "a", "street", "at", "night", "blurred")
    vocabulary = {word: number for number, word in enumerate(words)}
    made = library.Tokenizer(library.models.WordLevel(vocabulary, unk_token=special["unk_token"]))
    made.pre_tokenizer = library.pre_tokenizers.Whitespace()
    return load("transformers").PreTrainedTokenizerFast(tokenizer_object=made, **special)
