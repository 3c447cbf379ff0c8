"""NSA for models of Hugging Face transformers 5.23 or later: ``import flexnsa.transformers``.

The import registers ``attn_implementation="flexnsa"`` for every causal model with full attention, also one that is
loaded already (``model.set_attn_implementation("flexnsa")``), and makes saved configs keep that choice.
"""

from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from flexnsa.functional.indices import record_indices, replay_indices
from flexnsa.transformers.cache import FlexNSACache
from flexnsa.transformers.choice import LAYERS, NAME, keep_choice
from flexnsa.transformers.classes import register_classes
from flexnsa.transformers.conversion import convert, to_dense
from flexnsa.transformers.converted import attend_in_dense_layers
from flexnsa.transformers.dropin import attention_forward, make_mask
from flexnsa.transformers.index_teaching import TAUGHT, IndexTeaching, teach_indexers
from flexnsa.transformers.local_layers import make_layer_mask
from flexnsa.transformers.options import DropInOptions, LayerOptions
from flexnsa.transformers.schedule import UpTraining
from flexnsa.transformers.taught_layers import attend_taught
from flexnsa.transformers.teaching import TeachSelection, recall
from flexnsa.transformers.unsupported import refuse_models

AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, make_mask)
AttentionInterface.register(LAYERS, attend_in_dense_layers)
AttentionMaskInterface.register(LAYERS, make_layer_mask)
for plain, taught in TAUGHT.items():
    AttentionInterface.register(taught, attend_taught)
    AttentionMaskInterface.register(taught, ALL_MASK_ATTENTION_FUNCTIONS[plain])
register_classes()
keep_choice()
refuse_models()

__all__ = [
    "DropInOptions",
    "FlexNSACache",
    "IndexTeaching",
    "LayerOptions",
    "TeachSelection",
    "UpTraining",
    "convert",
    "recall",
    "record_indices",
    "replay_indices",
    "teach_indexers",
    "to_dense",
]
