"""A decoded token reads its compressed, index, selected and window keys, and no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flexnsa.attention.sdpa.paged import Pages
from flexnsa.vllm.batch import Batch
from flexnsa.vllm.buffers import PagedBuffer
from tests.integrations.vllm.engines import ask, engine
from tests.integrations.vllm.references import Reference

CONTEXT, PAGE, LAYERS = 656, 16, 2  # a token after the prompt completes no block
Reads = list[tuple[str, torch.Size, int]]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Record what buffers load: their kind, the shape of the runs, and the states of a key head."""
    found: Reads = []
    pages_of = PagedBuffer.pages

    class Recorded(Pages):
        kind = ""

        def load(self, size: int, run: torch.Tensor) -> tuple[torch.Tensor, ...]:
            parts = super().load(size, run)
            found.append((self.kind, run.shape, parts[0][..., 0].numel() // self.states.shape[1]))
            return parts

    def recorded(self: PagedBuffer, batch: Batch) -> Pages:
        pages = Recorded(*pages_of(self, batch))
        pages.kind = self.prefix.rpartition(".")[2]
        return pages

    monkeypatch.setattr(PagedBuffer, "pages", recorded)
    return found


def test_tokens_read_pages_of_their_branches_only(reference: Callable[[str], Reference], reads: Reads) -> None:
    said = reference("index")
    prompts = [said.answers[0].prompt[start : start + CONTEXT] for start in (0, 1)]
    found: dict[str, float] = {}
    with engine(said.folder, block_size=PAGE) as llm:
        for tokens, sign in ((1, -1), (2, 1)):  # the prompt gives the first
            reads.clear()
            ask(llm, prompts, tokens)
            for kind, _, states in reads:
                found[kind] = found.get(kind, 0) + sign * states / LAYERS / len(prompts)
    at_once = [runs[0] for kind, runs, _ in reads if kind == "slc" and len(runs) == 4]
    assert at_once == [len(prompts)] * LAYERS
    length, block, pages = CONTEXT + 1, 64, 2 * PAGE  # whole blocks are read, and whole pages of the window
    assert found.pop("cmp") == pytest.approx(length / 16, abs=block / 16)
    assert found.pop("index") == pytest.approx(length / 8, abs=block / 8)
    assert found.pop("slc") == 4 * 64
    assert found.pop("win") == pytest.approx(64, abs=pages)
    assert found == {"tail": 0}


def test_a_request_with_fewer_new_tokens_reads_nothing_beyond_its_last() -> None:
    starts, lengths = torch.tensor([0, 3, 4]), torch.tensor([10, 7])
    batch = Batch(torch.zeros(2, 1), torch.arange(4), starts, lengths, starts, lengths, num_decodes=2)
    assert batch.decoded_tokens.tolist() == [[[7, 8, 9], [6, 6, 6]], [[0] * 3] * 2, [[0] * 3] * 2]
