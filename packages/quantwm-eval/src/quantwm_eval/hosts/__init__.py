"""The family of hosts that experiments can load: one file each, whose name is the host's name and its adapter's.

Each binds ``LOAD``, from a :class:`Setup` to a :class:`~quantwm_eval.host.Host`. Other distributions add theirs through the
entry-point group ``quantwm.hosts``. A host's own code is the user's checkout: nothing of it is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from quantwm_core.errors import ParameterError
from quantwm_core.plugin import Family
from quantwm_eval.host import Host
from quantwm_models import adapters

__all__ = ["Loader", "Setup", "distributions", "get", "names"]


@dataclass(frozen=True)
class Setup:
    """What a host is made from; each says which parts it needs.

    Attributes:
        device: As torch calls it.
        checkout: Folder of the host's own code.
        weights: File or folder of released weights.
        inputs: Prompts, first frames or actions, in the format that the host states.
        config: The host's own configuration, where it has several.
        size: ``"480p"`` or ``"720p"``; empty for the host's own.
        scenes: Numbers of those that will be asked for. These three are told so that what cannot be is said before a host is loaded.
        frames: Of a video, where the user said how many.
        batch: Videos that the user wants together.
    """

    device: str = "cpu"
    checkout: Path | None = None
    weights: Path | None = None
    inputs: Path | None = None
    config: Path | None = None
    size: str = ""
    scenes: tuple[int, ...] = ()
    frames: int | None = None
    batch: int = 1

    def need(self, host: str, part: str) -> Path:
        """Return a path that is given and there.

        Raises:
            ParameterError: It is not, or a file where only a folder would do.
        """
        path: Path | None = getattr(self, part)
        if path is None:
            raise ParameterError(f"host {host!r} needs --{part} PATH")
        if not path.exists():
            raise ParameterError(f"--{part} {path}: there is no such file or folder")
        if part == "checkout" and not path.is_dir():
            raise ParameterError(f"--checkout {path}: is a file; name the folder of the host's code")
        return path


Loader: TypeAlias = Callable[[Setup], Host]
_FAMILY = Family("host", __name__, "a function from a quantwm_eval.hosts.Setup to a Host", callable, "LOAD")


def names() -> tuple[str, ...]:
    """Return the names of all hosts that can be loaded, sorted.

    >>> "demo" in names()
    True
    """
    return _FAMILY.names()


def distributions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of the other distributions that register some of these hosts, by their names.

    >>> distributions(["demo"])
    {}
    """
    return _FAMILY.distributions(names)


def get(name: str) -> Loader:
    """Return what loads the host of that name.

    Raises:
        ParameterError: There is an adapter for it but nothing that loads it.
        UnknownNameError: It is not known at all.
        PluginError: What registers it cannot be loaded or called, or several distributions register it.

    >>> get("demo")(Setup()).name
    'demo'
    """
    if name in adapters.names() and name not in names():
        raise ParameterError(
            f"host {name!r}: experiments cannot load it (they load {', '.join(names())}); attach a cache in its own script, "
            "quantwm_models.attach(pipeline, METHOD), and score the videos with quantwm compare"
        )
    loader: Loader = _FAMILY.get(name)
    return loader
