"""The oracle against Python loops: whatever else is compared with ``reference`` stands on this page."""

from __future__ import annotations

import pytest
import torch

import flexnsa
from flexnsa.attention.interface import given
from tests.support import literal
from tests.support.inputs import SMALL, Inputs, attend, attend_with_aux, make_inputs, sizes

CONFIGS = {
    "paper's proportions": sizes(4, 2, 8, 4, 1, 2, 7),
    "nothing overlaps, nothing forced": sizes(4, 4, 4, 2, 0, 0, 1),
    "compressed tokens longer than blocks": sizes(12, 2, 4, 5, 2, 1, 40),
}
SCALE = 0.3

configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def inputs(config: flexnsa.NSAConfig, seq_len: int = 37) -> Inputs:
    return make_inputs(seq_len, config, batch=2, kv_heads=2, group=2, key_dim=3, value_dim=2).to(torch.float64)


@pytest.mark.parametrize("branch", ["cmp", "slc", "win"])
@configs
def test_branches(config: flexnsa.NSAConfig, branch: str) -> None:
    x = inputs(config)
    blocks = literal.select_blocks(literal.block_importance(x.q, x.k_cmp, config, SCALE), config)
    blocks[:, 1, 20] = -1  # a row that selected nothing
    (out, lse), (expected, expected_lse) = {
        "cmp": lambda: (
            flexnsa.compressed_attention(x.q, x.k_cmp, x.v_cmp, config=config, scale=SCALE, impl="reference"),
            literal.compressed_attention(x.q, x.k_cmp, x.v_cmp, config, SCALE),
        ),
        "slc": lambda: (
            flexnsa.selected_attention(x.q, x.k, x.v, blocks, config=config, scale=SCALE, impl="reference"),
            literal.selected_attention(x.q, x.k, x.v, blocks, config, SCALE),
        ),
        "win": lambda: (
            flexnsa.sliding_window_attention(x.q, x.k_win, x.v_win, config=config, scale=SCALE, impl="reference"),
            literal.window_attention(x.q, x.k_win, x.v_win, config, SCALE),
        ),
    }[branch]()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse.double(), expected_lse)


@configs
def test_block_importance(config: flexnsa.NSAConfig) -> None:
    x = inputs(config)
    scores = flexnsa.block_importance(x.q, x.k_cmp, config=config, scale=SCALE)
    assert scores.dtype == torch.float32
    assert not scores.requires_grad
    torch.testing.assert_close(
        scores.double(), literal.block_importance(x.q, x.k_cmp, config, SCALE), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
@configs
def test_select_blocks_alone_and_with_the_lse_of_the_compressed_branch(config: flexnsa.NSAConfig, impl: str) -> None:
    x = inputs(config)
    blocks = flexnsa.select_blocks(x.q, x.k_cmp, config=config, scale=SCALE, impl=impl)
    importance = literal.block_importance(x.q, x.k_cmp, config, SCALE)
    assert blocks.dtype == torch.int32
    assert torch.equal(blocks, literal.select_blocks(importance, config))
    _, lse = flexnsa.compressed_attention(x.q, x.k_cmp, x.v_cmp, config=config, scale=SCALE, impl=impl)
    assert torch.equal(flexnsa.select_blocks(x.q, x.k_cmp, config=config, lse=lse, scale=SCALE, impl=impl), blocks)


@configs
def test_whole_attention_and_its_gradients(config: flexnsa.NSAConfig) -> None:
    x = inputs(config, seq_len=29)
    leaves = list(x.named().values())
    direction = torch.randn(*x.q.shape[:3], x.v.shape[-1], dtype=torch.float64)

    out, aux = attend_with_aux(x, config=config, scale=SCALE, impl="reference")

    blocks = literal.select_blocks(literal.block_importance(x.q, x.k_cmp, config, SCALE), config)
    compressed, lse = literal.compressed_attention(x.q, x.k_cmp, x.v_cmp, config, SCALE)
    selected, _ = literal.selected_attention(x.q, x.k, x.v, blocks, config, SCALE)
    window, _ = literal.window_attention(x.q, x.k_win, x.v_win, config, SCALE)
    expected = torch.zeros_like(out)
    for branch, values in enumerate((compressed, selected, window)):
        expected = expected + x.gates[..., branch, None] * values

    torch.testing.assert_close(out, expected)
    assert torch.equal(given(aux.block_indices), blocks)
    torch.testing.assert_close((aux.out_cmp, aux.out_slc, aux.out_win), (compressed, selected, window))
    torch.testing.assert_close(aux.lse_cmp.double(), lse)
    got, want = (dict(zip(x.named(), torch.autograd.grad(y, leaves, direction), strict=True)) for y in (out, expected))
    torch.testing.assert_close(got, want)


def test_default_scale_is_that_of_the_key_dim() -> None:
    x = make_inputs(40, key_dim=16, value_dim=8)
    assert torch.equal(attend(x, impl="reference"), attend(x, impl="reference", scale=16**-0.5))
    assert not torch.allclose(attend(x, impl="reference"), attend(x, impl="reference", scale=8**-0.5))


def test_blocks_are_scored_in_fp32() -> None:
    """From bf16 inputs the oracle chooses as from the same numbers in fp64: their products are exact in fp32."""
    low = make_inputs(200, kv_heads=2, group=4, dtype=torch.bfloat16)
    for impl in ("reference", "sdpa"):
        got, want = (flexnsa.select_blocks(x.q, x.k_cmp, config=SMALL, impl=impl) for x in (low, low.to(torch.float64)))
        assert torch.equal(got, want), impl


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_autocast_changes_nothing(impl: str) -> None:
    x = make_inputs(100, dtype=torch.float32)
    out, aux = attend_with_aux(x, impl=impl)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low, low_aux = attend_with_aux(x, impl=impl)
    assert low.dtype == torch.float32
    torch.testing.assert_close([low, *low_aux], [out, *aux], rtol=0, atol=0)
