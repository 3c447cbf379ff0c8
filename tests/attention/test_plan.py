"""Which kernels run: a table of plans, in which each row is one side of a threshold or of a rule."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from flexnsa.attention.plan import Plan, can_copy, fits_one_step, needs_int64
from flexnsa.attention.tiles.device import AMPERE, HOPPER, Device

DEVICES = {"H100": Device(0, HOPPER), "A100": Device(0, AMPERE), "CPU": torch.device("cpu")}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

WHOLE = """
device dtype dims     T     N  group block | compressed selected window scores  joins
H100   bf16  64/64    8192  511   16    64 | gluon      gluon    gluon  tile    forward,backward
H100   fp16  128/128  8192  511   16    64 | gluon      gluon    gluon  tile    backward
H100   bf16  128/64   8192  511   16    64 | gluon      gluon    gluon  tile    backward
H100   bf16  128/128 65536 4095   16    64 | gluon      gluon    gluon  tile    backward
H100   fp32  128/128 65536 4095   16    64 | flex       triton   triton tile    -
H100   bf16  80/80   65536 4095   16    64 | flex       triton   triton tile    -
H100   bf16  64/64    8192  511   16    33 | gluon      gluon    gluon  tile    forward,backward
H100   bf16  64/64    8192  511   16    32 | gluon      triton   gluon  tile    -
H100   bf16  64/64    8192  511   16   128 | gluon      triton   gluon  tile    -
H100   bf16  64/64    8192  511   64    64 | gluon      gluon    gluon  tile    forward,backward
H100   bf16  64/64    8192  511   65    64 | gluon      triton   gluon  tile    -
H100   bf16  64/64       9  511   16    64 | gluon      gluon    gluon  tile    forward,backward
H100   bf16  64/64       8  511   16    64 | gluon      gluon    gluon  query   forward,backward
A100   bf16  64/64   65536 4095   16    64 | triton     triton   triton tile    -
A100   bf16  128/128 65536 2048   16    64 | triton     triton   triton tile    -
A100   bf16  128/128 65536 4095   16    64 | flex       triton   triton tile    -
"""

CACHED = """
device mod group largest  T | flex    triton  sdpa
H100   no      4     128  1 | divided flex    gathered
H100   no      4     128  8 | tile    flex    gathered
H100   yes    16     128  7 | divided flex    blocks
H100   no     17     128  3 | divided flex    gathered
H100   no     17     128  4 | tile    flex    gathered
H100   no      8     128 16 | tile    flex    gathered
H100   no      8     128 17 | whole   flex    blocks
H100   no      4     128 64 | whole   flex    blocks
H100   no      4     128 65 | whole   whole   blocks
H100   no      4     256 65 | whole   whole   blocks
H100   no      4     257 65 | whole   flex    blocks
H100   yes     4     128 65 | whole   flex    blocks
H100   no      1     128 65 | tile    whole   blocks
CPU    no      4     128  1 | tile    flex    gathered
CPU    yes     4     128 16 | whole   flex    blocks
CPU    no      4     128 65 | whole   flex    blocks
"""


def rows_of(table: str) -> list[tuple[list[str], list[str]]]:
    """Give what is given and what is expected of each row."""
    _, *rows = table.strip().splitlines()
    return [(row.split("|")[0].split(), row.split("|")[1].split()) for row in rows]


@pytest.mark.parametrize(("sizes", "expected"), rows_of(WHOLE))
def test_whole_sequences_go_to(sizes: list[str], expected: list[str]) -> None:
    device, dtype, dims, *counts = sizes
    queries, keys, group, block_size = map(int, counts)
    dk, dv = map(int, dims.split("/"))
    plan = Plan(queries, keys, 4 * group, 4, (dk, dv), DTYPES[dtype], DEVICES[device], block_size=block_size)
    interval = "gluon" if plan.in_gluon else "triton"
    joins = [name for name in ("forward", "backward") if getattr(plan, f"joins_{name}")]
    assert expected == [
        interval if plan.compressed_in_triton else "flex",
        "gluon" if plan.selected_in_gluon else "triton",
        interval,
        "query" if plan.score_alone else "tile",
        ",".join(joins) or "-",
    ]


@pytest.mark.parametrize(("sizes", "expected"), rows_of(CACHED))
def test_queries_on_a_cache_go_to(sizes: list[str], expected: list[str]) -> None:
    device, mod, *counts = sizes
    group, largest, queries = map(int, counts)
    plan = Plan(queries, 1000, 2 * group, 2, (64, largest), torch.bfloat16, DEVICES[device], has_mod=mod == "yes")
    assert expected == [
        "divided" if plan.divide_keys else "tile" if plan.fit_tile else "whole",
        "whole" if plan.share_keys else "flex",
        "gathered" if plan.are_gathered else "blocks",
    ]


def test_one_step_has_few_tokens_heads_of_256_and_programs_for_all() -> None:
    assert fits_one_step(8, 8191, (256, 64))
    assert not fits_one_step(9, 1, (64, 64))
    assert not fits_one_step(8, 8192, (64, 64))
    assert not fits_one_step(1, 1, (64, 257))


def heads(dim: int = 64) -> Tensor:
    return torch.empty(1, 4, 256, dim, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (heads(), True),
        (heads().transpose(1, 2), True),
        (heads()[:, :, ::2], True),
        (heads(72)[..., :64], False),
        (heads(80)[..., 1:65], False),
        (torch.empty(1, 1, 64, 2**25, dtype=torch.bfloat16, device="meta")[..., :64], False),
    ],
    ids=["contiguous", "token-major", "every second token", "not aligned", "begin at the second number", "far apart"],
)
def test_gluon_copies_rows_that_are_aligned_and_near(rows: Tensor, expected: bool) -> None:
    assert can_copy(heads(), rows) is expected


def test_offsets_of_a_chunk_have_64_bits_where_its_rows_are_far_apart() -> None:
    assert not needs_int64(heads(), group=4, chunk=8192)
    assert needs_int64(torch.empty(1, 16, 2**20, 128, device="meta"), group=16, chunk=8192)
    assert needs_int64(torch.empty(1, 1, 4096, 2**18, device="meta"), group=1, chunk=8192)
    assert not needs_int64(torch.empty(1, 1, 4096, 2**18, device="meta"), group=1, chunk=256)


def test_versions_of_triton_that_are_not_known_leave_gluon_out_with_a_warning() -> None:
    plan = Plan(8192, 511, 64, 4, (64, 64), torch.bfloat16, DEVICES["H100"])
    unknown = mock.patch("flexnsa.attention.plan.triton_version", return_value="4.0.0")
    with unknown, pytest.warns(UserWarning, match=r"^triton: expected .*got 4\.0"):
        assert not plan.in_gluon
    assert plan.in_gluon


def test_blocks_of_msa_are_halved_for_gluon_kernels_alone() -> None:
    plan = Plan(8192, 8192, 64, 4, (128, 128), torch.bfloat16, DEVICES["H100"], block_size=128)
    assert plan.halves_blocks
    others = {"block_size": 64}, {"device": DEVICES["A100"]}, {"dtype": torch.float32}
    assert not any(replace(plan, **change).halves_blocks for change in others)


def test_blocks_that_flex_has_no_tile_for_are_read_by_triton_from_a_cache_too() -> None:
    plan = Plan(1, 1000, 24, 2, (256, 256), torch.bfloat16, DEVICES["H100"], block_size=4)
    assert plan.share_keys
    assert not any(replace(plan, **change).share_keys for change in ({"block_size": 16}, {"has_mod": True}))
