"""Sealing and reading with any method of :mod:`quantwm_core.methods`, third-party ones included.

A sealed tensor cannot cross an operator, so it travels as a flat list of tensors and a text, its *specification*:
JSON with method, parameters, shape and the names of the arrays in order. :func:`seal` cannot know the number formats
of every method's arrays beforehand, so its operator returns their bytes, and the specification as bytes before them. An
operator may not return what it was given either: of an array that is the unit before's, it says so and returns nothing.

On a GPU, sealing outside of a compiled graph goes around the operators, whose text would have to be waited for:
:func:`begin_chunk` launches, and says only when asked whether the unit could be sealed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import BFloat16, Float
from torch import Tensor

from quantwm_core import chunk as core_chunk
from quantwm_core import domain, methods
from quantwm_core import statistics as core_statistics
from quantwm_core.chunk import Kind
from quantwm_core.errors import DeviceError, DtypeError, RangeError, ShapeError, StateError
from quantwm_core.method import Method, Scheme, decode_tensor
from quantwm_kernels.bridge import check_detached, owned, to_numpy
from quantwm_kernels.chunk import SealedChunk, SealedTensor, described, description
from quantwm_kernels.launch import check_available
from quantwm_kernels.reading_launches import read_single
from quantwm_kernels.sealing import ACCEPTED, Asked, Finished, PendingChunk, PendingTensors
from quantwm_kernels.statistics import QueryMoment


def decoded_shape(sealed: Sequence[int], start: int, stop: int) -> tuple[int, ...]:
    """Shape of tokens ``start`` to ``stop`` of a sealed ``[B, H, N, D]``.

    Raises:
        RangeError: The range does not lie inside the unit.

    >>> decoded_shape((1, 2, 8, 64), 2, 5)
    (1, 2, 3, 64)
    """
    batch, heads, tokens, channels = sealed
    if not 0 <= start <= stop <= tokens:
        raise RangeError(f"tokens {start} to {stop} of a sealed unit of {tokens}: need 0 <= start <= stop <= {tokens}")
    return batch, heads, stop - start, channels


@torch.library.custom_op("quantwm::seal", mutates_args=())
def _seal(
    values: Tensor, moment: Tensor | None, moment_queries: int, previous: Sequence[Tensor], specification: str
) -> list[Tensor]:
    asked = json.loads(specification)
    label = asked["label"]
    method, kind = methods.get(asked["method"], **asked["parameters"]), asked["kind"]
    exact = domain.to_bf16(to_numpy(values, label), label, rank=4)
    known = None
    if moment is not None:
        known = core_statistics.QueryMoment(to_numpy(moment, f"{label}, query moment"), moment_queries)
        if kind == "keys":
            core_statistics.check_moment(known.mean, f"{label}, query moment")
    before = SealedTensor(**described(asked["previous"], previous)).to_core() if asked["previous"] else None
    sealed = method.seal(kind, exact, known, before)
    names = method.array_names(kind)
    if strangers := sealed.arrays.keys() - set(names):
        raise StateError(f"{label}: method {method.name!r} wrote arrays {sorted(strangers)} that it does not list")
    given = {} if before is None else before.arrays
    layout = {
        name: None if array is given.get(name) else (array.dtype.name, array.shape)
        for name, array in sealed.arrays.items()
    }
    text = _answer(sealed, layout)
    missing = np.zeros(0, np.uint8)
    arrays = [sealed.arrays[name] if layout.get(name) else missing for name in names]
    return [owned(text), *(owned(np.ascontiguousarray(array).reshape(-1).view(np.uint8)) for array in arrays)]


@_seal.register_kernel("cuda")
def _seal_by_kernels(
    values: Tensor, moment: Tensor | None, moment_queries: int, previous: Sequence[Tensor], specification: str
) -> list[Tensor]:
    asked = json.loads(specification)
    method = methods.get(asked["method"], **asked["parameters"])
    known = None if moment is None else QueryMoment(moment, moment_queries)
    before = SealedTensor(**described(asked["previous"], previous)) if asked["previous"] else None
    (sealed,) = _begin([Asked(method, asked["kind"], values, asked["label"], before)], known).wait()
    names = {dtype: name for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
    given = {} if before is None else before.arrays
    layout = {
        name: None if array is given.get(name) else (names[array.dtype], tuple(array.shape))
        for name, array in sealed.arrays.items()
    }
    # An operator's results may not share storage, not even that of absent arrays.
    arrays = [
        sealed.arrays[name] if layout.get(name) else values.new_empty(0, dtype=torch.uint8)
        for name in method.array_names(asked["kind"])
    ]
    text = owned(_answer(sealed, layout)).to(values.device)
    return [text, *(array.contiguous().view(-1).view(torch.uint8) for array in arrays)]


@_seal.register_fake
def _(
    values: Tensor, moment: Tensor | None, moment_queries: int, previous: Sequence[Tensor], specification: str
) -> list[Tensor]:
    del moment, moment_queries, previous
    asked = json.loads(specification)
    names = methods.get(asked["method"], **asked["parameters"]).array_names(asked["kind"])
    context = torch.library.get_ctx()
    sizes = [context.new_dynamic_size(min=0) for _ in range(1 + len(names))]
    return [values.new_empty((size,), dtype=torch.uint8) for size in sizes]


@torch.library.custom_op("quantwm::decode", mutates_args=("out",))
def _decode(arrays: Sequence[Tensor], specification: str, out: Tensor, start: int, stop: int) -> None:
    sealed = SealedTensor(**described(json.loads(specification), arrays))
    target = to_numpy(out, "workspace")
    np.copyto(target, decode_tensor(sealed.to_core(), start, stop))


@_decode.register_kernel("cuda")
def _(arrays: Sequence[Tensor], specification: str, out: Tensor, start: int, stop: int) -> None:
    check_detached(out, "workspace")
    for tensor in arrays:
        check_detached(tensor, "sealed array")
    sealed = SealedTensor(**described(json.loads(specification), arrays))
    read_single(sealed, out, start, stop)


@_decode.register_fake
def _(arrays: Sequence[Tensor], specification: str, out: Tensor, start: int, stop: int) -> None:
    pass


def seal(
    method: Method,
    kind: Kind,
    values: Float[Tensor, "batch heads tokens channels"],
    moment: QueryMoment | None = None,
    previous: SealedTensor | None = None,
    label: str = "",
) -> SealedTensor:
    """Encode a unit's keys or values.

    Args:
        method: A method that :func:`quantwm_core.methods.get` can make.
        kind: ``"keys"`` or ``"values"``.
        values: BF16, FP16 or FP32 ``[B, H, N, D]``; rounded to BF16 first.
        moment: Queries seen before the unit began, or None.
        previous: The same tensor of the unit before, for warm starts.
        label: Where it belongs, for messages: ``"layer 3, chunk 7"``.

    Returns:
        A tensor that shares no memory with its input.

    Raises:
        DtypeError, ShapeError, DomainError: The input cannot be sealed, or the moment does not fit it; the message names
            ``label`` and ``kind``.
        StateError, DeviceError: A tensor requires grad, or lives where no implementation serves it.

    >>> sealed = seal(methods.get("rtn"), "keys", torch.ones(1, 1, 4, 64))
    >>> sealed.nbytes, sealed.arrays["scales"].dtype
    (73, torch.float8_e4m3fn)
    """
    where = f"{label}, {kind}" if label else kind
    if values.is_cuda and not torch.compiler.is_compiling():
        return _begin([Asked(method, kind, values, where, previous)], moment).wait()[0]
    if kind == "keys" and moment is not None and values.ndim == 4:  # the reference refuses other shapes of values
        _check_moment(moment, values, where)
    asked: dict[str, Any] = {
        "method": method.name,
        "parameters": asdict(cast("Any", method)),
        "kind": kind,
        "label": where,
        "previous": None,
    }
    before: list[Tensor] = []
    if previous is not None:
        asked["previous"] = description(previous.method, previous.parameters, previous.shape, previous.arrays)
        before = list(previous.arrays.values())
    mean, queries = (None, 0) if moment is None else moment
    text, *buffers = _seal(values, mean, queries, before, json.dumps(asked))
    answer = json.loads(bytes(to_numpy(text.cpu())))
    given = {} if previous is None else previous.arrays
    by_name = dict(zip(method.array_names(kind), buffers, strict=True))
    arrays = [
        by_name[name].view(getattr(torch, stored[0])).view(stored[1]) if stored else given[name]
        for name, stored in answer["layout"].items()
    ]
    return SealedTensor(**described(answer, arrays))


def decode_into(
    sealed: SealedTensor, out: BFloat16[Tensor, "batch heads range channels"], start: int = 0, stop: int | None = None
) -> None:
    """Reconstruct tokens ``start`` to ``stop`` (end by default) of a unit into given memory.

    Args:
        sealed: What :func:`seal` returned.
        out: BF16 ``[B, H, stop - start, D]`` of any strides, such as a transposed view of a ``[B, S, H, D]`` workspace.
        start: First token, counted inside the unit.
        stop: Token after the last.

    Raises:
        RangeError: The range does not lie inside the unit.
        ShapeError, DtypeError: ``out`` does not fit.
        StateError, DeviceError: ``out`` requires grad, or lives where no implementation serves it.

    >>> sealed = seal(methods.get("bf16"), "keys", torch.arange(8.0).view(1, 1, 2, 4))
    >>> out = torch.empty(1, 1, 1, 4, dtype=torch.bfloat16)
    >>> decode_into(sealed, out, start=1)
    >>> out
    tensor([[[[4., 5., 6., 7.]]]], dtype=torch.bfloat16)
    """
    end = sealed.shape[2] if stop is None else stop
    shape = decoded_shape(sealed.shape, start, end)
    if tuple(out.shape) != shape:
        raise ShapeError(f"workspace: got shape {tuple(out.shape)}, need {shape} for tokens {start} to {end}")
    if out.dtype is not torch.bfloat16:
        raise DtypeError(f"workspace: got {out.dtype}, need torch.bfloat16")
    if out.is_cuda and not torch.compiler.is_compiling():
        check_detached(out, "workspace")
        read_single(sealed, out, start, end)
    else:
        _decode(list(sealed.arrays.values()), sealed.specification, out, start, end)


def seal_chunk(
    scheme: Scheme,
    keys: Float[Tensor, "batch heads tokens channels"],
    values: Float[Tensor, "batch heads tokens channels"],
    moment: QueryMoment | None = None,
    previous: SealedChunk | None = None,
    start: int = 0,
    label: str = "",
) -> SealedChunk:
    """Encode a unit of one layer, keys and values; :meth:`quantwm_core.method.Scheme.seal` on tensors.

    Raises:
        DtypeError, ShapeError, DomainError: The input cannot be sealed; the message names ``label`` and tensor.
        StateError, DeviceError: A tensor requires grad, or lives where no implementation serves it.

    >>> from quantwm_core.method import scheme
    >>> ones = torch.ones(1, 2, 32, 64)
    >>> seal_chunk(scheme("quantwm"), ones, ones).nbytes
    3376
    """
    return begin_chunk(scheme, keys, values, moment, previous, start, label).wait()


def begin_chunk(
    scheme: Scheme,
    keys: Float[Tensor, "batch heads tokens channels"],
    values: Float[Tensor, "batch heads tokens channels"],
    moment: QueryMoment | None = None,
    previous: SealedChunk | None = None,
    start: int = 0,
    label: str = "",
) -> PendingChunk:
    """Begin to encode a unit of one layer; :func:`seal_chunk` without the wait.

    On a GPU the kernels are launched and nothing is waited for, so the units of all layers can be begun before the first
    is waited for. Keys and values must stay as they are until then. On a CPU the unit is sealed at once.

    Args:
        scheme: Methods of keys and values.
        keys, values: BF16, FP16 or FP32 ``[B, H, N, D]``.
        moment: Queries seen before the unit began.
        previous: The unit before, for warm starts.
        start: Absolute position of its first token.
        label: Where it belongs, for messages.

    Returns:
        What :meth:`quantwm_kernels.sealing.PendingChunk.wait` turns into the unit, or into a :class:`DomainError`.

    Raises:
        DtypeError, ShapeError: The input cannot be sealed; the message names ``label`` and tensor.
        DomainError: On a CPU, the same for its numbers.
        StateError, DeviceError: A tensor requires grad, or lives where no implementation serves it.

    >>> from quantwm_core.method import scheme
    >>> layers = [begin_chunk(scheme("rtn"), *torch.ones(2, 1, 1, 4, 64)) for _ in range(3)]
    >>> [pending.wait().nbytes for pending in layers]
    [146, 146, 146]
    """
    where = f"{label}: " if label else ""
    if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
        raise ShapeError(
            f"{where}keys {tuple(keys.shape)} and values {tuple(values.shape)}: need [B, H, N, D] with the same B, H, N"
        )
    batch, heads, _, channels = keys.shape
    if moment is not None and tuple(moment.mean.shape) != (batch, heads, channels, channels):
        raise ShapeError(f"{where}query moment {tuple(moment.mean.shape)} does not fit keys {tuple(keys.shape)}")
    before = (None, None) if previous is None else (previous.keys, previous.values)
    if keys.is_cuda and not torch.compiler.is_compiling():
        where = f"{label}, " if label else ""
        asked = [
            Asked(scheme.keys, "keys", keys, f"{where}keys", before[0]),
            Asked(scheme.values, "values", values, f"{where}values", before[1]),
        ]
        return PendingChunk(_begin(asked, moment), start)
    sealed_keys = seal(scheme.keys, "keys", keys, moment, before[0], label)
    sealed_values = seal(scheme.values, "values", values, moment, before[1], label)
    return PendingChunk(Finished((sealed_keys, sealed_values)), start)


def _begin(asked: Sequence[Asked], moment: QueryMoment | None) -> PendingTensors:
    """Launch what seals CUDA tensors, after the checks that need no device."""
    for each in asked:
        check_detached(each.values, each.label)
        check_available(each.label)
        if each.values.dtype not in ACCEPTED:
            raise DtypeError(f"{each.label}: got {each.values.dtype}, need bfloat16, float16 or float32")
        if each.values.ndim != 4 or each.values.numel() == 0:
            raise ShapeError(f"{each.label}: got shape {tuple(each.values.shape)}, need [B, H, N, D], not empty")
        if each.values.device != asked[0].values.device:
            raise DeviceError(f"{each.label} lives on {each.values.device}, the keys on {asked[0].values.device}")
        if each.kind == "keys" and moment is not None:
            _check_moment(moment, each.values, each.label)
    from quantwm_kernels.triton import sealing as kernels  # noqa: PLC0415 - Triton is needed on a GPU only

    return kernels.seal(asked, moment)


def _check_moment(moment: QueryMoment, keys: Tensor, label: str) -> None:
    """Refuse a moment that is not of queries of these keys ``[B, H, N, D]``: a kernel would read beyond its end."""
    mean = moment.mean
    check_detached(mean, f"{label}, query moment")
    batch, heads, _, channels = keys.shape
    if tuple(mean.shape) != (batch, heads, channels, channels):
        raise ShapeError(
            f"{label}: query moment {tuple(mean.shape)} does not fit {tuple(keys.shape)}, "
            f"need {(batch, heads, channels, channels)}"
        )
    if mean.dtype is not torch.float32:
        raise DtypeError(f"{label}: query moment of {mean.dtype}, need torch.float32")
    if mean.device != keys.device:
        raise DeviceError(f"{label}: query moment on {mean.device}, the keys on {keys.device}; move one to the other")


def _answer(sealed: SealedTensor | core_chunk.SealedTensor, layout: Mapping[str, Any]) -> np.ndarray:
    """Specification of a sealed tensor, and number format and shape of each array, as the bytes of a text."""
    told = description(sealed.method, sealed.parameters, sealed.shape, sealed.arrays)
    return np.frombuffer(json.dumps({**told, "layout": layout}).encode(), np.uint8)
