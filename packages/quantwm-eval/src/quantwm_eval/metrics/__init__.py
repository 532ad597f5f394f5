"""The family of metrics: one file each, whose name is the metric's public name.

Other distributions add theirs through the entry-point group ``quantwm.metrics``, each entry naming a
:class:`~quantwm_eval.metric.Metric`.
"""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from importlib.metadata import EntryPoint, entry_points

from quantwm_core import plugin
from quantwm_core.errors import FormatError, PluginError, lookup
from quantwm_eval.metric import Metric

__all__ = ["get", "installed", "loaded", "names"]


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
    return tuple(name for name, metric in loaded().items() if metric.installed)


def loaded() -> dict[str, Metric]:
    """Return all metrics by name, sorted; one of a third party that cannot be loaded, or is none, is left out with a warning.

    >>> set(loaded()) <= set(names())
    True
    """
    found = {}
    for name in names():
        try:
            found[name] = get(name)
        except (PluginError, FormatError) as error:
            warnings.warn(f"metric {name!r} is left out: {error}", stacklevel=2)
    return found


def get(name: str) -> Metric:
    """Return the metric of that name; a bundled one wins over a third party's.

    Raises:
        UnknownNameError: There is none.
        PluginError: A third party's cannot be loaded.
        FormatError: A third party's entry point is not a :class:`~quantwm_eval.metric.Metric`.

    >>> get("psnr").quantities[0].unit
    'dB'
    """
    lookup("metric", name, names())
    own = name in _own()
    found = importlib.import_module(f"{__name__}.{name}").METRIC if own else plugin.load(_third_party()[name])
    if not isinstance(found, Metric):
        raise FormatError(f"metric {name!r}: got {type(found).__name__}, need a quantwm_eval.metric.Metric")
    return found
