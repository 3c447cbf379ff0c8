"""Overrides of others, which torchtitan activates besides ours."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import derive, override
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear


class Halved(FeedForward):
    """A feed-forward layer of half the output."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        pass

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


class LowBits(Linear):
    """A projection as quantisation would make it."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass


class Scaled(GQAttention):
    """Attention of a model that does something else besides."""

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        pass


class Counting(MetricsProcessor):
    """Metrics of a project of its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass


@override(target=FeedForward.Config, description="halved")
def halve(config: FeedForward.Config) -> Halved.Config:
    return derive(config, Halved.Config)


@override(target=GQAttention.Config, fqns=["*layers.0.attention"], description="scaled")
def scale(config: GQAttention.Config) -> Scaled.Config:
    return derive(config, Scaled.Config)
