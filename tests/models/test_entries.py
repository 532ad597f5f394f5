"""What a host allocates for a layer, made anew: tensors where they belong, counters where Python reads them."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from quantwm_models import attach
from quantwm_models.entries import Entries, materialise
from tests.models.miniatures import causal_forcing


def test_counters_are_allocated_on_the_cpu_and_nothing_else() -> None:
    counter, place = torch.empty(1, dtype=torch.int64, device="meta"), torch.device("meta")
    entries = {"k": torch.empty(1, 2, 3, 4, device="meta"), "end": counter, "scale": torch.empty(1, device="meta")}
    materialise(entries, place)
    assert {name: entry.device.type for name, entry in entries.items()} == {"k": "meta", "end": "cpu", "scale": "meta"}
    assert entries["end"].tolist() == [0]


def test_counters_that_a_host_sets_anew_are_brought_to_the_cpu() -> None:
    entries = Entries()
    with FakeTensorMode():  # a GPU's tensors, without one
        entries["end"] = torch.tensor([0], device="cuda")
        entries["k"] = torch.zeros(1, 2, device="cuda")
        assert (entries["end"].device.type, entries["k"].device.type) == ("cpu", "cuda")


def test_a_host_is_given_such_dicts() -> None:
    small = causal_forcing()
    with attach(small.host, "bf16"):
        small.video(0, 2)
        assert all(isinstance(entries, Entries) for entries in small.host.kv_cache1)
