"""A decoder language model around either attention: small enough to read, large enough to learn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from flexnsa.attention.interface import given
from flexnsa.cache.cache import NSACache
from flexnsa.checks.calls import check_document_ids
from flexnsa.layers.attention import NativeSparseAttention
from flexnsa.layers.forward import SparseLayer
from flexnsa.layers.indexer import Indexer, SelectionLoss, SharedIndex, check_selection, warn_untaught
from flexnsa.layers.layouts import RowLayout
from flexnsa.layers.projection import weight_of
from flexnsa.lm.dense.attention import DenseAttention, DenseLayout
from flexnsa.lm.dense.cache import DenseCache
from flexnsa.lm.generation.generate import generate_tokens
from flexnsa.lm.model.caches import check_caches
from flexnsa.lm.model.config import DecoderConfig
from flexnsa.lm.model.loss import check_targets, head_cross_entropy
from flexnsa.masks.user_mods import MaskMod, ScoreMod
from flexnsa.operators.checkpointing import keep_selection
from flexnsa.operators.opaque import in_transform
from flexnsa.primitives import check_lengths, check_tensor, check_tokens, check_type, describe


class LayerOutput(NamedTuple):
    """The residual stream behind a layer; its selection loss, a sum and its weight; and its index for other layers."""

    x: Tensor
    loss: Tensor | None
    weight: Tensor | None
    shared: SharedIndex | None


class DecoderLM(nn.Module):
    """``Embedding -> L x {RMSNorm, attention, RMSNorm, MLP} -> RMSNorm -> head``, no biases, head untied.

    Built on the meta device it takes no memory; ``to_empty`` followed by :meth:`reset_parameters` brings it to life.

    Example:
        >>> model = DecoderLM(preset("small"))
        >>> logits = model(torch.randint(256, (2, 128)))  # (2, 128, 256)
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        check_type("config", config, DecoderConfig)
        self.config = config
        self.leaders = config.leaders
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(
            DecoderLayer(config, follows=leader != number) for number, leader in enumerate(self.leaders)
        )
        self.norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self._run_layer = run_layer
        self.reset_parameters()

    def __getstate__(self) -> dict[str, Any]:
        """Give what is copied and pickled; as of any compiled module, the compilation is not."""
        return super().__getstate__() | {"_run_layer": run_layer}

    def compile_layers(self, **options: Any) -> None:
        """Have whole rows go through ``torch.compile(**options)`` layer by layer, all layers through the same code.

        So compiling takes as long as one layer takes. Checkpointing is compiled along with the layer. A second length
        compiles code for all lengths, which takes two to three times as long as code for one (``dynamic=False``). See
        :func:`quick_options`.
        """
        self._run_layer = torch.compile(run_layer, **quick_options(options))

    def reset_parameters(self) -> None:
        """Draw all parameters anew, so that the first loss is about ``ln(vocab_size)`` at any depth.

        Every layer adds to the residual stream with variance ``1 / 2L`` per branch, and the logits start small.
        """
        nn.init.normal_(self.embedding.weight)
        for layer in cast("Iterable[DecoderLayer]", self.layers):
            layer.reset_parameters()
        self.norm.reset_parameters()
        nn.init.normal_(self.head.weight, std=1 / self.config.dim)

    def forward(
        self,
        tokens: Tensor,
        *,
        targets: Tensor | None = None,
        reduction: str = "mean",
        document_ids: Tensor | None = None,
        score_mod: ScoreMod | None = None,
        mask_mod: MaskMod | None = None,
        caches: Sequence[NSACache | DenseCache] | None = None,
        lengths: Tensor | None = None,
        states: list[Tensor] | None = None,
        selection: SelectionLoss | None = None,
    ) -> Tensor:
        """Predict the next token at every position, or give the loss of predicting the given ones.

        Args:
            tokens: int64 or int32 ``(B, S)``, or their embeddings ``(B, S, dim)``; with caches, the tokens that follow
                those in the caches.
            targets: int64 or int32 ``(B, S)``, -100 where there is nothing to predict. The loss is that of the
                logits, in memory for a chunk of them (see :func:`flexnsa.lm.linear_cross_entropy`). A head that
                is more than its weight (with a bias, a hook or a forward of its own, or an adapter) is called, with
                slices ``(B, T, dim)`` where there are several chunks, and then once more in backward.
            reduction: of the loss, ``"mean"`` or ``"sum"``.
            document_ids: int ``(B, S)``, never decreasing along a row: each document of a packed row then stands alone.
                :func:`flexnsa.next_token_targets` gives what its tokens have to predict. With empty caches, document
                ``b`` of one packed row goes into row ``b`` of each. An id that is left out before the last one leaves
                its row empty.
            score_mod: as in :func:`flexnsa.native_sparse_attention`, the same in every layer.
            mask_mod: as in :func:`flexnsa.native_sparse_attention`, the same in every layer.
            caches: of :meth:`new_caches`; needs ``torch.no_grad()``.
            lengths: int ``(B,)``, with caches only: tokens of each row that are real, the others being padding.
            states: a list that gets ``L + 1`` hidden states ``(B, S, dim)``: what goes into each layer, and what the
                head is given.
            selection: gets the losses that teach the layers' indexers, in training; the loss returned is without them.

        Returns:
            logits ``(B, S, vocab_size)``; given targets, the loss in nats, a scalar of fp32 or wider.

        Raises:
            TypeError: an argument is not of its kind.
            ValueError: ``tokens`` is not a batch of sequences, a token is not in the vocabulary (which is seen on a
                CPU), or another argument does not fit; the message names it.
        """
        if states is not None:
            check_type("states", states, list)
        self._check(tokens, caches, lengths, document_ids)
        if targets is not None:
            check_targets(targets, tokens.shape[:2], reduction)
        if selection is not None:
            check_selection(selection, bool(self.indexers()))
        options: dict[str, Any] = {"document_ids": document_ids, "score_mod": score_mod, "mask_mod": mask_mod}
        x = self.norm(self._run_layers(tokens, caches, lengths, states, selection, **options))
        if states is not None:
            states.append(x)
        if targets is None:
            return self.head(x)
        return head_cross_entropy(self.head, x, targets, vocab_size=self.config.vocab_size, reduction=reduction)

    def last_logits(
        self,
        tokens: Tensor,
        *,
        lengths: Tensor | None = None,
        score_mod: ScoreMod | None = None,
        mask_mod: MaskMod | None = None,
        caches: Sequence[NSACache | DenseCache] | None = None,
    ) -> Tensor:
        """Predict what follows each row; unlike :meth:`forward`, no logits are computed of the tokens before.

        Args:
            tokens: as in :meth:`forward`, padded on the right.
            lengths: int ``(B,)``, real tokens of each row, at least 1 (which is seen on a CPU); by default all.
            score_mod: as in :meth:`forward`.
            mask_mod: as in :meth:`forward`.
            caches: as in :meth:`forward`.

        Returns:
            logits ``(B, vocab_size)``.

        Raises:
            TypeError: an argument is not of its kind.
            ValueError: an argument does not fit; the message names it.
        """
        kept = None if caches is None else lengths
        self._check(tokens, caches, kept, None)
        last = tokens.new_full((len(tokens),), tokens.shape[1] - 1, dtype=torch.int64)
        if lengths is not None:
            check_lengths(lengths, tokens, least=1)
            last = lengths.long() - 1
        x = self._run_layers(tokens, caches, kept, None, None, score_mod=score_mod, mask_mod=mask_mod)
        return self.head(self.norm(x[torch.arange(len(x), device=x.device), last]))

    def _run_layers(
        self,
        tokens: Tensor,
        caches: Sequence[NSACache | DenseCache] | None,
        lengths: Tensor | None,
        states: list[Tensor] | None,
        selection: SelectionLoss | None,
        *,
        document_ids: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Give the residual stream ``(B, S, dim)`` behind the last layer; ``states`` gets what it was before each."""
        layouts: Sequence[RowLayout | DenseLayout | None] = [None] * len(self.layers)
        if caches is None or document_ids is not None or all(cache.takes_rows(tokens.shape[1]) for cache in caches):
            layouts = self._layouts(tokens, document_ids)
        if self.training and torch.is_grad_enabled() and caches is None:
            if selection is not None:
                num_ranks = max(layout.num_ranks for layout in layouts if isinstance(layout, RowLayout))
                sampled = selection.tokens(tokens, num_ranks * tokens.shape[1])
                if self._run_layer is not run_layer and not torch.compiler.is_compiling():
                    # A dense stage without a loss has none, and a constant size here would make that of x constant
                    torch._dynamo.maybe_mark_dynamic(sampled, 0)
                options |= {"sampled": sampled, "query_weights": selection.query_weights}
            elif self.indexers() and not self._attends_densely():
                warn_untaught()  # here too, because compiled layers do not
        x = tokens if tokens.dim() == 3 else self.embedding(tokens)
        shared: dict[int, SharedIndex] = {}
        for number, (layer, leader) in enumerate(zip(self.layers, self.leaders, strict=True)):
            if states is not None:
                states.append(x)
            layer_options = options | {"layout": layouts[number]}
            if leader != number:
                layer_options["index"] = shared[leader]
            elif leader in self.leaders[number + 1 :]:
                layer_options["return_index"] = True
            if caches is not None:
                out = layer(x, cache=caches[number], lengths=lengths, **layer_options)
            else:
                checkpointed = self.training and self.config.is_checkpointed(number)
                out = self._run_layer(layer, x, checkpointed=checkpointed, **layer_options)
            if isinstance(out, LayerOutput):
                if out.loss is not None:
                    given(selection).add(out.loss, given(out.weight))
                if out.shared is not None:
                    shared[number] = out.shared
                out = out.x
            x = out
        return x

    def attend_densely(self, branches: Sequence[str] | None = ("slc",)) -> None:
        """Begin or end a dense stage of all layers; see :meth:`flexnsa.NativeSparseAttention.attend_densely`."""
        for module in self.modules():
            if isinstance(module, SparseLayer):
                module.attend_densely(branches)

    def _attends_densely(self) -> bool:
        return all(module.dense_branches is not None for module in self.modules() if isinstance(module, SparseLayer))

    def indexers(self) -> list[Indexer]:
        """List the indexers of the layers that have one."""
        return [*dict.fromkeys(self.indexers_by_layer())]

    def indexers_by_layer(self) -> list[Indexer]:
        """List the indexers that choose the layers' blocks, one for each layer: its own or that of another layer."""
        layers = [layer.attention for layer in cast("Iterable[DecoderLayer]", self.layers)]
        leaders = [layers[leader] for leader in self.leaders]
        return [layer.indexer for layer in leaders if isinstance(layer, NativeSparseAttention) and layer.indexer]

    def _check(self, tokens: Tensor, caches: Any, lengths: Tensor | None, document_ids: Tensor | None) -> None:
        embedding = weight_of(self.embedding)
        if isinstance(tokens, Tensor) and tokens.dim() == 3:
            check_tensor("tokens", tokens, ("B", "S", self.config.dim), like=embedding, as_of="the model")
        else:
            check_tokens("tokens", tokens, embedding)
        if caches is None:
            if lengths is not None:
                raise ValueError(f"lengths: expected None without caches, got {describe(lengths)}")
            return
        trained = chain([tokens], self.embedding.parameters(), self.layers.parameters())
        if torch.is_grad_enabled() and any(x.requires_grad for x in trained):
            raise ValueError("caches: expected torch.no_grad(), because what they hold has no gradient, got training")
        layers = [layer.attention for layer in cast("Iterable[DecoderLayer]", self.layers)]
        check_caches(caches, layers, tokens, lengths, packed=document_ids is not None)

    def _layouts(self, tokens: Tensor, document_ids: Tensor | None) -> list[RowLayout | DenseLayout]:
        """Say for each layer where the tokens stand: once for all layers of the same sizes."""
        if document_ids is not None:
            check_document_ids(document_ids, *tokens.shape[:2], like=tokens)
        layouts: list[RowLayout | DenseLayout] = []
        for layer in cast("Iterable[DecoderLayer]", self.layers):
            sizes = layer.attention.layout_sizes
            shared = next((layout for layout in layouts if layout.sizes == sizes), None)
            layouts.append(layer.attention.row_layout(tokens, document_ids) if shared is None else shared)
        return layouts

    def new_caches(
        self, batch_size: int, max_seq_len: int, *, dtype: torch.dtype | None = None
    ) -> list[NSACache | DenseCache]:
        """Make an empty cache for every layer, to decode ``batch_size`` rows of up to ``max_seq_len`` tokens."""
        layers = cast("Iterable[DecoderLayer]", self.layers)
        return [layer.attention.new_cache(batch_size, max_seq_len, dtype=dtype) for layer in layers]

    def generate(self, prompts: Tensor, max_new_tokens: int, **options: Any) -> list[list[int]]:
        """Continue each of ``prompts (B, S)``; see :func:`flexnsa.lm.generate_tokens` for the options."""
        return generate_tokens(self, prompts, max_new_tokens, **options)


class DecoderLayer(nn.Module):
    """One pre-norm layer: attention, then a SiLU MLP four times as wide."""

    def __init__(self, config: DecoderConfig, *, follows: bool = False) -> None:
        super().__init__()
        self.residual_scale = (2 * config.num_layers) ** -0.5
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.attention = build_attention(config, follows=follows)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.mlp = MLP(config.dim)

    def reset_parameters(self) -> None:
        """Draw all parameters; what writes to the residual stream starts smaller, the deeper the model."""
        for module in (self.attention_norm, self.attention, self.mlp_norm, self.mlp):
            module.reset_parameters()
        for linear in (self.attention.w_o, self.mlp.down):
            nn.init.normal_(linear.weight, std=self.residual_scale * linear.in_features**-0.5)

    def forward(
        self, x: Tensor, *, sampled: Tensor | None = None, query_weights: str = "mass", **options: Any
    ) -> Tensor | LayerOutput:
        """Map the residual stream ``(B, S, dim)`` to the next; the options are those of the attention.

        With ``sampled (B, m)``, queries that teach an indexer, the loss is returned too: backward may run this again.
        """
        selection = None if sampled is None else SelectionLoss.at(sampled, query_weights)
        taught = {} if selection is None else {"selection": selection}
        out, index = self.attention(self.attention_norm(x), **taught, **options), None
        if isinstance(out, tuple):
            out, index = cast("tuple[Tensor, SharedIndex]", out)
        x = x + out
        x = x + self.mlp(self.mlp_norm(x))
        if selection and selection.sums:
            return LayerOutput(x, selection.sums[0], selection.weights[0], index)
        return x if index is None else LayerOutput(x, None, None, index)


def quick_options(options: dict[str, Any]) -> dict[str, Any]:
    """Have Inductor combine small kernels and time no variants, unless options name a backend, mode or options.

    On an H200 combined kernels save 480 of 2,072 launches and 3 % of a step of text-125m at 8k. The first step is 4
    seconds shorter without variants of pointwise kernels, and none of them is faster. Sums of rows are not combined:
    their tiles would have 1,024 rows, which fit no GPU.
    """
    if options.keys() & {"backend", "mode", "options"}:
        return options
    combined = {"combo_kernels": True, "combo_kernels_autotune": 0, "combo_kernels_pointwise_only": True}
    return options | {"options": {"triton.autotune_pointwise": False} | combined}


def run_layer(layer: Callable[..., Any], x: Tensor, *, checkpointed: bool, **options: Any) -> Tensor | LayerOutput:
    """Call the layer; checkpointed, it keeps its input and its selection for backward, and computes all else anew.

    Transforms of ``torch.func``, which know no checkpoints, keep everything.
    """
    if not checkpointed or in_transform():
        return layer(x, **options)
    contexts: dict[str, Any] = {"preserve_rng_state": False, "context_fn": keep_selection}
    return cast("Tensor | LayerOutput", checkpoint(layer, x, use_reentrant=False, **contexts, **options))


class MLP(nn.Module):
    """``down(silu(up(x)))``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def reset_parameters(self) -> None:
        """Draw both projections from a normal of variance 1 / fan-in."""
        for linear in (self.up, self.down):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, S, dim)`` to ``(B, S, dim)``, each token alone."""
        return self.down(F.silu(self.up(x)))


def build_attention(config: DecoderConfig, *, follows: bool = False) -> NativeSparseAttention | DenseAttention:
    """Build the attention that the config names, of a layer that reads its own index or ``follows`` another."""
    if config.attention == "nsa":
        return NativeSparseAttention.of(config, follows=follows)
    heads = (config.dim, config.num_heads, config.num_kv_heads, config.head_dim)
    return DenseAttention(*heads, v_head_dim=config.v_head_dim, rope_base=config.rope_base)
