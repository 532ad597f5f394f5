"""Videos of others: files that PyAV reads and folders of frames, one frame after the other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import PIL.Image
from av.video.frame import VideoFrame
from av.video.reformatter import Colorspace
from jaxtyping import UInt8

from quantwm_core.errors import FormatError, StateError

Picture = UInt8[np.ndarray, "height width 3"]
FRAMES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
FILMS = frozenset({".avi", ".gif", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm"})
_SPACES = {1: Colorspace.ITU709, 5: Colorspace.ITU601, 6: Colorspace.ITU601, 7: Colorspace.SMPTE240M}
"""H.273's matrix coefficients as files state them; what states none is converted as FFmpeg does by default."""


@dataclass(frozen=True)
class Footage:
    """A video that is read frame by frame.

    Attributes:
        path: The file, or the folder of frames.
        stills: The frames' files in their order; empty for a file.
    """

    path: Path
    stills: tuple[Path, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        """What is read: the file, or those of the frames."""
        return self.stills or (self.path,)

    @property
    def rate(self) -> Fraction | None:
        """Frames a second, None where the file does not say or frames lie in a folder.

        Raises:
            FormatError: The file cannot be read.
        """
        if self.stills:
            return None
        try:
            with av.open(str(self.path), "r") as container:
                return container.streams.video[0].average_rate
        except (av.FFmpegError, IndexError) as error:
            raise FormatError(f"{self.path}: not a video that can be read: {error}") from error

    def frames(self) -> Iterator[Picture]:
        """Every frame, RGB, uint8 ``[H, W, 3]``.

        Raises:
            FormatError: The file is none of a video, breaks off, or its frames differ in size.
        """
        shape = None
        for number, picture in enumerate(self._stills() if self.stills else self._film()):
            if shape not in (None, picture.shape):
                where = self.stills[number] if self.stills else f"{self.path}: frame {number}"
                raise FormatError(f"{where}: {_size(picture)}, the frames before it are {shape[1]} x {shape[0]}")
            shape = picture.shape
            yield picture
        if shape is None:
            raise FormatError(f"{self.path}: holds no frame")

    def _stills(self) -> Iterator[Picture]:
        for still in self.stills:
            yield np.asarray(picture(still))

    def _film(self) -> Iterator[Picture]:
        number = 0
        try:
            with av.open(str(self.path), "r") as container:
                for frame in container.decode(video=0):
                    yield _rgb(frame)
                    number += 1
        except (av.FFmpegError, IndexError) as error:
            where = f"breaks off after frame {number}" if number else "not a video that can be read"
            raise FormatError(f"{self.path}: {where}: {error}") from error


def picture(path: Path) -> PIL.Image.Image:
    """Read a picture as RGB.

    Raises:
        FormatError: It is none.
    """
    try:
        with PIL.Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:  # what Pillow's readers raise on broken files
        raise FormatError(f"{path}: not a picture that can be read: {error}") from error


def find(path: Path) -> dict[str, Footage]:
    """The videos at a path, by name.

    A file is one video, and so is a folder of pictures, whose frames are taken in the order of the numbers in their names;
    both go by the empty name. A folder of video files, or of folders of pictures, is as many videos, each named as its
    file without the suffix.

    Raises:
        StateError: There is nothing there, or nothing that is known as a picture or a video, or both.
        FormatError: Two files of a folder bear one name, or the order of its frames is not known.
    """
    if not path.exists():
        raise StateError(f"{path}: there is no such file or folder")
    if path.is_file():
        return {"": Footage(path)}
    found: dict[str, Footage] = {}
    for entry in sorted(path.iterdir()):
        stills = stills_of(entry) if entry.is_dir() else ()
        if not (stills or (entry.is_file() and entry.suffix.lower() in FILMS)):
            continue
        name = entry.name if stills else entry.stem
        if name in found:
            raise FormatError(f"{path}: {entry.name} and {found[name].path.name} bear one name; rename one of them")
        found[name] = Footage(entry, stills)
    stills = stills_of(path)
    if stills and found:
        raise StateError(
            f"{path}: holds pictures and videos ({next(iter(found))}); keep frames in a folder of their own"
        )
    if not (stills or found):
        raise StateError(
            f"{path}: holds no video ({_list(FILMS)}), no picture ({_list(FRAMES)}) and no folder of pictures"
        )
    return {"": Footage(path, stills)} if stills else found


def stills_of(folder: Path) -> tuple[Path, ...]:
    """Pictures of a folder in the order of the numbers in their names; of the names, where none has a number.

    Raises:
        FormatError: Some have a number and one has none, which could be anywhere.
    """
    stills = [entry for entry in folder.iterdir() if entry.suffix.lower() in FRAMES and entry.is_file()]
    unnumbered = [still for still in stills if not re.search(r"\d", still.stem)]
    if unnumbered and len(unnumbered) < len(stills):
        raise FormatError(
            f"{min(unnumbered)}: has no number as the other frames have, so its place is not known; rename or move it"
        )
    return tuple(sorted(stills, key=lambda still: in_order(still.name)))


def in_order(name: str) -> list[tuple[int, str]]:
    """Key that puts frame_10 behind frame_9."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if index % 2 else (-1, part) for index, part in enumerate(parts)]


def _rgb(frame: VideoFrame) -> Picture:
    space = _SPACES.get(int(frame.colorspace))
    picture: Picture = frame.to_ndarray(format="rgb24", src_colorspace=space)
    return picture


def _size(picture: Picture) -> str:
    return f"{picture.shape[1]} x {picture.shape[0]}"


def _list(suffixes: frozenset[str]) -> str:
    return ", ".join(sorted(suffixes))
