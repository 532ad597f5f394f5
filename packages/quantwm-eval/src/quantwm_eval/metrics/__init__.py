"""The family of metrics: one file each, whose name is the metric's public name.

Other distributions add theirs through the entry-point group ``quantwm.metrics``, each entry naming a
:class:`~quantwm_eval.metric.Metric`.
"""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import EntryPoint, entry_points

from quantwm_core.errors import FormatError, lookup
from quantwm_eval.metric import Metric

__all__ = ["get", "installed", "names"]


def _own() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(__path__)]


def _third_party() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group="quantwm.metrics")}


def names() -> tuple[str, ...]:
    """Return the names of all metrics, sorted.

    >>> "psnr" in names()
    True
    """
    return tuple(sorted({*_own(), *_third_party()}))


def installed() -> tuple[str, ...]:
    """Return the names of the metrics whose optional modules are there, sorted.

    >>> set(installed()) <= set(names())
    True
    """
    return tuple(name for name in names() if get(name).installed)


def get(name: str) -> Metric:
    """Return the metric of that name; a bundled one wins over a third party's.

    Raises:
        UnknownNameError: There is none.
        FormatError: A third party's entry point is not a :class:`~quantwm_eval.metric.Metric`.

    >>> get("psnr").quantities[0].unit
    'dB'
    """
    lookup("metric", name, names())
    own = name in _own()
    found = importlib.import_module(f"{__name__}.{name}").METRIC if own else _third_party()[name].load()
    if not isinstance(found, Metric):
        raise FormatError(f"metric {name!r}: got {type(found).__name__}, need a quantwm_eval.metric.Metric")
    return found
