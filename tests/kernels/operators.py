"""A call of every registered operator, on small inputs: what the operator tests loop over."""

import importlib
import json
import pkgutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import quantwm_kernels
from quantwm_core import methods as core_methods
from quantwm_core.method import scheme as make_scheme
from quantwm_kernels import affine, codebook, psac, scales, statistics
from quantwm_kernels.methods import seal, seal_chunk

NAMESPACE = "quantwm"


@dataclass(frozen=True)
class Call:
    """Arguments of one call.

    Attributes:
        arguments: Positional arguments.
        written: Positions of arguments that the operator writes.
    """

    arguments: tuple[Any, ...]
    written: tuple[int, ...] = ()


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers of their own generator."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def moment(heads: int = 2, channels: int = 8) -> Tensor:
    """Second moment of a few queries, ``[1, heads, channels, channels]``."""
    return statistics.second_moment(normal(1, heads, 20, channels, seed=3), heads).mean


def _specification(method: str, **more: object) -> str:
    made = core_methods.get(method)
    return json.dumps({"method": method, "parameters": asdict(made), "label": "keys", "previous": None, **more})  # type: ignore[call-overload]  # a method is a dataclass, which its protocol does not say


def _seal() -> Call:
    values = normal(1, 2, 32, 8, dtype=torch.bfloat16)
    return Call((values, moment(), 20, [], _specification("quantwm", kind="keys")))


def _decode(method: str) -> Call:
    sealed = seal(core_methods.get(method), "keys", normal(1, 2, 32, 8))
    names = list(sealed.arrays)
    text = json.dumps(
        {"method": method, "parameters": dict(sealed.parameters), "shape": list(sealed.shape), "names": names}
    )
    workspace = torch.zeros(1, 40, 2, 8, dtype=torch.bfloat16)
    return Call((list(sealed.arrays.values()), text, workspace[:, 4:24].transpose(1, 2), 3, 23), written=(2,))


def _psac(threshold: float, bits: int = 8) -> Call:
    basis, energies = statistics.principal_basis(moment(), 4)
    return Call((normal(1, 2, 70, 8), basis, energies, threshold, bits))


def _decode_psac(threshold: float, bits: int = 8) -> Call:
    return Call((*psac.encode(*_psac(threshold, bits).arguments), 70, 5, 69))


def _attend_packed(*methods: str, rotated: bool = False) -> Call:
    units = [
        seal_chunk(make_scheme(method), normal(1, 2, 12, 8, seed=seed), normal(1, 2, 12, 8, seed=seed + 1))
        for seed, method in enumerate(methods)
    ]
    sealed = [tensor for unit in units for each in (unit.keys, unit.values) for tensor in each.arrays.values()]
    text = json.dumps([(unit.keys.specification, unit.values.specification, 2, 11) for unit in units])
    queries = normal(1, 5, 4, 8).transpose(1, 2).bfloat16()
    plain = [normal(1, 2, 3, 8, dtype=torch.bfloat16) for _ in range(2)]
    return Call((queries, sealed, plain, text, 0.3, rotated))


def _choose(metric: bool) -> Call:
    keys = normal(1, 2, 30, 8)
    table = codebook.fit(keys, 6)
    return Call((keys, table, 4, torch.ones(1, 2, 8), moment() if metric else None, 3))


CALLS: dict[str, tuple[Callable[[], Call], ...]] = {
    "pack_codes": (lambda: Call((torch.arange(7, dtype=torch.uint8).view(1, 7) % 4,)),),
    "unpack_codes": (lambda: Call((torch.tensor([[57, 2]], dtype=torch.uint8), 7)),),
    "encode_scales": (lambda: Call((normal(2, 5, 3).abs(),)),),
    "decode_scales": (lambda: Call(scales.encode(normal(2, 5, 3).abs())),),
    "encode_affine": (lambda: Call((normal(2, 5, 24), 8, 1)), lambda: Call((normal(3, 2, 7, 8)[:, 0], 4, 3))),
    "decode_affine": (lambda: Call((*affine.encode(normal(2, 5, 24), 8), 1, 4)),),
    "fit_codebook": (
        lambda: Call((normal(1, 2, 30, 8), 6, None, 3, None)),
        lambda: Call((normal(1, 2, 30, 8), 6, moment().diagonal(dim1=-2, dim2=-1).contiguous(), 0, normal(1, 2, 6, 8))),
    ),
    "nearest_centroids": (lambda: Call((normal(1, 2, 30, 8), normal(1, 2, 6, 8), moment(), 3)),),
    "second_moment": (lambda: Call((normal(1, 5, 6, 8).transpose(1, 2).bfloat16(), 2)),),
    "fold_moment": (
        lambda: Call((moment(), 20, moment() * 2, 10, None)),
        lambda: Call((moment(), 20, moment() * 2, 10, 0.5)),
    ),
    "sensitivity": (lambda: Call((moment(),)),),
    "normalised_moment": (lambda: Call((moment(),)), lambda: Call((torch.zeros(1, 1, 4, 4),))),
    "principal_basis": (lambda: Call((moment(), 3)),),
    "choose_centroids": (lambda: _choose(metric=False), lambda: _choose(metric=True)),
    "project_error": (lambda: Call(_psac(0.0).arguments[:2]),),
    "encode_psac": (lambda: _psac(0.0), lambda: _psac(1.0), lambda: _psac(0.0, bits=4)),
    "decode_psac": (lambda: _decode_psac(0.0), lambda: _decode_psac(1.0), lambda: _decode_psac(0.0, bits=4)),
    "attend": (
        lambda: Call((normal(1, 4, 5, 8), normal(1, 2, 7, 8), normal(1, 2, 7, 8, seed=1))),
        lambda: Call((normal(1, 4, 5, 8), normal(1, 2, 7, 8), normal(1, 2, 7, 6, seed=1))),
    ),
    "attend_packed": (
        lambda: _attend_packed("rtn", "quantwm"),
        lambda: _attend_packed("klt", "bf16", rotated=True),
    ),
    "attention_logits": (lambda: Call((normal(1, 4, 5, 8), normal(1, 2, 7, 8))),),
    "logit_error": (lambda: Call((normal(2, 5, 7), normal(2, 5, 7, seed=1))),),
    "selection_shift": (lambda: Call((normal(2, 5, 7), normal(2, 5, 7, seed=1), 2)),),
    "attention_kl": (lambda: Call((normal(2, 5, 7), normal(2, 5, 7, seed=1))),),
    "seal": (_seal,),
    "decode": (lambda: _decode("bf16"), lambda: _decode("rtn")),
}


def registered() -> set[str]:
    """Names of all operators of the project."""
    for module in pkgutil.walk_packages(quantwm_kernels.__path__, "quantwm_kernels."):
        if not module.name.startswith("quantwm_kernels.triton."):  # kernels register nothing, and need Triton
            importlib.import_module(module.name)
    names = torch._C._dispatch_get_all_op_names()
    return {name.removeprefix(f"{NAMESPACE}::") for name in names if name.startswith(f"{NAMESPACE}::")}


def tensors(value: Any) -> list[Tensor]:
    """All tensors in nested arguments or results."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors(item)]
    return []
