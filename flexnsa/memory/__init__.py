"""How much memory a decoder takes, and what one decoded token costs: closed forms of the configuration, no tensors.

Every term is a line below that names what is held. The forms follow the code: what each layer saves for backward, and
what stands at once in the moments that can be the largest. Activations count once however many operations read them.
"""

from flexnsa.memory.decoding import DecodingEstimate, estimate_decoding
from flexnsa.memory.training import IMPLEMENTATIONS, MemoryEstimate, estimate_training
from flexnsa.memory.weights import parameter_count

__all__ = [
    "IMPLEMENTATIONS",
    "DecodingEstimate",
    "MemoryEstimate",
    "estimate_decoding",
    "estimate_training",
    "parameter_count",
]
