"""A small decoder LM with NSA or dense attention, and the presets used across the benchmarks."""

from flexnsa.models.config import PRESETS, DecoderConfig, preset
from flexnsa.models.decoder import DecoderLM
from flexnsa.models.dense import DenseAttention
from flexnsa.models.dense_cache import DenseCache
from flexnsa.models.generation import generate, generate_tokens
from flexnsa.models.loss import linear_cross_entropy
from flexnsa.models.sampling import Sampling
from flexnsa.models.session import DecodingSession

__all__ = [
    "PRESETS",
    "DecoderConfig",
    "DecoderLM",
    "DecodingSession",
    "DenseAttention",
    "DenseCache",
    "Sampling",
    "generate",
    "generate_tokens",
    "linear_cross_entropy",
    "preset",
]
