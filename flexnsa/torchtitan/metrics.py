"""The metrics of a run with NSA layers: they pass the step and the ranks on to the layers, and log their losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import dist_sum, dist_sum_tensor
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_type

from flexnsa.parallel.shared_rows import SharingRanks
from flexnsa.torchtitan.attention import NSAttention
from flexnsa.torchtitan.options import Options
from flexnsa.torchtitan.teaching import Teaching


class NSAMetrics(MetricsProcessor):
    """As :class:`MetricsProcessor`, with the selection loss.

    torchtitan passes neither the step nor the ranks that share tokens to a layer. It passes both to its metrics.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """As of :class:`MetricsProcessor`, with the options of the override."""

        options: Options

    def __init__(
        self, config: Config, *, parallel_dims: ParallelDims, config_dict: dict[str, Any], **others: Any
    ) -> None:
        super().__init__(config, parallel_dims=parallel_dims, config_dict=config_dict, **others)
        self.has_indexers = config.options.has_indexer
        self.sequences = _sequences_per_step(config_dict["training"], parallel_dims)
        self.step: Tensor | None = None
        self.taught: list[Teaching] = []

    def should_log(self, step: int) -> bool:
        """Return whether to log this step; the trainer asks at the beginning of each."""
        self.step = self._begin() if self.step is None else self.step
        self.step.fill_(step)
        return super().should_log(step)

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Log the metrics of a step, with the selection loss of all layers since the last time."""
        if self.has_indexers:
            loss = self._selection_loss()
            extra_metrics = {**(extra_metrics or {}), "loss_metrics/selection_loss": loss}
            color = self.color
            logger.info(f"{color.red}step: {step:2}  {color.green}selection loss: {loss:8.5f}{color.reset}")
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)

    def _begin(self) -> Tensor:
        """Give the layers what they have to know of the run, and return the step that they all read."""
        modules = (module for part in self.model_parts or () for module in part.modules())
        layers = [module for module in modules if isinstance(module, NSAttention)]
        step = torch.zeros((), dtype=torch.int64, device=device_type)
        mesh = self.parallel_dims.get_optional_mesh("cp")
        ranks = None if mesh is None else SharingRanks.of(mesh)
        for layer in layers:
            layer.ranks = ranks
            layer.passed = layer.passed if layer.leader is None else layers[layer.leader].passed
            if self.has_indexers:
                heads = layer.n_kv_heads * self.parallel_dims.tp
                layer.teaching = Teaching(layer.options, num_heads=heads, sequences=self.sequences, step=step)
                self.taught.append(layer.teaching)
        return step

    def _selection_loss(self) -> float:
        """Return the sum of all layers' mean divergences since the last time, over all ranks."""
        loss = torch.zeros((), device=device_type)
        if self.taught:  # a pipeline stage may have no such layer
            seen = torch.stack([teaching.take() for teaching in self.taught])
            for axis in ("batch", "tp"):
                seen = dist_sum_tensor(seen, self.parallel_dims.get_optional_mesh(axis))
            total, weight = seen.unbind(1)
            loss = (total / weight.where(weight > 0, 1)).sum()
        return dist_sum(loss, self.parallel_dims.get_optional_mesh("pp"))


def _sequences_per_step(training: dict[str, Any], parallel_dims: ParallelDims) -> int:
    """Count the sequences that all ranks learn from in a step."""
    if training["global_batch_size"] >= 0:
        return training["global_batch_size"]
    return training["local_batch_size"] * parallel_dims.dp_replicate * parallel_dims.dp_shard
