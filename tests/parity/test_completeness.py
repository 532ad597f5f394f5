"""Nothing is published here without a namesake in quantwm-core, and no GPU kernel without a parity test."""

import importlib
import importlib.util
import inspect
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch._library.custom_ops import CustomOpDef

import quantwm_core
import quantwm_kernels
from tests.parity.gate import declared_operators, missing_tests

KERNELS = "triton"
HAS_TRITON = importlib.util.find_spec("triton") is not None
MODULES = {
    info.name.partition(".")[2]: importlib.import_module(info.name)
    for info in pkgutil.walk_packages(quantwm_kernels.__path__, "quantwm_kernels.")
    if HAS_TRITON or not info.name.startswith(f"quantwm_kernels.{KERNELS}.")
}
# What exists only because tensors do.
WITHOUT_NAMESAKE = {
    "array_shapes": "what a kernel must know of a sealed tensor",
    "attention_passes": "many units in one launch",
    "arrival": "NumPy has no streams",
    "bridge": "crosses between torch and NumPy",
    "launch": "NumPy launches nothing",
    "dense_attention": "attention, in torch",
    "packed_attention": "attention, over many units in one launch",
    "reading": "many units in one launch",
    "reading_batches": "many units in one launch",
    "reading_launches": "NumPy launches nothing",
    "recipe": "what a kernel must know of a sealed tensor",
    "description": "what a kernel must know of a sealed tensor",
    "sealing": "NumPy seals at once",
    "triton": "the folder of the kernels",
    "triton.arithmetic": "what NumPy has a word for",
    "triton.assignment": "the kernels of codebook",
    "triton.baselines": "methods of core, in torch operations",
    "triton.frame": "the kernels of codebook",
    "triton.grid": "what the kernels of affine share",
    "triton.groups": "what the kernels of affine and symmetric share",
    "triton.projection": "the kernels' part of psac that affine does",
    "triton.residual": "what the kernels of affine and symmetric share",
    "triton.online_softmax": "the loops of a program of attention",
    "triton.principal": "the kernel of statistics",
    "triton.layer": "keys and values as one batch",
    "triton.sealing": "all of a layer in shared launches",
    "triton.clustered_sealing": "all of a layer in shared launches",
    "triton.compensation": "the reading half of psac",
    "triton.reading": "many units in one launch",
    "triton.replay": "launches are recorded, not computed",
    "triton.tile": "the reading half of clustered, minmax and psac",
    "triton.grouped": "the reading half of clustered",
    "triton.rows": "NumPy has no threads",
    "triton.side_stream": "NumPy has no streams",
    "triton.span": "the loops of a program",
    "triton.transform_sealing": "transform on a device, all streams together",
    "methods.begin_chunk": "NumPy seals at once",
    "methods.decode_into": "core returns an array, a workspace is written in place",
    "methods.seal": "a method of core's Method, which here is a function",
    "methods.seal_chunk": "a method of core's Scheme, which here is a function",
    "chunk.described": "what a list of tensors and what travels beside it make together",
    "chunk.description": "what travels beside a list of tensors",
    "chunk.storage_nbytes": "a tensor's storage may exceed the tensor",
    "tensor_file.TensorFile": "NumPy reads a file as a whole",
    "tensor_file.available_device": "NumPy has no devices",
    "tensor_file.opened": "NumPy reads a file as a whole",
    "tensor_file.write_tensors": "chunk.write_arrays, for tensors of any device",
    "triton.kernel": "NumPy launches nothing",
}

# Launchers that take all streams of a layer at once, and what passes between them.
OF_LAYERS = {
    "affine": "Codes encode_layer largest_ranges",
    "basis": "Rows Stored flattened kept_rows",
    "codebook": "Frame add_members assign begin framed magnitudes_of prepare rank refine",
    "directions": "packed shifts_of",
    "psac": "laid_out projection_of quantize sparse_streams",
    "qsac": "choose_layer",
    "statistics": "write_sensitivity",
    "symmetric": "encode_layer",
}
if HAS_TRITON:
    WITHOUT_NAMESAKE |= {
        f"{KERNELS}.{module}.{name}": "on all streams of a layer"
        for module, names in OF_LAYERS.items()
        for name in names.split()
    }


DECLARED = {
    path.stem.removeprefix("test_"): declared_operators(path.read_text())
    for path in Path(__file__).parent.glob("test_*.py")
}


def operators(module: ModuleType) -> dict[str, CustomOpDef]:
    """Operators that a module registers, by name."""
    found = [value for value in vars(module).values() if isinstance(value, CustomOpDef)]
    return {operator._name: operator for operator in found}


def published(module: ModuleType) -> list[str]:
    """Public functions and classes that a module defines, less the shape rules."""
    return [
        name
        for name, value in vars(module).items()
        if (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
        and not name.startswith("_")
        and not name.endswith(("_shape", "_shapes"))
    ]


@pytest.mark.parametrize("name", MODULES)
def test_what_is_published_has_a_namesake(name: str) -> None:
    if name in WITHOUT_NAMESAKE:
        pytest.skip(WITHOUT_NAMESAKE[name])
    namesake = importlib.import_module(f"{quantwm_core.__name__}.{name.removeprefix(f'{KERNELS}.')}")
    absent = [
        each
        for each in published(MODULES[name])
        if f"{name}.{each}" not in WITHOUT_NAMESAKE and not hasattr(namesake, each)
    ]
    assert absent == []


def test_exceptions_are_still_needed() -> None:
    everything = set(MODULES) | {f"{name}.{each}" for name, module in MODULES.items() for each in published(module)}
    assert WITHOUT_NAMESAKE.keys() <= everything


def test_every_module_of_operators_was_found() -> None:
    found = {name for name, module in MODULES.items() if operators(module)}
    assert found >= {"packing", "scales", "affine", "codebook", "statistics", "qsac", "psac", "attention", "methods"}


def test_every_gpu_kernel_has_a_parity_test() -> None:
    kernels = [
        (name, operator)
        for name, module in MODULES.items()
        for operator, definition in operators(module).items()
        if torch._C._dispatch_has_kernel_for_dispatch_key(definition._qualname, "CUDA")
    ]
    assert missing_tests(kernels, DECLARED) == []


def test_what_a_parity_test_declares_is_an_operator_of_its_module() -> None:
    declared = {(module, name) for module, names in DECLARED.items() for name in names}
    assert declared <= {(name, operator) for name, module in MODULES.items() for operator in operators(module)}
