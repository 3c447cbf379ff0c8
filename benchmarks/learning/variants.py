"""What models differ in, and the models of recall: NSA, NSA with one thing changed, and attention to compare with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from flexnsa import NativeSparseAttention
from flexnsa.lm import DecoderConfig, DecoderLM, parameter_groups


@dataclass(frozen=True, kw_only=True)
class Change:
    """What a model has of its own.

    Args:
        config: fields of its config that differ.
        nsa: sizes of its branches that differ.
        shared_keys: what the compressed branch compresses are the keys of the selected one, rather than its own.
        compressor_rate: learning rate of what compresses keys and values, relative to that of all else. It maps whole
            blocks: a step moves a compressed key further than one of a token.
        begun_as_mean: compressors start as the mean of their blocks, and learn from there.
        normalised_keys: compressed keys are brought to one length, so that their scores cannot grow without end.
        indexer: an indexer scores blocks, by a query for each query head.
        index_tokens: of an index key; one begins where the one before ends.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    nsa: Mapping[str, int] = field(default_factory=dict)
    shared_keys: bool = False
    compressor_rate: float = 1.0
    begun_as_mean: bool = False
    normalised_keys: bool = False
    indexer: bool = False
    index_tokens: int = 8

    def configure(self, config: DecoderConfig) -> DecoderConfig:
        """Change what differs."""
        options = {"shared_keys": self.shared_keys, "begin_as_mean": self.begun_as_mean, **self.config}
        nsa = replace(config.nsa, **self.nsa)
        if self.indexer:
            index = {"index_block_size": self.index_tokens, "index_stride": self.index_tokens}
            nsa = replace(nsa, index_heads=config.num_heads // config.num_kv_heads, **index)
        return replace(config, nsa=nsa, **options)

    def build(self, config: DecoderConfig) -> DecoderLM:
        """Make the model of the config that has what differs already."""
        model = DecoderLM(config)
        for module in model.modules():
            if self.normalised_keys and isinstance(module, NativeSparseAttention):
                module.phi_k.register_forward_hook(_normalise)
        return model


@dataclass(frozen=True, kw_only=True)
class Variant(Change):
    """A model of recall.

    Args:
        tight: at stages that say so it reads but little; otherwise as much as at the end, from the beginning.
    """

    tight: bool = True

    def rates(self, model: DecoderLM) -> list[dict[str, Any]]:
        """Group the parameters by their learning rate, relative to each other under ``scale``."""
        groups = parameter_groups(model, lr=1.0, compressor_lr=self.compressor_rate)
        return [{"params": group["params"], "scale": group["lr"]} for group in groups]


def _normalise(_: nn.Module, __: object, keys: Tensor) -> Tensor:
    return F.rms_norm(keys, keys.shape[-1:])


_MEAN = {"compression": "mean"}
_LINEAR = {"compression": "linear"}
_RESIDUAL = {"gate": "residual"}
_SLOW = 0.1
_SHORT = {"compress_block_size": 4, "compress_stride": 2}
_INDEXED: dict[str, Any] = {"indexer": True, "index_tokens": 4}

VARIANTS: dict[str, Variant] = {
    "dense": Variant(config={"attention": "dense"}),
    "window only": Variant(config={"branches": ("win",)}),
    "NSA": Variant(),
    "NSA, mean compressor": Variant(config=_MEAN),
    "NSA, shared keys, mean compressor": Variant(config=_MEAN, shared_keys=True),
    "NSA without selected": Variant(config={"branches": ("cmp", "win")} | _MEAN),
    "NSA without compressed": Variant(config={"branches": ("slc", "win")}),
    "NSA, shared keys": Variant(shared_keys=True),
    "NSA, begun as mean": Variant(begun_as_mean=True),
    "NSA, slow": Variant(compressor_rate=_SLOW),
    "NSA, slow, l=4 d=2": Variant(compressor_rate=_SLOW, nsa=_SHORT),
    "NSA, begun as mean, slow": Variant(begun_as_mean=True, compressor_rate=_SLOW),
    "NSA, shared keys, begun as mean": Variant(shared_keys=True, begun_as_mean=True),
    "NSA, shared keys, begun as mean, slow": Variant(shared_keys=True, begun_as_mean=True, compressor_rate=_SLOW),
    "NSA, begun as mean, slow, indexer": Variant(begun_as_mean=True, compressor_rate=_SLOW, **_INDEXED),
    "NSA, shared keys, begun as mean, slow, indexer": Variant(
        shared_keys=True, begun_as_mean=True, compressor_rate=_SLOW, **_INDEXED
    ),
    "NSA, shared keys, begun as mean, slow, residual": Variant(
        shared_keys=True, begun_as_mean=True, compressor_rate=_SLOW, config=_RESIDUAL
    ),
    "NSA, shared keys, begun as mean, slow, indexer, residual": Variant(
        shared_keys=True, begun_as_mean=True, compressor_rate=_SLOW, config=_RESIDUAL, **_INDEXED
    ),
    "NSA, normalised": Variant(normalised_keys=True),
    "NSA, shared keys, normalised": Variant(shared_keys=True, normalised_keys=True),
}
"""Models of the long recall; the compressor is the MLP where no other is named."""

_SHORT_RECALL = {
    name: VARIANTS[name]
    for name in (
        "dense",
        "NSA, slow, l=4 d=2",
        "NSA, slow",
        "NSA",
        "window only",
        "NSA, begun as mean, slow",
        "NSA, shared keys, begun as mean, slow",
        "NSA, begun as mean, slow, indexer",
        "NSA, shared keys, begun as mean, slow, indexer",
        "NSA, shared keys, begun as mean, slow, residual",
        "NSA, shared keys, begun as mean, slow, indexer, residual",
    )
} | {"NSA, shared keys, slow": Variant(shared_keys=True, compressor_rate=_SLOW)}
ON_CPU: dict[str, Variant] = _SHORT_RECALL | {
    f"{name}, rope {base}": replace(variant, config={**variant.config, "rope_base": float(base)})
    for base in (1000, 115)
    for name, variant in _SHORT_RECALL.items()
    if name not in ("NSA", "window only") and not variant.indexer and "gate" not in variant.config
}
"""Models of the short recall. With 115 as large a share of a head turns by less than a round within its 256 tokens as
with 10,000 within 8k, about a fifth; with 1,000 it is seven in sixteen: what turns slowly matches keys wherever they
stand."""


def _changed(compressor_rate: float = _SLOW, **changes: Any) -> Variant:
    return Variant(compressor_rate=compressor_rate, **changes)


ABLATIONS: dict[str, Variant] = {
    "l=8 d=4 l'=16 n=16": _changed(),
    "l=4 d=2": _changed(nsa=_SHORT),
    "l=8 d=8": _changed(nsa={"compress_stride": 8}),
    "l=16 d=8": _changed(nsa={"compress_block_size": 16, "compress_stride": 8}),
    "MLP, begun as mean": _changed(begun_as_mean=True),
    "MLP, normalised": _changed(normalised_keys=True),
    "MLP at a third of the rate": _changed(compressor_rate=0.3),
    "linear": _changed(config=_LINEAR),
    "linear, begun as mean": _changed(config=_LINEAR, begun_as_mean=True),
    "mean": _changed(config=_MEAN),
    "shared keys": _changed(shared_keys=True),
    "softmax gate": _changed(config={"gate": "softmax"}),
    "w=64": _changed(nsa={"window_size": 64}),
    "n=4": _changed(nsa={"num_selected_blocks": 4}),
    "n=8": _changed(nsa={"num_selected_blocks": 8}),
    "n=32": _changed(nsa={"num_selected_blocks": 32}),
    "l'=8 n=32": _changed(nsa={"select_block_size": 8, "num_selected_blocks": 32}),
    "nothing forced": _changed(nsa={"num_local_blocks": 0}),
    "l'=32 n=8": _changed(nsa={"select_block_size": 32, "num_selected_blocks": 8}),
    "l'=64 n=4": _changed(nsa={"select_block_size": 64, "num_selected_blocks": 4}),
    "first and two last forced": _changed(nsa={"num_init_blocks": 1, "num_local_blocks": 2}),
    "all blocks from the start": _changed(tight=False),
}
"""What matters, one thing at a time: the MLP at a tenth of the rate, sizes as in the first name, but for what is named.

At the full rate the MLP unlearns, and all that would be measured is when."""
