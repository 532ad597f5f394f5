"""The recorder against the reference measures of quantwm-core, on a real cache."""

import numpy as np
import pytest
import torch
from torch import Tensor

from quantwm_core import attention
from quantwm_core.method import scheme
from quantwm_eval.evidence import Recording
from quantwm_eval.metrics.logit_error import logit_error
from quantwm_eval.metrics.selection_shift import selection_shift
from quantwm_eval.recorder import Recorder, sample_tokens, share
from quantwm_models.cache import LayerCache

BATCH, HEADS, TOKENS, CHANNELS = 2, 2, 24, 16


def chunks(count: int, query_heads: int = HEADS) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and values of some chunks."""
    generator = torch.Generator().manual_seed(3)

    def draw(heads: int) -> Tensor:
        return torch.randn(BATCH, heads, TOKENS, CHANNELS, generator=generator).bfloat16()

    return [(draw(query_heads), draw(HEADS), draw(HEADS)) for _ in range(count)]


def roll(cache: LayerCache, given: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
    outputs = []
    for queries, keys, values in given:
        cache.append(keys, values)
        outputs.append(cache.attend(queries))
    return outputs


def numpy(tensor: Tensor) -> np.ndarray:
    return tensor.float().numpy()


@pytest.mark.parametrize("query_heads", [HEADS, 2 * HEADS])
def test_counts_equal_the_reference_when_every_query_is_sampled(query_heads: int) -> None:
    recorder = Recorder(samples=TOKENS)
    cache = LayerCache(scheme("rtn"), observers=[recorder])
    given = chunks(3, query_heads)
    roll(cache, given)
    queries = numpy(given[2][0])
    exact = np.concatenate([numpy(keys) for _, keys, _ in given[:2]], axis=2)
    read = numpy(cache.read()[0])[:, :, : 2 * TOKENS]

    for video, recording in enumerate(recorder.recordings()):
        true, rebuilt = (
            attention.logits(queries[video : video + 1], keys[video : video + 1]).reshape(1, HEADS, -1, 2 * TOKENS)
            for keys in (exact, read)
        )
        last = Recording(
            *(getattr(recording, name)[..., -1:] for name in ("queries", "shifted", "error_energy", "logit_energy"))
        )
        shifts = share(last.shifted, last.queries, axis=(0, 2))
        errors = share(last.error_energy, last.logit_energy, axis=(0, 2))
        np.testing.assert_allclose(shifts, attention.selection_shift(true, rebuilt)[0], atol=1e-6)
        np.testing.assert_allclose(errors, attention.logit_error(true, rebuilt)[0], rtol=1e-4)
        assert 0 < selection_shift(last) < 1
        assert logit_error(last) > 0


def test_an_exact_cache_shifts_nothing() -> None:
    recorder = Recorder()
    roll(LayerCache(scheme("bf16"), observers=[recorder]), chunks(4))
    for recording in recorder.recordings():
        assert recording.queries[..., 1:].min() > 0
        assert selection_shift(recording) == 0
        assert logit_error(recording) == 0


def test_nothing_is_counted_before_anything_is_sealed() -> None:
    recorder = Recorder()
    roll(LayerCache(scheme("rtn"), observers=[recorder]), chunks(1))
    (recording, _) = recorder.recordings()
    assert recording.queries.sum() == 0
    assert np.isnan(selection_shift(recording))
    assert np.isnan(logit_error(recording))


def test_the_recorder_changes_nothing_that_the_model_sees() -> None:
    watched, alone = LayerCache(scheme("quantwm"), observers=[Recorder()]), LayerCache(scheme("quantwm"))
    state = torch.get_rng_state()
    for seen, unseen in zip(roll(watched, chunks(4)), roll(alone, chunks(4)), strict=True):
        assert torch.equal(seen, unseen)
    assert torch.equal(torch.get_rng_state(), state)


def test_two_recorders_count_the_same() -> None:
    one, two = Recorder(samples=5), Recorder(samples=5)
    for recorder in (one, two):
        roll(LayerCache(scheme("kivi"), observers=[recorder]), chunks(4))
    for first, second in zip(one.recordings(), two.recordings(), strict=True):
        for name in ("queries", "shifted", "error_energy", "logit_energy"):
            np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


@pytest.mark.parametrize("sink", [0, 10])
def test_memory_is_bounded_by_the_window_and_partial_evictions_are_followed(sink: int) -> None:
    window = 2 * TOKENS + 20  # no multiple of a chunk: units are left in parts
    recorder = Recorder(samples=TOKENS)
    cache = LayerCache(scheme("rtn"), window=window, sink=sink, observers=[recorder])
    for queries, keys, values in chunks(8):
        cache.append(keys, values)
        cache.attend(queries)
        held = recorder._layers[0].exact
        live = [piece for piece in cache.stream.read() if piece.unit is not None]
        assert sum(span.tokens for span, _ in held) == sum(piece.span.tokens for piece in live)
        assert all(tensor.shape[2] == span.tokens and tensor._base is None for span, tensor in held)
    exact = torch.cat([tensor for _, tensor in recorder._layers[0].exact], 2).float()
    read = cache.read()[0][:, :, : exact.shape[2]].float()
    assert (exact - read).abs().max() < 1.5  # the same tokens in the same order, up to quantization
    assert (exact.roll(1, 2) - read).abs().max() > 3


def test_recordings_are_laid_out_by_video_layer_head_and_read() -> None:
    recorder = Recorder(samples=6)
    caches = [LayerCache(scheme("rtn"), layer=layer, observers=[recorder]) for layer in range(3)]
    for given in chunks(4):
        for cache in caches:
            roll(cache, [given])
            cache.attend(given[0])  # a second pass over the same read
    first, second = recorder.recordings()
    assert first.queries.shape == (3, HEADS, 4)
    np.testing.assert_array_equal(first.queries[:, :, 1:], 12)
    np.testing.assert_array_equal(first.queries[:, :, 0], 0)
    assert (first.error_energy[..., 1:] != second.error_energy[..., 1:]).all()
    assert Recorder().recordings() == ()


@pytest.mark.parametrize("tokens", [1, 7, 64, 256, 1560, 4680])
def test_samples_are_distinct_and_spread_over_rows_columns_and_frames(tokens: int) -> None:
    drawn = sample_tokens(tokens, 32, turn=3)
    assert len(set(drawn.tolist())) == min(32, tokens)
    assert drawn.min() >= 0
    assert drawn.max() < tokens
    if tokens == 256:  # four frames of 8 x 8
        for axis in (drawn % 8, drawn // 8 % 8, drawn // 64):
            counts = np.bincount(axis)
            assert counts.min() >= counts.mean() / 2
    turns = {tuple(sample_tokens(tokens, 32, turn).tolist()) for turn in range(4)}
    assert len(turns) > 1 or tokens == 1
