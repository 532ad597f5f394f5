"""Compiles every kernel for every architecture, without a GPU: ``python -m tests.parity.compile_ahead``.

One line of JSON for each: kernel, variant, architecture, bytes of shared memory, and matrix operands of fewer rows than the
registers of a thread are arranged for, whose products would be wrong.
Triton's interpreter replaces the compiler, so this runs as a process of its own, without ``TRITON_INTERPRET``.
"""

import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from quantwm_kernels.launch import LAUNCHES
from quantwm_kernels.packed_attention import WIDE_CHANNELS
from quantwm_kernels.reading_batches import launch_of
from quantwm_kernels.recipe import FEWEST_DIGITS, Form, Recipe, Steps
from quantwm_kernels.triton.reading import constants
from tests.parity.specialization import ALIGNMENT, DEVICES, PACKAGE, Specialization, compiled


@dataclass(frozen=True)
class Case:
    """A kernel as it is launched.

    Attributes:
        kernel: Module and name.
        launch: Its entry of ``LAUNCHES``.
        arguments: Types of the run-time arguments, in order, by their first letters: ``"codes:*u8 total:i64"``.
        constants: Compile-time arguments beside the blocks of the launch.
        variant: What distinguishes it from other cases of the kernel.
        architectures: All; a further variant of a kernel that has a case with all may name some.
    """

    kernel: str
    launch: str
    arguments: str
    constants: Mapping[str, float] = field(default_factory=dict)
    variant: str = ""
    architectures: tuple[int, ...] = tuple(DEVICES)

    @property
    def specializations(self) -> Iterator[Specialization]:
        """What each architecture compiles: pointers lie at whole vectors, and so do the strides of what is sealed."""
        launch = LAUNCHES[self.launch]
        types = dict(argument.split(":") for argument in self.arguments.split())
        for name in types:
            if types[name][0] == "*" or name in ("batch_stride", "head_stride", "token_stride"):
                types[name] += f":{ALIGNMENT}"
        for architecture in self.architectures:
            blocks = {**launch.blocks, **self.constants}
            yield Specialization(self.kernel, types, blocks, launch.compiler_options, architecture)


READ = (
    "table:*i64 keys:*bf16 values:*bf16 key_programs:i32 span:i32 heads:i32 four:i32 "
    "key_batch:i64 key_head:i64 key_token:i64 value_batch:i64 value_head:i64 value_token:i64"
)


def read(
    variant: str,
    keys: Recipe,
    values: Recipe,
    *,
    lanes: int = 8,
    aligned: bool = True,
    architectures: tuple[int, ...] = (86, 90),
) -> Case:
    """The reading kernel for two recipes."""
    recipes = constants("KEY", keys, lanes) | constants("VALUE", values, lanes)
    launch = next(name for name, each in LAUNCHES.items() if each is launch_of(keys, values))
    return Case(
        "reading.read_kernel", launch, READ, recipes | {"LANES": lanes, "ALIGNED": int(aligned)}, variant, architectures
    )


ATTEND = (
    "table:*i64 queries:*bf16 out:*bf16 log_sum:*fp32 peaks:*fp32 totals:*fp32 slot:i32 heads:i32 rows:i32 "
    "group_rows:i32 scale:fp32 four:i32 query_batch:i64 query_head:i64 query_token:i64 out_batch:i64 out_head:i64 "
    "out_token:i64"
)
MERGE = (
    "sums:*fp32 peaks:*fp32 totals:*fp32 out:*bf16 log_sum:*fp32 parts:i32 heads:i32 rows:i32 group_rows:i32 "
    "out_batch:i64 out_head:i64 out_token:i64"
)


def attend(
    variant: str,
    keys: Recipe,
    values: Recipe,
    *,
    lanes: int = 8,
    divided: bool = False,
    rotated: bool = False,
    architectures: tuple[int, ...] = (86, 90),
) -> Case:
    """The attention kernel for two recipes."""
    recipes = constants("KEY", keys, lanes) | constants("VALUE", values, lanes)
    flags = {
        "LANES": lanes,
        "ALIGNED": int(lanes == 8),
        "PLAIN_ALIGNED": int(lanes == 8),
        "DIVIDED": int(divided),
        "ROTATES": int(rotated),
    }
    types = ATTEND.replace("out:*bf16", "out:*fp32") if divided else ATTEND
    wide = max(keys.channels, values.channels) > WIDE_CHANNELS
    launch = "attend_wide" if wide else "attend_rotated" if rotated else "attend"
    return Case("attention.attend_kernel", launch, types, recipes | flags, variant, architectures)


SEARCH = (
    "coefficients:*fp32 tried:*bf16 shifts:*fp32 highest:*fp32 errors:*fp32 tokens:i32 directions:i32 per_piece:i32"
)
PACK = "coefficients:*fp32 steps:*bf16 shifts:*fp32 highest:*fp32 places:*i64 codes:*u8 tokens:i32 directions:i32"
# Types of the arguments of the kernels that seal, by name; a stride is a whole number of vectors.
SEALED = {
    **dict.fromkeys(("first", "second", "queries", "high", "low", "basis", "first_stored", "second_stored"), "*bf16"),
    **dict.fromkeys(("codes", "scales", "zero_points", "index", "found", "first_index", "second_index"), "*u8"),
    **dict.fromkeys(("first_codes", "second_codes", "first_scales", "second_scales"), "*u8"),
    **dict.fromkeys(("first_zeros", "second_zeros"), "*u8"),
    **dict.fromkeys(("magnitudes", "exponent", "non_zero", "products", "ranked"), "*i32"),
    **dict.fromkeys(("bias", "block", "coefficients", "counts", "energies", "matrix", "mean", "metric", "offset", "parts"), "*fp32"),
    "before": "*fp32",
    **dict.fromkeys(("peaks", "projection", "sensitivity", "sums", "super_scales", "table", "values", "weights"), "*fp32"),
    **dict.fromkeys(("first_super", "second_super", "largest"), "*fp32"),
    "steps": "*i8", "share": "fp32", "threshold": "fp32",
}  # fmt: skip
BIG = (90, 100)  # where a program may have 227 KB; the others stream the tables


def seal(
    kernel: str,
    launch: str,
    *,
    variant: str = "",
    architectures: tuple[int, ...] = tuple(DEVICES),
    scales: str = "*u8",
    largest: str = "*fp32",
    tokens: str = "*bf16",
    **constants: float,
) -> Case:
    """A kernel that seals, on heads of 128 channels and 256 centroids unless ``constants`` say otherwise."""
    module, _, name = kernel.partition(".")
    names = getattr(importlib.import_module(f"{PACKAGE}.{module}"), name).function.arg_names
    blocks = LAUNCHES[launch].blocks
    sizes = {
        "CHANNELS": 128, "BLOCK_D": 128, "BLOCK_C": 256, "GROUP": 64, "GROUPS": 2, "GROUPS_2": 2, "GROUP_2": 64,
        "PIECES": 64, "PLAIN": 0, "METRIC": 1, "RANK": 8, "RANK_2": 16, "BLOCK_K": 32, "CANDIDATES": 1, "FED": 0, "MOST": 127,
        "RELAXATION": 1.0, "CHANNEL_BLOCKS": 1,
    } | constants  # fmt: skip
    known = SEALED | {"scales": scales, "largest": largest, "first": tokens, "second": tokens}
    types = {each: known.get(each, "i32") for each in names if not each.isupper()}
    fixed = {each: sizes[each] for each in names if each.isupper() and each not in blocks}
    return Case(kernel, launch, " ".join(map(":".join, types.items())), fixed, variant, architectures)


CLUSTERED = Recipe(Form.AFFINE, 128, 64, 1)
TRANSFORM = Recipe(Form.TRANSFORM, 128, 16, rank=128)
FEW = Recipe(Form.TRANSFORM, 80, 2, rank=FEWEST_DIGITS)  # words that are put together
ROTATED = Recipe(Form.ROTATED, 128, 128, rank=128)
SHARP = Recipe(Form.AFFINE, 128, 32, 1, rank=16, steps=Steps.NIBBLES, centroid_bits=4)
CASES = (
    Case("packing.pack_kernel", "pack_codes", "codes:*u8 packed:*u8 codes_per_row:i32 bytes_per_row:i32 total:i64"),
    Case("packing.unpack_kernel", "unpack_codes", "packed:*u8 codes:*u8 codes_per_row:i32 bytes_per_row:i32 total:i64"),
    Case(
        "scales.encode_kernel",
        "encode_scales",
        "steps:*fp32 largest:*fp32 stored:*u8 super_scale:*fp32 per_stream:i32 total:i64",
    ),
    Case("scales.decode_kernel", "decode_scales", "stored:*u8 super_scale:*fp32 steps:*fp32 per_stream:i32 total:i64"),
    read("quantwm", Recipe(Form.AFFINE, 128, 64, 1, rank=8), CLUSTERED, architectures=tuple(DEVICES)),
    read("quantwm, sparse", Recipe(Form.AFFINE, 256, 64, 1, rank=16, steps=Steps.EITHER), Recipe(Form.EXACT, 256)),
    read(
        "quantwm, high rank",
        Recipe(Form.AFFINE, 80, 40, 1, rank=24, steps=Steps.EITHER),
        Recipe(Form.AFFINE, 80, 40, 1),
    ),
    read("quantwm, sharp", SHARP, replace(SHARP, rank=0, steps=Steps.DENSE)),
    read("quantwm, odd", replace(SHARP, group=16, rank=5, centroid_bits=8), CLUSTERED, lanes=4, aligned=False),
    read("qvg", Recipe(Form.SYMMETRIC, 96, 48, 3), CLUSTERED, lanes=4, aligned=False),
    read("kivi", Recipe(Form.CHANNEL_MINMAX, 128, 32), Recipe(Form.MINMAX, 128, 32)),
    read("rtn", Recipe(Form.CHANNEL_AFFINE, 64, 64), Recipe(Form.AFFINE, 64, 64)),
    read("klt", TRANSFORM, TRANSFORM, architectures=(80, 86, 90)),
    read("klt, wide", Recipe(Form.TRANSFORM, 256, 16, rank=256), Recipe(Form.EXACT, 256)),
    read("klt, few", FEW, Recipe(Form.AFFINE, 80, 40, 1), lanes=4, aligned=False),
    read("oscar", ROTATED, ROTATED),
    attend("klt", TRANSFORM, TRANSFORM),
    attend("klt, few", FEW, FEW, lanes=4, architectures=(90,)),
    attend("klt, rotated", TRANSFORM, TRANSFORM, rotated=True, architectures=(80, 86, 90)),
    attend("klt, wide", Recipe(Form.TRANSFORM, 256, 2, rank=128), Recipe(Form.EXACT, 256), architectures=(86,)),
    attend("oscar", ROTATED, ROTATED, architectures=(90,)),
    attend("quantwm", Recipe(Form.AFFINE, 128, 64, 1, rank=8), CLUSTERED, architectures=tuple(DEVICES)),
    attend("quantwm, divided", Recipe(Form.AFFINE, 128, 64, 1, rank=8), CLUSTERED, divided=True),
    attend(
        "quantwm, wide",
        Recipe(Form.AFFINE, 256, 64, 1, rank=16, steps=Steps.EITHER),
        Recipe(Form.AFFINE, 256, 64, 1),
        architectures=(80, 86, 90),
    ),
    attend("quantwm, sharp", SHARP, replace(SHARP, rank=0, steps=Steps.DENSE)),
    attend("bf16, wide", Recipe(Form.EXACT, 256), Recipe(Form.EXACT, 256), architectures=(86,)),
    attend("qvg", Recipe(Form.SYMMETRIC, 96, 48, 3), CLUSTERED, lanes=4, architectures=(90,)),
    attend("kivi", Recipe(Form.CHANNEL_MINMAX, 80, 32), Recipe(Form.MINMAX, 80, 32), lanes=4, architectures=(86,)),
    attend("rtn", Recipe(Form.CHANNEL_AFFINE, 64, 64), Recipe(Form.AFFINE, 64, 64), architectures=(90,)),
    Case("attention.merge_kernel", "merge_attention", MERGE, {"CHANNELS": 128, "WIDE": 128}),
    Case("attention.merge_kernel", "merge_attention", MERGE, {"CHANNELS": 256, "WIDE": 256}, "wide", (86,)),
    seal("frame.magnitude_kernel", "magnitude"),
    seal("frame.frame_kernel", "frame", largest="*i32", FROM_TOKENS=1),
    *(
        seal(
            "frame.table_kernel",
            "prepare_centroids",
            variant=f"metric {metric}",
            UPDATE=int(metric < 2),
            FINAL=final,
            METRIC=metric,
            CENTRED=final,
        )
        for metric, final in ((0, 0), (1, 1), (2, 0))
    ),
    seal(
        "frame.table_kernel",
        "prepare_centroids",
        variant="relaxed",
        UPDATE=1,
        FINAL=0,
        METRIC=1,
        CENTRED=0,
        RELAXATION=1.5,
    ),
    seal(
        "frame.table_kernel",
        "prepare_centroids",
        variant="wide",
        UPDATE=0,
        FINAL=1,
        METRIC=2,
        CENTRED=1,
        CHANNELS=256,
        BLOCK_D=256,
    ),
    seal("assignment.assign_kernel", "assign_centroids", CENTRED=0, BLOCK_K=128),
    seal("assignment.assign_kernel", "assign_centroids_streamed", variant="wide", CENTRED=1, CHANNELS=256, BLOCK_D=256),
    seal(
        "assignment.assign_kernel",
        "assign_centroids_wide",
        variant="wide, resident",
        architectures=BIG,
        CENTRED=0,
        CHANNELS=256,
        BLOCK_D=256,
        BLOCK_K=256,
    ),
    seal("assignment.nearest_kernel", "rank_centroids", variant="resident", architectures=BIG, PLAIN=1, BLOCK_K=128),
    seal("assignment.nearest_kernel", "rank_centroids_streamed", variant="streamed"),
    seal(
        "assignment.nearest_kernel",
        "rank_centroids_streamed",
        variant="streamed, plain",
        architectures=(86, 90),
        PLAIN=1,
    ),
    seal("assignment.nearest_kernel", "rank_centroids_streamed", variant="wide", CHANNELS=256, BLOCK_D=256),
    seal(
        "assignment.nearest_kernel",
        "rank_centroids_wide",
        variant="wide, tall",
        architectures=(80, *BIG),
        PLAIN=1,
        CHANNELS=256,
        BLOCK_D=256,
    ),
    seal(
        "assignment.nearest_kernel",
        "rank_centroids_streamed",
        variant="wide, plain",
        architectures=(86, 90),
        PLAIN=1,
        CHANNELS=256,
        BLOCK_D=256,
    ),
    *(
        seal(
            f"assignment.{kernel}_kernel",
            launch,
            variant=f"{form} tokens",
            architectures=(86, 90),
            tokens=form,
            CENTRED=1,
            PARTS=3,
        )
        for form in ("*fp16", "*fp32")
        for kernel, launch in (
            ("assign", "assign_centroids_streamed"),
            ("sum", "sum_members"),
            ("nearest", "rank_centroids_streamed"),
        )
    ),
    seal("qsac.choose_kernel", "choose_centroids", variant="FP32 tokens", architectures=(90,), tokens="*fp32"),
    seal(
        "affine.encode_kernel", "encode_groups", variant="FP32 tokens", architectures=(90,), tokens="*fp32", CLUSTERED=1
    ),
    seal(
        "frame.frame_kernel",
        "frame",
        variant="FP32 tokens",
        architectures=(90,),
        largest="*i32",
        tokens="*fp32",
        FROM_TOKENS=1,
    ),
    seal("assignment.sum_kernel", "sum_members", PARTS=1),
    *(
        seal(
            "assignment.sum_kernel",
            "sum_members_wide",
            variant=f"wide, {parts}",
            tokens=form,
            PARTS=parts,
            CHANNELS=256,
            CHANNEL_BLOCKS=2,
        )
        for form, parts in (("*bf16", 1), ("*fp32", 3))
    ),
    *(
        seal(
            f"assignment.{kernel}_kernel",
            launch,
            variant=f"wide, {form} tokens",
            architectures=(90,),
            tokens=form,
            CENTRED=1,
            CHANNELS=256,
            BLOCK_D=256,
            BLOCK_K=block,
        )
        for form in ("*fp16", "*fp32")
        for kernel, launch, block in (("assign", "assign_centroids_wide", 256), ("nearest", "rank_centroids_wide", 32))
    ),
    seal("qsac.choose_kernel", "choose_centroids"),
    seal("affine.range_kernel", "group_ranges"),
    seal("affine.encode_kernel", "encode_groups", CLUSTERED=1),
    seal(
        "affine.encode_kernel",
        "encode_groups",
        variant="three groups",
        CLUSTERED=0,
        RANK=0,
        CHANNELS=96,
        GROUP=32,
        GROUPS_2=4,
        GROUP_2=32,
    ),
    seal(
        "affine.encode_kernel",
        "encode_groups",
        variant="wide",
        architectures=(86, 90),
        CLUSTERED=1,
        CHANNELS=256,
        GROUPS_2=4,
        RANK=16,
    ),
    seal(
        "affine.encode_kernel",
        "encode_groups",
        variant="sharp",
        architectures=(86, 90),
        CLUSTERED=1,
        CANDIDATES=3,
        FED=1,
        RANK=16,
        GROUP=32,
        GROUPS_2=4,
        GROUP_2=32,
    ),
    seal("affine.decode_kernel", "decode_groups"),
    seal("symmetric.encode_kernel", "encode_symmetric"),
    seal("psac.projection_kernel", "invert_gram", variant="wide", CHANNELS=256, BLOCK_D=256, RANK=32, RANK_2=32),
    seal("psac.project_kernel", "project_error", variant="wide", CHANNELS=256, BLOCK_D=256),
    seal("psac.quantize_kernel", "quantize_coefficients", scales="*bf16", THRESHOLD=1, RANK_2=8, BLOCKS=1024),
    seal("statistics.moment_kernel", "second_moment", BLOCK=128, BLOCKS=1),
    Case("directions.search_kernel", "search_steps", SEARCH, {"TRIED": 20, "TRIED_2": 32}),
    Case("directions.pack_kernel", "pack_directions", PACK, {"BYTES": 32}),
    Case("directions.pack_kernel", "pack_directions", PACK, {"BYTES": 256}, "wide", (86,)),
    seal("principal.principal_kernel", "principal_basis_128", WIDTH=16),
    seal("principal.principal_kernel", "principal_basis", variant="narrow", CHANNELS=64, BLOCK_D=64, WIDTH=16),
    seal("principal.principal_kernel", "principal_basis_wide", variant="wide", CHANNELS=256, BLOCK_D=256, WIDTH=32),
    seal("statistics.add_kernel", "add_moments", FOLD=1),
    seal("statistics.sensitivity_kernel", "sensitivity", largest="*i32", BLOCK=128),
)


def lines() -> Iterator[dict[str, object]]:
    """What comes of every case on every architecture."""
    for case in CASES:
        for each in case.specializations:
            known = {"kernel": case.kernel, "variant": case.variant, "architecture": each.architecture}
            yield known | compiled(each)


if __name__ == "__main__":
    for line in lines():
        sys.stdout.write(json.dumps(line) + "\n")
