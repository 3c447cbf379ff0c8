"""What transformers composes into a mask: causal, padding and packed documents are taken, all else is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, BartConfig, BartForCausalLM, DynamicCache, HrmTextConfig
from transformers import masking_utils as masks

from flexnsa.transformers import dropin
from flexnsa.transformers.mask_functions import NEW, VALID, read_mask
from tests.integrations.transformers.families import ALL, FEW, SIZES, converted, dense, sparse, tokens

LENGTH = 20
PADDED = torch.tensor([[1] * LENGTH, [0] * 5 + [1] * (LENGTH - 5)])
BLOCKS = torch.tensor([[0] * 6 + [-1] * (LENGTH - 6)] * 2)
IDS = torch.tensor([[0] * 6 + [1] * (LENGTH - 6)] * 2)


def own_function(_batch: Any, _head: Any, q: Tensor, kv: Tensor) -> Tensor:
    return kv < q - 3


def make_mask(create: Callable[..., Any], config: Any, *, padded: bool = False, **options: Any) -> Any:
    embeds = torch.zeros(2, LENGTH, SIZES["hidden_size"])
    mask = PADDED if padded else None
    return create(config, inputs_embeds=embeds, attention_mask=mask, past_key_values=None, **options)


causal = masks.create_causal_mask
REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any], str]] = {
    "prefix": (causal, {}, {"block_sequence_ids": BLOCKS}, "block_sequence_ids"),
    "union": (causal, {}, {"or_mask_function": own_function}, "attention_mask"),
    "intersection": (causal, {}, {"and_mask_function": own_function}, "attention_mask"),
    "union with blocks": (causal, {}, {"or_mask_function": masks.blockwise_overlay(BLOCKS)}, "block_sequence_ids"),
    "documents of its own": (
        causal,
        {},
        {"and_mask_function": masks.packed_sequence_mask_function(IDS)},
        "attention_mask",
    ),
    "sliding": (masks.create_sliding_window_causal_mask, {"sliding_window": 8}, {}, "sliding_window"),
    "long window": (masks.create_sliding_window_causal_mask, {"sliding_window": 99}, {}, "sliding_window"),
    "chunked": (masks.create_chunked_causal_mask, {"attention_chunk_size": 8}, {}, "attention_chunk_size"),
    "both ways": (masks.create_bidirectional_mask, {}, {}, "is_causal"),
    "both ways by config": (causal, {"is_causal": False}, {}, "is_causal"),
    "both ways, sliding": (masks.create_bidirectional_sliding_window_mask, {"sliding_window": 8}, {}, "sliding_window"),
}


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("positions", [None, torch.tensor([[*range(12), *range(8)]])], ids=["no positions", "packed"])
@pytest.mark.parametrize("case", REFUSED)
def test_masks_that_are_not_causal_are_refused(padded: bool, positions: Any, case: str) -> None:
    """Only what came by ``or_mask_function`` and ``and_mask_function`` was, and the rest became causal."""
    create, changes, options, name = REFUSED[case]
    config = sparse("llama", FEW).config
    for option, value in changes.items():
        setattr(config, option, value)
    with pytest.raises(ValueError, match=f"^{name}: expected .* got "):
        read_mask(make_mask(create, config, padded=padded, position_ids=positions, **options), 2, LENGTH)


@pytest.mark.parametrize("make", [sparse, converted])
def test_masks_that_are_causal_are_taken(make: Callable[..., Any]) -> None:
    config, create = make("llama", FEW).config, causal
    assert make_mask(create, config) is None
    assert make_mask(create, config, position_ids=torch.arange(LENGTH)[None]) is None
    mask = make_mask(create, config, padded=True, position_ids=torch.tensor([[*range(12), *range(8)]]))
    got, documents = read_mask(mask, 2, LENGTH)
    assert torch.equal(got[:, 0, 0], (PADDED * VALID + NEW).to(torch.int8))
    assert documents is None
    for positions in ([[*range(12), *range(8)]], [[*range(12), *range(8)], [*range(3), *range(7, 24)]]):
        want = masks.find_packed_sequence_indices(torch.tensor(positions))
        assert want is not None
        for blocks in (None, BLOCKS * 0 - 1):
            mask = make_mask(create, config, position_ids=torch.tensor(positions), block_sequence_ids=blocks)
            got, documents = read_mask(mask, 2, LENGTH)
            assert got is None
            assert documents is not None
            assert torch.equal(documents, want.expand(2, -1).to(torch.int32))


def test_masks_are_read_inside_of_a_compiler() -> None:
    """There closures cannot be read."""
    config, positions = sparse("llama", FEW).config, torch.tensor([[*range(12), *range(8)]])

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(position_ids: Tensor | None, **options: Any) -> Any:
        return make_mask(causal, config, position_ids=position_ids, **options)

    assert compiled(None) is None
    want = make_mask(causal, config, position_ids=positions)
    assert torch.equal(compiled(positions), want)
    for options in ({"block_sequence_ids": BLOCKS}, {"or_mask_function": own_function}):
        for position_ids in (None, positions):
            with pytest.raises(Exception, match=r"ValueError|block_sequence_ids: expected None"):
                compiled(position_ids, **options)


def test_a_prefix_that_attends_to_itself_is_refused() -> None:
    """It became causal, and logits differed by 1.9."""
    sizes: Any = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    config = HrmTextConfig(**sizes | {"num_hidden_layers": 8, "head_dim": 8})
    model = AutoModelForCausalLM.from_config(config).eval().double()
    x, kinds = tokens(2, LENGTH), (BLOCKS == 0).long()
    with torch.no_grad():
        want, prefixed = model(x, use_cache=False).logits, model(x, token_type_ids=kinds, use_cache=False).logits
        assert (want - prefixed).abs().max() > 1e-2
        model.config.flexnsa = ALL
        model.set_attn_implementation("flexnsa")
        assert_close(model(x, use_cache=False).logits, want)
        for padding in ({}, {"attention_mask": PADDED}):
            message = r"block_sequence_ids: expected None \(and no token_type_ids.* got .*\(2, 20\)"
            with pytest.raises(ValueError, match=message):
                model(x, token_type_ids=kinds, **padding)


def test_a_model_made_to_attend_both_ways_is_refused() -> None:
    """Its layers still say that they are causal; only its mask tells."""
    model, x = dense("llama", is_causal=False), tokens(1, LENGTH)
    model.set_attn_implementation("flexnsa")
    for mask in (None, torch.ones_like(x)):
        with pytest.raises(ValueError, match="is_causal: expected True"):
            model(x, attention_mask=mask, use_cache=False)


def test_masks_that_no_layer_uses_stop_nobody() -> None:
    """Bart's decoder makes one for an encoder; models with sliding layers make theirs, though none be sliding."""
    sizes: Any = {"d_model": 48, "decoder_layers": 2, "decoder_attention_heads": 6, "decoder_ffn_dim": 64}
    model, x = BartForCausalLM(BartConfig(vocab_size=64, **sizes)).eval().double(), tokens(1, LENGTH)
    with torch.no_grad():
        want = model(x, use_cache=False).logits
        model.config.flexnsa = ALL
        model.set_attn_implementation("flexnsa")
        assert_close(model(x, use_cache=False).logits, want)
    with pytest.raises(ValueError, match="is_causal: expected True"):
        model(x, encoder_hidden_states=torch.zeros(1, 7, 48).double(), use_cache=False)


def test_a_cache_that_forgets_is_refused() -> None:
    model = sparse("llama", FEW)
    options: dict[str, Any] = {"batch_size": 1, "q_length": 1, "kv_length": 8, "q_offset": 12, "kv_offset": 5}
    mask = dropin.make_mask(**options, config=model.config)
    with pytest.raises(ValueError, match="cache: expected a cache that keeps every token, got one that drop"):
        read_mask(mask, 1, 8)
    assert model(tokens(1, 20), past_key_values=DynamicCache(config=model.config)).logits.isfinite().all()
