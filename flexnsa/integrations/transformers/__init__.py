"""NSA for models of Hugging Face transformers 5.10 or later: ``import flexnsa.integrations.transformers``.

Importing it registers ``attn_implementation="flexnsa"``, which any causal model with full attention takes, also one
that is loaded already (``model.set_attn_implementation("flexnsa")``).
"""

from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from flexnsa.integrations.transformers.dropin import NAME, attention_forward, make_mask
from flexnsa.integrations.transformers.options import DropInOptions

AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, make_mask)

__all__ = ["DropInOptions"]
