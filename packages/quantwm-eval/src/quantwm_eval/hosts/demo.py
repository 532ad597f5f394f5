"""The bundled demo world, which needs nothing but a device."""

from __future__ import annotations

from quantwm_core.errors import ParameterError
from quantwm_eval.demo_host import DemoHost
from quantwm_eval.hosts import Setup


def load(setup: Setup) -> DemoHost:
    """Load the bundled weights.

    Raises:
        ParameterError: Something was given that it has no use for.
        StateError: The weights are not installed.
    """
    given = [part for part in ("checkout", "weights", "inputs", "config", "size") if getattr(setup, part)]
    if given:
        raise ParameterError(f"--{given[0]}: the demo world has no use for it; --host names another world")
    return DemoHost(device=setup.device)


LOAD = load
