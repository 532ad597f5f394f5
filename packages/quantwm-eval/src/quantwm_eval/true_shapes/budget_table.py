"""Budgets as tables: what fits into a card, and how long a history does, with room to spare for the allocator or without.

An allocator that loses nothing in pieces lets all of a card be used, one that loses as much as was once seen
:data:`~quantwm_eval.true_shapes.budget.PIECES_NBYTES` less: what lies between fits or does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quantwm_core.method import Scheme, scheme
from quantwm_eval.latents import frames_of
from quantwm_eval.true_shapes.budget import GIB, PIECES_NBYTES, STANDARD_FRAMES, longest, process
from quantwm_eval.true_shapes.shape import Shape

SMALL_CARDS = (24, 32, 48)
CARDS = (24, 48, 80, 141)
Row = tuple[str, ...]


FITTING = f"""\
What a process needs that makes a video of {STANDARD_FRAMES} frames, GiB. A card of N GB is taken as N GiB.
cache: BF16 is the host's own, two histories where it makes one anew; 2 bits are units of one chunk or of two.
weights: of the layers; FP8 ones are the host's affair, nothing here makes them.
other: the VAE's weights, a pass or the VAE's decoder, whichever is more, and 1 GiB for CUDA itself.
in all: these three, or what reads the prompt and CUDA, which come before and go, where that is more.
measured: how much of it a live host took; all else is computed or estimated.
yes: fits; tight: only if PyTorch's allocator loses less than {PIECES_NBYTES // GIB} GiB in pieces; -: does not."""
LENGTHS = f"""\
Frames of the longest video whose whole history fits, if the model attended to all of it.
A range: with {PIECES_NBYTES // GIB} GiB lost in pieces, and with nothing lost; one number: the same for both.
up to N: N with nothing lost, none with {PIECES_NBYTES // GIB} GiB lost; -: not even the shortest in either case."""


PACKED = tuple(scheme("quantwm", chunks_per_seal=each) for each in (1, 2))
"""Two bits: whichever takes less. Units of two chunks take less for their tokens, but one more chunk waits in BF16."""


def fitting(names: Sequence[str]) -> list[Row]:
    """A head, and what a process of each model, resolution and set of options needs, and where that fits."""
    head = (
        "model",
        "cache",
        "weights",
        "weights GiB",
        "cache GiB",
        "other GiB",
        "in all",
        "measured",
        *(f"{each} GB" for each in SMALL_CARDS),
    )
    return [head, *(row for name in names for row in _fitting(Shape.load(name)))]


def _fitting(shape: Shape) -> Iterator[Row]:
    ways: dict[str, tuple[Sequence[Scheme | None], bool]] = {
        "BF16": ((None,), False),
        "2 bits": (PACKED, False),
        "2 bits, offloaded": (PACKED, True),
    }
    latents = shape.latents(STANDARD_FRAMES)
    for resolution in shape.resolutions:
        for cache, (methods, offload) in ways.items():
            for weights, fp8 in (("BF16", False), ("FP8", True)):
                needs = min(
                    (process(shape, resolution, latents, each, fp8=fp8, offload=offload) for each in methods),
                    key=lambda each: each.running,
                )
                other = needs.running - needs.weights - needs.cache.total
                yield (
                    f"{shape.title}, {resolution}",
                    cache,
                    weights,
                    *(f"{each / GIB:.1f}" for each in (needs.weights, needs.cache.total, other, needs.total)),
                    f"{100 * needs.measured_share:.0f} %",
                    *(_fit(needs.total, each * GIB) for each in SMALL_CARDS),
                )


def lengths(names: Sequence[str]) -> list[Row]:
    """A head, and frames of the longest video whose whole history fits into a card, in BF16 and in two bits.

    Each is a range: what leaves room for what the allocator may lose, which may be no video, and what fits if it loses nothing.
    """
    head = ("model", "weights", *(f"{each} GB, {cache}" for each in CARDS for cache in ("BF16", "2 bits")))
    return [head, *(row for name in names for row in _lengths(Shape.load(name)))]


def _lengths(shape: Shape) -> Iterator[Row]:
    for resolution in shape.resolutions:
        for weights, fp8 in (("BF16", False), ("FP8", True)):
            found = (
                tuple(
                    max(longest(shape, resolution, memory, each, fp8=fp8) for each in methods)
                    for memory in (card * GIB - PIECES_NBYTES, card * GIB)
                )
                for card in CARDS
                for methods in ((None,), PACKED)
            )
            yield (f"{shape.title}, {resolution}", weights, *(_videos(*each) for each in found))


def _fit(needs: int, memory: int) -> str:
    """Whether so many bytes fit, whatever the allocator loses, or only if that is little.

    >>> [_fit(needs * GIB, 24 * GIB) for needs in (21, 22, 25)]
    ['yes', 'tight', '-']
    """
    if needs + PIECES_NBYTES <= memory:
        return "yes"
    return "tight" if needs <= memory else "-"


def _videos(with_room: int, without: int) -> str:
    """Frames of the videos that so many latent ones are.

    >>> _videos(21, 24), _videos(24, 24), _videos(0, 24), _videos(0, 0)
    ('81-93', '93', 'up to 93', '-')
    """
    if not without:
        return "-"
    if not with_room:
        return f"up to {frames_of(without)}"
    least, most = frames_of(with_room), frames_of(without)
    return str(most) if least == most else f"{least}-{most}"
