"""The measurements on activations of real inputs: their readers and their scores, without any weights."""

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.activations import anew, harness, ideas, methods, room, table, whisper
from benchmarks.activations.minilm import pieces
from benchmarks.activations.recording import Recording, heads_of
from quantwm_core.rotary import Turning


def recording(tokens: int = 96) -> Recording:
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = torch.randn(3, 1, 2, tokens, 32, generator=generator)
    return Recording("noise", "input 0", 3, queries, keys, values)


def test_an_exact_cache_has_no_error_and_sixteen_bits() -> None:
    score = harness.measure(recording(), "bf16", 16)
    assert (score.key_bits, score.value_bits, score.shared_bits, score.state_bits) == (16, 16, 0, 0)
    assert score.logit_error == score.selection_shift == score.key_error == score.value_error == score.output_error == 0


def test_bits_are_those_of_the_units_that_are_scored_and_state_is_counted() -> None:
    score = harness.measure(recording(), "quantwm:rank=2:centroids=4", 16)
    # Units of 32 tokens: codes, a scale, a quarter of a zero-point and an index a token; centroids and super-scale.
    values = 32 * (8 + 1 + 1 / 4 + 1) + 4 * 64 + 4
    keys = values + 2 * 64 + 32 * 2 + 4
    assert score.value_bits == pytest.approx(8 * values / 1024)
    assert score.key_bits == pytest.approx(8 * keys / 1024)
    assert score.state_bits == pytest.approx(8 * 4 * 32 / (2 * 96))
    assert 0 < score.logit_error < 0.2
    assert score.key_error > 0


def test_the_first_unit_and_the_last_are_not_scored() -> None:
    changed = recording()
    for part in (changed.keys, changed.values):
        part[:, :, :32] = part[:, :, 64:] = 1e3
    assert harness.measure(changed, "rtn", 16).key_bits == harness.measure(recording(), "rtn", 16).key_bits
    with pytest.raises(ValueError, match="no unit has both a past and a future"):
        harness.measure(recording(64), "rtn", 16)


def test_a_line_is_the_mean_over_layers() -> None:
    score = harness.measure(recording(), "rtn", 16)
    twice = harness.lines([score, harness.measure(recording(), "rtn", 16), harness.measure(recording(), "bf16", 16)])
    assert [line["method"] for line in twice] == ["rtn", "bf16"]
    assert [line["layers"] for line in twice] == [2, 1]
    assert twice[0]["logit_error"] == float(f"{score.logit_error:.5g}")


def test_ratios_are_taken_input_by_input() -> None:
    ours: table.Rows = [{"source": name, "logit_error": value} for name, value in (("a", 1.0), ("b", 20.0))]
    theirs: table.Rows = [
        {"source": name, "logit_error": value} for name, value in (("b", 10.0), ("a", 0.5), ("c", 7.0))
    ]
    found = table.ratio(ours, theirs, "logit_error")
    assert (found.mean, found.low, found.high, found.n) == (2, 2, 2, 2)


def test_heads_are_consecutive_channels() -> None:
    heads = heads_of(torch.arange(12.0).view(2, 6), 3)
    assert heads[0, :, 1].tolist() == [[6, 7], [8, 9], [10, 11]]


def test_words_are_cut_into_the_longest_pieces() -> None:
    vocabulary = {piece: number for number, piece in enumerate(("[UNK]", "un", "##see", "##seen", "##n", "!", "a"))}
    assert pieces("Unseen! A Unseem", vocabulary) == [1, 3, 5, 6, 0]


def test_weights_in_parts_are_read_as_one_file(tmp_path: Path) -> None:
    arrays: dict[str, np.ndarray] = {"one": np.array([[1, 2, 3]], np.float16), "two": np.array([-4, 5], np.int8)}
    blob = struct.pack("<IH", 6, 5) + b"Spec\0" + struct.pack("<II", 3, len(arrays))
    for name, array in arrays.items():
        kind = {"float16": 4, "int8": 1}[array.dtype.name]
        blob += struct.pack("<H", len(name) + 1) + name.encode() + b"\0" + struct.pack("<B", array.ndim)
        blob += struct.pack(f"<{array.ndim}I", *array.shape) + struct.pack("<BI", kind, array.nbytes) + array.tobytes()
    paths = [tmp_path / "first", tmp_path / "second"]
    for path, part in zip(paths, (blob[:21], blob[21:]), strict=True):
        path.write_bytes(part)
    read = whisper.read_weights(paths)
    assert {name: tensor.tolist() for name, tensor in read.items()} == {"one": [[1, 2, 3]], "two": [-4, 5]}


def test_a_tone_is_loudest_in_its_own_band() -> None:
    filters = whisper.mel_filters()
    assert filters.shape == (80, 201)
    assert bool((filters.sum(dim=1) > 0).all())
    seconds = torch.arange(whisper.RATE * whisper.SECONDS) / whisper.RATE
    picture = whisper.spectrogram(torch.sin(2 * torch.pi * 1000 * seconds))
    assert picture.shape == (80, 3000)
    # Slaney's scale is linear up to 1000 Hz, which lies at 15 of its 45.245 units: band 26 of 81.
    assert abs(int(picture[:, 1500].argmax()) - 15 / 45.245 * 81 + 1) <= 1
    assert picture.max() - picture.min() <= 2


def test_the_page_of_transform_codes_says_what_the_lines_say() -> None:
    folder = Path(__file__).parents[2] / "docs" / "results"
    printed = table.markdown(folder / "activations-room.jsonl", methods.labels("room")).splitlines()
    page = (folder / "transform-codes.md").read_text(encoding="utf-8").splitlines()
    shown = [row for row in page if row.count("|") == printed[0].count("|") and row.startswith("| `")]
    assert {row.split("`")[1] for row in shown} >= set(methods.BASES)
    assert set(shown) <= set(printed)


def test_the_page_of_coming_frames_says_what_the_lines_say() -> None:
    docs = Path(__file__).parents[2] / "docs"
    printed = table.pairs(docs / "results" / "activations-room.jsonl")
    assert printed.count(":frames_ahead=") >= len(methods.AHEAD)
    assert printed in (docs / "frames-ahead.md").read_text(encoding="utf-8")


def test_the_page_of_transform_codes_says_what_longer_units_take() -> None:
    results = Path(__file__).parents[2] / "docs" / "results"
    printed = table.totals(results / "activations-long.jsonl")
    assert printed.count(":chunks_per_seal=11") >= len(methods.LONG)
    assert printed in (results / "transform-codes.md").read_text(encoding="utf-8")


def test_feedback_makes_up_for_what_is_not_compensated() -> None:
    queries, keys, values = torch.randn(3, 1, 2, 96, 32, generator=torch.Generator().manual_seed(0))
    queries[..., :16] += 2 * queries[..., 16:]  # sixteen pairs of channels that the queries see together
    one = Recording("noise", "input 0", 3, queries, keys, values)
    shares = [ideas.left_by_feedback([one], rank, 16) for rank in (16, 2)]
    assert shares[1] < 0.8
    assert 0.99 < shares[0] < 1  # sixteen directions hold all that is correlated


def test_histories_are_counted_from_their_first_frame_and_an_exact_one_has_no_error() -> None:
    tokens, turning = (anew.HISTORY + 3) * room.CHUNK_TOKENS, Turning(64, tuple(0.5 ** np.arange(16)))
    noise = replace(recording(tokens), turning=turning)
    assert list(anew.histories(noise, "bf16")) == [0.0] * (anew.HISTORY + 1)
    one, other = (anew.counted_from(3, each.numpy(), turning) for each in (noise.queries, noise.keys))
    logits = np.einsum("bhqd,bhkd->bhqk", noise.queries[:, :, :8], noise.keys[:, :, :8])
    np.testing.assert_allclose(np.einsum("bhqd,bhkd->bhqk", one[:, :, :8], other[:, :, :8]), logits, atol=1e-4)
    assert not np.allclose(one, noise.queries)
    with pytest.raises(ValueError, match="positions are unknown"):
        next(anew.histories(recording(tokens), "bf16"))
