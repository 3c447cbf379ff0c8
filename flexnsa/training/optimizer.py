"""Which parameters learn how fast: AdamW's groups, in which compressors take smaller steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from flexnsa import LinearCompressor, MLPCompressor, NativeSparseAttention
from flexnsa.training.config import COMPRESSOR_LR, TrainConfig
from flexnsa.validation import check_number, check_type, describe


def parameter_groups(
    model: nn.Module, *, lr: float, weight_decay: float = 0.0, compressor_lr: float = COMPRESSOR_LR
) -> list[dict[str, Any]]:
    """Give the groups of an optimizer, ``AdamW(parameter_groups(model, lr=1e-3))``, in which compressors learn slower.

    AdamW moves every weight by about the learning rate, whatever its gradient, and a compressor sums over a whole
    block, ``l * D`` inputs; rates that fall with a matrix's inputs are what muP derives (arXiv 2203.03466). Measured:
    at one rate for all, a model unlearns recall while most of its blocks come to score 0; at a tenth it is kept
    (``docs/learning.md``). Of text a small model loses a little by that (``docs/language.md``).
    Every parameter is in one group, once, also where modules share it; schedulers of ``torch.optim.lr_scheduler`` keep
    the ratio.

    Args:
        model: any module with layers of the library in it, wrapped, sharded or converted ones too.
        lr: learning rate.
        weight_decay: of matrices; vectors and embeddings are not decayed. AdamW multiplies it by each group's rate.
        compressor_lr: rate of what compresses keys and values, relative to ``lr``.

    Raises:
        TypeError: ``model`` is no module, or another argument is no number.
        ValueError: an argument is negative or not finite.
    """
    check_type("model", model, nn.Module)
    for name, value in (("lr", lr), ("weight_decay", weight_decay), ("compressor_lr", compressor_lr)):
        check_number(name, value)
        if not value >= 0:
            raise ValueError(f"{name}: expected at least 0, got {describe(value)}")
    slow = {parameter for compressor in _compressors(model) for parameter in compressor.parameters()}
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        rate = lr * compressor_lr if parameter in slow else lr
        decay = weight_decay if parameter.dim() >= 2 and parameter not in embeddings else 0.0
        groups.setdefault((rate, decay), []).append(parameter)
    return [{"params": found, "lr": rate, "weight_decay": decay} for (rate, decay), found in groups.items()]


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Give AdamW for a run; what :func:`set_learning_rate` scales by stands in each group, as ``relative_lr``."""
    slower = COMPRESSOR_LR if config.compressor_lr is None else config.compressor_lr
    groups = parameter_groups(model, lr=1.0, weight_decay=config.weight_decay, compressor_lr=slower)
    for group in groups:
        group["relative_lr"] = group.pop("lr")
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the rate of a step; each group's own is relative to it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["relative_lr"]


def _compressors(model: nn.Module) -> Iterator[nn.Module]:
    """Give the library's compressors, wherever they are, and whatever else layers compress by."""
    for module in model.modules():
        if isinstance(module, LinearCompressor | MLPCompressor):
            yield module
        elif isinstance(module, NativeSparseAttention) and "cmp" in module.branches:
            yield from (module.phi_k, module.phi_v)
