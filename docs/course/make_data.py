"""Make the data and the pictures of chapters 3 and 4: ``python docs/course/make_data.py`` (needs quantwm-eval).

Writes ``data/room.safetensors`` (keys, values and queries of one head, and the frames they belong to) while the demo
world model turns away from a ball and back, and draws ``../images/selection.png`` and ``../images/transform-code.png``
from it.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import ml_dtypes
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from quantwm_core import allocation, archive, attention, basis, scheme, second_moment, transform_plan
from quantwm_core.chunk import read_arrays, write_arrays
from quantwm_eval.demo import episodes, sampler
from quantwm_eval.demo import model as world_model

HERE = Path(__file__).parent
DATA, PICTURE = HERE / "data" / "room.safetensors", HERE.parent / "images" / "selection.png"
SPECTRUM = PICTURE.with_name("transform-code.png")
SEED, DEGREES, LAYER, HEAD, CHUNKS = 2_000_003, 60, 3, 2, 7
CHUNK, FRAME, GRID, PATCH = 256, 64, 8, 8


def record() -> None:
    """Generate, and keep what one head writes and asks in the clean pass of every chunk."""
    world = sampler.load()
    seeds = torch.tensor([SEED])
    episode = episodes.look_away(seeds, DEGREES)
    calls: list[tuple[torch.Tensor, ...]] = []
    native = world_model.attention

    def listening(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(part[0, -CHUNK:, HEAD].clone() for part in (q, k, v)))
        return native(q, k, v)

    world_model.attention = listening
    try:
        video = world.generate(episode.video[:, :4], episode.actions, seeds=[SEED], steps=2)
    finally:
        world_model.attention = native
    layers = len(world.model.blocks)
    passes = [0, *range(3, 3 * CHUNKS, 3)]  # the prefill, then the third call of every chunk: the clean pass
    parts = zip(*(calls[layers * number + LAYER] for number in passes), strict=True)
    arrays = {
        name: torch.cat(part).view(torch.int16).numpy().view(ml_dtypes.bfloat16)[None, None]
        for name, part in zip(("queries", "keys", "values"), parts, strict=True)
    }
    frames = torch.cat([episode.video[0, :4], video[0]])[: 4 * CHUNKS].numpy()
    write_arrays(DATA, arrays | {"frames": frames}, {"layer": str(LAYER), "head": str(HEAD), "seed": str(SEED)})


def draw() -> None:
    """Of the ball's patches whose query two bits mislead and QuantWM does not, the one that is surest when exact."""
    arrays, _ = read_arrays(DATA)
    frames = arrays.pop("frames")
    dump = archive.Dump(**arrays)
    past = CHUNK * (CHUNKS - 1)
    queries = dump.queries[:, :, past:] if dump.queries is not None else dump.keys
    restored = {
        name: archive.restore(archive.compress(dump, scheme(name, chunks_per_seal=2), CHUNK))
        for name in ("qvg", "quantwm")
    }
    scores = {"exact": attention.logits(queries, dump.keys[:, :, :past])[0, 0]}
    scores |= {name: attention.logits(queries, part.keys[:, :, :past])[0, 0] for name, part in restored.items()}
    winner = {name: score.argmax(-1) for name, score in scores.items()}
    far = np.abs(winner["qvg"] // FRAME - winner["exact"] // FRAME) > 3
    misled = far & (winner["quantwm"] == winner["exact"])
    weight = attention.softmax(scores["exact"]).max(-1) * misled * on_ball()[past:]
    query = int(weight.argmax())
    _, axes = plt.subplots(1, 4, figsize=(11, 3.2), constrained_layout=True)
    titles = ("asks", "selects, exact", "selects, 2 bits (QVG)", "selects, 2 bits (QuantWM)")
    tokens = (past + query, *(int(winner[name][query]) for name in ("exact", "qvg", "quantwm")))
    for axis, title, token in zip(axes, titles, tokens, strict=True):
        show(axis, frames[token // FRAME], token % FRAME, f"{title}\nframe {token // FRAME}")
    plt.savefig(PICTURE, dpi=120, bbox_inches="tight")


def on_ball() -> np.ndarray:
    """Whether the ball covers most of a patch, one flag a token."""
    mask = episodes.look_away(torch.tensor([SEED]), DEGREES).mask[0, : 4 * CHUNKS].numpy()
    covered: np.ndarray = mask.reshape(-1, GRID, PATCH, GRID, PATCH).mean(axis=(2, 4)) > 0.4
    return covered.ravel()


def show(axis: Axes, frame: np.ndarray, patch: int, title: str) -> None:
    """A frame with one patch framed."""
    axis.imshow(frame, interpolation="nearest")
    row, column = divmod(patch, GRID)
    corner = (column * PATCH - 0.5, row * PATCH - 0.5)
    axis.add_patch(Rectangle(corner, PATCH, PATCH, fill=False, edgecolor="yellow", linewidth=2.5))
    axis.set_title(title, fontsize=11)
    axis.set_axis_off()


def draw_spectrum() -> None:
    """Energy, bits and error of the directions of the fourth chunk, in the basis that ``klt`` gives it."""
    arrays, _ = read_arrays(DATA)
    chunk = np.s_[:, :, 3 * CHUNK : 4 * CHUNK]
    moment = second_moment(arrays["queries"][:, :, : 3 * CHUNK], 1)
    (source,) = transform_plan.sources(arrays["keys"][chunk], moment.mean.astype(float), damp=0.5)
    rows = basis.fit(source.covariance, source.metric)
    sealed = scheme("klt").keys.seal("keys", arrays["keys"][chunk], moment)
    error = (scheme("klt").keys.decode(sealed).astype(float) - arrays["keys"][chunk].astype(float))[0, 0]
    forward = basis.projector(rows, source.metric)
    energy = np.einsum("id,de,ie->i", forward, source.covariance, forward)
    left = np.square(np.ldexp(error, -source.exponent) @ forward.T).mean(axis=0)
    bits = allocation.widths(sealed.arrays["blocks"][0, 0])
    directions = np.arange(len(rows))
    figure, axis = plt.subplots(figsize=(7.5, 3.6), constrained_layout=True)
    axis.semilogy(directions, energy / energy[0], label="energy")
    axis.semilogy(directions, left / energy[0], label="error that is left")
    axis.set_xlabel("direction, by energy")
    axis.set_ylabel("share of the first direction's energy")
    axis.legend(loc="upper right")
    stairs = axis.twinx()
    stairs.fill_between(directions, np.pad(bits, (0, len(rows) - len(bits))), step="mid", alpha=0.15, color="tab:green")
    stairs.set_ylabel("bits (green)")
    stairs.set_ylim(0, 16)
    stairs.set_yticks((0, 2, 4, 8))
    figure.savefig(SPECTRUM, dpi=120)


if __name__ == "__main__":
    record()
    draw()
    draw_spectrum()
