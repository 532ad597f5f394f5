"""What a host allocates for a layer, made anew: tensors where they belong, and counters that nobody waits for."""

from typing import Any

import torch
from torch.distributed.utils import _recursive_to

from quantwm_models import attach
from quantwm_models.counter import Counter
from quantwm_models.entries import Entries, materialise
from tests.models.miniatures import causal_forcing


def test_whole_numbers_become_counters_and_nothing_else_does() -> None:
    number, place = torch.empty(1, dtype=torch.int64, device="meta"), torch.device("cpu")
    entries = {"k": torch.empty(1, 2, 3, 4, device="meta"), "end": number, "scale": torch.empty(1, device="meta")}
    materialise(entries, place)
    assert {name: type(entry) for name, entry in entries.items()} == {
        "k": torch.Tensor,
        "end": Counter,
        "scale": torch.Tensor,
    }
    assert entries["end"].tolist() == [0]


def test_a_number_that_a_host_sets_anew_is_a_counter_again() -> None:
    entries = Entries()
    for name, value in (("k", torch.ones(1, 2)), ("n", 5), ("meta", torch.empty(1, dtype=torch.long, device="meta"))):
        entries[name] = value
        assert entries[name] is value
    for number in (3, 0):
        entries["end"] = torch.tensor([number])
        assert isinstance(entries["end"], Counter)
        assert int(entries["end"]) == number
    del entries["meta"]
    rebuilt: Any = _recursive_to([entries], torch.device("cpu"), False)
    assert rebuilt[0][0]["end"] is entries["end"]


def test_a_host_is_given_such_dicts() -> None:
    small = causal_forcing()
    with attach(small.host, "bf16"):
        small.video(0, 2)
        assert all(isinstance(entries, Entries) for entries in small.host.kv_cache1)
