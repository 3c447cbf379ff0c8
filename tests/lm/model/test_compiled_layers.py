"""Layers compiled one by one: once for all of them, with the results of the model as it is written.

Inductor compiles them in ``tests/layers/test_shared_index.py``.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule

from flexnsa.lm import DecoderConfig, DecoderLM
from flexnsa.operators.checkpointing import SELECTION_OPERATORS
from tests.support.inputs import TINY


def make(attention: Any, **changes: Any) -> tuple[DecoderLM, Tensor, Tensor]:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    model = DecoderLM(DecoderConfig(**sizes, nsa=TINY, attention=attention, compression="mean", **changes))
    return model, torch.randint(256, (2, 40)), torch.randint(256, (2, 40))


def loss_and_gradients(model: Callable[..., Tensor], tokens: Tensor, targets: Tensor) -> list[Tensor]:
    loss = model(tokens, targets=targets)
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]  # pyright: ignore[reportFunctionMemberAccess]


def occurrences(code: list[GraphModule], *operators: str) -> int:
    return sum(any(name in str(node.target) for name in operators) for graph in code for node in graph.graph.nodes)


def recording(code: list[GraphModule]) -> Callable[..., Any]:
    """Return a backend that keeps the graphs of forward and backward, cut as Inductor cuts them."""

    def keep(graph: GraphModule, _inputs: Any) -> GraphModule:
        code.append(graph)
        return graph

    return aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)


@pytest.mark.parametrize(
    ("attention", "checkpointing", "recompute"),
    [("dense", True, ()), ("nsa", False, ("slc", "win")), ("nsa", True, ("slc", "win"))],
)
def test_all_layers_share_one_compilation_in_which_blocks_are_selected_once(
    attention: str, checkpointing: bool, recompute: tuple[str, ...]
) -> None:
    model, tokens, targets = make(attention)
    plain = loss_and_gradients(model, tokens, targets)
    again, *_ = make(attention, recompute=recompute, checkpointing=checkpointing)
    again.load_state_dict(model.state_dict())
    eager = loss_and_gradients(again, tokens, targets)
    assert all(torch.equal(a, b) for a, b in zip(eager, plain, strict=True))

    torch._dynamo.reset()
    counters.clear()
    code: list[GraphModule] = []
    again.compile_layers(backend=recording(code), fullgraph=True)
    torch.testing.assert_close(loss_and_gradients(again, tokens, targets), plain, rtol=1e-4, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1
    assert len(code) == 2  # forward and backward
    assert occurrences(code, *SELECTION_OPERATORS) == (attention == "nsa")
    assert occurrences(code, "transpose_copy") == 0, "a copy that only exporters need"
    if recompute:
        assert occurrences(code, "flexnsa.selected_attention.default") == 2
        assert occurrences(code, "flexnsa.interval_attention.default") == 2 + 1 + checkpointing


def test_a_model_with_compiled_layers_is_pickled_as_it_is_written() -> None:
    model, tokens, _ = make("nsa")
    plain = model(tokens)
    model.compile_layers(backend="eager")
    assert torch.equal(pickle.loads(pickle.dumps(model))(tokens), plain)


def test_rotary_tables_are_computed_once_by_a_model_compiled_whole() -> None:
    model, tokens, targets = make("dense")
    torch._dynamo.reset()
    code: list[GraphModule] = []
    loss_and_gradients(torch.compile(model, backend=recording(code), fullgraph=True), tokens, targets)
    assert len(code) == 2
    assert occurrences(code, "flexnsa.rope_tables") == 1
    assert occurrences(code, "aten.sin", "aten.cos") == 0


def test_kernels_are_combined_and_no_variants_timed_unless_the_caller_says_how_to_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = list[dict[str, Any]]()
    monkeypatch.setattr(torch, "compile", lambda _, **options: given.append(options))
    model, *_ = make("dense")
    model.compile_layers(fullgraph=True)
    model.compile_layers(mode="max-autotune")
    model.compile_layers(options={"max_autotune": True})
    assert given[1:] == [{"mode": "max-autotune"}, {"options": {"max_autotune": True}}]
    quick = {"triton.autotune_pointwise": False, "combo_kernels": True, "combo_kernels_autotune": 0}
    assert given[0] == {"fullgraph": True, "options": quick | {"combo_kernels_pointwise_only": True}}
    assert given[0]["options"].keys() <= set(torch._inductor.list_options())
