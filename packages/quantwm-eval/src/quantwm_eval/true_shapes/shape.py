"""The shape of a model's attention stack, read from a table, and the bytes that follow from it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.resources import files
from typing import Literal, Self

from quantwm_core.errors import ParameterError, lookup
from quantwm_eval.latents import frames_of, latents_of

Host = Literal["rolling", "rebuilt", "segments"]
"""How a host keeps its cache: written chunk by chunk, made anew before each chunk, or before each segment."""

TABLES = files(__package__) / "models"
BF16_NBYTES = 2


@dataclass(frozen=True)
class Shape:
    """What a model's attention stack and its schedule measure; whole numbers, per stream of the batch.

    Attributes:
        title: What the model is called.
        host: How it keeps its cache.
        layers, heads, channels: Depth, heads of a layer, channels of a head.
        feed_forward: Hidden channels of the feed-forward part.
        context: Tokens that cross-attention sees.
        chunk: Latent frames that are generated together; of LongCat-Video, new ones of a segment.
        steps: Denoising steps of a chunk.
        tokens: Of a latent frame, by resolution.
        window: Latent frames that the cache holds; None keeps all.
        sink: First latent frames that a window never loses.
        kinds: Keys (and values) that a token has, one for each positional encoding.
        prompts: Streams of the batch that read one history, for guidance.
        clean: Whether a pass without noise follows the steps.
        per_seal: Chunks that are sealed together, where a cache is written chunk by chunk.
        gated: Whether the feed-forward part has a gate, a third matrix.
        two_streams: Whether the prompt passes the layers with weights of its own, and there is no cross-attention; each token's
            modulations come of a matrix then, and each kind has a projection of what its attention gives.
        pass_nbytes: What a pass takes beside weights and cache at the first resolution; linear in a frame's tokens.
        pass_measured: Whether a live host took that; otherwise it is reckoned from what the stack takes.
        vae_nbytes, encoder_nbytes: BF16 weights of the VAE, and of what reads the prompt or the first picture.
        token_pixels: Pixels of a frame of video that a token stands for.
        decoder_channels: Channels of the VAE decoder where they are most for each pixel of a frame of video.
    """

    title: str
    host: Host
    layers: int
    heads: int
    channels: int
    feed_forward: int
    context: int
    chunk: int
    steps: int
    tokens: Mapping[str, int] = field(default_factory=dict)
    window: int | None = None
    sink: int = 0
    kinds: int = 1
    prompts: int = 1
    clean: bool = True
    per_seal: int = 2
    gated: bool = False
    two_streams: bool = False
    pass_nbytes: int = 0
    pass_measured: bool = False
    vae_nbytes: int = 0
    encoder_nbytes: int = 0
    token_pixels: int = 256
    decoder_channels: int = 0

    @classmethod
    def load(cls, name: str) -> Self:
        """The shape of one of the models.

        Raises:
            UnknownNameError: There is no table of that name.

        >>> Shape.load("longcat_video").width
        4096
        """
        lookup("model", name, names())
        return cls(**tomllib.loads((TABLES / f"{name}.toml").read_text(encoding="utf-8")))

    @property
    def width(self) -> int:
        """Channels of the residual stream."""
        return self.heads * self.channels

    @property
    def layer_parameters(self) -> int:
        """Numbers in a layer's matrices: self-attention, cross-attention, feed-forward, and the six modulations."""
        if self.two_streams:
            return self.width * (2 * (10 * self.width + 2 * self.feed_forward) + (self.kinds - 1) * self.width)
        return self.width * (8 * self.width + (3 if self.gated else 2) * self.feed_forward + 6)

    @property
    def resolutions(self) -> tuple[str, ...]:
        """Those that the host supports, the smallest first."""
        return tuple(sorted(self.tokens, key=lambda name: self.tokens[name]))

    def frame_tokens(self, resolution: str | None = None) -> int:
        """Tokens of a latent frame.

        Raises:
            UnknownNameError: The host does not support the resolution.
        """
        name = self.resolutions[0] if resolution is None else resolution
        lookup(f"resolution of {self.title}", name, self.resolutions)
        return self.tokens[name]

    def token_nbytes(self, layers: int | None = None) -> int:
        """BF16 bytes of a token's keys and values, in all layers.

        >>> Shape.load("longcat_video").token_nbytes()
        786432
        """
        return BF16_NBYTES * 2 * self.kinds * self.width * (self.layers if layers is None else layers)

    def latents(self, frames: int) -> int:
        """Latent frames of a video, as many as whole chunks hold.

        Raises:
            ParameterError: The video is shorter than a chunk, and for LongCat-Video than a chunk and a frame before it.

        >>> Shape.load("lingbot_world").latents(93)
        24
        """
        found = latents_of(frames)
        found -= 0 if self.host == "segments" else found % self.chunk
        least = self.chunk + (self.host == "segments")
        if found < least:
            raise ParameterError(
                f"--frames {frames}: {self.title} needs {least} latent frames, {frames_of(least)} of video"
            )
        return found

    def cached(self, latents: int) -> int:
        """Latent frames that the cache holds at most while such a video is made.

        >>> [Shape.load(name).cached(24) for name in names()]
        [24, 16, 20, 18, 19, 6]
        """
        most = self.history(latents)
        return most if self.window is None else min(most, self.window)

    def history(self, latents: int) -> int:
        """Latent frames that it would hold without a window.

        >>> [Shape.load(name).history(24) for name in names()]
        [24, 20, 20, 24, 19, 24]
        """
        return latents if self.host == "rolling" else latents - self.chunk


def names() -> tuple[str, ...]:
    """Models that there are tables of.

    >>> names()
    ('causal_forcing', 'hy_world', 'hy_world_8b', 'lingbot_world', 'longcat_video', 'matrix_game')
    """
    return tuple(sorted(each.name.removesuffix(".toml") for each in TABLES.iterdir() if each.name.endswith(".toml")))


def tiny(shape: Shape) -> Shape:
    """The same stack in small, for a machine without a GPU: schedule, window and protocol stay.

    Heads have 64 channels, those of both encodings together where there are two: a group of every preset.

    >>> tiny(Shape.load("hy_world")).width
    64
    """
    heads = {"heads": 2, "channels": 64 // shape.kinds}
    small = heads | {"layers": 2, "feed_forward": 32, "context": 4, "steps": min(shape.steps, 4)}
    kept = {each.name: getattr(shape, each.name) for each in fields(shape)}
    return Shape(**kept | small | {"tokens": dict.fromkeys(shape.tokens, 16)})
