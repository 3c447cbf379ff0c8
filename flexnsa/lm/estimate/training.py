"""The memory of one training step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from flexnsa.lm.estimate.parameters import parameter_count
from flexnsa.lm.estimate.work import FOOTPRINTS, Work
from flexnsa.lm.model.config import DecoderConfig
from flexnsa.primitives import check_choice, check_positive_int, check_type

Precision = Literal["fp32", "bf16"]
IMPLEMENTATIONS = tuple(FOOTPRINTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes of one training step; ``saved_by`` splits the bytes that the first layer saves for backward."""

    parameters: int
    optimizer: int
    saved: int
    saved_by: dict[str, int]
    after_forward: int
    peak_forward: int
    peak_training: int


def estimate_training(
    config: DecoderConfig,
    *,
    seq_len: int,
    batch_size: int = 1,
    precision: Precision = "fp32",
    impl: str = "sdpa",
    fused_norm: bool = False,
    optimizer: bool = False,
    compiled: bool = False,
) -> MemoryEstimate:
    """Estimate the memory of one forward and backward pass of :class:`flexnsa.lm.DecoderLM`.

    Args:
        config: config of the model; its ``checkpointing`` decides what layers save.
        seq_len: tokens of a sequence.
        batch_size: number of sequences.
        precision: ``"fp32"``, or ``"bf16"`` for autocast; parameters are fp32 either way.
        impl: ``"sdpa"``, or ``"flex"`` or ``"triton"`` on a GPU; dense attention ignores it.
        fused_norm: RMSNorm is one kernel that saves only its input, as on CUDA; elsewhere it saves a normed copy too.
        optimizer: count AdamW's two moments in the peak.
        compiled: layers run through ``torch.compile``, which saves each activation once and recomputes sums.

    Raises:
        ValueError: an argument is out of range.
    """
    check_type("config", config, DecoderConfig)
    check_positive_int("seq_len", seq_len)
    check_positive_int("batch_size", batch_size)
    check_choice("precision", precision, ("fp32", "bf16"))
    check_choice("impl", impl, IMPLEMENTATIONS)
    for name, flag in {"fused_norm": fused_norm, "optimizer": optimizer, "compiled": compiled}.items():
        check_type(name, flag, bool)
    work = Work(config, batch_size, seq_len, 2 if precision == "bf16" else 4, impl, fused_norm, compiled)
    parameters = 4 * parameter_count(config)
    moments = 2 * parameters if optimizer else 0
    layers = [replace(work, follows=leader != index) for index, leader in enumerate(config.leaders)]
    again = [config.is_checkpointed(index) for index in range(config.num_layers)]
    held = [layer.checkpoint() if twice else layer.saved() for layer, twice in zip(layers, again, strict=True)]
    # Checkpointed layers share tables that they do not save
    saved = sum(held) + work.saved_outside() + (0 if all(again) else work.rotary_tables())
    kept = saved + (work.rotary_tables() if all(again) else 0)
    # Autocast keeps its casts to the end of forward, also of checkpointed layers
    cached = work.autocast_cache() * sum(again)
    return MemoryEstimate(
        parameters=parameters,
        optimizer=2 * parameters,
        saved=saved,
        saved_by=work.saved_by(),
        after_forward=parameters + kept,
        peak_forward=moments + parameters + kept + cached + work.forward_excess(not again[-1]),
        peak_training=moments + parameters + _peak_backward(layers, held, again),
    )


def _peak_backward(layers: list[Work], held: list[int], again: list[bool]) -> int:
    """Return the largest of the moments of backward that can be the peak: in each layer, and before the last.

    From layer to layer, saved activations are freed and gradients of weights are added.
    """
    work = layers[0]
    head = 4 * work.config.dim * (work.config.vocab_size + 1)
    moments = [sum(held) + work.saved_outside() + work.rotary_tables() + work.head_excess() + head]
    below, gradients = work.embedded() + work.rotary_tables(), head + 4 * sum(sum(x.weights.values()) for x in layers)
    for layer, saved, twice in zip(layers, held, again, strict=True):
        gradients -= 4 * sum(layer.weights.values())
        # A checkpointed layer keeps its input during recomputation
        activations = layer.saved() + (saved if twice else 0)
        moments.append(below + gradients + activations + max(layer.backward_excess()))
        below += saved
    return max(moments)
