"""A small decoder LM with NSA or dense attention: its presets, its training on text, and generation from it."""

from flexnsa.lm.data.corpus import Corpus, read_corpus
from flexnsa.lm.data.rows import Batch, PackedDocuments, Windows
from flexnsa.lm.data.tokenizer import TextTokenizer
from flexnsa.lm.dense.attention import DenseAttention
from flexnsa.lm.dense.cache import DenseCache
from flexnsa.lm.generation.generate import generate, generate_tokens
from flexnsa.lm.generation.sampling import Sampling
from flexnsa.lm.generation.session import DecodingSession
from flexnsa.lm.model.config import PRESETS, DecoderConfig, preset
from flexnsa.lm.model.decoder import DecoderLM
from flexnsa.lm.model.loss import linear_cross_entropy
from flexnsa.lm.training.config import TRAIN_PRESETS, TrainConfig
from flexnsa.lm.training.run import Watcher, run
from flexnsa.lm.training.trainer import StepResult, Trainer
from flexnsa.optim import parameter_groups

__all__ = [
    "PRESETS",
    "TRAIN_PRESETS",
    "Batch",
    "Corpus",
    "DecoderConfig",
    "DecoderLM",
    "DecodingSession",
    "DenseAttention",
    "DenseCache",
    "PackedDocuments",
    "Sampling",
    "StepResult",
    "TextTokenizer",
    "TrainConfig",
    "Trainer",
    "Watcher",
    "Windows",
    "generate",
    "generate_tokens",
    "linear_cross_entropy",
    "parameter_groups",
    "preset",
    "read_corpus",
    "run",
]
