"""Experiments in TOML: a file of settings to an :class:`~quantwm_eval.experiment.Experiment`.

Keys are the attributes of the experiment. ``scenes`` is a list of numbers, or how many to take from 0 on; ``methods`` is a
list of labels as ``quantwm demo --methods`` takes them, or of tables with a ``name`` and settings. The BF16 control need
not be named. ``about`` and ``sources`` are for people and for the report, see :mod:`quantwm_eval.named`. Left out are ``kinds``, ``frames``, ``degrees``, ``seeds``, ``chunks_per_seal``, ``samples``, ``model`` and
``metrics`` where their defaults will do, and ``batch``, which is 1 here: a killed run loses the batch in flight.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from quantwm_core.errors import FormatError, ParameterError, StateError, lookup
from quantwm_eval import metrics
from quantwm_eval.experiment import Experiment, MethodChoice, with_control

NUMBERS = ("frames", "degrees", "chunks_per_seal", "batch", "samples")
LISTS = {"kinds": str, "metrics": str, "seeds": int}
MOST_SCENES = 100_000
"""More than anybody measures, and few enough to be listed."""
NOTES = ("about", "sources")
"""Keys that set nothing."""


def read(path: Path) -> dict[str, Any]:
    """Read the settings of a file, checked one by one.

    Raises:
        FormatError: The file is not TOML.
        ParameterError: A setting is unknown or of another type than it must be.
        StateError: It is not there or cannot be read.
    """
    try:
        plain = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StateError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # numbers of too many digits, lists in lists in lists
        raise FormatError(f"{path}: not TOML: {error}") from error
    try:
        return settings(plain)
    except (ParameterError, LookupError) as error:
        raise ParameterError(f"{path}: {error}") from error


def settings(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values to what :class:`Experiment` takes.

    Raises:
        ParameterError: A value is of another type than it must be.
        UnknownNameError: There is no such setting.

    >>> settings({"scenes": 2, "methods": ["kivi", {"name": "quantwm", "rank": 16}]})["methods"][1].label
    'quantwm:rank=16'
    """
    known = [field.name for field in fields(Experiment) if field.name != "name"]
    return {lookup("setting", key, known): _setting(key, value) for key, value in plain.items() if key not in NOTES}


def build(chosen: Mapping[str, Any]) -> Experiment:
    """Make the experiment, with its control and one scene in a batch unless more are asked for.

    Raises:
        ParameterError: Methods or scenes are missing, a setting is out of range, or a metric is not installed.
        UnknownNameError: There is no such method or metric.

    >>> build(settings({"scenes": 2, "methods": ["kivi"]})).compressed
    ('kivi',)
    """
    lacking = [name for name in ("methods", "scenes") if name not in chosen]
    if lacking:
        raise ParameterError(f"the experiment names no {' and no '.join(lacking)}")
    for name in chosen.get("metrics", ()):
        metric = metrics.get(name)
        if not metric.installed:
            raise ParameterError(f"metric {name!r} needs {metric.lacks}, which is not there")
    made = Experiment(**{"batch": 1} | dict(chosen) | {"methods": with_control(tuple(chosen["methods"]))})
    made.check()
    return made


def _setting(key: str, value: Any) -> Any:
    if key == "methods":
        if value == []:
            raise ParameterError("methods = []: need at least one; 'bf16' alone runs the control")
        return tuple(map(_method, _list(key, value, (str, dict))))
    if key == "scenes":
        return tuple(range(_countable(value))) if _whole(value) else _list(key, value, (int,))
    if key in LISTS:
        return _list(key, value, (LISTS[key],))
    if key in NUMBERS and not _whole(value):
        raise ParameterError(f"{key} = {value!r}: need a whole number")
    if key == "model" and not isinstance(value, str):
        raise ParameterError(f"{key} = {value!r}: need a name")
    return value


def _countable(scenes: int) -> int:
    if scenes > MOST_SCENES:
        raise ParameterError(f"scenes = {scenes}: need at most {MOST_SCENES}")
    return scenes


def _method(entry: str | Mapping[str, Any]) -> MethodChoice:
    if isinstance(entry, str):
        return MethodChoice.parse(entry)
    options = dict(entry)
    name = options.pop("name", None)
    if not isinstance(name, str) or not all(isinstance(value, (bool, int, float, str)) for value in options.values()):
        raise ParameterError(f"methods: {dict(entry)!r} is no table of a name and plain settings")
    # Through its label, so that a table and a label of the same settings are the same method.
    return MethodChoice.parse(MethodChoice(name, tuple(options.items())).label)


def _list(key: str, value: Any, types: tuple[type, ...]) -> tuple[Any, ...]:
    fits = isinstance(value, list) and all(isinstance(x, types) and not isinstance(x, bool) for x in value)
    if not fits:
        raise ParameterError(f"{key} = {value!r}: need a list of {' or '.join(one.__name__ for one in types)}")
    return tuple(value)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
