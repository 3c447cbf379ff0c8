"""A small decoder LM with NSA or dense attention, and the presets used across the benchmarks."""

from flexnsa.models.config import PRESETS, DecoderConfig, preset
from flexnsa.models.decoder import DecoderLM
from flexnsa.models.dense import DenseAttention
from flexnsa.models.sampling import generate

__all__ = ["PRESETS", "DecoderConfig", "DecoderLM", "DenseAttention", "generate", "preset"]
