"""What is recorded of a trained model is what its layers did."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.learning.trained import NSA, QUERIES, describe, observe, read_blocks
from flexnsa.attention.table import IMPLEMENTATIONS, SDPA
from flexnsa.lm import DecoderLM


def test_observed_selection_is_the_layers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    selected: list[torch.Tensor] = []

    def select(*arguments: Any) -> torch.Tensor:
        block_indices = SDPA.select(*arguments)
        selected.append(block_indices[0])
        return block_indices

    monkeypatch.setitem(IMPLEMENTATIONS, "sdpa", replace(SDPA, select=select))
    torch.manual_seed(0)
    tokens = torch.randint(32, 127, (300,))
    seen = observe(DecoderLM(replace(NSA, num_layers=2)), tokens)
    of_layers, of_observation = selected[: len(seen)], selected[len(seen) :]
    assert len(of_observation) == len(seen)
    assert [torch.equal(layer.blocks, blocks) for layer, blocks in zip(seen, of_layers, strict=True)] == [True, True]

    recorded = describe(seen, NSA.nsa.select_block_size)
    for layer, words in zip(seen, recorded["blocks"], strict=True):
        for head, word in zip(layer.blocks.tolist(), words, strict=True):
            counts = read_blocks(word)
            assert len(counts) == -(-len(head) // QUERIES)
            for number, group in enumerate(counts):
                read = Counter(block for query in head[QUERIES * number :][:QUERIES] for block in query if block >= 0)
                assert read == {block: count for block, count in enumerate(group) if count}
    assert recorded["gates"][1][3]["slc"] == pytest.approx(seen[1].gates[3, :, 1].mean().item(), abs=1e-4)
