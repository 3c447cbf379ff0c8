"""NSA for models of Hugging Face transformers 5.10 or later: ``import flexnsa.integrations.transformers``.

Importing it registers ``attn_implementation="flexnsa"``, which any causal model with full attention takes, also one
that is loaded already (``model.set_attn_implementation("flexnsa")``), and lets configs be saved with that choice.
"""

from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from flexnsa.integrations.transformers.cache import FlexNSACache
from flexnsa.integrations.transformers.choice import NAME, save_choice
from flexnsa.integrations.transformers.conversion import convert, to_dense
from flexnsa.integrations.transformers.converted import LAYERS
from flexnsa.integrations.transformers.decoder import FlexNSAForCausalLM
from flexnsa.integrations.transformers.decoder_config import FlexNSAConfig
from flexnsa.integrations.transformers.dropin import attention_forward, make_mask
from flexnsa.integrations.transformers.families import register_families
from flexnsa.integrations.transformers.marks import mark_slots
from flexnsa.integrations.transformers.options import DropInOptions, LayerOptions
from flexnsa.integrations.transformers.schedule import UpTraining

AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, make_mask)
AttentionMaskInterface.register(LAYERS, mark_slots)
register_families()
save_choice()

__all__ = [
    "DropInOptions",
    "FlexNSACache",
    "FlexNSAConfig",
    "FlexNSAForCausalLM",
    "LayerOptions",
    "UpTraining",
    "convert",
    "to_dense",
]
