"""The models of recall: NSA as it is meant, NSA that differs in one thing, and attention to compare with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexnsa import NativeSparseAttention
from flexnsa.layers.compression import BlockLinear, LinearCompressor
from flexnsa.models import DecoderConfig, DecoderLM


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What a model has of its own.

    Args:
        config: fields of its config that differ.
        nsa: sizes of its branches that differ.
        shared_keys: what the compressed branch compresses are the keys of the selected one, rather than its own.
        key_compressor_rate: learning rate of what compresses keys, relative to that of all else. It maps whole blocks:
            a step moves a compressed key further than one of a token.
        begun_as_mean: a linear compressor starts as the mean of its block, and learns from there.
        normalised_keys: compressed keys are brought to one length, so that their scores cannot grow without end.
        tight: at stages that say so it reads but little; otherwise as much as at the end, from the beginning.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    nsa: Mapping[str, int] = field(default_factory=dict)
    shared_keys: bool = False
    key_compressor_rate: float = 1.0
    begun_as_mean: bool = False
    normalised_keys: bool = False
    tight: bool = True

    def configure(self, config: DecoderConfig) -> DecoderConfig:
        """Change what differs."""
        return replace(config, nsa=replace(config.nsa, **self.nsa), **self.config)

    def build(self, config: DecoderConfig) -> DecoderLM:
        """Make the model of the config that has what differs already."""
        model = DecoderLM(config)
        for module in model.modules():
            if self.shared_keys and isinstance(module, NativeSparseAttention):
                module.w_k_cmp = module.w_k_slc
            if self.begun_as_mean and isinstance(module, LinearCompressor):
                _begin_as_mean(module.project)
            if self.normalised_keys and isinstance(module, NativeSparseAttention):
                module.phi_k.register_forward_hook(_normalise)
        return model

    def rates(self, model: DecoderLM) -> list[dict[str, Any]]:
        """Group the parameters by their learning rate, relative to each other under ``scale``."""
        groups: dict[float, list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            groups.setdefault(self.key_compressor_rate if ".phi_k." in name else 1.0, []).append(parameter)
        return [{"params": parameters, "scale": scale} for scale, parameters in groups.items()]


@torch.no_grad()
def _begin_as_mean(project: BlockLinear) -> None:
    project.position.zero_()
    project.weight.copy_(project.mean_weight())


def _normalise(_: nn.Module, __: object, keys: Tensor) -> Tensor:
    return F.rms_norm(keys, keys.shape[-1:])


_SMALLER = {"compress_block_size": 4, "compress_stride": 2, "select_block_size": 8, "num_selected_blocks": 32}

VARIANTS: dict[str, Variant] = {
    "NSA": Variant(),
    "dense": Variant(config={"attention": "dense"}),
    "window only": Variant(config={"branches": ("win",)}),
    "NSA without selected": Variant(config={"branches": ("cmp", "win")}),
    "NSA without compressed": Variant(config={"branches": ("slc", "win")}),
    "NSA, linear compressor": Variant(config={"compression": "linear"}),
    "NSA, linear compressor begun as the mean": Variant(config={"compression": "linear"}, begun_as_mean=True),
    "NSA, mean compressor": Variant(config={"compression": "mean"}),
    "NSA, shared keys": Variant(shared_keys=True),
    "NSA, shared keys, mean compressor": Variant(config={"compression": "mean"}, shared_keys=True),
    "NSA, normalised compressed keys": Variant(normalised_keys=True),
    "NSA, shared keys, normalised compressed keys": Variant(normalised_keys=True, shared_keys=True),
    "NSA, slow key compressor": Variant(key_compressor_rate=0.15),
    "NSA, shared keys, slow key compressor": Variant(shared_keys=True, key_compressor_rate=0.15),
    "NSA, smaller blocks": Variant(nsa=_SMALLER),
    "NSA, all blocks from the start": Variant(tight=False),
}
