"""Training on text: data, schedule, steps, exact resumption."""

from flexnsa.training.config import TRAIN_PRESETS, TrainConfig
from flexnsa.training.data import Corpus, read_corpus
from flexnsa.training.optimizer import parameter_groups
from flexnsa.training.rows import Batch, PackedDocuments, Windows
from flexnsa.training.run import Watcher, run
from flexnsa.training.tokenizer import TextTokenizer
from flexnsa.training.trainer import StepResult, Trainer

__all__ = [
    "TRAIN_PRESETS",
    "Batch",
    "Corpus",
    "PackedDocuments",
    "StepResult",
    "TextTokenizer",
    "TrainConfig",
    "Trainer",
    "Watcher",
    "Windows",
    "parameter_groups",
    "read_corpus",
    "run",
]
