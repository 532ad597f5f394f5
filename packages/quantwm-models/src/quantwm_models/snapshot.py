"""A whole live cache <-> one safetensors file: branch a world, resume it after a restart, move it to another device.

The metadata say ``format = quantwm-snapshot/1`` and, under ``state``, as JSON what each layer's cache is and where its
tokens are. Arrays are called ``cache.C.unit.I.keys.NAME``, ``cache.C.exact.I.keys``, ``cache.C.queries.past`` and
``cache.C.queries.I``, values alike, ``C`` counting the caches; what the caller adds is ``extra.NAME``. An array that
units share stands there once, and the JSON names each array's entry.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quantwm_core import methods
from quantwm_core.errors import FormatError, QuantWMError, ShapeError, StateError
from quantwm_kernels.tensor_file import TensorFile, available_device, opened, write_tensors
from quantwm_models.attach import Attachment
from quantwm_models.bookkeeping import sizes_told, whole
from quantwm_models.cache import LayerCache
from quantwm_models.errors import located
from quantwm_models.handed import Caches, check_path, extra_tensors, listed_caches, plain
from quantwm_models.memory import explained
from quantwm_models.ranks import rank_here, rank_told
from quantwm_models.recorded import Recorder, Source

FORMAT, VERSION = "quantwm-snapshot", 1
_EXTRA = "extra."
_ADVICE = "clear() caches that hold something else first, or name another device"


def save(caches: Caches, path: str | os.PathLike[str], extra: Mapping[str, Tensor] | None = None) -> None:
    """Write all that caches hold to one file, which replaces what was there only when it is whole and on the disk.

    Tensors go over one after the other, so no second copy of the cache is held. Of several ranks each needs a file of its own.

    Args:
        caches: The caches.
        path: Where to.
        extra: Tensors of the host's own state by name, such as that of its random generator; :func:`load` returns them.

    Raises:
        ParameterError: What came are no caches or one twice, no path, no dense tensors by name, or a cache has a layer or a
            setting that JSON cannot say.
        StateError: A host has no caches yet, or wrote keys whose values are still to come; or an extra tensor requires grad.
        DtypeError: An extra tensor, or what a method of another distribution stores, has a number format that files do not hold.
        FormatError: ``path`` is a folder, a device, a pipe or a socket.
        OSError: The folder cannot be written, or the disk is full; an older file stays as it was.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> path = Path(tempfile.mkdtemp()) / "world.safetensors"
    >>> keys, values = torch.randn(2, 1, 2, 256, 64, generator=torch.Generator().manual_seed(0))
    >>> cache, branch = LayerCache("quantwm", window=1024), LayerCache("quantwm", window=1024)
    >>> cache.append(keys, values)
    >>> save(cache, path, {"frame": torch.tensor(3)})
    >>> load(branch, path)
    {'frame': tensor(3)}
    >>> branch.tokens, torch.equal(branch.read()[0], cache.read()[0])
    (256, True)
    """
    check_path(path)
    adapter, placed = _placed(caches)
    tensors = {_EXTRA + name: tensor for name, tensor in extra_tensors(extra).items()}
    told = []
    for number, (place, cache) in enumerate(placed):
        _check_whole(cache)
        recorder = Recorder(f"cache.{number}.")
        told.append({"place": place, "settings": _settings(cache)} | recorder.record(cache))
        tensors |= recorder.tensors
    state: dict[str, Any] = {"adapter": adapter, "caches": told}
    if any(cache.ranks > 1 for _, cache in placed):
        state["rank"] = rank_here()
    write_tensors(path, tensors, {"format": f"{FORMAT}/{VERSION}", "state": json.dumps(state, default=plain)})


def load(caches: Caches, path: str | os.PathLike[str], device: torch.device | str | None = None) -> dict[str, Tensor]:
    """Let caches hold what :func:`save` wrote; what follows is, on the device of before, what it would have been there.

    They are changed together at the end, and only if the whole file could be read; what they hold until then takes its
    memory until then, so clear them first where that is too much. Arrays go straight to where they belong.

    Args:
        caches: As they were saved: the same adapter or none, the same layers in the same order, schemes, sinks and windows.
        path: Where from.
        device: Where to; None for where the caches are, or where their host wants them, or else where they were.

    Returns:
        What the caller had added, on the CPU.

    Raises:
        ParameterError: What came are no caches or one twice, or no path.
        FormatError: The file is no snapshot, of a newer version, truncated or damaged, or a folder.
        StateError: It is of other caches or of another rank, a host was detached or has none yet, or wrote keys whose values are still to come.
        ShapeError: It is of another batch, number of heads or of channels.
        DeviceError: The device is not there, or of a kind that nothing here serves.
        CacheMemoryError: Its memory ran out.
        OSError: The file cannot be read.
    """
    check_path(path)
    if isinstance(caches, Attachment) and caches.detached:
        raise StateError(
            f"{path}: the host was detached and reads these caches no more; attach() again and load into what that returns"
        )
    adapter, placed = _placed(caches)
    with opened(path) as file, _damage_named(path):
        state = _state(file)
        if not isinstance(state["adapter"], str):
            raise FormatError(f"adapter: got {state['adapter']!r}, need a name, or none in quotation marks")
        told_rank, rank = rank_told(state.get("rank")), rank_here()
        if None not in (told_rank, rank):
            _compare("caches", str(told_rank), str(rank))
        _compare("caches", state["adapter"] or "no adapter", adapter or "no adapter")
        _compare("caches", [_place(each["place"]) for each in state["caches"]], [place for place, _ in placed])
        pairs = [(told, cache) for told, (_, cache) in zip(state["caches"], placed, strict=True)]
        for told, cache in pairs:
            _check_whole(cache)
            _check_fits(told, cache)
        made = []
        for told, cache in pairs:
            with located(f"layer {cache.layer}"), explained(lambda: _ADVICE):
                source = Source(file, told, cache, _device(told, cache, device))
                made.append((cache, source.contents(), source.geometry))
        names = (name for name in file.places if name.startswith(_EXTRA))
        extra = {name.removeprefix(_EXTRA): file.read(name) for name in names}
    for cache, contents, geometry in made:
        cache.hold(contents, geometry)
    return extra


def _placed(caches: Caches) -> tuple[str, list[tuple[tuple[str, int], LayerCache]]]:
    """The adapter that the caches are under, and the caches by branch and layer."""
    if isinstance(caches, Attachment):
        if not caches.layers:
            raise StateError("the host was given no caches yet; let it allocate its cache first")
        return caches.adapter, list(caches.layers.items())
    return "", [(("", cache.layer), cache) for cache in listed_caches(caches)]


def _settings(cache: LayerCache) -> dict[str, Any]:
    """What a cache is told once, and what it holds depends on."""
    scheme, stream = cache.scheme, cache.stream
    settings: dict[str, Any] = {}
    for kind, method in (("keys", scheme.keys), ("values", scheme.values)):
        named = {"method": method.name} | methods.settings(method)
        settings |= {f"{kind}.{name}": value for name, value in named.items()}
    own: dict[str, Any] = {"chunks_per_seal": scheme.chunks_per_seal, "decay": scheme.decay}
    if cache.turning is not None:
        turning = cache.turning
        own |= {"frames_ahead": scheme.frames_ahead, "turning": [turning.frame_tokens, *turning.rates]}
    return settings | own | {"sink": stream.sink, "window": stream.window}


def _check_whole(cache: LayerCache) -> None:
    """Refuse a cache between two writes of its host."""
    if cache.half_written:
        raise StateError(f"layer {cache.layer}: keys or values were written, the other half not yet; write both first")


def _check_fits(told: Mapping[str, Any], cache: LayerCache) -> None:
    """Refuse a cache that could not go on with what is in the file."""
    came, needed = told["settings"], _settings(cache)
    for name in sorted(came.keys() | needed.keys(), key=lambda name: (not name.endswith(".method"), name)):
        _compare(f"layer {cache.layer}, {name}", came.get(name, "nothing"), needed.get(name, "nothing"))
    expected, sizes = cache.expected or cache.geometry, sizes_told(told["geometry"])
    if expected is not None and sizes is not None and sizes != expected[:4]:
        raise ShapeError(
            f"layer {cache.layer}: the file holds [batch, heads, key channels, value channels] {list(sizes)}, this cache needs "
            f"{list(expected[:4])}; load it under a host of its sizes, or clear() a cache that holds others"
        )


def _compare(what: str, came: object, needed: object) -> None:
    if came != needed:
        raise StateError(f"{what}: the file is of {came!r}, this is {needed!r}; a snapshot goes back to what it is of")


def _device(told: Mapping[str, Any], cache: LayerCache, asked: torch.device | str | None) -> torch.device:
    """Where a cache is to be read."""
    known = cache.geometry or cache.expected
    if asked is None and known is None and not isinstance(told["device"], str):
        raise FormatError(f"device: got {told['device']!r}, need a name")
    if asked is None:
        asked = told["device"] if known is None else known.device
    return available_device(asked)


def _place(told: Sequence[Any]) -> tuple[str, int]:
    """Branch and layer of a cache."""
    branch, layer = told
    return branch, whole("place", layer)


def _state(file: TensorFile) -> dict[str, Any]:
    """What the metadata say, of a version that can be read."""
    stated = file.metadata.get("format", "")
    name, _, version = stated.partition("/")
    if name != FORMAT or not version.isdecimal():
        raise FormatError(f"not a snapshot (format {stated!r}); snapshot.save() makes one")
    if int(version) > VERSION:
        raise FormatError(f"snapshot version {version}, this release reads up to {VERSION}; upgrade quantwm")
    state: dict[str, Any] = json.loads(file.metadata["state"])
    return state


@contextmanager
def _damage_named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name the file in errors, and turn what a damaged one leads to into an error that says so."""
    try:
        with located(str(path)):
            yield
    except QuantWMError:
        raise
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise FormatError(f"{path}: what is said of the caches is damaged ({error!r})") from error
