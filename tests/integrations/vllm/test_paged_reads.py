"""A decoded token reads its compressed, index, selected and window keys, and no others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from flexnsa.attention.sdpa.paged import Pages
from flexnsa.vllm.batch import Batch
from flexnsa.vllm.buffers import PagedBuffer
from tests.integrations.vllm.engines import ask, engine
from tests.integrations.vllm.references import Reference

CONTEXT, PAGE, LAYERS = 656, 16, 2  # a token after the prompt completes no block


class Read(NamedTuple):
    """What a buffer loaded at once: its name, the shape of the runs, and the states of a key head."""

    name: str
    runs: torch.Size
    states: int


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Read]:
    """Record what buffers load."""
    found: list[Read] = []
    pages_of = PagedBuffer.pages

    class Recorded(Pages):
        name = ""

        def load(self, size: int, run: torch.Tensor) -> tuple[torch.Tensor, ...]:
            parts = super().load(size, run)
            found.append(Read(self.name, run.shape, parts[0][..., 0].numel() // self.states.shape[1]))
            return parts

    def recorded(self: PagedBuffer, batch: Batch) -> Pages:
        pages = Recorded(*pages_of(self, batch))
        pages.name = self.prefix
        return pages

    monkeypatch.setattr(PagedBuffer, "pages", recorded)
    return found


def test_a_token_reads_pages_of_its_branches_only(reference: Callable[[str], Reference], reads: list[Read]) -> None:
    said = reference("index")
    prompt = said.answers[0].prompt[:CONTEXT]
    found: dict[str, float] = {}
    with engine(said.folder, block_size=PAGE) as llm:
        for tokens, sign in ((1, -1), (2, 1)):  # the prompt gives the first
            reads.clear()
            ask(llm, [prompt], tokens)
            for read in reads:
                kind = read.name.rpartition(".")[2]
                found[kind] = found.get(kind, 0) + sign * read.states / LAYERS
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


def test_many_requests_are_read_in_one_call(reference: Callable[[str], Reference], reads: list[Read]) -> None:
    said = reference("index")
    with engine(said.folder) as llm:
        ask(llm, [x.prompt for x in said.answers], 5)
    # Of packed prompts, states are read one by one.
    calls = Counter((x.name, x.runs[0]) for x in reads if x.name.endswith("slc") and len(x.runs) > 2)
    assert {requests for _, requests in calls} == {len(said.answers)}
    assert set(calls.values()) == {4}  # the prompt gives the first of five tokens
