"""Tensor parallelism of transformers: which parameters it shards over processes, and how layers are adapted."""

from __future__ import annotations

from typing import Any

from flexnsa.checks.calls import check_no_indexer
from flexnsa.config import BRANCHES
from flexnsa.layers.attention import NativeSparseAttention
from flexnsa.layers.compression import LinearCompressor, MeanCompressor, MLPCompressor
from flexnsa.transformers.attention import ConvertedAttention

SUMMED = "replicated_with_grad_allreduce"
"""Whole on each process, which computes gradients of its own heads only: they are summed."""

KEYS = [f"{kind}_{tag}" for kind in "kv" for tag in BRANCHES]


def converted_plan(dense: dict[str, str] | None, *, mixed: bool) -> dict[str, str]:
    """Return the plan that shards converted layers, ``mixed`` with dense ones, by whole groups of heads."""
    layer = "layers.*.self_attn"
    replaced = ["o_proj", "qkv_proj", *([] if mixed else ["k_proj", "v_proj"])]
    left_out = [f"{layer}.{name}" for name in replaced]
    plan = {f"{layer}.q_proj": "colwise", f"{layer}.o_proj": "rowwise"}
    plan |= {name: style for name, style in (dense or {}).items() if name not in left_out}
    plan |= {f"{layer}.{name[0]}_proj_{name[2:]}": "colwise" for name in KEYS}
    plan |= {f"{layer}.compress_{kind}.project": SUMMED for kind in "kv"}
    return plan | dict.fromkeys((f"{layer}.gate", f"{layer}.out_gate"), "colwise")


class SpreadHeads:
    """Mixin of models that transformers may load sharded over processes."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a model as transformers does, and adapt its layers if it is sharded."""
        loaded = super().from_pretrained(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        size = getattr(model, "tp_size", None) or 1
        if size > 1:
            for module in model.modules():
                if isinstance(module, ConvertedAttention | NativeSparseAttention):
                    keep_local_heads(module, size)
        return loaded


def keep_local_heads(layer: Any, size: int) -> None:
    """Adapt a layer to the heads that one of ``size`` processes has.

    Raises:
        ValueError: the processes cannot share the key and value heads evenly, or the layer has an indexer or norms of
            all heads together.
    """
    check_no_indexer("tp_size", layer.config if isinstance(layer, NativeSparseAttention) else layer.options.sizes)
    if layer.num_kv_heads % size:
        raise ValueError(f"tp_size: expected a divisor of num_key_value_heads={layer.num_kv_heads}, got {size}")
    norm = getattr(getattr(layer, "q_norm", None), "weight", None)
    if norm is not None and norm.shape[-1] > layer.head_dim:
        raise ValueError(f"tp_size: expected 1 for a layer whose norms are of all heads together, got {size}")
    layer.num_heads //= size
    layer.num_kv_heads //= size
    if isinstance(layer, NativeSparseAttention):
        layer.gate.num_heads //= size
    for module in layer.children():
        if isinstance(module, MeanCompressor | LinearCompressor | MLPCompressor):
            module.shape = (layer.num_kv_heads, module.shape[1])
