"""What users do to a host's weights before anything is attached: move them, adapt them, quantize them."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

Treatment = Callable[[nn.Module], nn.Module]


def moved_by_leaf(model: nn.Module) -> nn.Module:
    """Each layer's weights brought for its own call, by diffusers."""
    return _moved(model, offload_type="leaf_level")


def moved_by_block(model: nn.Module) -> nn.Module:
    """Blocks of layers, likewise."""
    return _moved(model, offload_type="block_level", num_blocks_per_group=1)


def _moved(model: nn.Module, **how: object) -> nn.Module:
    hooks = pytest.importorskip("diffusers.hooks")
    place = torch.device("cpu")
    hooks.apply_group_offloading(model, onload_device=place, offload_device=place, **how)
    return model


def adapted(model: nn.Module) -> nn.Module:
    """LoRA of the blocks' linear layers, by peft."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=_linear(model), init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        made: nn.Module = peft.inject_adapter_in_model(config, model)
    return made.eval().requires_grad_(False)


def quantized(model: nn.Module) -> nn.Module:
    """Those layers in INT8, by PyTorch, which takes FP32 for it."""
    quantization = torch.ao.quantization
    settings = dict.fromkeys(_linear(model), quantization.default_dynamic_qconfig)
    made: nn.Module = quantization.quantize_dynamic(model, settings, inplace=True)
    return made


def _linear(model: nn.Module) -> list[str]:
    """Names of the linear layers of the blocks."""
    names = [name for name, part in model.named_modules() if isinstance(part, nn.Linear) and "blocks." in name]
    if not names:
        pytest.skip("the host has linear layers of its own")
    return names


TREATMENTS: dict[str, Treatment] = {each.__name__: each for each in (moved_by_leaf, moved_by_block, adapted, quantized)}
