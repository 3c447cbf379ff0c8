"""Parameter groups for AdamW, with learning rates of their own for compressors and indexers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

from flexnsa.layers.attention import NativeSparseAttention
from flexnsa.layers.compression import LinearCompressor, MLPCompressor
from flexnsa.layers.indexer import Indexer
from flexnsa.primitives import check_number, check_type, describe

COMPRESSOR_LR = 0.1
"""Default learning rate of the compressors, relative to that of all other parameters."""
INDEXER_LR = 1.0
"""Default learning rate of indexers, likewise: at half of it, layers of a language model stayed behind."""


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    compressor_lr: float = COMPRESSOR_LR,
    indexer_lr: float = INDEXER_LR,
) -> list[dict[str, Any]]:
    """Return groups for ``AdamW(parameter_groups(model, lr=1e-3))``, with a lower learning rate for compressors.

    AdamW moves every weight by about the learning rate, whatever its gradient, and a compressor sums over the
    ``l * D`` inputs of a block. muP likewise lowers the rate of a matrix with its inputs (arXiv 2203.03466). In our
    measurements, models trained with one rate for all parameters lost recall, and most blocks scored 0; with a tenth
    for the compressors they kept it (``docs/learning.md``). A small language model loses a little by the lower rate
    (``benchmarks/results/language.md``).

    Every parameter is in exactly one group, also where modules share it. Schedulers of ``torch.optim.lr_scheduler``
    keep the ratio of the rates.

    Args:
        model: any module that contains layers of this library, also wrapped, sharded or converted ones.
        lr: learning rate.
        weight_decay: of matrices; vectors and embeddings are not decayed. AdamW multiplies it by each group's rate.
        compressor_lr: learning rate of what compresses keys and values, relative to ``lr``.
        indexer_lr: learning rate of indexers, what compresses index keys included, relative to ``lr``.

    Raises:
        TypeError: ``model`` is not a module, or another argument is not a number.
        ValueError: an argument is negative or not finite.
    """
    check_type("model", model, nn.Module)
    rates = {"compressor_lr": compressor_lr, "indexer_lr": indexer_lr}
    for name, value in {"lr": lr, "weight_decay": weight_decay, **rates}.items():
        check_number(name, value)
        if not value >= 0:
            raise ValueError(f"{name}: expected at least 0, got {describe(value)}")
    relative = {parameter: compressor_lr for module in _compressors(model) for parameter in module.parameters()}
    relative |= dict.fromkeys(index_parameters(model), indexer_lr)
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        rate = lr * relative.get(parameter, 1.0)
        decay = weight_decay if parameter.dim() >= 2 and parameter not in embeddings else 0.0
        groups.setdefault((rate, decay), []).append(parameter)
    return [{"params": parameters, "lr": rate, "weight_decay": decay} for (rate, decay), parameters in groups.items()]


def index_parameters(model: nn.Module) -> list[nn.Parameter]:
    """List the parameters of all indexers of a model, which learn from the selection loss alone."""
    return [parameter for module in model.modules() if isinstance(module, Indexer) for parameter in module.parameters()]


def audit(model: nn.Module) -> str:
    """Tell which parameters of a model learn and which are frozen: a line for each name, with ``*`` for numbers in it.

    Raises:
        TypeError: ``model`` is not a module.
    """
    check_type("model", model, nn.Module)
    sizes, kinds = {"learns": 0, "frozen": 0}, Counter[tuple[str, ...]]()
    for name, parameter in model.named_parameters():
        state = "learns" if parameter.requires_grad else "frozen"
        sizes[state] += parameter.numel()
        kinds[state, re.sub(r"\b\d+\b", "*", name), str(tuple(parameter.shape))] += 1
    found = [f"{state} {kinds[state, name, shape]} x {shape} {name}" for state, name, shape in kinds]
    lines = sorted(found, key=lambda line: line.startswith("frozen"))
    return "\n".join((f"{sizes['learns']:,} parameters learn, {sizes['frozen']:,} are frozen:", *lines))


def _compressors(model: nn.Module) -> Iterator[nn.Module]:
    """Yield this library's compressors in any module, and the modules that NSA layers compress with."""
    for module in model.modules():
        if isinstance(module, LinearCompressor | MLPCompressor):
            yield module
        elif isinstance(module, NativeSparseAttention) and "cmp" in module.branches:
            yield from (module.phi_k, module.phi_v)
