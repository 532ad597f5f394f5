"""Latent frames of the VAEs that the five models share: the first is one frame of video, each other one four."""

from __future__ import annotations

FRAMES_PER_LATENT = 4


def frames_of(latents: int) -> int:
    """Frames of video that so many latent frames are.

    >>> frames_of(24)
    93
    """
    return FRAMES_PER_LATENT * (latents - 1) + 1


def latents_of(frames: int) -> int:
    """Latent frames that so many frames of video are; a last one that they do not fill is not counted.

    >>> latents_of(93), latents_of(96), latents_of(97)
    (24, 24, 25)
    """
    return (frames - 1) // FRAMES_PER_LATENT + 1
