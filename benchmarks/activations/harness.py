"""Seal a recording as a stream would be, and score what later queries see of it.

Units are sealed in order with the statistics of what came before them. Each unit is scored by the queries of the tokens that
follow it, up to :data:`AHEAD` chunks: logits over the unit's own tokens, exact against reconstructed. The first unit, which
no method has statistics for, and those that nobody asks afterwards are left out, bytes included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from benchmarks.activations.recording import Recording
from quantwm_core import archive, attention
from quantwm_core.archive import Dump
from quantwm_core.chunk import SealedChunk, SealedTensor
from quantwm_eval.experiment import MethodChoice

AHEAD = 3
CHUNKS_PER_SEAL = 2


@dataclass(frozen=True)
class Score:
    """Means over heads and scored units of one layer.

    Attributes:
        model, source, layer: Where the recording is from.
        method: Label.
        key_bits, value_bits: Bits an element that the units' own arrays take.
        shared_bits: Bits an element, of keys and values together, that arrays shared by units take, over the whole recording.
        state_bits: Likewise, what query statistics take.
        logit_error: Squared error of the logits over their variance, both centred.
        selection_shift: Share of queries whose largest logit moves.
        attention_kl: Divergence of the attention, nats.
        key_error, value_error: Relative squared error of the tensors themselves.
        output_error: Relative squared error of the attention's result, keys and values reconstructed.
    """

    model: str
    source: str
    layer: int
    method: str
    key_bits: float
    value_bits: float
    shared_bits: float
    state_bits: float
    logit_error: float
    selection_shift: float
    attention_kl: float
    key_error: float
    value_error: float
    output_error: float


def lines(scores: Sequence[Score]) -> list[dict[str, object]]:
    """What is kept: a line for each input and method, figures averaged over layers, to five digits."""
    groups: dict[tuple[str, str, str], list[Score]] = {}
    for score in scores:
        groups.setdefault((score.model, score.source, score.method), []).append(score)
    figures = [each.name for each in fields(Score) if each.type == "float"]
    return [
        {"model": model, "source": source, "method": method, "layers": len(own)}
        | {name: float(f"{sum(getattr(score, name) for score in own) / len(own):.5g}") for name in figures}
        for (model, source, method), own in groups.items()
    ]


def relative(exact: np.ndarray, approximate: np.ndarray) -> float:
    """Squared error over squared norm."""
    wide = exact.astype(np.float32)
    return float(np.square(approximate.astype(np.float32) - wide).sum() / np.square(wide).sum())


def scored(dump: Dump, chunk: SealedChunk, chunk_tokens: int) -> list[float]:
    """The six errors of a unit, in the order of :class:`Score`."""
    if dump.queries is None:
        raise ValueError("a recording without queries cannot be scored")
    span = np.s_[:, :, chunk.start : chunk.stop]
    keys, values = dump.keys[span], dump.values[span]
    restored = archive.restore([SealedChunk(chunk.keys, chunk.values)])
    queries = dump.queries[:, :, chunk.stop : chunk.stop + AHEAD * chunk_tokens]
    exact, ours = attention.logits(queries, keys), attention.logits(queries, restored.keys)
    measures = (attention.logit_error, attention.selection_shift, attention.attention_kl)
    output, approximate = (
        attention.softmax(logits) @ v.astype(np.float32) for logits, v in ((exact, values), (ours, restored.values))
    )
    errors = [relative(keys, restored.keys), relative(values, restored.values), relative(output, approximate)]
    return [float(measure(exact, ours).mean()) for measure in measures] + errors


def measure(recording: Recording, label: str, chunk_tokens: int) -> Score:
    """Seal with a method and score.

    Args:
        recording: One layer's.
        label: ``method:option=value:...``; units of two chunks unless it says otherwise.
        chunk_tokens: Tokens that count as one chunk.

    Raises:
        ParameterError, UnknownNameError: There is no such method.
        ValueError: The recording is too short to score a unit.
    """
    dump = recording.dump
    scheme = MethodChoice.parse(label).scheme(CHUNKS_PER_SEAL)
    chunks = archive.compress(dump, scheme, chunk_tokens, recording.layer, recording.turning)
    tokens = dump.keys.shape[2]
    later = [chunk for chunk in chunks if chunk.start > 0 and chunk.stop < tokens]
    if not later:
        raise ValueError(f"{tokens} tokens in chunks of {chunk_tokens}: no unit has both a past and a future")
    errors = np.mean([scored(dump, chunk, chunk_tokens) for chunk in later], axis=0)
    bits = [
        8 * sum(tensor.nbytes - sum(shared_arrays(tensor).values()) for tensor in tensors)
        / sum(tensor.bf16_nbytes / 2 for tensor in tensors)
        for tensors in ([chunk.keys for chunk in later], [chunk.values for chunk in later])
    ]  # fmt: skip
    elements = sum(chunk.bf16_nbytes for chunk in chunks) / 2
    shared: dict[int, int] = {}
    for chunk in chunks:
        shared |= shared_arrays(chunk.keys) | shared_arrays(chunk.values)
    state = 4 * dump.keys.shape[1] * dump.keys.shape[3] ** 2 if scheme.uses_queries else 0
    bits += [8 * sum(shared.values()) / elements, 8 * state / elements]
    where = (recording.model, recording.source, recording.layer)
    return Score(*where, label, *(float(figure) for figure in (*bits, *errors)))


def shared_arrays(tensor: SealedTensor) -> dict[int, int]:
    """Bytes of the arrays that a tensor shares with other units, by identity."""
    return {id(array): array.nbytes for name, array in tensor.arrays.items() if name.startswith("shared_")}
