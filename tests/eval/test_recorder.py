"""The recorder against the reference measures of quantwm-core, on a real cache."""

import numpy as np
import pytest
import torch
from torch import Tensor

from quantwm_core import attention
from quantwm_core.method import scheme
from quantwm_eval.recorder import SPLIT, TALLIES, Recorder, sample_tokens
from quantwm_eval.scoring import TOP
from quantwm_eval.tally import Tally
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


def last_read(tally: Tally) -> Tally:
    return Tally(tally.part[..., -1:], tally.whole[..., -1:])


def by_head(tally: Tally) -> np.ndarray:
    return tally.over_heads()[0]


@pytest.mark.parametrize("query_heads", [HEADS, 2 * HEADS])
def test_sums_equal_the_reference_when_every_query_is_sampled(query_heads: int) -> None:
    recorder = Recorder(samples=TOKENS)
    cache = LayerCache(scheme("rtn"), observers=[recorder])
    given = chunks(3, query_heads)
    roll(cache, given)
    read_keys, read_values = map(numpy, cache.read())
    keys, values = (np.concatenate([numpy(chunk[part]) for chunk in given], 2) for part in (1, 2))
    sealed = slice(0, 2 * TOKENS)

    for video, recording in enumerate(recorder.recordings()):
        one = slice(video, video + 1)
        queries = numpy(given[2][0])[one]
        true, rebuilt = (
            attention.logits(queries, tokens[one]).reshape(1, HEADS, -1, 3 * TOKENS) for tokens in (keys, read_keys)
        )
        last = {name: last_read(getattr(recording, name)) for name in TALLIES}
        past = true[..., sealed], rebuilt[..., sealed]
        np.testing.assert_allclose(by_head(last["selection"]), attention.selection_shift(*past)[0], atol=1e-6)
        np.testing.assert_allclose(by_head(last["top"]), attention.selection_shift(*past, top=TOP)[0], atol=1e-6)
        np.testing.assert_allclose(by_head(last["logits"]), attention.logit_error(*past)[0], rtol=1e-4)
        np.testing.assert_allclose(by_head(last["attention"]), attention.attention_kl(true, rebuilt)[0], rtol=1e-4)
        exact = attention.attend(queries, keys[one], values[one]).reshape(HEADS, -1)
        found = attention.attend(queries, read_keys[one], read_values[one]).reshape(HEADS, -1)
        errors = np.square(found - exact).sum(-1) / np.square(exact).sum(-1)
        np.testing.assert_allclose(by_head(last["output"]), errors, rtol=1e-4)
        for name, whole, read in (("keys", keys, read_keys), ("values", values, read_values)):
            error = np.square(read - whole)[video, :, sealed].sum((1, 2))
            energy = np.square(whole)[video, :, sealed].sum((1, 2))
            np.testing.assert_allclose(by_head(last[name]), error / energy, rtol=1e-5)
        assert all(tally.ratio() > 0 for tally in last.values())


def test_the_oldest_age_is_that_of_the_first_chunk_in_the_last_read() -> None:
    recorder = Recorder(samples=TOKENS)
    cache = LayerCache(scheme("rtn"), observers=[recorder])
    given = chunks(3)
    roll(cache, given)
    read = numpy(cache.read()[0])[:, :, : 2 * TOKENS]
    keys = np.concatenate([numpy(chunk[1]) for chunk in given[:2]], 2)
    queries = numpy(given[2][0])
    true, rebuilt = attention.logits(queries, keys), attention.logits(queries, read)
    error, exact = (x - x.mean(-1, keepdims=True) for x in (rebuilt - true, true))
    winner, first = true.argmax(-1), slice(0, TOKENS)
    for video, recording in enumerate(recorder.recordings()):
        assert np.isnan(recording.logits.over_ages()[0])  # the active chunk is not sealed
        assert recording.logits.over_ages().shape == (3,)
        share = np.square(error[video, ..., first]).sum() / np.square(exact[video, ..., first]).sum()
        assert recording.logits.over_ages()[2] == pytest.approx(share, rel=1e-4)
        old = winner[video] < TOKENS
        moved = (rebuilt.argmax(-1) != winner)[video]
        assert recording.selection.whole_by_age[0, :, 2].sum() == old.sum()
        assert recording.selection.part_by_age[0, :, 2].sum() == (old & moved).sum()
        share = np.square((read - keys)[video, :, first]).sum() / np.square(keys[video, :, first]).sum()
        assert recording.keys.over_ages()[2] == pytest.approx(share, rel=1e-5)
        # Read twice, as age 1 and as age 2, it is one position.
        assert recording.keys.over_positions().shape == (2,)
        assert recording.keys.over_positions()[0] == pytest.approx(share, rel=1e-5)
        for name in SPLIT:
            tally = getattr(recording, name)
            np.testing.assert_allclose(tally.part_by_age.sum(-1), tally.part.sum(-1))
            np.testing.assert_allclose(tally.whole_by_age.sum(-1), tally.whole.sum(-1))
            np.testing.assert_allclose(tally.part_by_position.sum(-1), tally.part.sum(-1))
            np.testing.assert_allclose(tally.whole_by_position.sum(-1), tally.whole.sum(-1))


@pytest.mark.parametrize("query_heads", [HEADS, 2 * HEADS])
def test_the_spectrum_is_that_of_all_queries(query_heads: int) -> None:
    recorder = Recorder(samples=2)
    given = chunks(3, query_heads)
    roll(LayerCache(scheme("rtn"), observers=[recorder]), given)
    queries = np.concatenate([numpy(chunk[0]).reshape(BATCH, HEADS, -1, CHANNELS) for chunk in given], 2)
    for video, recording in enumerate(recorder.recordings()):
        singular = np.linalg.svd(queries[video], compute_uv=False)
        np.testing.assert_allclose(recording.spectrum[0], np.square(singular), rtol=1e-4)


def test_passes_of_a_chunk_count_its_tokens_once() -> None:
    once, twice = Recorder(), Recorder()
    for recorder, passes in ((once, 1), (twice, 2)):
        cache = LayerCache(scheme("rtn"), observers=[recorder])
        for queries, keys, values in chunks(3):
            cache.append(keys, values)
            for _ in range(passes):
                cache.attend(queries)
    for first, second in zip(once.recordings(), twice.recordings(), strict=True):
        np.testing.assert_array_equal(first.keys.part, second.keys.part)
        np.testing.assert_array_equal(2 * first.selection.whole, second.selection.whole)


def test_an_exact_cache_shifts_nothing() -> None:
    recorder = Recorder()
    roll(LayerCache(scheme("bf16"), observers=[recorder]), chunks(4))
    for recording in recorder.recordings():
        assert recording.selection.whole[..., 1:].min() > 0
        assert [getattr(recording, name).ratio() for name in TALLIES] == [0] * len(TALLIES)


def test_nothing_is_counted_before_anything_is_sealed() -> None:
    recorder = Recorder()
    roll(LayerCache(scheme("rtn"), observers=[recorder]), chunks(1))
    (recording, _) = recorder.recordings()
    for name in TALLIES:
        tally = getattr(recording, name)
        assert tally.whole.sum() == 0
        assert np.isnan(tally.ratio())


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
        for name in TALLIES:
            np.testing.assert_equal(vars(getattr(first, name)), vars(getattr(second, name)))


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
        assert sum(unit.span.tokens for unit in held) == sum(piece.span.tokens for piece in live)
        for unit in held:
            assert all(x.shape[2] == unit.span.tokens and x._base is None for x in (unit.keys, unit.values))
    for part, whole in zip(("keys", "values"), cache.read(), strict=True):
        exact = torch.cat([getattr(unit, part) for unit in recorder._layers[0].exact], 2).float()
        read = whole[:, :, : exact.shape[2]].float()
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
    assert first.selection.whole.shape == (3, HEADS, 4)
    np.testing.assert_array_equal(first.selection.whole[:, :, 1:], 12)
    np.testing.assert_array_equal(first.selection.whole[:, :, 0], 0)
    assert first.selection.whole_by_age.shape == (3, HEADS, 4)
    assert (first.logits.part[..., 1:] != second.logits.part[..., 1:]).all()
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
