"""What hosts are asked for, from a user's path: prompts, first frames, actions, a scene each.

A path holds scenes in one of three forms, see ``docs/evaluation.md``:

* a text file, a prompt a line, as MovieGen's suite comes;
* a folder of pictures, each the first frame of a scene, as Matrix-Game's come; files of the same stem beside a picture
  (``0003.txt``, ``0003.npz``) are its prompt and its actions;
* a folder of folders, one a scene, as LingBot-World's examples come: ``prompt.txt``, ``image.*``, ``video.*`` or a folder
  ``video`` of frames, and the actions by the names that the host states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quantwm_core.errors import FormatError, ParameterError
from quantwm_eval import footage

NAMES = {".txt": "prompt", ".npz": "actions", ".json": "pose", **dict.fromkeys(footage.FILMS, "video")}
"""What a file beside a picture is, by its suffix."""


@dataclass(frozen=True)
class Scene:
    """What is given for one video.

    Attributes:
        place: Where it comes from, for messages.
        prompt: What the video is to show; empty where nothing is said.
        parts: Files and folders by name: ``"image"``, ``"video"``, ``"actions"``, ``"pose"``, and whatever else lies in a
            scene's folder by its stem.
    """

    place: str
    prompt: str = ""
    parts: Mapping[str, Path] = field(default_factory=dict)

    def need(self, host: str, part: str, name: str) -> Path:
        """A part by name.

        Args:
            host: Who asks, for the message.
            part: The part.
            name: How its file is called, for the message.

        Raises:
            ParameterError: The scene has none.
        """
        if part not in self.parts:
            raise ParameterError(f"{self.place}: host {host!r} needs {part} there ({name})")
        return self.parts[part]

    def need_prompt(self, host: str) -> str:
        """The prompt.

        Raises:
            ParameterError: The scene has none.
        """
        if not self.prompt:
            raise ParameterError(f"{self.place}: host {host!r} needs a prompt there (prompt.txt)")
        return self.prompt


def read(path: Path) -> tuple[Scene, ...]:
    """Read all scenes of a path, in the order of the numbers in their names.

    Raises:
        FormatError: It holds no scene, pictures and folders of scenes mixed, two files for one part, or no UTF-8 text.
        OSError: A file cannot be read.
    """
    if path.is_file():
        return tuple(Scene(f"{path}: line {number}", line) for number, line in _lines(path))
    pictures = footage.stills_of(path)
    folders = [entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    folders.sort(key=lambda entry: footage.in_order(entry.name))
    if pictures and folders:
        raise FormatError(f"{path}: holds pictures and folders ({folders[0].name}); keep one of them, a scene each")
    if not (pictures or folders):
        raise FormatError(
            f"{path}: holds no scene; need a text file of prompts, a folder of pictures, or one of folders"
        )
    return tuple(map(_beside, pictures)) or tuple(map(_inside, folders))


def _lines(path: Path) -> list[tuple[int, str]]:
    """Lines that say something, with their numbers from 1."""
    found = [(number, line.strip()) for number, line in enumerate(_text(path).splitlines(), 1) if line.strip()]
    if not found:
        raise FormatError(f"{path}: holds no prompt; one a line is needed")
    return found


def _beside(picture: Path) -> Scene:
    parts = {"image": picture}
    for entry in sorted(picture.parent.glob(f"{_escaped(picture.stem)}.*")):
        name = NAMES.get(entry.suffix.lower())
        if name is not None:
            _add(parts, name, entry)
    return _scene(str(picture), parts)


def _inside(folder: Path) -> Scene:
    parts: dict[str, Path] = {}
    for entry in sorted(folder.iterdir()):
        _add(parts, entry.stem, entry)
    return _scene(str(folder), parts)


def _add(parts: dict[str, Path], name: str, entry: Path) -> None:
    if name in parts:
        raise FormatError(f"{entry.parent}: {parts[name].name} and {entry.name} are both its {name}; keep one of them")
    parts[name] = entry


def _scene(place: str, parts: dict[str, Path]) -> Scene:
    prompt = parts.pop("prompt", None)
    return Scene(place, "" if prompt is None else _text(prompt).strip(), parts)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not UTF-8 text: {error}") from error


def _escaped(stem: str) -> str:
    """A stem that a pattern takes literally."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in stem)
