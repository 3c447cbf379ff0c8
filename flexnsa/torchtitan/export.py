"""Export of a checkpoint of torchtitan to a folder that :mod:`flexnsa.transformers` loads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torchtitan.config.override import apply_overrides
from torchtitan.trainer import Trainer

from flexnsa.files import replaced, write_whole
from flexnsa.layers.config import BranchOptions
from flexnsa.primitives import describe
from flexnsa.torchtitan.attention import NSAttention
from flexnsa.torchtitan.options import Options

FAMILIES = ("llama", "qwen3")
"""Dense models, by their ``model_type``, of which torchtitan and :mod:`flexnsa.transformers` both have NSA ones."""
KEPT = ("compress_k", "compress_v", "gate", "indexer")
"""Modules that have the same names in both."""


def export(config: Trainer.Config, checkpoint: str | Path, folder: str | Path) -> None:
    """Write a checkpoint as a model of Hugging Face transformers, on one process without a GPU.

    ``import flexnsa.transformers`` and ``AutoModelForCausalLM.from_pretrained(folder)`` load one with NSA layers. That
    of a run without the override is written as the dense model, which runs with the override begin with.

    Args:
        config: of the run, with its override, if any; ``hf_assets_path`` has the ``config.json`` of the dense model.
        checkpoint: a folder ``step-N`` of the run.
        folder: gets ``config.json`` and ``model.safetensors``.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: the run's layers have no counterpart there, or the checkpoint is of others.
    """
    from safetensors.torch import save_file

    config, folder = deepcopy(config), Path(folder)
    spec = config.model_spec
    if spec is None:
        raise ValueError("config: expected one with a model_spec, got none")
    apply_overrides(config.override, config)
    options = _options(spec.model)
    adapter_class = spec.state_dict_adapter
    dense = json.loads(Path(config.hf_assets_path, "config.json").read_text())
    if dense.get("model_type") not in FAMILIES or adapter_class is None:
        got = describe(dense.get("model_type"))
        raise ValueError(f"hf_assets_path: expected the config.json of one of {', '.join(FAMILIES)}, got {got}")
    with torch.device("meta"):
        names = list(spec.model.build().state_dict())
    state = _read(Path(checkpoint), names)
    adapter = adapter_class(spec.model, None)
    converted = dict(adapter.to_hf(state) if options is None else _converted(state, options, adapter.to_hf))
    folder.mkdir(parents=True, exist_ok=True)
    with replaced(folder / "model.safetensors") as path:
        save_file(converted, path, metadata={"format": "pt"})
    dtype = str(next(iter(converted.values())).dtype).removeprefix("torch.")
    told = dense if options is None else _config(dense, options)
    write_whole(folder / "config.json", json.dumps(told | {"dtype": dtype}, indent=2) + "\n")


def _options(model: Any) -> Options | None:
    """Return the options of all layers, if converted models of transformers have them too; None if all are dense."""
    layers = [layer.attention for layer in model.layers]
    if not any(isinstance(layer, NSAttention.Config) for layer in layers):
        return None
    for index, layer in enumerate(layers):
        if not isinstance(layer, NSAttention.Config):
            raise ValueError(f"layers: expected 'all', as converted models have no dense ones, got layer {index} dense")
    options: Options = layers[0].options
    if options.shared_keys:
        raise ValueError("shared_keys: expected False, as each branch of a converted model has keys, got True")
    if options.compression != "linear" and (options.has_indexer or "cmp" in options.branches):
        raise ValueError(f"compression: expected 'linear', as converted models compress, got {options.compression!r}")
    return options


def _read(checkpoint: Path, names: list[str]) -> dict[str, Tensor]:
    """Read the tensors of these names."""
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state: dict[str, Tensor] = {}
    for name in names:
        about: Any = stored.get(name)
        if about is None:
            expected = f"{name}, which the layers of the config have"
            raise ValueError(f"checkpoint: expected {expected}, got a checkpoint without")
        state[name] = torch.empty(about.size, dtype=about.properties.dtype)
    load(state, checkpoint_id=checkpoint, no_dist=True)
    return state


def _converted(state: Mapping[str, Tensor], options: Options, to_hf: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model of transformers, by name."""
    dense = {name: tensor for name, tensor in state.items() if not (_is_kept(name) or ".attention.w_" in name)}
    for tag in options.branches:
        # The adapter knows dense layers alone, so it is asked once for each branch, with the branch's keys and values.
        own = {
            re.sub(rf"w_([kv])_{tag}", r"qkv_linear.w\1", name): tensor
            for name, tensor in state.items()
            if re.search(rf"\.w_[kv]_{tag}\.", name)
        }
        for name, tensor in to_hf(dense | own).items():
            renamed = re.sub(r"\.([kv]_proj)\.", rf".\1_{tag}.", name)
            if renamed != name or tag == "slc":
                yield renamed, tensor.contiguous()
    for name, tensor in state.items():
        if _is_kept(name):
            yield f"model.{name.replace('.attention.', '.self_attn.')}", tensor


def _is_kept(name: str) -> bool:
    return any(f".attention.{module}." in name for module in KEPT)


def _config(dense: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """Return the config of the converted model."""
    names = (*(field.name for field in fields(BranchOptions)), "share_index")
    chosen = {name: getattr(options, name) for name in names} | asdict(options.sizes)
    kept = {name: value for name, value in dense.items() if name != "torch_dtype"}
    return {
        **kept,
        "architectures": [f"FlexNSA{name}" for name in dense["architectures"]],
        "model_type": f"flexnsa_{dense['model_type']}",
        "attn_implementation": "flexnsa_layers",
        "flexnsa": {name: value for name, value in chosen.items() if value is not None},
    }
