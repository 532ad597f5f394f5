"""The family of metrics: one file each, whose name is the metric's public name.

Other distributions add theirs through the entry-point group ``quantwm.metrics``, each entry naming a
:class:`~quantwm_eval.metric.Metric`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from quantwm_core.errors import PluginError
from quantwm_core.plugin import Family
from quantwm_eval.metric import Metric

__all__ = ["distributions", "get", "installed", "loaded", "names"]


def _is_metric(found: object) -> bool:
    return isinstance(found, Metric)


_FAMILY = Family("metric", __name__, "a quantwm_eval.metric.Metric", _is_metric, "METRIC")


def names() -> tuple[str, ...]:
    """Return the names of all metrics, sorted.

    >>> "psnr" in names()
    True
    """
    return _FAMILY.names()


def distributions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of the other distributions that register some of these metrics, by their names.

    >>> distributions(["psnr"])
    {}
    """
    return _FAMILY.distributions(names)


def installed() -> tuple[str, ...]:
    """Return the names of the metrics whose optional modules are there, sorted.

    >>> set(installed()) <= set(names())
    True
    """
    return tuple(name for name, metric in loaded().items() if metric.installed)


def loaded() -> dict[str, Metric]:
    """Return all metrics by name, sorted; one of a third party that :func:`get` refuses is left out with a warning.

    >>> set(loaded()) <= set(names())
    True
    """
    found = {}
    for name in names():
        try:
            found[name] = get(name)
        except PluginError as error:
            warnings.warn(f"metric {name!r} is left out: {error}", stacklevel=2)
    return found


def get(name: str) -> Metric:
    """Return the metric of that name; a bundled one wins over a third party's.

    Raises:
        UnknownNameError: There is none.
        PluginError: A third party's cannot be loaded or is not a :class:`~quantwm_eval.metric.Metric`, or several register it.

    >>> get("psnr").quantities[0].unit
    'dB'
    """
    metric: Metric = _FAMILY.get(name)
    return metric
