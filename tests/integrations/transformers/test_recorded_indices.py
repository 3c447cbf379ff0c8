"""Texts of ``generate`` are trained on the blocks with which they were drawn, in each kind of model of transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.testing import assert_close

from flexnsa.attention import dispatch
from flexnsa.functional.indices import record_indices, replay_indices
from tests.integrations.transformers.families import FEW, dense, pad_left, sparse, tokens
from tests.integrations.transformers.test_one_model import EVERY_KIND

NEW = 30
GENERATIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "static cache": {"cache_implementation": "static"},
    "drafts": {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 2},
}


def generate(model: Any, options: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor, list[Tensor]]:
    """Generate; return all tokens with their mask, the logits of the new ones and the blocks."""
    drafts = "prompt_lookup_num_tokens" in options  # of a single text that repeats itself, some of which are wrong
    prompts = {"input_ids": tokens(1, 10).repeat(1, 5)} if drafts else pad_left([tokens(50), tokens(31)])
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
    with record_indices(model) as handle:
        out = model.generate(**prompts, **options, output_logits=True, return_dict_in_generate=True)
    mask = prompts.get("attention_mask", torch.ones_like(prompts["input_ids"]))
    text = {"input_ids": out.sequences, "attention_mask": pad(mask, (0, out.sequences.shape[1] - 50), value=1)}
    return text, torch.stack(out.logits, 1), handle.indices()


def same_without_choosing(
    model: Any, text: dict[str, Tensor], indices: list[Tensor], patch: pytest.MonkeyPatch
) -> Tensor:
    """Return logits of replayed blocks; the model must not choose any, nor can its indexers."""
    for name, parameter in model.named_parameters():
        if ".indexer." in name:
            torch.nn.init.normal_(parameter)
    blind = replace(dispatch.IMPLEMENTATIONS["sdpa"], select=lambda *_: pytest.fail("blocks are chosen"))
    patch.setitem(dispatch.IMPLEMENTATIONS, "sdpa", blind)
    with replay_indices(model, indices):
        return model(**text, use_cache=False).logits


ROLLOUTS = {
    "drop-in": ("static cache", "drafts"),
    "drop-in, three branches": ("greedy", "static cache"),
    "three branches": ("greedy", "drafts"),
    "selected branch": ("sampled", "static cache"),
    "indexer": ("greedy", "drafts"),
    "shared index": ("greedy", "drafts"),
    "own decoder": ("sampled", "static cache", "drafts"),
}


@pytest.mark.parametrize(("kind", "how"), [(kind, how) for kind, ways in ROLLOUTS.items() for how in ways])
def test_training_has_the_log_probabilities_of_the_rollout(
    kind: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of padded rows, and of packed ones."""
    model = EVERY_KIND[kind]()
    text, expected, indices = generate(model, GENERATIONS[how])
    with record_indices(model) as handle:
        model(**text, use_cache=False)
    for drawn_with, whole in zip(indices, handle.indices(), strict=True):
        for row, length in enumerate(text["attention_mask"].sum(1)):
            assert torch.equal(drawn_with[row, :, : length - 1], whole[row, :, : length - 1])
    documents = [row[mask == 1] for row, mask in zip(text["input_ids"], text["attention_mask"], strict=True)]
    packed = {
        "input_ids": torch.cat(documents)[None],
        "position_ids": torch.cat([torch.arange(len(x)) for x in documents])[None],
    }
    rows = same_without_choosing(model, text, indices, monkeypatch)
    parts = same_without_choosing(model, packed, indices, monkeypatch)[0].split([len(x) for x in documents])
    count = rows.shape[1] - 50
    for got in (rows[:, 49:-1], torch.stack([x[-count - 1 : -1] for x in parts])):
        assert_close(*(x.float().log_softmax(-1) for x in (got, expected[:, :count])), rtol=0, atol=1e-5)


def test_a_compiled_drop_in_records_and_replays_without_leaving_its_graph() -> None:
    model, x = sparse("llama", FEW, num_hidden_layers=1), tokens(2, 70)
    torch.compiler.reset()
    compiled: Any = torch.compile(model, fullgraph=True, backend="eager")
    whole = compiled(x, use_cache=False).logits
    with record_indices(model) as handle:
        assert_close(compiled(x, use_cache=False).logits, whole)
    indices = handle.indices()
    indices[0][:, :, 48:, 1] = torch.where(indices[0][:, :, 48:, 1] == 1, 2, 1)  # of 1 to 4, the first of two free ones
    indices[0][:, :, 48:, 2] = 3
    with replay_indices(model, indices):
        others = compiled(x, use_cache=False).logits
        assert_close(others, model(x, use_cache=False).logits)
    assert_close(others[:, :48], whole[:, :48])
    assert not torch.allclose(others, whole)
    assert_close(compiled(x, use_cache=False).logits, whole)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["drop-in", "indexer"])
def test_a_cache_is_refused_where_blocks_are_replayed(kind: str) -> None:
    model, x = EVERY_KIND[kind](), tokens(2, 60)
    with record_indices(model) as handle:
        cache = model(x, use_cache=True).past_key_values
    with (
        replay_indices(model, handle.indices()),
        pytest.raises(ValueError, match=r"expected .* blocks are replayed, got"),
    ):
        model(x[:, :1], past_key_values=cache)


@pytest.mark.parametrize("branches", [["win"], None], ids=["no selected branch", "dense"])
def test_models_without_a_choice_are_refused(branches: list[str] | None) -> None:
    model = dense("llama") if branches is None else sparse("llama", FEW | {"branches": branches})
    with pytest.raises(ValueError, match="model: expected layers of NSA with the selected branch, got a LlamaFor"):
        record_indices(model)


def test_continuous_batching_is_refused() -> None:
    model = sparse("llama", FEW)
    with record_indices(model):
        (out,) = model.generate_batch([[3, 5, 7]], max_new_tokens=2, progress_bar=False).values()
    assert "generate_batch: expected none where blocks are recorded" in out.error
