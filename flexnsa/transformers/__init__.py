"""NSA for models of Hugging Face transformers 5.10 or later: ``import flexnsa.transformers``.

The import registers ``attn_implementation="flexnsa"`` for every causal model with full attention, also one that is
loaded already (``model.set_attn_implementation("flexnsa")``), and makes saved configs keep that choice.
"""

from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from flexnsa.transformers.cache import FlexNSACache
from flexnsa.transformers.choice import NAME, save_choice
from flexnsa.transformers.conversion import convert, to_dense
from flexnsa.transformers.converted import LAYERS
from flexnsa.transformers.dropin import attention_forward, make_mask
from flexnsa.transformers.families import register_families
from flexnsa.transformers.marks import mark_slots
from flexnsa.transformers.options import DropInOptions, LayerOptions
from flexnsa.transformers.recall import recall
from flexnsa.transformers.refusal import refuse_models
from flexnsa.transformers.schedule import UpTraining
from flexnsa.transformers.shared_options import share_options

AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, make_mask)
AttentionMaskInterface.register(LAYERS, mark_slots)
register_families()
save_choice()
refuse_models()
share_options()

__all__ = [
    "DropInOptions",
    "FlexNSACache",
    "LayerOptions",
    "UpTraining",
    "convert",
    "recall",
    "to_dense",
]
