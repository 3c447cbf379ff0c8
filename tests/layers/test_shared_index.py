"""Layers that follow another: they attend to its blocks, teach its indexer, and keep no index keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from flexnsa import NativeSparseAttention, SelectionLoss, native_sparse_attention
from flexnsa.attention.dispatch import by_branch
from flexnsa.layers.indexer import SharedIndex
from flexnsa.layers.layouts import RowKeys
from flexnsa.layers.rope import apply_rope
from flexnsa.lm import DecoderConfig, DecoderLM
from flexnsa.lm.estimate import parameter_count
from flexnsa.lm.estimate.decoding import estimate_decoding
from flexnsa.optim import index_parameters
from tests.support.compiled import assert_compiled_gradients_are_right
from tests.support.decoding import taught, tokens
from tests.support.inputs import SMALL, TINY

INDEXED = replace(SMALL, index_heads=2, index_block_size=4, index_stride=4)
MODEL = DecoderConfig(
    dim=16,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    nsa=replace(TINY, num_selected_blocks=5, index_heads=2, index_block_size=2, index_stride=2),  # 3 are forced
    share_index=2,
)


def make(*, follows: bool = False, **options: Any) -> NativeSparseAttention:
    torch.manual_seed(int(follows))
    options = {"config": INDEXED, "follows": follows} | options
    return taught(NativeSparseAttention(32, 4, 2, 8, **options))


def build(**changes: Any) -> DecoderLM:
    torch.manual_seed(0)
    model = DecoderLM(replace(MODEL, **changes))
    for layer in model.modules():
        if isinstance(layer, NativeSparseAttention):
            taught(layer)
    return model


def drawn(length: int, batch: int = 2) -> Tensor:
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(3))


def learn(model: DecoderLM, x: Tensor, **options: Any) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Return the loss of the language, that of selections, and all gradients."""
    model.zero_grad()
    selection = SelectionLoss(seed=1, num_queries=20)
    loss = model(x, targets=x, selection=selection, **options)
    (loss + selection.total).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), float(torch.as_tensor(selection.total).detach()), gradients


@pytest.mark.parametrize("branches", [("cmp", "slc", "win"), ("slc",)])
def test_a_layer_that_follows_is_the_function_of_given_blocks(branches: tuple[str, ...]) -> None:
    leader, follower = make(branches=branches), make(follows=True, branches=branches)
    x, y = tokens(2, 150), tokens(2, 150).flip(1)
    with torch.no_grad():
        _, index = leader(x, return_index=True)
        heads, layout = follower.project(y), follower.layout(150)
        _, read = follower.attend(y, heads, layout, RowKeys(), (None, None), cached=False, index=index)
        gates = torch.stack([heads.gates.get(tag, torch.zeros(2, 4, 150)) for tag in ("cmp", "slc", "win")], -1)
        keys = {name: getattr(read.keys, name) for name in ("k_cmp", "v_cmp", "k_win", "v_win")}
        expected = native_sparse_attention(
            apply_rope(heads.q, layout.tokens),
            read.keys.k_slc,
            read.keys.v_slc,
            gates,
            config=replace(INDEXED, index_heads=None, index_block_size=None, index_stride=None),
            branches=branches,
            block_indices=index.block_indices,
            **keys,
        )
        out = follower.w_o(expected.transpose(1, 2).flatten(2))
        torch.testing.assert_close(follower(y, index=index), out, rtol=1e-5, atol=1e-6)
    assert set(by_branch(gates)) == {"cmp", "slc", "win"}


def test_the_loss_is_the_divergence_of_the_leaders_scores_from_the_followers_shares() -> None:
    """In float64, by dense formulas of the query at every token."""
    leader, follower = (layer.double() for layer in (make(), make(follows=True)))
    x, y = (tokens(1, 90).double().requires_grad_() for _ in range(2))
    selection = SelectionLoss(num_queries=90, query_weights="mean")
    _, index = leader(x, selection=selection, return_index=True)
    follower(y, selection=selection, index=index)
    heads, layout = follower.project(y), follower.layout(90)
    _, read = follower.attend(y, heads, layout, RowKeys(), (None, None), cached=False, index=index)
    size, group = INDEXED.select_block_size, INDEXED.scoring.compress_block_size
    token = torch.arange(90)
    past = token <= token[:, None]
    shares = torch.einsum("bhtd,bhsd->bhts", read.q, read.keys.k_slc.repeat_interleave(2, 1)) * 8**-0.5
    shares = shares.masked_fill(~past, -torch.inf).softmax(-1).unflatten(1, (2, 2)).mean(2)
    blocks = -(-90 // size)
    true = torch.zeros(1, 2, 90, blocks, dtype=torch.float64).index_add(3, token // size, shares)
    ends = (torch.arange(index.k.shape[2]) + 1) * group
    scores = torch.einsum("bhtd,bhnd->bhtn", index.q, index.k.repeat_interleave(2, 1)) * 8**-0.5
    scores = scores.masked_fill(ends > token[:, None] + 1, -1e9)  # finite: early queries see no index key
    probs = scores.softmax(-1).unflatten(1, (2, 2)).sum(2)
    own = torch.zeros_like(true).index_add(3, (ends - 1) // size, probs)
    block, current = torch.arange(blocks), token[:, None] // size
    free = (block >= INDEXED.num_init_blocks) & (block <= current - INDEXED.num_local_blocks)
    true, own = (part.where(free, 0) for part in (true, own))
    true, own = (part / part.sum(-1, keepdim=True).where(free.any(-1, keepdim=True), 1) for part in (true, own))
    divergence = (true * (true.where(free, 1).log() - own.where(free, 1).log())).sum()
    torch.testing.assert_close(selection.sums[1].detach(), divergence.detach(), rtol=1e-6, atol=1e-9)
    got = torch.autograd.grad(selection.sums[1], index_parameters(leader), retain_graph=True)
    torch.testing.assert_close(got, torch.autograd.grad(divergence, index_parameters(leader)), rtol=1e-5, atol=1e-8)


def test_what_follows_teaches_the_leaders_indexer_and_nothing_else_of_it() -> None:
    leader, follower = make(), make(follows=True)
    x, selection = tokens(2, 100).requires_grad_(), SelectionLoss()
    _, index = leader(x, selection=selection, return_index=True)
    out = follower(tokens(2, 100), selection=selection, index=index)
    every = [x, *leader.parameters()]
    assert all(gradient is None for gradient in torch.autograd.grad(out.sum(), every, allow_unused=True))
    out = follower(tokens(2, 100), selection=selection, index=index)
    found = torch.autograd.grad(selection.sums[1], every, allow_unused=True)
    own = {*index_parameters(leader)}
    assert all((gradient is not None) == (p in own) for gradient, p in zip(found, every, strict=True))


def test_an_index_for_each_layer_is_what_it_was() -> None:
    (one, first, gradients), (other, second, same) = (
        learn(build(share_index=share), drawn(70)) for share in (1, (0, 1, 2, 3))
    )
    assert torch.equal(one, other)
    assert first == second
    assert all(torch.equal(gradients[name], same[name]) for name in gradients)


@pytest.mark.parametrize("share", [2, (0, 1, 0, 1)])
def test_steps_prefill_and_chunks_equal_whole_rows(share: Any) -> None:
    model, x = build(share_index=share).eval(), drawn(70)
    with torch.no_grad():
        whole = model(x)
        for parts in ([40] + [1] * 30, [1] * 20 + [30, 20]):
            caches = model.new_caches(2, 70)
            got = torch.cat([model(part, caches=caches) for part in x.split(parts, 1)], 1)
            torch.testing.assert_close(got, whole, rtol=0, atol=2e-6)
        changed, wide = x.clone(), model.double()  # fused attention in fp32 rounds the last bit by what it masks
        changed[:, 60:] = 7
        assert torch.equal(wide(changed)[:, :60], wide(x)[:, :60])


def test_a_layer_reads_the_index_of_the_layer_that_the_list_names() -> None:
    """Layer 2 follows layer 0, though layer 1 chose after it."""
    model, x, indices = build(share_index=(0, 1, 0, 1)).eval(), drawn(90), dict[int, SharedIndex]()
    with torch.no_grad():
        h: Any = model.embedding(x)
        for number, (layer, leader) in enumerate(zip(model.layers, (0, 1, 0, 1), strict=True)):
            modules: Any = layer
            normed = modules.attention_norm(h)
            if leader == number:
                out, indices[number] = modules.attention(normed, return_index=True)
            else:
                out = modules.attention(normed, index=indices[leader])
            h = h + out
            h = h + modules.mlp(modules.mlp_norm(h))
        torch.testing.assert_close(model.head(model.norm(h)), model(x), rtol=0, atol=1e-6)
        assert not torch.equal(indices[0].block_indices, indices[1].block_indices)


def test_packed_rows_equal_separate_ones() -> None:
    model, x = build().eval(), drawn(90, 1)
    ids = (torch.arange(90) >= 37).int()[None]
    with torch.no_grad():
        packed, apart = model(x, document_ids=ids), torch.cat([model(x[:, :37]), model(x[:, 37:])], 1)
        torch.testing.assert_close(packed, apart, rtol=0, atol=2e-6)
        caches = model.new_caches(2, 60)
        model(x, document_ids=ids, caches=caches)
        padded = model(torch.tensor([[7, 0], [7, 8]]), caches=caches, lengths=torch.tensor([1, 2]))
        for row, document in enumerate((x[:, :37], x[:, 37:])):
            alone = model(torch.cat((document, torch.tensor([[7, 8]])), 1))[:, document.shape[1] :]
            torch.testing.assert_close(padded[[row], : row + 1], alone[:, : row + 1], rtol=0, atol=2e-6)


def test_checkpoints_and_a_dense_stage_change_what_they_should() -> None:
    for stage in (None, ("slc",)):
        model, results = build(), list[tuple[Tensor, float, dict[str, Tensor]]]()
        model.attend_densely(stage)
        for checkpointing in (False, True, "every:2"):
            model.config = replace(model.config, checkpointing=checkpointing)
            results.append(learn(model, drawn(70)))
        for loss, selected, gradients in results[1:]:
            torch.testing.assert_close((loss, selected, gradients), results[0], rtol=1e-6, atol=1e-7)


def test_inductor_compiles_layers_of_packed_texts_that_share_an_index() -> None:
    def loss(called: Callable[..., Tensor], x: Tensor) -> Tensor:
        selection = SelectionLoss(seed=1, num_queries=20)
        return called(x, targets=x, document_ids=ids, selection=selection) + selection.total

    ids = (torch.arange(79) >= 30).int().expand(2, -1)
    model = build(num_layers=2, compression="mean", gate="residual", shared_keys=True)
    assert_compiled_gradients_are_right(model, drawn(79), loss, DecoderLM.compile_layers)


def test_two_graphs_of_layers_that_share_an_index_serve_every_length() -> None:
    torch.compiler.reset()
    graphs = CompileCounterWithBackend("eager")
    eager, compiled = (build(num_layers=2, branches=("slc",)) for _ in range(2))
    compiled.compile_layers(dynamic=True, backend=graphs)
    for length in (79, 95):
        torch.testing.assert_close(learn(compiled, drawn(length)), learn(eager, drawn(length)), rtol=1e-4, atol=1e-5)
    assert graphs.frame_count == 2


def test_a_model_compiled_whole_takes_steps_without_leaving_its_graph() -> None:
    torch.compiler.reset()  # which sizes vary is remembered from other models
    model, x = build(num_layers=2).eval(), drawn(42)
    step = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        caches = model.new_caches(2, 42)
        model(x[:, :40], caches=caches)
        got = torch.cat([step(x[:, [at]], caches=caches) for at in (40, 41)], 1)
        torch.testing.assert_close(got, model(x)[:, 40:], rtol=0, atol=2e-6)


def test_followers_have_no_indexer_and_no_index_keys_as_estimated() -> None:
    alone, shared = build(share_index=1), build()
    assert len(shared.indexers()) == 2
    assert sum(p.numel() for p in shared.parameters()) == parameter_count(MODEL)
    bytes_of = [[cache.num_bytes for cache in model.new_caches(1, 65)] for model in (alone, shared)]
    names = [[*cache.buffers] for cache in shared.new_caches(1, 65)]
    assert ["k_index" in each for each in names] == [True, False, True, False]
    assert sum(bytes_of[1]) == estimate_decoding(MODEL, seq_len=64, precision="fp32").cache_bytes < sum(bytes_of[0])
    reloaded = DecoderLM(DecoderConfig.from_dict(MODEL.to_dict() | {"share_index": [0, 0, 2, 2]}))
    reloaded.load_state_dict(shared.state_dict())
    assert torch.equal(reloaded(drawn(50)), shared(drawn(50)))


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "too few leaders": (lambda: replace(MODEL, share_index=(0, 0)), "share_index: expected a number for each of 4"),
    "a leader behind": (lambda: replace(MODEL, share_index=(0, 2, 2, 2)), "share_index: expected for layer 1"),
    "one that follows": (lambda: replace(MODEL, share_index=(0, 0, 1, 1)), "share_index: expected for layer 2"),
    "no layers": (lambda: replace(MODEL, share_index=0), "share_index"),
    "no indexer": (lambda: replace(MODEL, nsa=TINY), "share_index: expected 1 without an indexer"),
    "a layer without sizes": (lambda: make(follows=True, config=SMALL), "follows: expected False without an indexer"),
    "no index": (lambda: make(follows=True)(tokens(1, 20)), "index: expected that of the layer"),
    "an index too many": (lambda: make()(tokens(1, 20), index=SharedIndex(tokens(1, 1))), "index: expected None"),
    "an index of followers": (lambda: make(follows=True)(tokens(1, 20), return_index=True), "return_index"),
    "a cache of another kind": (
        lambda: make(follows=True)(tokens(1, 20), index=_index(), cache=make().new_cache(1, 20)),
        "cache: expected follows=True",
    ),
    "no queries": (
        lambda: make(follows=True)(tokens(1, 20), index=_index(), selection=SelectionLoss()),
        "index: expected that of a layer in training",
    ),
}


def _index() -> SharedIndex:
    with torch.no_grad():
        return make()(tokens(1, 20), return_index=True)[1]


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_use_is_refused_by_name(name: str) -> None:
    call, message = REFUSED[name]
    with torch.set_grad_enabled("cache" not in name), pytest.raises(ValueError, match=message):
        call()
