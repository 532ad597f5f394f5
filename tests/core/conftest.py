"""Shape annotations are enforced while these tests run: the hook stands before the first import of quantwm_core.

Where other tests run in the same process, no conftest.py of theirs may import quantwm_core: pytest reads those of all
folders that it is told before any test, in the order in which they were told.
"""

import sys

import hypothesis
import jaxtyping
import pytest
from jaxtyping import install_import_hook

if "quantwm_core" in sys.modules:
    raise pytest.UsageError(
        "quantwm_core was imported before tests/core could have its annotations checked; run it apart"
    )
install_import_hook("quantwm_core", "beartype.beartype")

hypothesis.settings.register_profile("core", max_examples=40, deadline=None, derandomize=True, print_blob=False)
hypothesis.settings.load_profile("core")


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch the annotations off, to see what the package itself says about a wrong dtype."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
