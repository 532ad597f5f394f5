import numpy as np
import pytest

from quantwm_core import allocation, attention, methods
from quantwm_core.chunk import Kind, SealedTensor
from quantwm_core.method import decode_tensor
from quantwm_core.statistics import QueryMoment, second_moment
from tests.core import strategies


def _recording(seed: int = 0, channels: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Keys whose energy lies elsewhere than that of the queries, BF16 ``[1, 2, 256, channels]`` each."""
    rng = np.random.default_rng(seed)
    fixed = np.random.default_rng(9)
    spread = np.exp2(-np.arange(channels) / 8)
    turns = np.linalg.qr(fixed.standard_normal((2, 2, channels, channels)))[0]
    keys, queries = ((rng.standard_normal((1, 2, 256, channels)) * spread) @ turn for turn in turns)
    return keys.astype("bfloat16"), (3 * queries).astype("bfloat16")


def _logit_error(sealed: SealedTensor, keys: np.ndarray, queries: np.ndarray) -> float:
    exact = attention.logits(queries, keys)
    return float(attention.logit_error(exact, attention.logits(queries, decode_tensor(sealed))).mean())


def test_knowing_the_queries_helps_and_beats_its_relatives_at_equal_or_fewer_bytes() -> None:
    keys, past = _recording()
    _, queries = _recording(1)
    moment = second_moment(past, 2)
    sealed = {name: methods.get(name).seal("keys", keys, moment) for name in ("klt", "kvtc", "oscar", "quantwm")}
    errors = {name: _logit_error(each, keys, queries) for name, each in sealed.items()}
    blind = _logit_error(methods.get("klt").seal("keys", keys), keys, queries)
    assert errors["klt"] < blind
    assert errors["klt"] < min(errors["kvtc"], errors["oscar"], errors["quantwm"]) / 1.5
    codes = {name: each.nbytes - each.shared_nbytes for name, each in sealed.items()}
    assert codes["klt"] <= 1.02 * min(codes["kvtc"], codes["oscar"], codes["quantwm"])


@pytest.mark.parametrize("tolerance", [0.2, 0.03, 0.004])
def test_a_target_error_is_met(tolerance: float) -> None:
    keys, past = _recording()
    moment = second_moment(past, 2)
    method = methods.get("klt", tolerance=tolerance, damp=1e-3)
    errors = _logit_error(method.seal("keys", keys, moment), keys, past)
    assert tolerance / 4 < errors < 1.3 * tolerance


def test_a_level_sends_bits_where_queries_are_loud_and_no_head_knows_of_another() -> None:
    keys, past = _recording()
    loud = past.astype(np.float32) * np.array([1, 8], np.float32)[:, None, None]
    moment = second_moment(loud, 2)
    method = methods.get("klt", level=0.001)
    sealed = method.seal("keys", keys, moment)
    counts = sealed.arrays["blocks"]
    quiet, noisy = (allocation.token_bytes(each) for each in counts[0])
    assert noisy > 1.5 * quiet
    alone = [
        method.seal("keys", keys[:, head : head + 1], QueryMoment(moment.mean[:, head : head + 1], 256))
        for head in (0, 1)
    ]
    assert [each.arrays["blocks"].tolist() for each in alone] == [counts[:, :1].tolist(), counts[:, 1:].tolist()]
    joint = methods.get("klt", level=0.001, allocation="layer").seal("keys", keys, moment)
    assert joint.arrays["blocks"].tolist() == counts.tolist()


def test_a_level_is_an_error_of_logits_and_leaves_values_alone() -> None:
    keys, past = _recording()
    errors, plain = [], methods.get("klt").seal("values", keys)
    for level in (0.003, 0.0003, 0.00003):
        method = methods.get("klt", level=level)
        sealed = method.seal("keys", keys, second_moment(past, 2))
        exact = attention.logits(past, keys)
        errors.append(float(np.square(attention.logits(past, decode_tensor(sealed)) - exact).mean()))
        louder = methods.get("klt", level=4 * level).seal("keys", keys, second_moment(2 * past.astype(np.float32), 2))
        assert louder.arrays["blocks"].tolist() == sealed.arrays["blocks"].tolist()
        values = method.seal("values", keys)
        assert all(np.array_equal(array, plain.arrays[name]) for name, array in values.arrays.items())
    assert errors[0] > 2 * errors[1] > 4 * errors[2]


def test_a_moment_of_few_queries_is_damped_as_little_as_one_likes() -> None:
    keys, past = _recording()
    few = past[:, :, :5]
    moment = second_moment(few, 2)
    assert np.linalg.eigvalsh(moment.mean).min() < 0  # of FP32, whose rounding is larger than what is added
    error = _logit_error(methods.get("klt", damp=1e-8).seal("keys", keys, moment), keys, few)
    assert error < _logit_error(methods.get("klt").seal("keys", keys), keys, few)


def test_heads_of_a_layer_share_their_bytes() -> None:
    keys, past = _recording()
    loud = keys.astype(np.float32)
    loud[:, 1] *= 30
    moment = second_moment(past, 2)
    sealed = methods.get("klt", allocation="layer").seal("keys", loud.astype("bfloat16"), moment)
    bytes_of = [allocation.token_bytes(counts) for counts in sealed.arrays["blocks"][0]]
    assert bytes_of[1] > bytes_of[0]
    assert sum(bytes_of) == 2 * allocation.budget(2.0, 64)


def test_a_stream_without_queries_is_coded_as_without_statistics() -> None:
    keys, past = _recording()
    moment = second_moment(past, 2).mean.copy()
    moment[:, 1] = 0
    half = methods.get("klt").seal("keys", keys, QueryMoment(moment, 256))
    blind = methods.get("klt").seal("keys", keys)
    np.testing.assert_array_equal(decode_tensor(half)[:, 1], decode_tensor(blind)[:, 1])
    assert (decode_tensor(half)[:, 0] != decode_tensor(blind)[:, 0]).any()


def test_a_head_without_a_single_bit_decodes_to_its_mean() -> None:
    keys = strategies.unit(("normal", "normal"), 0, 64, 32).astype(np.float32)
    keys[:, 0] *= 2.0**-30
    sealed = methods.get("klt", allocation="layer", bits=0.5).seal("values", keys.astype("bfloat16"))
    assert not sealed.arrays["blocks"][0, 0].any()
    decoded = decode_tensor(sealed).astype(np.float32)
    np.testing.assert_allclose(decoded[:, 0].std(axis=1), 0, atol=0)


def test_values_may_have_other_bits_than_keys() -> None:
    unit, _ = _recording()
    method = methods.get("klt", bits=1.5, value_bits=3.0)
    kinds: tuple[tuple[Kind, int], ...] = (("keys", 12), ("values", 24))
    for kind, nbytes in kinds:
        counts = method.seal(kind, unit).arrays["blocks"]
        assert {allocation.token_bytes(each) for each in counts.reshape(-1, 3)} == {nbytes}
