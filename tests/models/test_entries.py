"""What a host allocates for a layer, made anew."""

import torch

from quantwm_models import attach
from quantwm_models.counter import Counter
from quantwm_models.entries import Entries
from tests.models.miniatures import causal_forcing


def test_a_number_that_a_host_sets_anew_is_a_counter_again() -> None:
    entries = Entries()
    entries["end"] = torch.tensor([7])
    assert isinstance(entries["end"], Counter)
    assert (entries["end"].item(), entries["end"].shape, entries["end"].dtype) == (7, (1,), torch.int64)
    kept = entries["end"]
    entries["end"] = kept
    assert entries["end"] is kept
    for other in (torch.zeros(1), torch.tensor([1, 2]), torch.empty(1, dtype=torch.int64, device="meta"), 3):
        entries["other"] = other
        assert entries["other"] is other


def test_a_host_is_given_such_dicts() -> None:
    small = causal_forcing()
    with attach(small.host, "bf16"):
        for seed in range(2):
            small.video(seed, 2)
            assert all(isinstance(each["global_end_index"], Counter) for each in small.host.kv_cache1)
