"""What the attention means, in statements that need no oracle: who sees whom, and what equals what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import literal
import pytest
import torch
import torch.nn.functional as F
from cases import SMALL, Inputs, attend, make_inputs
from torch import Tensor

from flexnsa import (
    compressed_attention,
    native_sparse_attention,
    select_blocks,
    selected_attention,
    sliding_window_attention,
)
from flexnsa.geometry import num_compressed

IMPLS = ["reference", "sdpa"]
SEQ_LEN = 3 * SMALL.window_size + 5

impls = pytest.mark.parametrize("impl", IMPLS)


def changed_rows(before: Tensor, after: Tensor) -> Tensor:
    """Which queries of which head came out differently, ``(B, H, S)``; results are fp64."""
    return (before - after).abs().amax(-1) > 1e-9


class TestCausality:
    @impls
    @pytest.mark.parametrize("t", [1, 7, 8, 16, 24, 25, 60])
    def test_changing_the_future_changes_nothing_before_it(self, impl: str, t: int) -> None:
        x = make_inputs(SEQ_LEN)
        other = make_inputs(SEQ_LEN, seed=1)
        first_cmp = num_compressed(t, SMALL)  # later compressed tokens contain a token that is not before t

        def future(name: str, tensor: Tensor) -> Tensor:
            cut = first_cmp if name.endswith("_cmp") else t
            return torch.cat([tensor[:, :, :cut], other.named()[name][:, :, cut:]], dim=2)

        changed = Inputs(**{name: future(name, tensor) for name, tensor in x.named().items()})
        out, after = attend(x, impl=impl), attend(changed, impl=impl)
        torch.testing.assert_close(after[:, :, :t], out[:, :, :t])
        assert changed_rows(out, after)[:, :, t:].all()

    @impls
    def test_a_prefix_gives_the_prefix_of_the_output(self, impl: str) -> None:
        x = make_inputs(SEQ_LEN)
        whole = attend(x, impl=impl)
        for length in (1, 8, 33, 60):
            keys = num_compressed(length, SMALL)
            prefix = {n: t[:, :, : keys if n.endswith("_cmp") else length] for n, t in x.named().items()}
            torch.testing.assert_close(attend(Inputs(**prefix), impl=impl), whole[:, :, :length])


class TestWhoSeesWhom:
    """Changing one key and its value changes exactly the rows that may see it."""

    def check(self, attention: Callable[[Tensor, Tensor], Tensor], k: Tensor, v: Tensor, visible: Tensor) -> None:
        """``visible``: bool ``(B, Hkv, S, keys)``."""
        before = attention(k, v)
        group = before.shape[1] // k.shape[1]
        for s in range(k.shape[2]):
            other_k, other_v = k.clone(), v.clone()
            other_k[:, :, s] += torch.randn_like(k[:, :, s])
            other_v[:, :, s] += torch.randn_like(v[:, :, s])
            changed = changed_rows(before, attention(other_k, other_v))
            assert torch.equal(changed, visible[..., s].repeat_interleave(group, dim=1)), f"key {s}"

    @impls
    def test_compressed(self, impl: str) -> None:
        x = make_inputs(SEQ_LEN, batch=2)
        keys = x.k_cmp.shape[2]
        rows = [[i in literal.compressed_keys(t, keys, SMALL) for i in range(keys)] for t in range(SEQ_LEN)]
        visible = torch.tensor(rows).expand(2, 2, -1, -1)
        self.check(lambda k, v: compressed_attention(x.q, k, v, config=SMALL, impl=impl)[0], x.k_cmp, x.v_cmp, visible)

    @impls
    def test_window(self, impl: str) -> None:
        x = make_inputs(SEQ_LEN, batch=2)
        rows = [[s in literal.window_keys(t, SMALL) for s in range(SEQ_LEN)] for t in range(SEQ_LEN)]
        visible = torch.tensor(rows).expand(2, 2, -1, -1)
        self.check(
            lambda k, v: sliding_window_attention(x.q, k, v, config=SMALL, impl=impl)[0], x.k_win, x.v_win, visible
        )

    @impls
    def test_selected(self, impl: str) -> None:
        x = make_inputs(SEQ_LEN, batch=2)
        blocks = select_blocks(x.q, x.k_cmp, config=SMALL, impl=impl)
        visible = torch.zeros(2, 2, SEQ_LEN, SEQ_LEN, dtype=torch.bool)
        for b, h, t in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(SEQ_LEN)).tolist():
            visible[b, h, t, literal.selected_keys(t, blocks[b, h, t].tolist(), SMALL)] = True
        self.check(lambda k, v: selected_attention(x.q, k, v, blocks, config=SMALL, impl=impl)[0], x.k, x.v, visible)

    @impls
    def test_heads_of_a_group_share_their_keys_and_no_others(self, impl: str) -> None:
        x = make_inputs(SEQ_LEN, kv_heads=3, group=2)
        before = attend(x, impl=impl)
        for head in range(3):
            changed = {}
            for name in ("k", "v", "k_cmp", "v_cmp", "k_win", "v_win"):
                changed[name] = x.named()[name].clone()
                changed[name][:, head] += 1.0
            rows = changed_rows(before, attend(x.replace(**changed), impl=impl))[0]
            assert rows[2 * head : 2 * head + 2].all()
            assert not rows[: 2 * head].any()
            assert not rows[2 * head + 2 :].any()

    @impls
    def test_sequences_of_a_batch_do_not_meet(self, impl: str) -> None:
        x = make_inputs(SEQ_LEN, batch=3)
        whole = attend(x, impl=impl)
        for b in range(3):
            alone = Inputs(**{name: tensor[b : b + 1] for name, tensor in x.named().items()})
            torch.testing.assert_close(attend(alone, impl=impl), whole[b : b + 1])

    @impls
    def test_each_branch_reads_its_own_keys_and_its_own_gate(self, impl: str) -> None:
        """With two gates shut, only the keys of the third matter (block_indices fixed, as k_cmp chooses them)."""
        x = make_inputs(SEQ_LEN)
        blocks = select_blocks(x.q, x.k_cmp, config=SMALL, impl=impl)
        for branch, names in enumerate((("k_cmp", "v_cmp"), ("k", "v"), ("k_win", "v_win"))):
            gates = F.one_hot(torch.tensor(branch), 3).to(x.gates).expand_as(x.gates)
            open_one = x.replace(gates=gates)
            before = attend(open_one, impl=impl, block_indices=blocks)
            for name in ("k_cmp", "v_cmp", "k", "v", "k_win", "v_win"):
                other = open_one.replace(**{name: torch.randn_like(x.named()[name])})
                changed = changed_rows(before, attend(other, impl=impl, block_indices=blocks)).any()
                assert changed == (name in names), (branch, name)

    @impls
    def test_window_keys_default_to_the_selection_keys(self, impl: str) -> None:
        x = make_inputs(40)
        shared = x.replace(k_win=x.k, v_win=x.v)
        omitted = {name: t for name, t in x.named().items() if name not in ("k_win", "v_win")}
        out = native_sparse_attention(**omitted, config=SMALL, impl=impl)
        assert isinstance(out, Tensor)
        assert torch.equal(out, attend(shared, impl=impl))


class TestLimits:
    """Where the sparse attention is the dense one."""

    def dense(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention with an explicit mask."""
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        return scores.masked_fill(future, -torch.inf).softmax(-1) @ v

    @impls
    @pytest.mark.parametrize("num_selected", [5, 6, 50])
    def test_all_blocks_selected_is_dense_attention(self, impl: str, num_selected: int) -> None:
        config = replace(SMALL, num_selected_blocks=num_selected)
        x = make_inputs(77)  # five blocks
        blocks = select_blocks(x.q, x.k_cmp, config=config, impl=impl)
        out, _ = selected_attention(x.q, x.k, x.v, blocks, config=config, impl=impl)
        torch.testing.assert_close(out, self.dense(x.q, x.k, x.v))

    @impls
    def test_one_block_too_few_is_not(self, impl: str) -> None:
        x = make_inputs(77)
        blocks = select_blocks(x.q, x.k_cmp, config=SMALL, impl=impl)
        out, _ = selected_attention(x.q, x.k, x.v, blocks, config=SMALL, impl=impl)
        same = ~changed_rows(out, self.dense(x.q, x.k, x.v))[0]
        assert same[:, :64].all()  # four blocks, four selected
        assert not same[:, 64:].any()

    @impls
    @pytest.mark.parametrize("window_size", [77, 78, 1000])
    def test_a_window_over_everything_is_dense_attention(self, impl: str, window_size: int) -> None:
        x = make_inputs(77)
        config = replace(SMALL, window_size=window_size)
        out, _ = sliding_window_attention(x.q, x.k_win, x.v_win, config=config, impl=impl)
        torch.testing.assert_close(out, self.dense(x.q, x.k_win, x.v_win))

    @impls
    def test_a_window_of_one_is_the_value_itself(self, impl: str) -> None:
        x = make_inputs(40)
        out, lse = sliding_window_attention(x.q, x.k_win, x.v_win, config=replace(SMALL, window_size=1), impl=impl)
        torch.testing.assert_close(out, x.v_win.repeat_interleave(2, dim=1))
        own_score = (x.q * x.k_win.repeat_interleave(2, dim=1)).sum(-1) / 4
        torch.testing.assert_close(lse.double(), own_score, rtol=1e-6, atol=1e-6)

    @impls
    def test_compression_of_single_tokens_is_dense_attention(self, impl: str) -> None:
        config = replace(SMALL, compress_block_size=1, compress_stride=1)
        x = make_inputs(40, config)
        out, _ = compressed_attention(x.q, x.k_cmp, x.v_cmp, config=config, impl=impl)
        torch.testing.assert_close(out, self.dense(x.q, x.k_cmp, x.v_cmp))


class TestEmptyRows:
    """A query without a key: output 0, lse ``-inf``, gradients 0, never NaN."""

    @impls
    @pytest.mark.parametrize("seq_len", [1, 7, 8, 30])
    def test_compressed(self, impl: str, seq_len: int) -> None:
        x = make_inputs(seq_len).to(torch.float64)
        out, lse = compressed_attention(x.q, x.k_cmp, x.v_cmp, config=SMALL, impl=impl)
        empty = slice(0, min(7, seq_len))
        assert (out[:, :, empty] == 0).all()
        assert (lse[:, :, empty] == -torch.inf).all()
        assert lse[:, :, 7:].isfinite().all()
        loss = out.sum() + lse.where(lse.isfinite(), 0.0).sum()
        grads = torch.autograd.grad(loss, (x.q, x.k_cmp, x.v_cmp))
        assert all(grad.isfinite().all() for grad in grads)
        assert (grads[0][:, :, empty] == 0).all()

    @impls
    def test_selected(self, impl: str) -> None:
        x = make_inputs(40).to(torch.float64)
        blocks = select_blocks(x.q, x.k_cmp, config=SMALL, impl=impl)
        blocks[:, 1, ::2] = -1
        out, lse = selected_attention(x.q, x.k, x.v, blocks, config=SMALL, impl=impl)
        assert (out[:, 2:, ::2] == 0).all()
        assert (lse[:, 2:, ::2] == -torch.inf).all()
        assert lse[:, 2:, 1::2].isfinite().all()
        grads = torch.autograd.grad(out.sum() + lse.where(lse.isfinite(), 0.0).sum(), (x.q, x.k, x.v))
        assert all(grad.isfinite().all() for grad in grads)
        assert (grads[0][:, 2:, ::2] == 0).all()
        assert (grads[0][:, 2:, 1::2] != 0).any()

    @impls
    def test_nothing_selected_at_all(self, impl: str) -> None:
        x = make_inputs(20).to(torch.float64)
        blocks = torch.full((1, 2, 20, 4), -1, dtype=torch.int32)
        out, lse = selected_attention(x.q, x.k, x.v, blocks, config=SMALL, impl=impl)
        assert (out == 0).all()
        assert (lse == -torch.inf).all()
        assert all((grad == 0).all() for grad in torch.autograd.grad(out.sum(), (x.q, x.k, x.v)))

    @impls
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_large_scores_do_not_overflow(self, impl: str, dtype: torch.dtype) -> None:
        x = make_inputs(77, dtype=dtype)
        x = x.replace(q=x.q * 100, k=x.k * 100, k_cmp=x.k_cmp * 100, k_win=x.k_win * 100).to(dtype)
        out = attend(x, impl=impl)
        grads = torch.autograd.grad(out.float().square().sum(), list(x.named().values()))
        assert out.isfinite().all()
        assert all(grad.isfinite().all() for grad in grads)


class TestRepeatability:
    @impls
    def test_twice_the_same_bits(self, impl: str) -> None:
        x = make_inputs(300, batch=2, group=4, dtype=torch.float32).to(torch.float32)

        def run() -> list[Tensor]:
            out = attend(x, impl=impl)
            return [out, *torch.autograd.grad(out.square().sum(), list(x.named().values()))]

        threads = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))
        finally:
            torch.set_num_threads(threads)

    @impls
    def test_inputs_are_left_alone(self, impl: str) -> None:
        x = make_inputs(77, dtype=torch.float32)
        before = {name: tensor.clone() for name, tensor in x.named().items()}
        leaves = x.to(torch.float32)
        attend(leaves, impl=impl).sum().backward()
        for name, tensor in leaves.named().items():
            assert torch.equal(tensor.detach(), before[name]), name

    @impls
    def test_gradients_do_not_depend_on_what_else_requires_one(self, impl: str) -> None:
        x = make_inputs(50).to(torch.float64)
        every = dict(
            zip(x.named(), torch.autograd.grad(attend(x, impl=impl).sum(), list(x.named().values())), strict=True)
        )
        for name, tensor in x.named().items():
            only = Inputs(**{n: t if n == name else t.detach() for n, t in x.named().items()})
            torch.testing.assert_close(torch.autograd.grad(attend(only, impl=impl).sum(), tensor)[0], every[name])
