"""Shape annotations are enforced while these tests run: the hook stands before the first import of quantwm_core."""

import sys

import hypothesis
import jaxtyping
import pytest
from jaxtyping import install_import_hook

if "quantwm_core" not in sys.modules:  # else test_annotations.py fails and says so
    install_import_hook("quantwm_core", "beartype.beartype")

hypothesis.settings.register_profile("core", max_examples=40, deadline=None, derandomize=True, print_blob=False)
hypothesis.settings.load_profile("core")


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch the annotations off, to see what the package itself says about a wrong dtype."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
