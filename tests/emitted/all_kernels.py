"""Every kernel that attention launches on a GPU, compiled for the pretended one: FlexAttention's and our own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flexnsa import NSACache
from flexnsa.attention.dispatch import FLEX_CACHED
from flexnsa.attention.interface import BranchOutput, Call, Compressed, Keys, Scorer, given
from flexnsa.attention.step import CompressorWeights, StepInputs
from flexnsa.attention.triton import few_rows
from flexnsa.attention.triton import gated as triton_gated
from flexnsa.attention.triton import intervals as triton_intervals
from flexnsa.attention.triton import selected as triton_selected
from flexnsa.attention.triton import selection as triton_select
from flexnsa.attention.triton import selection_loss as triton_selection_loss
from flexnsa.attention.triton import step as triton_step
from flexnsa.config import NSAConfig, num_compressed
from flexnsa.masks.positions import Positions
from flexnsa.mods import ScoreMod, soft_cap
from flexnsa.operators.opaque import OpaqueOperator
from tests.emitted.calls import BRANCHES, arguments, attention, cached_attention
from tests.emitted.emit import emit
from tests.emitted.machine_code import Resources, compiling_launches, resources

CONFIG = NSAConfig()
INDEXED = replace(CONFIG, index_heads=2, index_block_size=8, index_stride=8)
GROUP, KV_HEADS, LENGTH = 16, 4, 4096
FEW, MANY = 1, 64
"""Queries of a step on a cache: those that divide the keys among programs, and those that do not."""

CAPPED = ("select", "select few", "selected", "gated sum", "selection loss", "decoding step")

Compile = Callable[[], list[tuple[str, Resources]]]


@dataclass(frozen=True, slots=True)
class Shape:
    """What tiles depend on, head dimensions and dtype; and a mod."""

    dims: tuple[int, int]
    dtype: torch.dtype
    mod: ScoreMod | None = None

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return self.dims[0] ** -0.5


def calls(shape: Shape, packed: Sequence[bool] = (False, True)) -> Iterator[tuple[str, Compile]]:
    """Name every call that attention may make, of packed documents or not, and give what compiles its kernels."""
    for branch in BRANCHES if False in packed else ():  # flex has the same kernels for both
        yield f"flex {branch}", partial(_flex, branch, shape)
        for queries in (FEW, MANY):
            yield f"flex {branch}, {queries} cached", partial(_flex_cached, branch, queries, shape)
    placed = (_select, _select_by_products, _selected, _compressed, _window, _gated_sum)
    functions: dict[str, Callable[..., None]] = {f.__name__[1:].replace("_", " "): f for f in placed}
    for has_documents in packed:
        for name, function in functions.items():
            yield name + " of documents" * has_documents, partial(_own, partial(function, packed=has_documents), shape)
    if shape.dtype == torch.bfloat16:  # where one kernel attends to the window and joins parts, in heads of at most 64
        yield "gated sum of small heads", partial(_own, _gated_sum, replace(shape, dims=(64, 64)))
    others: dict[str, Callable[..., None]] = {
        "select few": partial(_select, queries=FEW, packed=True),
        "gated sum without window": partial(_gated_sum, branches=2),
        "selection loss": _selection_loss,
        "selection loss of overlapping keys": partial(_selection_loss, config=CONFIG),  # those of the paper
        "decoding step": _decoding_step,
        "decoding step by given frequencies": partial(_decoding_step, given_frequencies=True),
        "step in pages": _step_in_pages,
    }
    for name, function in others.items():
        yield name, partial(_own, function, shape)
    for name in CAPPED * (False in packed):
        yield f"{name} capped", partial(_own, (functions | others)[name], replace(shape, mod=soft_cap(30.0)))


def _flex(branch: str, shape: Shape) -> list[tuple[str, Resources]]:
    function = attention(branch, CONFIG, shape.scale)
    make = partial(arguments, branch, CONFIG, GROUP, LENGTH, shape.dims, shape.dtype, heads=KV_HEADS)
    return [(kernel.direction, resources(kernel)) for kernel in emit(function, make).kernels if kernel.is_template]


def _flex_cached(branch: str, queries: int, shape: Shape) -> list[tuple[str, Resources]]:
    def make() -> tuple[Tensor, ...]:
        q, k, v = arguments(branch, CONFIG, GROUP, LENGTH, shape.dims, shape.dtype, heads=KV_HEADS)[:3]
        token = torch.zeros(1, queries, dtype=torch.int32)
        chosen = torch.zeros(1, KV_HEADS, queries, CONFIG.num_selected_blocks, dtype=torch.int32)
        return q.detach()[:, :, :queries], k.detach(), v.detach(), token, chosen

    kernels = emit(cached_attention(FLEX_CACHED, branch, config=CONFIG), make, backward=False).kernels
    return [(kernel.direction, resources(kernel)) for kernel in kernels if kernel.is_template]


def _own(attend: Callable[[Shape], None], shape: Shape) -> list[tuple[str, Resources]]:
    """Compile what is launched by a function that is called on fake tensors."""
    for module in (triton_select, triton_selected, triton_intervals, triton_selection_loss, triton_step, few_rows):
        for operator in vars(module).values():
            if isinstance(operator, OpaqueOperator):  # on fakes, too, run what runs on a device
                torch.library.register_fake(operator.name, operator.run, allow_override=True)
    with FakeTensorMode(), torch.device("cuda"), compiling_launches() as found:
        attend(shape)
    return [(needed.kernel, needed) for needed in found]


def _select(shape: Shape, queries: int = LENGTH, packed: bool = False) -> None:
    q = torch.empty(1, KV_HEADS * GROUP, queries, shape.dims[0], dtype=shape.dtype)
    k_cmp = q.new_empty(1, KV_HEADS, num_compressed(LENGTH, CONFIG), shape.dims[0])
    triton_select.select(q, k_cmp, _call(shape, packed, queries), None, None)


def _select_by_products(shape: Shape, packed: bool = False) -> None:
    """Score blocks as MSA and QSA do."""
    for config in (NSAConfig.msa().scoring, NSAConfig.qsa().scoring):
        q = torch.empty(1, KV_HEADS, LENGTH, shape.dims[0], dtype=shape.dtype)
        call = replace(_call(shape, packed), config=config)
        triton_select.select(q, q[:, :1, : num_compressed(LENGTH, config)], call, None, None)


def _selected(shape: Shape, packed: bool = False) -> None:
    for config in (CONFIG, NSAConfig.qsa()):  # a few large blocks, and many small ones, whose keys are gathered
        blocks = torch.empty(1, KV_HEADS, LENGTH, config.num_selected_blocks, dtype=torch.int32)
        call = replace(_call(shape, packed), config=config)
        _differentiate(triton_selected.selected(*_whole_sequence(shape), blocks, call))


def _window(shape: Shape, packed: bool = False) -> None:
    _differentiate(triton_intervals.window(*_whole_sequence(shape), _call(shape, packed)))


def _compressed(shape: Shape, packed: bool = False) -> None:
    q, k, v = _whole_sequence(shape)
    k_cmp, v_cmp = (x[:, :, : num_compressed(LENGTH, CONFIG)] for x in (k, v))
    out, lse, _ = triton_intervals.compressed(q, k_cmp, v_cmp, _call(shape, packed))
    _differentiate(BranchOutput(out, lse))


def _gated_sum(shape: Shape, packed: bool = False, branches: int = 3) -> None:
    q, k, v = _whole_sequence(shape)
    k_cmp, v_cmp = (x[:, :, : num_compressed(LENGTH, CONFIG)] for x in (k, v))
    keys = Keys(k_cmp, v_cmp, *(k, v) * (branches - 1))
    gate = torch.empty(q.shape[:3], dtype=shape.dtype, requires_grad=True)
    gates: dict[str, Tensor] = {"cmp": gate, "win": gate} if branches == 3 else {"cmp": gate}
    blocks = torch.empty(1, KV_HEADS, LENGTH, CONFIG.num_selected_blocks, dtype=torch.int32)
    branch = torch.empty(*q.shape[:3], v.shape[-1], dtype=shape.dtype), torch.empty(q.shape[:3])
    call = _call(shape, packed)
    attend = given(triton_gated.gated_sum(q, keys, call))
    out, _, _ = attend(q, keys, gates, blocks, Compressed(*branch), call, True, ())
    out.float().sum().backward()


def _selection_loss(shape: Shape, config: NSAConfig = INDEXED) -> None:
    """Teach an indexer at 256 queries."""
    q, k, _ = _whole_sequence(shape)
    keys = k.detach()[:, :, : num_compressed(LENGTH, config.scoring)].requires_grad_()
    heads, where = KV_HEADS * (config.index_heads or GROUP), _positions(256)
    scorer = Scorer(q[:, :heads, :256], keys, Call(config.scoring, shape.scale, shape.mod, where))
    call = Call(config, shape.scale, shape.mod, where)
    triton_selection_loss.selection_loss(q[:, :, :256], k, scorer, call, "mass")[0].backward()


def _decoding_step(shape: Shape, given_frequencies: bool = False) -> None:
    """Compress by the paper's compressor, which has the most kernels; turn heads as our models do or by frequencies."""
    (dk, dv), new, dim = shape.dims, partial(torch.empty, dtype=shape.dtype), 1024
    cache = NSACache(2, LENGTH, KV_HEADS, dk, v_head_dim=dv, config=CONFIG, dtype=shape.dtype)
    sizes = [KV_HEADS * GROUP * dk, *[KV_HEADS * dk] * 3, *[KV_HEADS * dv] * 3, KV_HEADS * GROUP * 3]
    rows = few_rows.multiply_few_rows(new(2, dim), [new(size, dim) for size in sizes])
    q, k_cmp, k_slc, k_win, v_cmp, v_slc, v_win, gates = rows[:, None].split(sizes, dim=-1)
    length = CONFIG.compress_block_size
    phis = [
        CompressorWeights("mlp", new(length, dim), new(4 * dim, length * dim), new(dim, 4 * dim)) for dim in shape.dims
    ]
    of_cache = {name: getattr(cache, name) for name in ("buffers", "lengths", "reached", "max_seq_len", "config")}
    triton_step.step(
        StepInputs(
            q=q,
            k={"cmp": k_cmp, "slc": k_slc, "win": k_win},
            v={"cmp": v_cmp, "slc": v_slc, "win": v_win},
            gates=gates,
            gate="sigmoid",
            phi_k=phis[0],
            phi_v=phis[1],
            new_lengths=None,
            num_heads=KV_HEADS * GROUP,
            scale=shape.scale,
            frequencies=new(dk // 2, dtype=torch.float32) if given_frequencies else None,
            score_mod=shape.mod,
            **of_cache,
        )
    )


def _step_in_pages(shape: Shape, page_size: int = 64) -> None:
    """Attend to pages with all that a layer may have, an indexer too."""
    (dk, dv), new, table = shape.dims, partial(torch.empty, dtype=shape.dtype), torch.empty(2, 64, dtype=torch.int32)
    strides = {"slc": 1, "win": 1} | {kind: config.compress_stride for kind, config in INDEXED.compressed.items()}
    buffers: dict[str, Tensor] = {}
    for kind, stride in strides.items():
        widths = [dk] if kind == "index" else [dk, dv]
        pool = new(128, KV_HEADS, page_size // stride, sum(widths))
        buffers |= zip((f"k_{kind}", f"v_{kind}"), pool.split(widths, -1), strict=False)
    heads = KV_HEADS * GROUP
    inputs = StepInputs.in_pages(
        new(2, 1, heads, dk),
        new(2, 1, KV_HEADS * given(INDEXED.index_heads), dk),
        new(2, 1, heads, 3),
        buffers,
        dict.fromkeys(strides, table),
        max_seq_len=LENGTH,
        config=INDEXED,
        scale=shape.scale,
    )
    triton_step.step_in_pages(inputs, torch.empty(3, 2, 1, dtype=torch.int32))


def _whole_sequence(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    (dk, dv), new = shape.dims, partial(torch.empty, dtype=shape.dtype, requires_grad=True)
    return new(1, KV_HEADS * GROUP, LENGTH, dk), new(1, KV_HEADS, LENGTH, dk), new(1, KV_HEADS, LENGTH, dv)


def _call(shape: Shape, packed: bool, queries: int = LENGTH) -> Call:
    positions = _positions(queries) if packed else None
    return Call(CONFIG, shape.scale, shape.mod, positions, positions)


def _positions(queries: int) -> Positions:
    row = torch.zeros(1, queries, dtype=torch.int32)
    return Positions(row, row, row)


def _differentiate(attended: BranchOutput) -> None:
    (attended.out.float().sum() + given(attended.lse).sum()).backward()
