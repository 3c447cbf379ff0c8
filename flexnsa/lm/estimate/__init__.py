"""The memory of training a decoder, and the cost of one decoded token: closed forms of the configuration, no tensors.

The forms follow the code: what each layer saves for backward, and what is in memory at possible peaks.
Activations count once, however many operations read them.
"""

from flexnsa.lm.estimate.decoding import DecodingEstimate, estimate_decoding
from flexnsa.lm.estimate.parameters import parameter_count
from flexnsa.lm.estimate.training import IMPLEMENTATIONS, MemoryEstimate, estimate_training

__all__ = [
    "IMPLEMENTATIONS",
    "DecodingEstimate",
    "MemoryEstimate",
    "estimate_decoding",
    "estimate_training",
    "parameter_count",
]
