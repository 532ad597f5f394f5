"""What a whole process needs by formula, what of it fits into a card, and how long a history fits.

Bytes of a cache are the storage formula's for the units that the cache's own bookkeeping forms, so they are what a cache of
that shape states about itself. Weights are those of the layers; a pass is what live hosts took beside them and their caches; the
VAE's decoder is estimated by its widest feature maps. What an allocator loses in pieces is no part of it, and is looked at beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from quantwm_core.chunk import KINDS
from quantwm_core.method import Scheme
from quantwm_core.stream import Span, Stream
from quantwm_eval.latents import FRAMES_PER_LATENT
from quantwm_eval.true_shapes.shape import BF16_NBYTES, Shape

GIB = 2**30
STANDARD_FRAMES = 93  # of the video whose passes were counted
CONTEXT_NBYTES = GIB  # of CUDA itself, estimated
PIECES_NBYTES = 3 * GIB
"""What PyTorch's allocator held free, but in pieces into which nothing fitted, where it was seen to run out (``docs/true-shapes.md``)."""
MOMENTS = 2  # of queries: of the units before, and of what came since
FP32_NBYTES = 4
DECODER_TENSORS = 4  # of the widest feature maps, alive at once


@dataclass(frozen=True)
class CacheBudget:
    """A cache at its largest, on the device.

    Attributes:
        stored: Sealed units, or all of a BF16 cache.
        exact: BF16 chunks beside sealed units.
        statistics: Second moments of queries.
        workspace: What reads share.
    """

    stored: int
    exact: int = 0
    statistics: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.stored + self.exact + self.statistics + self.workspace

    def offloaded(self, layers: int) -> CacheBudget:
        """The same with sealed units in host memory, which pass through two slots of a layer's size.

        >>> CacheBudget(480, 7).offloaded(48)
        CacheBudget(stored=20, exact=7, statistics=0, workspace=0)
        """
        return replace(self, stored=-(-2 * self.stored // layers))


def cache_nbytes(shape: Shape, frame_tokens: int, latents: int, method: Scheme | None = None) -> CacheBudget:
    """A cache while a video of so many latent frames is made.

    Args:
        shape: Of the model.
        frame_tokens: Tokens of a latent frame.
        latents: Of the video.
        method: How it is stored; None is the host's own BF16 cache, of which those that make it anew hold two at once.

    >>> from quantwm_core.method import scheme
    >>> longcat = Shape.load("longcat_video")
    >>> cache = cache_nbytes(longcat, 1560, 24, scheme("quantwm"))
    >>> round(cache.stored / GIB, 2), cache.exact
    (3.54, 0)
    """
    held = shape.cached(latents) * frame_tokens
    if method is None:
        return CacheBudget(held * shape.token_nbytes() * (1 if shape.host == "rolling" else 2))
    channels = shape.kinds * shape.channels
    statistics = MOMENTS * FP32_NBYTES * shape.layers * shape.heads * channels**2 if method.uses_queries else 0
    states = (
        CacheBudget(
            _sealed_nbytes(shape, method, stream.units, frame_tokens),
            _unsealed(stream) * shape.token_nbytes(),
            statistics,
            held * shape.token_nbytes(layers=1),
        )
        for stream in _streams(shape, frame_tokens, latents, method)
    )
    return max(states, key=lambda each: each.total)


def _streams(shape: Shape, frame_tokens: int, latents: int, method: Scheme) -> Iterator[Stream]:
    """Where tokens are after each of a video's last chunks, between which BF16 chunks become units and come anew."""
    if shape.host != "rolling":  # a history that is made anew is a unit
        made = Stream(recent_tokens=method.recent_tokens).append(shape.cached(latents) * frame_tokens)
        yield made.complete().sealed()
        return
    window = None if shape.window is None else shape.window * frame_tokens
    stream = Stream(method.chunks_per_seal, method.recent_tokens, shape.sink * frame_tokens, window)
    chunk, chunks = shape.chunk * frame_tokens, latents // shape.chunk
    begin = chunks - min(chunks, 2 * method.chunks_per_seal)
    if window is None and begin:  # nothing is evicted: all of before at once
        ends = tuple(range(chunk, begin * chunk + 1, chunk))
        stream = replace(stream, ends=ends, active=True, live=(Span(0, begin * chunk),)).sealed()
        begin, chunks = 0, chunks - begin
    for number in range(chunks):
        stream = stream.append(chunk).sealed()
        if number >= begin:
            yield stream


def _sealed_nbytes(shape: Shape, method: Scheme, units: Sequence[Span], frame_tokens: int) -> int:
    """Bytes of units in all layers; those of a video's first chunks are sealed before any queries are known."""
    known = method.chunks_per_seal * shape.chunk * frame_tokens if shape.host == "rolling" else 0
    sizes = Counter((unit.tokens, unit.start < known) for unit in units)
    one_layer = sum(
        count * each.nbytes(kind, (1, shape.heads, tokens, shape.kinds * shape.channels), first)
        for (tokens, first), count in sizes.items()
        for kind, each in zip(KINDS, (method.keys, method.values), strict=True)
    )
    return shape.layers * one_layer


def _unsealed(stream: Stream) -> int:
    """Live tokens that are BF16."""
    return sum(max(0, span.stop - max(span.start, stream.sealed_end)) for span in stream.live)


@dataclass(frozen=True)
class Process:
    """What a process has on the device at most, in bytes.

    Attributes:
        weights, vae: BF16 weights, those of the layers in FP8 if told.
        cache: Of keys and values.
        working: A pass, or the VAE's decoder, whichever is more; they take turns.
        measured: Bytes of it that a live host took; all others are computed or estimated.
        encoder: Weights that read the prompt; they are there before all others, and alone.
    """

    weights: int
    vae: int
    cache: CacheBudget
    working: int
    measured: int
    encoder: int

    @property
    def running(self) -> int:
        """All that is there while the video is made."""
        return CONTEXT_NBYTES + self.weights + self.vae + self.cache.total + self.working

    @property
    def total(self) -> int:
        """The most that is there at once."""
        return max(self.running, CONTEXT_NBYTES + self.encoder)

    @property
    def measured_share(self) -> float:
        """How much of the total a live host took; nothing of it where the encoder is the most."""
        return self.measured / self.total if self.total == self.running else 0.0


def process(
    shape: Shape,
    resolution: str,
    latents: int,
    method: Scheme | None = None,
    *,
    fp8: bool = False,
    offload: bool = False,
) -> Process:
    """What a process needs that makes a video of so many latent frames.

    Args:
        shape, resolution, latents: Of the model and the video.
        method: How the cache is stored; None is the host's own.
        fp8: Whether the layers' weights are.
        offload: Whether sealed units are in host memory.

    >>> from quantwm_core.method import scheme
    >>> shape = Shape.load("lingbot_world")
    >>> whole, packed = (process(shape, "480p", 24, each).total / GIB for each in (None, scheme("quantwm")))
    >>> 48 < whole < 56, 32 < packed < 40
    (True, True)
    """
    tokens = shape.frame_tokens(resolution)
    pixels = shape.token_pixels * tokens
    cache = cache_nbytes(shape, tokens, latents, method)
    decoder = DECODER_TENSORS * shape.decoder_channels * FRAMES_PER_LATENT * pixels * BF16_NBYTES
    host_pass = _pass_nbytes(shape, tokens, latents)
    as_measured = shape.pass_measured and tokens == shape.frame_tokens() and latents == shape.latents(STANDARD_FRAMES)
    return Process(
        weights=shape.layers * shape.layer_parameters * (1 if fp8 else BF16_NBYTES),
        vae=shape.vae_nbytes,
        cache=cache.offloaded(shape.layers) if offload else cache,
        working=max(decoder, host_pass),
        measured=host_pass if as_measured and host_pass > decoder else 0,
        encoder=shape.encoder_nbytes,
    )


def _pass_nbytes(shape: Shape, tokens: int, latents: int) -> int:
    """A pass beside weights and cache; where a history is made anew, its pass takes the most, and grows with it."""
    standard = shape.latents(STANDARD_FRAMES)
    longer = 1.0 if shape.host == "rolling" else max(1.0, shape.cached(latents) / shape.cached(standard))
    return int(shape.pass_nbytes * longer * tokens / shape.frame_tokens())


def unbounded(shape: Shape) -> Shape:
    """The same model, attending to all that it has made.

    >>> unbounded(Shape.load("matrix_game")).cached(24)
    24
    """
    return replace(shape, window=None, sink=0)


def longest(shape: Shape, resolution: str, memory: int, method: Scheme | None = None, *, fp8: bool = False) -> int:
    """Latent frames of the longest video whose history fits as a whole; 0 where not even a chunk does.

    Args:
        shape: Of the model; its window is left aside.
        resolution: Of the video.
        memory: Bytes of the card.
        method: How the cache is stored; None is the host's own.
        fp8: Whether the layers' weights are.
    """
    whole = unbounded(shape)
    least = shape.chunk + {"rolling": 0, "rebuilt": shape.chunk, "segments": 1}[shape.host]
    step = 1 if shape.host == "segments" else shape.chunk

    def needed(steps: int) -> Process:
        return process(whole, resolution, least + steps * step, method, fp8=fp8)

    # From some units on each more adds the same, so what fits is not searched for but found, and then tried.
    period = 1 if method is None else method.chunks_per_seal
    begin = needed(4 * period).running
    growth = needed(5 * period).running - begin
    steps = max(0, 4 * period + period * ((memory - begin) // growth))
    while needed(steps + 1).total <= memory:
        steps += 1
    while steps >= 0 and needed(steps).total > memory:
        steps -= 1
    return 0 if steps < 0 else least + steps * step
