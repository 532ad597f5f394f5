"""Sealing a layer: time against a floor of bytes and matrix products, kernel by kernel.

    python -m benchmarks.seal                      all shapes, parity first
    python -m benchmarks.seal --shape longcat --iterations 2
    python -m benchmarks.seal --sweep              each kernel alone under other launch parameters; the best shown last

The floor of a seal is 6.3 bytes an element, the tensors read three times and the codes written once, at the bandwidth of
a copy, and a matrix product of tokens and centroids per round and one more, at the rate of a large BF16 product.
A line of JSON per measurement goes to ``benchmarks/results/seal.jsonl``.
"""

import argparse
from collections.abc import Sequence

from benchmarks import needs
from benchmarks.decode import COPY_NBYTES, SHAPES, Copier, environment

CHOICES: dict[str, dict[str, Sequence[int]]] = {
    "magnitude": {"TILE": (32, 64), "warps": (4, 8), "programs": (8, 16)},
    "assign_centroids": {"TILE": (64, 128), "warps": (4, 8), "stages": (2, 3), "programs": (2, 4)},
    "sum_members": {"TILE": (64, 128), "BLOCK_C": (128, 256), "warps": (4, 8), "stages": (2, 3), "programs": (1, 2, 4)},
    "assign_centroids_wide": {"TILE": (64,), "warps": (4, 8), "stages": (1, 2), "programs": (1, 2, 3, 6)},
    "sum_members_wide": {
        "BLOCK_C": (128, 256),
        "BLOCK_K": (64, 128),
        "stages": (2, 3),
        "programs": (2, 3, 4),
        "registers": (0, 128),
    },
    "prepare_centroids": {"ROWS": (4, 8, 16, 32), "warps": (2, 4, 8)},
    "rank_centroids": {"TILE": (64, 128), "warps": (4, 8), "stages": (1,), "programs": (1, 2, 4)},
    "rank_centroids_wide": {
        "TILE": (64, 128),
        "BLOCK_K": (32,),
        "warps": (4, 8),
        "stages": (2, 3),
        "programs": (2, 4, 8),
    },
    "choose_centroids": {"TILE": (8, 16, 32), "warps": (2, 4), "programs": (16, 32), "registers": (0, 64)},
    "encode_groups": {"TILE": (16, 32, 64), "warps": (2, 4, 8), "registers": (0, 96, 128, 168)},
    "quantize_coefficients": {"TILE": (64, 128, 256), "warps": (4,)},
    "second_moment": {"TILE": (32, 64, 128), "warps": (4, 8), "stages": (2, 3), "programs": (1, 2)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--iterations", type=int, action="append")
    parser.add_argument("--sweep", action="store_true", help="try other launch parameters, each kernel alone")
    parser.add_argument("--kernel", choices=CHOICES, action="append", help="sweep these kernels only")
    parser.add_argument("--no-parity", action="store_true", help="after a run that held parity")
    arguments = parser.parse_args()
    needs.triton(parser)
    device = needs.cuda(parser)
    from benchmarks import seal_sweep, sealed_layer  # noqa: PLC0415 - need Triton, which --help does not

    known = environment() | {"benchmark": "seal"}
    copier = Copier(device)
    yardsticks = (COPY_NBYTES / sealed_layer.seconds(copier), sealed_layer.matrix_rate(device))
    print(f"{known['gpu']}, torch {known['torch']}, triton {known['triton']}: copy {yardsticks[0] / 1e12:.2f} TB/s, "
          f"BF16 product {yardsticks[1] / 1e12:.0f} TFLOP/s")  # fmt: skip
    names = arguments.shape or (["longcat", "causal-forcing-1", "hy"] if arguments.sweep else list(SHAPES))
    for name in names:
        if not arguments.no_parity:
            sealed_layer.check_parity(name, device)
        subject = sealed_layer.Subject(name, device)
        if arguments.sweep:
            seal_sweep.sweep(subject, known, copier, {each: CHOICES[each] for each in arguments.kernel or CHOICES})
            continue
        sealed_layer.measure_statistics(subject, known, copier, yardsticks[0])
        for iterations in arguments.iterations or (2, 10):
            sealed_layer.measure(subject, iterations, known, copier, yardsticks)
        sealed_layer.measure_waits(subject, known)


if __name__ == "__main__":
    main()
