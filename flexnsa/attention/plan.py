"""Which kernels run: every threshold, and the one place that chooses.

Few queries leave a GPU idle unless programs divide their keys; many have keys in common, which is worth a list for each
block of keys. Thresholds that count different things stay apart, whatever their values.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from flexnsa.attention.tiles.device import ALIGNMENT, HOPPER, Device, properties_of
from flexnsa.masks.intervals import DENSE_TILE

STEP_TOKENS = 8
"""Most new tokens of a sequence in one decoding step. Counts ``T``.

Up to here one operator can take the whole step, in 11 kernels instead of 45, whose launches took longer than reading
the cache (H200, ``benchmarks/results/decode_h200.json``). Programs that score blocks have one query and all heads of
its group: a tile of many queries would do 16 times as many products.
"""
DIVIDED_ROWS = 127
"""Most rows of queries that FlexAttention's decoding kernel takes. Counts ``T`` times the padded group.

A limit of PyTorch, not a measurement: 7 tokens of up to 16 heads. A step of ``STEP_TOKENS`` that goes branch by branch,
as with mods, is therefore one too long for it.
"""
TILE_ROWS = DENSE_TILE
"""Rows of a tile of FlexAttention's kernel for long queries, which the heads of a group can share. Counts ``T * G``."""
GATHERED_QUERIES = 16
"""Most queries for which ``sdpa`` gathers the keys of each one, or reads the cache as one slice. Counts ``T``.

It copies ``n * l'`` keys for each query, where a loop over blocks has a price for any number of queries. On one CPU
thread at 8k tokens (4 heads a group, 2 groups), gathering took 1 ms and the loop 14 for one query, 12 and 24 for 16, 27
and 35 for 32, and 76 and 37 for 64.
"""
OWN_KEYS_QUERIES = 64
"""Limit of the queries on a cache that each load their own keys on CUDA. Counts ``T``.

More of them have keys in common, which the Triton kernels for whole sequences load once. Set on an H200.
"""
THREADED_QUERIES = 4096
"""Fewest queries for which heads run on threads of their own on a CPU. Counts ``T``.

Time of operations on all heads, over that of a thread for each head (2 threads, 12 query and 2 key heads of 64): 0.4
to 0.9 at 512 to 2k queries, 1.0 or 1.2 by process at 4k, 1.1 at 8k, 1.2 at 16k.
"""
MOST_HEADS = 65535
"""CUDA's limit of programs in the second dimension of a grid. Counts ``B * H``."""
LEAST_BLOCK = 16
"""FlexAttention's blocks have a multiple of so many keys: the smallest tile of the tensor cores."""
LEAST_DIM = 16
LARGEST_DIM = 256
"""Head dimensions of the Triton kernels."""
LISTED_BLOCKS = 64
"""Most selected blocks of a query that the Triton kernels list, with a partial output for each. Counts ``n``.

Of more, as QSA has them, a program gathers the keys: with 513 blocks of 4 tokens a kernel that adds up so many partial
outputs did not compile within two minutes."""
FLEX_DIM = 64
FLEX_KEYS = 2048
"""FlexAttention is faster than Triton for larger heads that see more compressed keys than this (H200)."""
JOINED_DIM = 64
"""Largest heads for which one kernel attends to the window and joins partial outputs: with heads of 128 that took 3 to
8 % longer than two (H100)."""
HOPPER_DIMS = (64, 128)
"""Head dimensions of the Gluon kernels for Hopper GPUs."""
HOPPER_ROWS = 64
"""Rows of a tile there, and keys: what one group of 4 warps multiplies at a time."""
KNOWN_VERSIONS = ("3.6", "3.7", "3.8", "3.9")
"""Versions of Triton with which they were tested, those of PyTorch 2.11 to 2.15: Gluon is experimental."""


def padded_group(group: int) -> int:
    """Return the rows of a query's tile in the decoding kernel: a power of two that tensor cores take."""
    return max(16, 1 << (group - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Plan:
    """The sizes of a call, and the kernels that suit them; each property is read by the branches that it names.

    A property is computed when it is read: under ``torch.compile`` it adds a guard for each size that it compares.

    Args:
        queries: ``T``.
        keys: ``S``, or ``N`` of the compressed branch.
        heads: ``Hq``.
        kv_heads: ``Hkv``.
        dims: ``(Dk, Dv)``.
        dtype: of the queries.
        device: of the queries, or the properties of a GPU that is not here.
        has_mod: whether a score_mod tells heads and positions apart.
        block_size: keys of a selected block.
    """

    queries: int
    keys: int
    heads: int
    kv_heads: int
    dims: tuple[int, int]
    dtype: torch.dtype
    device: torch.device | Device
    has_mod: bool = False
    block_size: int = HOPPER_ROWS

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor | None = None,
        *,
        has_mod: bool = False,
        block_size: int = HOPPER_ROWS,
    ) -> Plan:
        """Describe the queries ``q (B, Hq, T, Dk)`` of keys ``k (B, Hkv, S, Dk)`` and values ``(B, Hkv, S, Dv)``."""
        dims = q.shape[3], (k if v is None else v).shape[3]
        sizes = q.shape[2], k.shape[2], q.shape[1], k.shape[1], dims
        return cls(*sizes, q.dtype, q.device, has_mod, block_size)

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.heads // self.kv_heads

    @property
    def is_cuda(self) -> bool:
        """Whether the queries are on a GPU."""
        return isinstance(self.device, Device) or self.device.type == "cuda"

    # Queries on a cache

    @property
    def divide_keys(self) -> bool:
        """``flex``: FlexAttention's decoding kernel divides the keys of a query among programs."""
        return self.is_cuda and self.queries * padded_group(self.group) <= DIVIDED_ROWS

    @property
    def fit_tile(self) -> bool:
        """``flex``: the heads of a group are rows of one tile. To a mod such rows would be one head."""
        return not self.has_mod and (self.group == 1 or self.queries * self.group <= TILE_ROWS)

    @property
    def share_keys(self) -> bool:
        """``triton``: the kernels for whole sequences, which alone take blocks that tensor cores cannot tile."""
        return self.in_triton and (self.queries > OWN_KEYS_QUERIES or self.block_size % LEAST_BLOCK != 0)

    @property
    def are_gathered(self) -> bool:
        """``sdpa``: the keys of each query are gathered, or the cache is read as one slice; mods need other code."""
        return not self.has_mod and self.queries <= GATHERED_QUERIES

    # Whole sequences

    @property
    def in_triton(self) -> bool:
        """All branches and the selection loss: Triton kernels, which take no mod but a soft cap."""
        return self.is_cuda and not self.has_mod and max(self.dims) <= LARGEST_DIM

    @property
    def score_alone(self) -> bool:
        """Selection: a program scores blocks for one query and all heads of its group."""
        return self.queries <= STEP_TOKENS

    @property
    def compressed_in_triton(self) -> bool:
        """``triton``, compressed branch: not FlexAttention."""
        return max(self.dims) <= FLEX_DIM or self.keys <= FLEX_KEYS or self.in_gluon

    @property
    def in_gluon(self) -> bool:
        """All branches, and selection in whole sequences: Gluon kernels, provided that :func:`can_copy` their rows."""
        suits = self.dtype in (torch.bfloat16, torch.float16) and all(dim in HOPPER_DIMS for dim in self.dims)
        if not suits or not self.is_cuda:
            return False
        device = self.device if isinstance(self.device, Device) else properties_of(self.device)
        return device.generation == HOPPER and _is_known()

    @property
    def selected_in_gluon(self) -> bool:
        """Selected branch: as :attr:`in_gluon`."""
        fits = HOPPER_ROWS // 2 < self.block_size <= HOPPER_ROWS and self.group <= HOPPER_ROWS
        return fits and self.in_gluon

    @property
    def halves_blocks(self) -> bool:
        """Selected branch: blocks of twice as many keys, as MSA has them, are two that suit the Gluon kernels."""
        return self.block_size == 2 * HOPPER_ROWS and replace(self, block_size=HOPPER_ROWS).selected_in_gluon

    @property
    def joins_forward(self) -> bool:
        """Gated sum: one kernel attends to the window and joins the partial outputs of the selected branch."""
        return max(self.dims) <= JOINED_DIM and self.selected_in_gluon

    @property
    def joins_backward(self) -> bool:
        """Gated sum: the kernel that sums the gradients of queries computes that of the window, too."""
        return self.selected_in_gluon


def choose_name(impl: str, *, is_cuda: bool, modded: bool, largest_dim: int) -> str:
    """Resolve ``"auto"``: triton on CUDA, flex there for other mods and larger head dimensions, and sdpa elsewhere."""
    if impl != "auto":
        return impl
    return "sdpa" if not is_cuda else "flex" if modded or largest_dim > LARGEST_DIM else "triton"


def fits_one_step(tokens: int, heads: int, dims: tuple[int, int]) -> bool:
    """Return whether one operator can take ``tokens`` of each sequence that follow a cache with ``B * Hkv`` heads."""
    return tokens <= STEP_TOKENS and tokens * heads <= MOST_HEADS and max(dims) <= LARGEST_DIM


def gathers_keys(num_blocks: int) -> bool:
    """Return whether Triton kernels gather the keys of each query, of so many selected blocks, instead of listing."""
    return num_blocks > LISTED_BLOCKS


def can_copy(*rows: Tensor) -> bool:
    """Return whether rows of ``(B, H, S, D)`` begin at multiples of 16 bytes, the unit of a copy of Gluon kernels.

    Of strides Triton asks for multiples of 16 numbers. The offsets of the rows of a tile have 32 bits.
    """
    places = [(x.storage_offset(), *x.stride()[:3]) for x in rows]
    return all((at | b | h | t) % ALIGNMENT == 0 and t < 2**31 // HOPPER_ROWS for at, b, h, t in places)


def needs_int64(x: Tensor, group: int, chunk: int) -> bool:
    """Return whether the rows of one chunk of a group are too far apart for 32-bit offsets."""
    return min(chunk, x.shape[2]) * x.stride(2) + group * x.stride(1) >= 2**31


@cache
def triton_version() -> str | None:
    """Return the version of Triton; None without it, where a plan is an estimate for another machine."""
    if find_spec("triton") is None:
        return None
    import triton  # pyright: ignore[reportMissingTypeStubs]

    return triton.__version__


def _is_known() -> bool:
    """Return whether Gluon kernels were tested with this version of Triton; warn where they were not."""
    version = triton_version()
    known = version is None or ".".join(version.split(".")[:2]) in KNOWN_VERSIONS
    if not known:
        message = f"triton: expected {' or '.join(KNOWN_VERSIONS)} for the kernels of Hopper GPUs, got {version}"
        slower = "the other kernels run, whose backward pass takes about 1.4 times as long"
        warnings.warn(f"{message}; {slower}", stacklevel=1)  # of this line, so that it is shown once
    return known


# Dynamo cannot trace into Triton. torch.compiler.assume_constant_result does the same, but imports the compiler.
_is_known._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
