"""An NSA layer in the place of torchtitan's dense one: its projections, norms and rotary embedding, and new ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.rope import ComplexRoPE

from flexnsa.layers.compression import COMPRESSORS, LinearCompressor, MeanCompressor, MLPCompressor
from flexnsa.layers.core import Compressors, Heads
from flexnsa.layers.forward import Attention, SparseLayer, run_layer
from flexnsa.layers.gating import gates_of
from flexnsa.layers.indexer import Indexer, PassedIndex
from flexnsa.layers.layouts import RowLayout, lay_out_rows
from flexnsa.layers.presets import GATE_LIMIT, StartingGate
from flexnsa.layers.projection import split_heads
from flexnsa.layers.rope import RopeTables
from flexnsa.packing import document_ids_from_position_ids
from flexnsa.parallel.shared_losses import OverTokens
from flexnsa.parallel.shared_rows import SharingRanks, lay_out_shared_rows
from flexnsa.primitives import may_look
from flexnsa.torchtitan.modules import OF_HEADS, adopt, as_heads, local
from flexnsa.torchtitan.options import Options
from flexnsa.torchtitan.teaching import Teaching


class NSAttention(SparseLayer, GQAttention):
    """Native Sparse Attention that replaces a dense layer of torchtitan.

    The selected branch has the dense layer's own projections of keys and values, under their names. Those of the other
    branches start as copies of them, also where a checkpoint is loaded that has the dense ones alone.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        """As of the dense layer, with the options of the override."""

        options: Options
        leader: int | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        options, shape = config.options, (self.n_kv_heads, self.head_dim)
        self.options, self.is_interleaved = options, isinstance(self.rope, ComplexRoPE)
        self.ranks: SharingRanks | None = None
        self.teaching: Teaching | None = None
        self.leader, self.follows = config.leader, config.leader is not None
        self.passed = PassedIndex()
        has_bias = "wk.bias" in self.qkv_linear.state_dict()
        for name in _copies(options):
            self.add_module(name, nn.Linear(config.dim, self.n_kv_heads * self.head_dim, bias=has_bias))
        several = len(options.branches) > 1  # else it is the dense layer's own weight
        self.gate = StartingGate(config.dim, self.n_heads, options.branches) if several else None
        self.compress_k = self.compress_v = None
        if "cmp" in options.branches:
            self.compress_k, self.compress_v = (_compressor(options, *shape) for _ in "kv")
        elif not options.has_indexer:
            self.compress_k = MeanCompressor(*shape, config=options.sizes)
        self.indexer: Indexer | None = None
        if options.has_indexer and not self.follows:
            kinds: dict[str, Any] = {"config": options.sizes, "compression": options.compression}
            self.indexer = Indexer(config.dim, *shape, rank=options.index_rank, **kinds)
        # With all branches: an optimizer that has never met a gradient of a parameter saves no state for it.
        self.attend_densely(options.branches if options.warmup else None)
        self._follow_protocol()
        self.register_load_state_dict_pre_hook(_complete)

    def forward(
        self,
        x_BLD: Tensor,
        attention_masks: object,  # noqa: ARG002  (of dense layers)
        positions: Tensor | None = None,
    ) -> Tensor:
        """Attend within each document of ``x_BLD (B, S, dim)``; arguments as of the dense layer.

        Raises:
            ValueError: positions restart without ``packed``, or the run has not the override's metrics.
        """
        x = local(x_BLD)
        layout = self._lay_out(x, positions)
        heads, teaching = self._project(x_BLD, x), self._teaching_now()
        index = self.passed.get(x) if self.follows else None
        if teaching is None:
            out, chosen = run_layer(self, x, heads=heads, layout=layout, index=index)
        else:
            selection = teaching.selection(x)
            options: dict[str, Any] = {"losses_over": () if self.ranks is None else (OverTokens(self.ranks),)}
            out, chosen = run_layer(self, x, heads=heads, layout=layout, selection=selection, index=index, **options)
            out = teaching.attach(out, selection, x.shape[1] * layout.num_ranks)
        if self.options.share_index != 1 and not self.follows:
            self.passed.index = chosen
        return self.wo(as_heads(out, x_BLD))

    def _project(self, x_BLD: Tensor, x: Tensor) -> Heads:
        """Project to the heads of all branches, and their gates; ``x`` is ``x_BLD`` as this rank has it."""
        queries, keys, values = self.qkv_linear(x_BLD)
        q, k, v = self._ordered(self.q_norm, queries), {}, {}
        for tag in self.options.branches:
            if tag == "slc":
                k[tag], v[tag] = self._ordered(self.k_norm, keys), local(values).transpose(1, 2)
            else:
                v[tag] = split_heads(self._map(f"w_v_{tag}")(x), self.n_kv_heads)
                if f"w_k_{tag}" in self._modules:
                    rows = torch.unflatten(self._map(f"w_k_{tag}")(x), -1, (self.n_kv_heads, -1))
                    k[tag] = self._ordered(self.k_norm, as_heads(rows, x_BLD))
        if self.options.shared_keys:
            k["cmp"] = k["slc"]
        index = None if self.indexer is None else self.indexer(x, q, k["slc"])
        return Heads(q, k, v, self._gates(x), index)

    def row_layout(self, x: Tensor, document_ids: Tensor | None) -> RowLayout:
        """Lay out rows, packed with the documents ``document_ids (B, S)``, or the tokens that this rank has of them."""
        sizes = self.options.sizes
        if self.ranks is None:
            return lay_out_rows(x.shape[1], document_ids, sizes, self._tabulate, x.device)
        of_ranks = self.ranks, self.options.branches
        return lay_out_shared_rows(x.shape[1], document_ids, sizes, self._tabulate, x.device, *of_ranks)

    def _lay_out(self, x: Tensor, positions: Tensor | None) -> RowLayout:
        """Lay out the tokens at these positions in their documents."""
        if positions is None or not self.options.packed:
            layout = self.row_layout(x, None)
            if positions is not None:
                _check_one_document(positions, layout)
            return layout
        whole = positions if self.ranks is None else self.ranks.whole(positions)
        return self.row_layout(x, document_ids_from_position_ids(whole))

    def attention(self) -> Attention:
        """Describe the layer as it is now; see :class:`flexnsa.layers.forward.SparseLayer`."""
        options = self.options
        return Attention(
            config=options.sizes,
            branches=options.branches,
            compressors=Compressors(self.compress_k, self.compress_v, getattr(self.indexer, "phi", None)),
            scale=self.head_dim**-0.5,
            impl=options.impl,
            recompute=options.recompute,
        )

    def reset_parameters(self) -> None:
        """Start the new branches' projections as copies of the dense ones; torchtitan calls this last."""
        dense = self.qkv_linear.state_dict()
        for name, copied in _copies(self.options).items():
            for kind, parameter in self._map(name).named_parameters():
                parameter.copy_(dense[f"{copied}.{kind}"])

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """Shard parameters by whole groups of heads."""
        super().parallelize(parallel_dims)
        self.n_heads //= parallel_dims.tp
        self.n_kv_heads //= parallel_dims.tp
        for module in self.modules():
            if isinstance(module, MeanCompressor | LinearCompressor | MLPCompressor):
                module.shape = (self.n_kv_heads, self.head_dim)
        if self.indexer is not None:
            self.indexer.num_kv_heads //= parallel_dims.tp
            self.indexer.num_index_heads //= parallel_dims.tp

    def _follow_protocol(self) -> None:
        """Make the library's modules torchtitan's, with the rows of a rank's heads where each head has rows."""
        of_heads = [self._map(name) for name in _copies(self.options)]
        of_heads += [] if self.gate is None else [self.gate]
        of_heads += [] if self.indexer is None else [self.indexer.change_q.up, self.indexer.change_k.up]
        for module in of_heads:
            adopt(module, OF_HEADS)
        adopt(self)

    def _ordered(self, norm: nn.Module | None, rows: Tensor) -> Tensor:
        """Return normed heads ``(B, S, H, D)`` as ``(B, H, S, D)``, in halves, which the library rotates as pairs."""
        heads = local(rows if norm is None else norm(rows))
        if self.is_interleaved:
            heads = torch.unflatten(heads, -1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return heads.transpose(1, 2)

    def _gates(self, x: Tensor) -> dict[str, Tensor]:
        """Weigh the branches, ``(B, Hq, S)``; a single one has weight 1."""
        if self.gate is None:
            return {}
        gates = gates_of(self.gate(x), self.n_heads, self.options.branches)
        return {tag: GATE_LIMIT * gate for tag, gate in gates.items()}

    def _tabulate(self, *positions: Tensor) -> list[RopeTables]:
        """Look up the angles of the model's rotary embedding; see :class:`flexnsa.layers.layouts.Rotate`."""
        cache, half = local(cast("Tensor", self.rope.cache)), self.head_dim // 2
        if self.is_interleaved:
            cos, sin = torch.view_as_real(cache).unbind(-1)
        else:  # each half is there twice
            cos, sin = cache[:, :half], cache[:, 2 * half : 3 * half]
        made = ([table[at] if at.dim() == 1 else table[at][:, None] for table in (cos, sin)] for at in positions)
        return [RopeTables(*tables) for tables in made]

    def _map(self, name: str) -> nn.Linear:
        return cast("nn.Linear", self.get_submodule(name))

    def _teaching_now(self) -> Teaching | None:
        if not self.options.has_indexer or not self.training or not torch.is_grad_enabled():
            return None
        if self.teaching is None:
            raise ValueError("metrics: expected the override's, which teach a layer with an indexer, got others")
        return self.teaching


def _compressor(
    options: Options, num_kv_heads: int, head_dim: int
) -> MeanCompressor | LinearCompressor | MLPCompressor:
    made = COMPRESSORS[options.compression](num_kv_heads, head_dim, config=options.sizes)
    made.begin_as_mean()
    return made


def _copies(options: Options) -> dict[str, str]:
    """Name the projections of the new branches, and the dense layer's that each is a copy of at first."""
    names = {f"w_{kind}_{tag}": f"w{kind}" for tag in options.branches if tag != "slc" for kind in "kv"}
    return {name: dense for name, dense in names.items() if name != "w_k_cmp" or not options.shared_keys}


def _complete(layer: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Add the projections of new branches to a state that has the dense ones alone; a hook of load_state_dict."""
    for name, copied in _copies(cast("NSAttention", layer).options).items():
        for kind in ("weight", "bias"):
            new, dense = f"{prefix}{name}.{kind}", f"{prefix}qkv_linear.{copied}.{kind}"
            if new not in state and dense in state:
                state[new] = state[dense]


def _check_one_document(positions: Tensor, layout: RowLayout) -> None:
    """Check on a CPU that no position restarts."""
    if not may_look(positions):
        return
    token = torch.arange(positions.shape[1]) if layout.positions is None else layout.positions.token
    if not (positions == token).all():
        raise ValueError("packed: expected True for rows of several documents, got False")
