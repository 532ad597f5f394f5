"""Loading what other distributions register by entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

from quantwm_core.errors import PluginError


def load(entry: EntryPoint) -> Any:
    """What an entry point names.

    Raises:
        PluginError: It cannot be imported, or lacks what is named; the message says whose it is.

    >>> load(EntryPoint("mean", "statistics:mean", "quantwm.metrics"))([1, 3])
    2
    >>> load(EntryPoint("gone", "no_such_module:METRIC", "quantwm.metrics"))
    Traceback (most recent call last):
    ...
    quantwm_core.errors.PluginError: entry point gone = no_such_module:METRIC of quantwm.metrics cannot be loaded (No module named 'no_such_module'); mend what registers it, or uninstall that
    """
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        owner = f", registered by {entry.dist.name}," if entry.dist is not None else ""
        raise PluginError(
            f"entry point {entry.name} = {entry.value} of {entry.group}{owner} cannot be loaded ({error}); "
            "mend what registers it, or uninstall that"
        ) from error
