"""Modules that are run as programs, in the tests' own process."""

import runpy
import sys

import pytest


def ended(name: str, patch: pytest.MonkeyPatch, *words: str) -> object:
    """How a module ends as a program: its status, or its last words."""
    patch.setattr(sys, "argv", [name, *words])
    patch.delitem(sys.modules, name, raising=False)
    with pytest.raises(SystemExit) as end:
        runpy.run_module(name, run_name="__main__")
    return end.value.code


def hide_triton(patch: pytest.MonkeyPatch) -> None:
    """Let what a program imports find no Triton, whatever was imported before."""
    hidden = ("triton", "quantwm_kernels.triton")
    for name in [*sys.modules, *hidden]:
        if any(f"{name}.".startswith(f"{each}.") for each in hidden):
            patch.setitem(sys.modules, name, None)
        elif name.partition(".")[0] == "benchmarks":
            patch.delitem(sys.modules, name)
