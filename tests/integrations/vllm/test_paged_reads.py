"""A decoded token reads its compressed, index, selected and window keys, and no others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flexnsa.vllm.batch import Batch
from flexnsa.vllm.buffers import PagedBuffer
from tests.integrations.vllm.engines import ask, engine
from tests.integrations.vllm.references import Reference

CONTEXT, PAGE, LAYERS = 656, 16, 2  # a token after the prompt completes no block


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the states of a key head that buffers load, by their names."""
    counts: Counter[str] = Counter()

    def counting(load: Callable[..., tuple[Any, ...]], dim: Callable[[Any], int]) -> Callable[..., Any]:
        def counted(self: PagedBuffer, *args: Any) -> tuple[Any, ...]:
            parts = load(self, *args)
            counts[self.prefix.rpartition(".")[2]] += dim(parts[0])
            return parts

        return counted

    monkeypatch.setattr(PagedBuffer, "take", counting(PagedBuffer.take, lambda x: x[..., 0, 0].numel()))
    for name in ("take_pages", "take_blocks"):
        load = counting(getattr(PagedBuffer, name), lambda x: x.shape[0] * x.shape[-2])
        monkeypatch.setattr(PagedBuffer, name, load)
    return counts


def test_a_token_reads_pages_of_its_branches_only(reference: Callable[[str], Reference], reads: Counter[str]) -> None:
    said = reference("index")
    prompt = said.answers[0].prompt[:CONTEXT]
    with engine(said.folder, block_size=PAGE) as llm:
        ask(llm, [prompt], 1)
        of_prompt = Counter(reads)
        reads.clear()
        ask(llm, [prompt], 2)
    found = {name: (count - of_prompt[name]) / LAYERS for name, count in reads.items()}
    length, pages = CONTEXT + 1, 2 * PAGE  # whole pages are read: at most two more
    assert found.pop("cmp") == pytest.approx(length / 16, abs=pages / 16)
    assert found.pop("index") == pytest.approx(length / 8, abs=pages / 8)
    assert found.pop("slc") == 4 * 64
    assert found.pop("win") == pytest.approx(64, abs=pages)
    assert found == {"tail": 0}


def test_a_request_with_fewer_new_tokens_reads_nothing_beyond_its_last() -> None:
    starts, lengths = torch.tensor([0, 3, 4]), torch.tensor([10, 7])
    batch = Batch(torch.zeros(2, 1), torch.arange(4), starts, lengths, starts, lengths, num_decodes=2)
    assert batch.decoded_tokens.tolist() == [[[7, 8, 9], [6, 6, 6]], [[0] * 3] * 2, [[0] * 3] * 2]


def test_many_requests_are_read_in_one_call(
    reference: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[tuple[str, int]] = Counter()
    load = PagedBuffer.take_blocks

    def counted(self: PagedBuffer, batch: Any, block: Any, size: int) -> tuple[Any, ...]:
        calls[self.prefix, len(block)] += 1
        return load(self, batch, block, size)

    monkeypatch.setattr(PagedBuffer, "take_blocks", counted)
    said = reference("index")
    with engine(said.folder) as llm:
        ask(llm, [x.prompt for x in said.answers], 5)
    assert {requests for _, requests in calls} == {len(said.answers)}
    assert set(calls.values()) == {4}  # the prompt gives the first of five tokens
