"""What one generated video leaves behind for metrics, and the checks that two videos can be compared at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Bool, Float64, UInt8

from quantwm_core.errors import DtypeError, ShapeError, StateError
from quantwm_eval.tally import Tally

Frames: TypeAlias = UInt8[np.ndarray, "frames height width 3"]
"""A video: grey levels 0 to 255, RGB."""
Curve: TypeAlias = Float64[np.ndarray, " positions"]
Map: TypeAlias = Float64[np.ndarray, "layers heads"]


@dataclass(frozen=True)
class LookAway:
    """What the look-away test knows beside the video.

    Attributes:
        truth: The true video, as long as the generated one.
        absent: The true video of the same walk with the ball taken out.
        region: The ball's pixels in the frames that are judged, False elsewhere.
    """

    truth: Frames
    absent: Frames
    region: Bool[np.ndarray, "frames height width"]


@dataclass(frozen=True)
class Recording:
    """What a :class:`~quantwm_eval.recorder.Recorder` counted in one video.

    A *read* is a position of the active chunk; the *age* of a token is how many blocks of queries ago it was written, its
    *position* how many were written before it. Where nothing was sealed yet all sums are zero.

    Attributes:
        selection: Queries whose largest logit moved to another sealed token, over sampled queries; by age and position
            of the token that should have won.
        logits: Sum of squared logit errors over that of squared exact logits, both centred per query over sealed tokens.
        attention: Sum of divergences, in nats, over sampled queries; does not split by token.
        output: Sum of squared errors of the attention's output over that of squared outputs; does not split by token.
        keys: Sum of squared errors of reconstructed keys over that of squared exact keys, once per read.
        values: The same of values.
        top: Sum of the shares of a query's largest logits that moved to other sealed tokens, over sampled queries; does
            not split by token.
        spectrum: Eigenvalues of the second moment of all queries of a KV head, descending, ``[layers, heads, channels]``.
    """

    selection: Tally
    logits: Tally
    attention: Tally
    output: Tally
    keys: Tally
    values: Tally
    top: Tally
    spectrum: Float64[np.ndarray, "layers heads channels"]


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of all layers' caches at one moment, counted from the tensors that are stored.

    Attributes:
        sealed: Of the sealed units that hold a live token.
        sealed_as_bf16: The same units in BF16.
        active: Of what is still BF16: the active chunk and tokens not yet due.
        live_as_bf16: All live tokens in BF16: what a plain cache would take.
        state: Query statistics, kept to compress with.
        shared: Those of the sealed units' bytes that are of arrays which units share, such as a basis.
    """

    sealed: float
    sealed_as_bf16: float
    active: float
    live_as_bf16: float
    state: float
    shared: float = 0.0


@dataclass(frozen=True)
class Seconds:
    """Wall time that one video took, without the time spent on measuring.

    Attributes:
        total: In all.
        seal: Of it, encoding sealed units.
        decode: Of it, reconstructing them for reads.
    """

    total: float
    seal: float
    decode: float


@dataclass(frozen=True)
class Evidence:
    """What one generated video leaves behind; whatever is not at hand is None.

    Attributes:
        video: The generated video.
        reference: The same video under a BF16 cache.
        look_away: Truth and counterfactual of a look-away episode.
        recording: Of queries against exact and reconstructed keys.
        cache: Bytes of the cache after every chunk.
        seconds: Time taken.
        truth: What would truly be seen.
        peak_bytes: The most that the device's allocator held at once, over the rollout of a batch and not per video.
    """

    video: Frames
    reference: Frames | None = None
    look_away: LookAway | None = None
    recording: Recording | None = None
    cache: tuple[CacheBytes, ...] | None = None
    seconds: Seconds | None = None
    truth: Frames | None = None
    peak_bytes: float | None = None

    def need(self, part: str) -> Any:
        """Return a part by name.

        Raises:
            StateError: The part is not at hand.
        """
        value = getattr(self, part)
        if value is None:
            raise StateError(f"the evidence holds no {part}; ask Metric.applies before measuring")
        return value


def check_video(video: Frames, name: str = "video") -> Frames:
    """Return the video if it is one.

    Raises:
        DtypeError: Not uint8.
        ShapeError: Not ``[T, H, W, 3]``, or empty.
    """
    if video.dtype != np.uint8:
        raise DtypeError(f"{name}: got {video.dtype}, need uint8 grey levels from 0 to 255")
    if video.ndim != 4 or video.shape[-1] != 3 or video.size == 0:
        raise ShapeError(f"{name}: got shape {video.shape}, need [frames, height, width, 3] with at least one frame")
    return video


def check_pair(video: Frames, reference: Frames) -> tuple[Frames, Frames]:
    """Return both videos if they can be compared frame by frame.

    Raises:
        DtypeError: One is not uint8.
        ShapeError: One is not a video, or they differ in length or size.
    """
    if check_video(video).shape != check_video(reference, "reference").shape:
        raise ShapeError(
            f"video {video.shape} and reference {reference.shape} differ; "
            "compare videos of equal length and size: cut or resize one of them first"
        )
    return video, reference
