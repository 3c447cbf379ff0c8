"""Sizes of the recall experiment: a model, and the rows from which it learns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.harness.setting import TINY_SIZES
from benchmarks.learning.plan import Plan, Stage
from benchmarks.learning.tasks import Vocabulary
from benchmarks.learning.variants import ABLATIONS, ON_CPU, VARIANTS, Variant
from flexnsa.lm import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model and how it is trained."""

    model: DecoderConfig
    plan: Plan
    variants: Mapping[str, Variant] = field(default_factory=lambda: VARIANTS)


def _model(vocabulary: Vocabulary, **sizes: Any) -> DecoderConfig:
    return DecoderConfig(num_layers=2, vocab_size=vocabulary.size, rope_base=1e8, **sizes)


_MANY = Vocabulary(keys=512, values=128, fillers=128)
_FEW = Vocabulary(keys=64, values=32, fillers=16)
_NSA = replace(TINY_SIZES, num_init_blocks=0, num_local_blocks=1, window_size=16)

SIZES = {
    "gpu": Size(
        model=_model(
            _MANY,
            dim=128,
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            nsa=replace(_NSA, num_selected_blocks=16),
        ),
        plan=Plan(
            vocabulary=_MANY,
            stages=(
                Stage(seq_len=16, rows=512, pairs=3, steps=300),
                Stage(seq_len=32, rows=256, pairs=4, steps=700, selected_tokens=16, window_size=4),
                Stage(seq_len=64, rows=128, pairs=8, steps=200, selected_tokens=32, window_size=4),
                Stage(seq_len=128, rows=64, pairs=16, steps=300, selected_tokens=32, window_size=8),
                Stage(seq_len=256, rows=64, pairs=32, steps=300, selected_tokens=64),
                Stage(seq_len=512, rows=32, pairs=64, steps=400, selected_tokens=128),
                Stage(seq_len=1024, rows=16, pairs=128, steps=400, selected_tokens=128),
                Stage(seq_len=2048, rows=16, pairs=256, steps=400),
                Stage(seq_len=4096, rows=8, pairs=256, steps=600),
                Stage(seq_len=8192, rows=4, pairs=256, steps=200),
                Stage(seq_len=16384, rows=2, pairs=256, steps=200),
            ),
            lr=2e-3,
            fall_steps=600,
            plain_up_to=128,
            map_lengths=(1024, 2048, 4096, 8192, 16384, 32768, 65536),
            map_pairs=128,
        ),
    ),
    "cpu": Size(
        model=_model(
            _FEW,
            dim=64,
            num_heads=2,
            num_kv_heads=2,
            head_dim=32,
            nsa=_NSA,
        ),
        plan=Plan(
            vocabulary=_FEW,
            stages=(
                Stage(seq_len=16, rows=128, pairs=3, steps=300),
                Stage(seq_len=32, rows=64, pairs=4, steps=300, selected_tokens=16, window_size=4),
                Stage(seq_len=64, rows=32, pairs=8, steps=200, selected_tokens=16, window_size=4),
                Stage(seq_len=128, rows=16, pairs=16, steps=200, selected_tokens=32),
                Stage(seq_len=256, rows=8, pairs=32, steps=300),
            ),
            lr=2e-3,
            plain_up_to=256,
            map_lengths=(128, 256, 512, 1024),
            map_pairs=16,
            map_tokens=2**12,
        ),
        variants=ON_CPU,
    ),
}
SIZES["ablation"] = Size(
    model=SIZES["gpu"].model,
    plan=replace(
        SIZES["gpu"].plan,
        stages=tuple(stage for stage in SIZES["gpu"].plan.stages if stage.seq_len <= 2048),
        map_lengths=(512, 1024, 2048, 4096),
    ),
    variants=ABLATIONS,
)
SIZES["smoke"] = Size(
    model=SIZES["cpu"].model,
    plan=replace(
        SIZES["cpu"].plan,
        stages=(
            Stage(seq_len=32, rows=4, pairs=3, steps=2, selected_tokens=16, window_size=4),
            Stage(seq_len=64, rows=1, pairs=4, steps=1),
        ),
        eval_every=2,
        plain_up_to=32,
        map_lengths=(64,),
        map_pairs=2,
    ),
)
