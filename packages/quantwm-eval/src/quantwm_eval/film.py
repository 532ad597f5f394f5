"""Frames to H.264 and back, through PyAV."""

from __future__ import annotations

import io
from fractions import Fraction

import av
import numpy as np
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc

from quantwm_core.errors import FormatError, ParameterError
from quantwm_eval.evidence import Frames, check_video

QUALITY = "14"
FRAMES_BETWEEN_KEYS = "8"


def enlarge(frames: Frames, factor: int) -> Frames:
    """Every pixel as a square of ``factor`` pixels.

    >>> enlarge(np.zeros((1, 2, 3, 3), np.uint8), 4).shape
    (1, 8, 12, 3)
    """
    return frames.repeat(factor, axis=1).repeat(factor, axis=2)


def difference(video: Frames, reference: Frames, gain: int = 4) -> Frames:
    """What differs: mid grey where nothing does, ``gain`` times the signed difference around it.

    >>> difference(np.full((1, 1, 1, 3), 9, np.uint8), np.full((1, 1, 1, 3), 7, np.uint8)).ravel()
    array([136, 136, 136], dtype=uint8)
    """
    signed = video.astype(np.int32) - reference
    return np.clip(128 + gain * signed, 0, 255).astype(np.uint8)


def encode(frames: Frames, rate: int) -> bytes:
    """MP4 file that browsers play: H.264, yuv420p, BT.709, a key frame every eight frames.

    Args:
        frames: Height and width even, because colour is stored at half the resolution.
        rate: Frames a second.

    Raises:
        DtypeError, ShapeError: Not a video.
        ParameterError: An odd height or width, or no positive rate.
    """
    _, height, width, _ = check_video(frames).shape
    if height % 2 or width % 2 or rate < 1:
        raise ParameterError(
            f"frames of {height} x {width} at {rate} a second: need even sides and a rate of at least 1"
        )
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        options = {"crf": QUALITY, "preset": "veryfast", "g": FRAMES_BETWEEN_KEYS}
        stream = container.add_stream("libx264", rate=rate, options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        context = stream.codec_context
        context.time_base = Fraction(1, rate)
        context.colorspace, context.color_range = Colorspace.ITU709, ColorRange.MPEG
        context.color_primaries, context.color_trc = ColorPrimaries.BT709, ColorTrc.BT709
        for index, picture in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            frame = frame.reformat(format="yuv420p", dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG)
            frame.pts, frame.time_base = index, context.time_base
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def decode(file: bytes) -> Frames:
    """Every frame of a video file.

    Raises:
        FormatError: It is not one.
    """
    try:
        with av.open(io.BytesIO(file), "r") as container:
            frames = [
                frame.to_ndarray(format="rgb24", src_colorspace=Colorspace.ITU709)
                for frame in container.decode(video=0)
            ]
    except (av.FFmpegError, IndexError) as error:
        raise FormatError(f"not a video that can be read: {error}") from error
    return np.stack(frames)
