"""The config of the library's own decoder, as transformers keeps configs."""

from __future__ import annotations

from dataclasses import MISSING, asdict, fields, make_dataclass
from typing import Any, ClassVar

from transformers.configuration_utils import PreTrainedConfig

from flexnsa.config import NSAConfig
from flexnsa.lm.model.config import PRESETS, DecoderConfig
from flexnsa.transformers.cache import CACHE
from flexnsa.transformers.parallel import KEYS, SUMMED

_FIELDS = [field for field in fields(DecoderConfig) if field.name not in ("attention", "checkpointing")]


def _default(name: str, default: Any) -> Any:
    """Return the default of a field, that of the small preset where :class:`DecoderConfig` has none."""
    if name == "nsa":
        return None
    return getattr(PRESETS["small"], name) if default is MISSING else default


_DecoderFields: Any = make_dataclass(
    "_DecoderFields", [(field.name, Any, _default(field.name, field.default)) for field in _FIELDS], kw_only=True
)


class FlexNSAConfig(_DecoderFields, PreTrainedConfig):
    """What a :class:`FlexNSAForCausalLM` is made of: the fields of :class:`flexnsa.lm.DecoderConfig`.

    ``nsa`` is a dict of fields of :class:`flexnsa.NSAConfig`. With ``skip_logits``, training on labels gives the loss
    and no logits, of which only a chunk exists at a time. Which layers are recomputed in backward is not a field:
    ``gradient_checkpointing_enable`` or Trainer decides it.
    """

    model_type = "flexnsa"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "dim",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "num_hidden_layers": "num_layers",
    }
    keys_to_ignore_at_inference: ClassVar[list[str]] = [CACHE]

    max_position_embeddings: int = 65_536
    use_cache: bool = True
    skip_logits: bool = False
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def decoder_config(self) -> DecoderConfig:
        """Return what the model is built from.

        Raises:
            TypeError: a field is not of its kind.
            ValueError: a field is out of range; the message names it.
        """
        if self.tie_word_embeddings:
            raise ValueError("tie_word_embeddings: expected False of the library's own decoder, got True")
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in _FIELDS}
        values["nsa"] = NSAConfig(**(self.nsa or {}))
        return DecoderConfig(**values)

    @classmethod
    def of(cls, config: DecoderConfig, **options: Any) -> FlexNSAConfig:
        """Describe a :class:`flexnsa.lm.DecoderLM`; ``options`` are those of any transformers config.

        Raises:
            ValueError: its attention is dense.
        """
        if config.attention != "nsa":
            raise ValueError(f"attention: expected 'nsa' of a model for transformers, got {config.attention!r}")
        values = asdict(config)
        return cls(**{field.name: values[field.name] for field in _FIELDS}, **options)


def decoder_plan() -> dict[str, str]:
    """Return the plan that shards the layers of the library's own decoder; embedding, norms and head stay whole."""
    layer = "model.layers.*"
    heads = ["w_q", "gate.linear", *(f"w_{name}" for name in KEYS)]
    plan = {f"{layer}.attention.{name}": "colwise" for name in heads}
    plan |= {f"{layer}.attention.phi_{kind}.{name}": SUMMED for kind in "kv" for name in ("project", "out")}
    return plan | {f"{layer}.attention.w_o": "rowwise", f"{layer}.mlp.up": "colwise", f"{layer}.mlp.down": "rowwise"}
