"""The config of the library's own decoder, as transformers keeps configs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, ClassVar

from transformers.configuration_utils import PreTrainedConfig

from flexnsa.config import NSAConfig
from flexnsa.geometry import BRANCHES
from flexnsa.models.config import DecoderConfig


class FlexNSAConfig(PreTrainedConfig):
    """What a :class:`FlexNSAForCausalLM` is made of: the fields of :class:`flexnsa.models.DecoderConfig`.

    ``nsa`` is a dict of fields of :class:`flexnsa.NSAConfig`. Which layers are computed again in backward is not said
    here but by ``gradient_checkpointing_enable`` or Trainer.
    """

    model_type = "flexnsa"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "dim",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "num_hidden_layers": "num_layers",
    }
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    dim: int = 128
    num_layers: int = 5
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 16
    v_head_dim: int | None = None
    vocab_size: int = 256
    nsa: dict[str, int] | None = None
    compression: str = "mlp"
    shared_keys: bool = False
    begin_as_mean: bool = False
    gate: str = "sigmoid"
    branches: list[str] | tuple[str, ...] = BRANCHES
    impl: str = "auto"
    rope_base: float = 10_000.0
    recompute: list[str] | tuple[str, ...] = ()
    max_position_embeddings: int = 65_536
    use_cache: bool = True
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def decoder_config(self) -> DecoderConfig:
        """Give what the model is built from.

        Raises:
            TypeError: a field is not of its kind.
            ValueError: a field is out of range; the message names it.
        """
        if self.tie_word_embeddings:
            raise ValueError("tie_word_embeddings: expected False of the library's own decoder, got True")
        names = DECODER_FIELDS - {"nsa", "branches", "recompute"}
        return DecoderConfig(
            nsa=NSAConfig(**(self.nsa or {})),
            branches=tuple(self.branches),
            recompute=tuple(self.recompute),
            **{name: getattr(self, name) for name in names},
        )

    @classmethod
    def of(cls, config: DecoderConfig, **options: Any) -> FlexNSAConfig:
        """Describe a :class:`flexnsa.models.DecoderLM`; ``options`` are those of any transformers config.

        Raises:
            ValueError: its attention is dense.
        """
        if config.attention != "nsa":
            raise ValueError(f"attention: expected 'nsa' of a model for transformers, got {config.attention!r}")
        fields = asdict(config)
        return cls(**{name: fields[name] for name in DECODER_FIELDS}, **options)


DECODER_FIELDS = frozenset(asdict(DecoderConfig(dim=2, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2))) - {
    "attention",
    "checkpointing",
}
"""Fields of a :class:`DecoderConfig` that stand in a :class:`FlexNSAConfig` by the same names."""
