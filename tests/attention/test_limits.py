"""Where the sparse attention is the dense one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flexnsa import NSAConfig
from tests.support.dense import causal, dense_attention
from tests.support.inputs import SMALL, attend, make_inputs

EVERYTHING = {
    "cmp": replace(SMALL, compress_block_size=1, compress_stride=1),
    "slc": replace(SMALL, num_selected_blocks=5),  # all of 77 tokens
    "win": replace(SMALL, window_size=77),
}


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
@pytest.mark.parametrize(("branch", "config"), EVERYTHING.items(), ids=EVERYTHING)
def test_a_branch_that_sees_everything_is_dense_attention(branch: str, config: NSAConfig, impl: str) -> None:
    x = make_inputs(77, config)
    out = attend(x.replace(gates=torch.ones_like(x.gates)), config=config, branches=(branch,), impl=impl)
    k, v = {"cmp": (x.k_cmp, x.v_cmp), "slc": (x.k, x.v), "win": (x.k_win, x.v_win)}[branch]
    torch.testing.assert_close(out, dense_attention(x.q, k, v, causal(77))[0])
