"""What the attention means, in statements that need no oracle: who sees whom, and what equals what."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flexnsa
from flexnsa.config import num_compressed
from tests.support.dense import visible_keys
from tests.support.inputs import SMALL, Inputs, attend, make_inputs

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


class TestWhoSeesWhom:
    """Changing one key and its value changes exactly the rows that may see it."""

    @impls
    @pytest.mark.parametrize("branch", ["cmp", "slc", "win"])
    def test_a_changed_key_is_felt_where_its_branch_shows_it(self, branch: str, impl: str) -> None:
        x, options = make_inputs(SEQ_LEN, batch=2), {"config": SMALL, "impl": impl}
        blocks = flexnsa.select_blocks(x.q, x.k_cmp, **options)
        visible = visible_keys(branch, (SEQ_LEN,), SMALL, blocks if branch == "slc" else None).expand(2, 2, -1, -1)
        attention, k, v = {
            "cmp": (flexnsa.compressed_attention, x.k_cmp, x.v_cmp),
            "slc": (partial(flexnsa.selected_attention, block_indices=blocks), x.k, x.v),
            "win": (flexnsa.sliding_window_attention, x.k_win, x.v_win),
        }[branch]
        before, _ = attention(x.q, k, v, **options)
        for s in range(k.shape[2]):
            other_k, other_v = k.clone(), v.clone()
            other_k[:, :, s] += torch.randn_like(k[:, :, s])
            other_v[:, :, s] += torch.randn_like(v[:, :, s])
            changed = changed_rows(before, attention(x.q, other_k, other_v, **options)[0])
            assert torch.equal(changed, visible[..., s].repeat_interleave(2, dim=1)), f"key {s}"

    @impls
    def test_each_branch_reads_its_own_keys_and_its_own_gate(self, impl: str) -> None:
        """With two gates shut, only the keys of the third matter (block_indices fixed, as k_cmp chooses them)."""
        x = make_inputs(SEQ_LEN)
        blocks = flexnsa.select_blocks(x.q, x.k_cmp, config=SMALL, impl=impl)
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
        out = flexnsa.native_sparse_attention(**omitted, config=SMALL, impl=impl)
        assert torch.equal(out, attend(shared, impl=impl))


@impls
@pytest.mark.parametrize("branches", [("cmp",), ("slc",), ("win",), ("cmp", "win"), ("win", "slc", "cmp")])
def test_branches_left_out_are_those_with_a_shut_gate(impl: str, branches: tuple[str, ...]) -> None:
    x = make_inputs(77)
    keep = torch.tensor([branch in branches for branch in ("cmp", "slc", "win")])
    alone = attend(x, branches=branches, impl=impl)
    shut = x.replace(gates=x.gates * keep)
    torch.testing.assert_close(alone, attend(shut, impl=impl))
