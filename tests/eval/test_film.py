"""Videos, written and read back."""

import io
from fractions import Fraction

import av
import numpy as np
import pytest
from av.video.reformatter import Colorspace

from quantwm_core.errors import DtypeError, FormatError, ParameterError, ShapeError
from quantwm_eval import film
from quantwm_eval.evidence import Frames


def picture_book(frames: int = 20) -> Frames:
    """Blocks of colour that move by a pixel a frame."""
    rows, columns = np.mgrid[0:16, 0:24]
    one = [
        np.stack([(rows * 16) % 256, ((columns + t) // 6 * 80) % 256, np.full_like(rows, 12 * t)], -1)
        for t in range(frames)
    ]
    return np.stack(one).astype(np.uint8)


def psnr(a: Frames, b: Frames) -> float:
    return float(10 * np.log10(255**2 / np.square(a.astype(float) - b).mean()))


def test_every_frame_comes_back_in_its_place() -> None:
    frames = film.enlarge(picture_book(), 4)
    back = film.decode(film.encode(frames, 8))
    assert back.shape == frames.shape
    for index in range(len(frames)):
        assert psnr(back[index], frames[index]) > 33
    assert psnr(back[1:], frames[:-1]) < 30  # a shift by one would be seen


def test_colours_are_not_shifted() -> None:
    for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255), (200, 130, 30)):
        frames = np.full((2, 32, 32, 3), colour, np.uint8)
        np.testing.assert_allclose(film.decode(film.encode(frames, 8)), frames, atol=4)


def test_the_file_is_what_browsers_play() -> None:
    with av.open(io.BytesIO(film.encode(film.enlarge(picture_book(), 2), 8)), "r") as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.pix_fmt) == ("h264", "yuv420p")
        assert stream.average_rate == Fraction(8)
        assert stream.codec_context.colorspace == Colorspace.ITU709
        frames = list(container.decode(stream))
        assert [round(frame.time * 8) for frame in frames] == list(range(20))
        keys = [index for index, frame in enumerate(frames) if frame.key_frame]
        assert max(b - a for a, b in zip(keys, [*keys[1:], 20], strict=True)) <= 8  # scrubbing decodes few frames


def test_the_same_frames_give_the_same_pictures_and_no_date() -> None:
    files = [film.encode(picture_book(), 8) for _ in range(2)]
    # x264 has been seen to choose otherwise once in hundreds of runs, so bytes are not held to be the same.
    pictures = [film.decode(file).astype(np.int16) for file in files]
    assert np.abs(pictures[0] - pictures[1]).mean() < 1
    assert b"creation_time" not in files[0]


def test_the_difference_is_grey_where_equal_and_signed_elsewhere() -> None:
    a = np.array([[[[10, 20, 250]]]], np.uint8)
    b = np.array([[[[10, 30, 0]]]], np.uint8)
    np.testing.assert_array_equal(film.difference(a, b).ravel(), [128, 88, 255])


@pytest.mark.parametrize(
    ("frames", "rate", "error", "message"),
    [
        (np.zeros((2, 15, 16, 3), np.uint8), 8, ParameterError, "15 x 16"),
        (np.zeros((2, 16, 16, 3), np.uint8), 0, ParameterError, "at 0 a second"),
        (np.zeros((2, 16, 16, 3)), 8, DtypeError, "uint8"),
        (np.zeros((2, 16, 16), np.uint8), 8, ShapeError, "frames, height, width, 3"),
    ],
)
def test_what_is_no_video_is_refused(frames: Frames, rate: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        film.encode(frames, rate)


@pytest.mark.parametrize("cut", [0, 20, 200])
def test_a_file_that_is_no_video_is_refused(cut: int) -> None:
    with pytest.raises(FormatError, match="not a video"):
        film.decode(film.encode(picture_book(), 8)[:cut])
