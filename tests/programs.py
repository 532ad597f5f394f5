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
