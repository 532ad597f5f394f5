"""What is changed on a host comes back, and functions are found where they are looked up."""

import functools
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from quantwm_core.errors import StateError
from quantwm_models.errors import HostError
from quantwm_models.patching import called_by, forward_of, module_of, named, replaced, restored
from tests.models import wan_host
from tests.models.wan_host import SelfAttention


class Holder:
    """Something with attributes."""

    shared: Any = "of the class"


def test_what_is_replaced_is_not_replaced_again() -> None:
    holder = Holder()
    with replaced(holder, "shared", 4):
        with (
            pytest.raises(StateError, match=r"Holder\.shared is set by another attachment"),
            replaced(holder, "shared", 5),
        ):
            pass
        assert holder.shared == 4
        with replaced(Holder(), "shared", 5), replaced(holder, "own", 6):
            pass
    with replaced(holder, "shared", 5):
        assert holder.shared == 5
    assert vars(holder) == {}


def test_an_attribute_comes_back_whatever_happened() -> None:
    holder = Holder()
    holder.__dict__["own"] = before = object()

    def fail() -> None:
        with restored(holder, "own"), restored(holder, "shared"), restored(holder, "absent"):
            vars(holder).update(own=1, shared=2, absent=3)
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert vars(holder) == {"own": before}
    assert holder.shared == "of the class"
    with replaced(holder, "shared", 4), restored(holder, "own"):
        assert holder.shared == 4
        del vars(holder)["own"]
    assert vars(holder) == {"own": before}
    with replaced(holder, "shared", 4):
        del holder.shared
    assert vars(holder) == {"own": before}


def test_names_are_those_of_the_class_and_its_bases() -> None:
    derived = type("Mine", (Holder,), {})()
    assert named(derived, "Other", "Holder")
    assert not named(derived, "Other")
    assert module_of(derived).__name__ == __name__


def offloaded(layer: Any) -> None:
    """Wrap a layer's forward on the instance, as libraries do that move weights in and out."""
    before = layer.forward

    def moved(*args: Any, **kwargs: Any) -> Any:
        return before(*args, **kwargs)

    layer.forward = functools.update_wrapper(functools.partial(moved), before)


def test_the_function_below_what_offloading_puts_around_it_is_found() -> None:
    layer = SelfAttention(0)
    plain = forward_of(layer)
    assert called_by(layer, "flash_attention", "attention") == (wan_host, "attention")
    offloaded(layer)
    assert forward_of(layer) is plain
    assert called_by(layer, "attention") == (wan_host, "attention")


def other_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    return other_attention(self, x)


def other_attention(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return x


def test_a_forward_that_was_put_on_the_instance_counts() -> None:
    layer: Any = SelfAttention(0)
    layer.forward = types.MethodType(other_forward, layer)
    module = sys.modules.get(__name__)
    if module is None:
        pytest.skip("this module is not imported by its name")
    assert called_by(layer, "attention", "other_attention") == (module, "other_attention")


def test_what_attends_otherwise_is_refused() -> None:
    with pytest.raises(HostError, match=r"SelfAttention: forward, of module .*wan_host, calls no function sdpa or mha"):
        called_by(SelfAttention(0), "sdpa", "mha")
    with pytest.raises(HostError, match=r"object: need \.forward"):
        forward_of(object())
    layer: Any = nn.Linear(1, 1)
    layer.forward = len
    with pytest.raises(HostError, match="forward is a builtin_function_or_method; need a Python function"):
        forward_of(layer)
