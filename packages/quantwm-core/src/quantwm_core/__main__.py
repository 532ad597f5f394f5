"""``python -m quantwm_core``: compress a dumped cache, restore it, look into a compressed file."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np

from quantwm_core import archive, chunk, method, methods
from quantwm_core.errors import ParameterError, QuantWMError

SUFFIX = ".qwm.safetensors"
OVERWRITE = "replace the regular file that stands at --out; links, pipes and devices never are"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m quantwm_core", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    compress = commands.add_parser("compress", help="BF16, FP16 or FP32 dump -> sealed chunks")
    compress.add_argument("file", type=Path, help="safetensors with [layer.N.]keys, values and optionally queries")
    compress.add_argument("--method", default="quantwm", help=f"one of: {', '.join(methods.names())}")
    compress.add_argument("--keys", help="another method for the keys")
    compress.add_argument("--values", help="another method for the values")
    compress.add_argument("--preset", help=f"one of: {', '.join(method.PRESETS)}")
    compress.add_argument("--chunk", type=int, required=True, metavar="N", help="tokens that the model makes at once")
    compress.add_argument("--chunks-per-seal", type=int, metavar="M", help="chunks per sealed unit")
    compress.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="parameter, such as rank=16")
    compress.add_argument("--out", type=Path, help=f"default: FILE with {SUFFIX}")
    compress.add_argument("--overwrite", action="store_true", help=OVERWRITE)
    restore = commands.add_parser("restore", help="sealed chunks -> BF16 keys and values")
    restore.add_argument("file", type=Path)
    restore.add_argument("--out", type=Path, help="default: FILE with .restored.safetensors")
    restore.add_argument("--overwrite", action="store_true", help=OVERWRITE)
    inspect = commands.add_parser("inspect", help="what a compressed file holds, byte for byte")
    inspect.add_argument("file", type=Path)
    inspect.add_argument("--json", action="store_true", help="a JSON object a chunk")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 on success, 2 with a message on bad input."""
    options = parser().parse_args(arguments)
    try:
        {"compress": _compress, "restore": _restore, "inspect": _inspect}[options.command](options)
        sys.stdout.flush()
    except BrokenPipeError:  # a reader such as head has all that it wants
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, sys.stdout.fileno())  # what is left would be written once more when Python ends
        os.close(silent)
    except (QuantWMError, OSError) as error:
        print(f"quantwm_core: {error}", file=sys.stderr)
        return 2
    return 0


def _compress(options: argparse.Namespace) -> None:
    out = options.out or options.file.with_name(options.file.name.removesuffix(".safetensors") + SUFFIX)
    _check_free(out, options)
    arrays, _ = chunk.read_arrays(options.file)
    scheme = _scheme(options)
    layers = {}
    for number, dump in archive.collect(arrays).items():
        layers[number] = archive.compress(dump, scheme, options.chunk, number)
    chunk.save(out, layers)
    print(f"{out}: {_summary(layers)}")


def _restore(options: argparse.Namespace) -> None:
    stem = options.file.name.removesuffix(SUFFIX).removesuffix(".safetensors")
    out = options.out or options.file.with_name(f"{stem}.restored.safetensors")
    _check_free(out, options)
    layers, _ = chunk.load(options.file)
    arrays: dict[str, np.ndarray] = {}
    for number, chunks in layers.items():
        try:
            dump = archive.restore(chunks)
        except QuantWMError as error:
            raise type(error)(f"{options.file}: layer {number}: {error}") from error
        arrays |= {f"layer.{number}.keys": dump.keys, f"layer.{number}.values": dump.values}
    chunk.write_arrays(out, arrays)
    print(f"{out}: {sum(array.nbytes for array in arrays.values())} bytes of BF16")


def _check_free(out: Path, options: argparse.Namespace) -> None:
    """Refuse to write over what is read, what is no regular file, or another file unless told to, or where nothing can be written."""
    if options.out is not None and not out.parent.is_dir():
        raise ParameterError(f"{out}: the folder {out.parent} is not there; make it first, or name another with --out")
    if out.exists() and options.file.exists() and out.samefile(options.file):
        raise ParameterError(f"{out}: that is the input itself; name another file with --out")
    if out.parent.is_dir():  # otherwise the input is not there either, which is said when it is read
        _check_writable(out)
    if not os.path.lexists(out):
        return
    if out.is_symlink() or not out.is_file():
        raise ParameterError(f"{out}: exists and is no regular file, which --out never replaces; name another file")
    if not options.overwrite:
        raise ParameterError(f"{out}: exists; name another file with --out, or add --overwrite")


def _check_writable(out: Path) -> None:
    try:
        with NamedTemporaryFile(dir=out.parent):  # whoever may do this may replace a file, too
            pass
    except OSError as error:
        raise ParameterError(f"{out}: cannot be written: {error.strerror}; name another file with --out") from error


def _inspect(options: argparse.Namespace) -> None:
    layers, _ = chunk.load(options.file)
    rows = list(archive.rows(layers))
    if options.json:
        for row in rows:
            print(json.dumps(row))
        return
    print("layer      tokens           keys       values         bytes     shared    ratio")
    for row in rows:
        tokens = f"{row['start']}..{row['stop']}"
        print(
            f"{row['layer']:>5}  {tokens:<15}  {row['keys']:<9}  {row['values']:<9}  {row['bytes']:>9}  "
            f"{row['shared_bytes']:>9}  {row['ratio']:>7.3f}"
        )
    print(_summary(layers))


def _summary(layers: dict[int, list[chunk.SealedChunk]]) -> str:
    """Totals over a file."""
    every = [sealed for chunks in layers.values() for sealed in chunks]
    own, shared = chunk.stored_nbytes(every)
    stored, plain = own + shared, sum(sealed.bf16_nbytes for sealed in every)
    ratio = f", ratio {plain / stored:.3f}" if stored else ""
    of_them = f" ({shared} shared by chunks)" if shared else ""
    return f"{len(every)} chunks, {stored} bytes{of_them} for {plain} bytes of BF16{ratio}"


def _scheme(options: argparse.Namespace) -> method.Scheme:
    """What the options of ``compress`` choose."""
    pairs = [_setting(text) for text in options.set]
    settings = dict(pairs)
    if len(settings) < len(pairs):
        names = [name for name, _ in pairs]
        raise ParameterError(f"--set {max(names, key=names.count)}: given more than once; say it once")
    own = ("method", "keys", "values", "preset", "chunks_per_seal")
    if taken := [name for name in own if name in settings]:
        raise ParameterError(f"--set {taken[0]}: use --{taken[0].replace('_', '-')} instead")
    return method.scheme(**{name: getattr(options, name) for name in own}, **settings)


def _setting(text: str) -> tuple[str, Any]:
    """``rank=16`` as a name and a value; what is no JSON value is text."""
    name, separator, value = text.partition("=")
    if not separator:
        raise ParameterError(f"--set {text}: need NAME=VALUE, such as rank=16")
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):  # numbers of too many digits, lists in lists in lists
        parsed = value
    return name.replace("-", "_"), parsed


if __name__ == "__main__":
    sys.exit(main())
