"""What is to be measured, as a value: model x method x scenes x seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from quantwm_core import methods
from quantwm_core.errors import ParameterError, lookup
from quantwm_core.method import Scheme, scheme
from quantwm_eval import hosts, metrics

Option: TypeAlias = int | float | str | bool | None
KINDS = ("walk", "look-away", "prompt")
CONTROL = "bf16"
SEEDS = 2**63
"""How many seeds there are: what torch and NumPy both take."""


@dataclass(frozen=True)
class MethodChoice:
    """A method with its settings.

    Attributes:
        name: Public name of the method.
        options: Settings in the order given: fields of the method, and ``keys``, ``values``, ``preset``,
            ``chunks_per_seal``, ``decay`` as :func:`quantwm_core.method.scheme` takes them; and ``window``, past chunks that
            the model sees, where fewer than it was trained for are wanted.
    """

    name: str
    options: tuple[tuple[str, Option], ...] = ()

    @property
    def label(self) -> str:
        """How results and tables call it, and what :meth:`parse` reads.

        >>> MethodChoice("quantwm", (("rank", 16),)).label
        'quantwm:rank=16'
        """
        return ":".join((self.name, *(f"{key}={value}" for key, value in self.options)))

    @classmethod
    def parse(cls, text: str) -> MethodChoice:
        """Read ``name`` or ``name:option=value:...``.

        Raises:
            ParameterError: The text has another form.

        >>> MethodChoice.parse("quantwm:values=bf16:rank=4").options
        (('values', 'bf16'), ('rank', 4))
        """
        name, *settings = text.strip().split(":")
        options = []
        for setting in settings:
            key, equals, value = setting.partition("=")
            if not (key and equals and value):
                raise ParameterError(f"method {text!r}: {setting!r} is not option=value, as in quantwm:rank=16")
            options.append((key, _literal(value)))
        if len(dict(options)) < len(options):
            raise ParameterError(f"method {text!r}: an option is given twice")
        return cls(name, tuple(options))

    @property
    def window(self) -> int | None:
        """Past chunks that the model is to see; None leaves the model its own window.

        Raises:
            ParameterError: It is no whole number of at least 1.

        >>> MethodChoice.parse("bf16:window=1").window
        1
        """
        window = dict(self.options).get("window")
        if window is None or (isinstance(window, int) and not isinstance(window, bool) and window >= 1):
            return window
        raise ParameterError(f"method {self.label!r}: window {window!r}, need a whole number of chunks of at least 1")

    @property
    def names(self) -> tuple[str, ...]:
        """Public names of the methods of keys and of values.

        >>> MethodChoice.parse("quantwm:values=bf16").names
        ('quantwm', 'bf16')
        """
        apart = dict(self.options)
        return tuple(self.name if apart.get(kind) is None else str(apart[kind]) for kind in ("keys", "values"))

    def scheme(self, chunks_per_seal: int) -> Scheme:
        """Build what it names.

        Args:
            chunks_per_seal: Chunks per sealed unit, unless the options or their preset say otherwise.

        Raises:
            UnknownNameError: No such method.
            ParameterError: A setting is unknown or out of range.
        """
        settings: dict[str, Any] = {key: value for key, value in self.options if key != "window"}
        if "preset" not in settings:
            settings.setdefault("chunks_per_seal", chunks_per_seal)
        return scheme(self.name, **settings)


@dataclass(frozen=True)
class Experiment:
    """What is generated and measured.

    Attributes:
        methods: Methods, the BF16 control first.
        scenes: Numbers of the scenes; each is run as every kind of episode.
        kinds: ``"walk"``: a random walk of ``frames`` frames; ``"look-away"``: turn from a ball and back; ``"prompt"``: a
            video of a prompt.
        frames: Generated frames of a walk.
        degrees: Angle of the look-away test.
        seeds: Numbers from which noise is drawn.
        chunks_per_seal: Chunks per sealed unit where a method does not say otherwise.
        batch: Scenes that are generated together; figures do not depend on it, times do.
        samples: Queries per head, layer and call that the recorder scores; with 0 there is no recorder, whose work and copies
            would be part of times and memory.
        model: The host.
        metrics: Names of the metrics; all that are installed, unless told otherwise.
        name: Of the bundled experiment that it is, see :mod:`quantwm_eval.named`; empty for others.
    """

    methods: tuple[MethodChoice, ...]
    scenes: tuple[int, ...]
    kinds: tuple[str, ...] = KINDS[:2]
    frames: int = 40
    degrees: int = 100
    seeds: tuple[int, ...] = (0,)
    chunks_per_seal: int = 2
    batch: int = 4
    samples: int = 32
    model: str = "demo"
    metrics: tuple[str, ...] = field(default_factory=metrics.installed)
    name: str = ""

    def __post_init__(self) -> None:
        for name, entries in (
            ("methods", self.methods),
            ("scenes", self.scenes),
            ("kinds", self.kinds),
            ("seeds", self.seeds),
            ("metrics", self.metrics),
        ):
            if not entries:
                raise ParameterError(f"{name}: got none, need at least one")
            if again := twice(entries):
                raise ParameterError(f"{name}: got {again} twice, need each once")
        for name, least in (("frames", 1), ("degrees", 1), ("chunks_per_seal", 1), ("batch", 1), ("samples", 0)):
            if getattr(self, name) < least:
                raise ParameterError(f"{name} {getattr(self, name)}: need at least {least}")
        if min(self.scenes) < 0:
            raise ParameterError(f"scenes {min(self.scenes)}: need numbers of at least 0")
        for seed in self.seeds:
            if not 0 <= seed < SEEDS:
                raise ParameterError(f"seeds {seed}: need numbers from 0 to {SEEDS - 1}")
        for kind in self.kinds:
            lookup("kind", kind, KINDS)
        if self.methods[0] != MethodChoice(CONTROL):
            raise ParameterError(f"methods: the first must be {CONTROL!r}, the control; see with_control")

    def check(self) -> None:
        """Refuse what cannot be run here. What was measured elsewhere may name methods and metrics that only others have.

        Raises:
            UnknownNameError: There is no such method or metric.
            ParameterError: A setting of a method is unknown or out of range.
        """
        for metric in self.metrics:
            metrics.get(metric)
        for method in self.methods:
            method.scheme(self.chunks_per_seal)
            _ = method.window

    @property
    def compressed(self) -> tuple[str, ...]:
        """Labels of the methods that compress: neither the control nor BF16 under a shorter window."""
        return tuple(method.label for method in self.methods if method.name != CONTROL)

    def distributions(self) -> dict[str, str]:
        """Versions of the other distributions that register its methods, its metrics or its host, by their names."""
        used = [name for method in self.methods for name in method.names]
        return methods.distributions(used) | metrics.distributions(self.metrics) | hosts.distributions([self.model])

    def batches(self) -> Iterator[tuple[int, str, tuple[int, ...]]]:
        """Seed, kind and scenes of what is generated together, in the order of a run."""
        for seed in self.seeds:
            for start in range(0, len(self.scenes), self.batch):
                for kind in self.kinds:
                    yield seed, kind, self.scenes[start : start + self.batch]

    def keys(self) -> Iterator[tuple[str, int, int, str]]:
        """Kind, scene, seed and method of every cell, in the order of a run."""
        for seed, kind, scenes in self.batches():
            for method in self.methods:
                for scene in scenes:
                    yield kind, scene, seed, method.label

    def to_json(self) -> dict[str, Any]:
        """Plain values, methods by label."""
        return asdict(self) | {"methods": [method.label for method in self.methods]}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Experiment:
        """Inverse of :meth:`to_json`."""
        settings: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in plain.items()}
        settings["methods"] = tuple(map(MethodChoice.parse, plain["methods"]))
        return cls(**settings)


def twice(entries: Iterable[Hashable]) -> str:
    """The first entry that is there more than once, as messages name it; empty where there is none.

    >>> twice((0, 3, 3)), twice((MethodChoice("kivi"),) * 2), twice("ab")
    ('3', "'kivi'", '')
    """
    found = next((entry for entry, count in Counter(entries).items() if count > 1), None)
    return "" if found is None else repr(found.label if isinstance(found, MethodChoice) else found)


def with_control(methods: tuple[MethodChoice, ...]) -> tuple[MethodChoice, ...]:
    """Put the BF16 control first, adding it where it is missing.

    >>> [method.name for method in with_control((MethodChoice("kivi"),))]
    ['bf16', 'kivi']
    """
    control = MethodChoice(CONTROL)
    return (control, *(method for method in methods if method != control))


def _literal(text: str) -> Option:
    named: dict[str, Option] = {"true": True, "false": False, "none": None}
    if text.lower() in named:
        return named[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
