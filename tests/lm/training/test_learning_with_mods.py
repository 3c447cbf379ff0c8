"""A model with mods of the user's, on packed rows of real text."""

import math
import random
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import flexnsa
from flexnsa import mods
from flexnsa.lm import DecoderConfig, DecoderLM, read_corpus
from flexnsa.lm.data.rows import PackedDocuments
from tests.support.inputs import TINY

MODEL = DecoderConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, nsa=TINY)


def test_a_soft_capped_alibi_model_learns_from_packed_text():
    rows = PackedDocuments(read_corpus(Path(flexnsa.__file__).parent).train, seq_len=96)
    model = DecoderLM(MODEL)
    log_slopes = nn.Parameter(mods.alibi_slopes(MODEL.num_heads).log())
    optimizer = torch.optim.AdamW([*model.parameters(), log_slopes], lr=1e-2)
    losses = []
    for step in range(40):
        batch = rows.draw(random.Random(step), 4)
        score_mod = mods.chain(mods.soft_cap(20.0), mods.alibi(log_slopes.exp()))
        logits = model(batch.tokens, document_ids=batch.document_ids, score_mod=score_mod)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        loss.backward()
        assert log_slopes.grad is not None
        assert log_slopes.grad.isfinite().all()
        assert (log_slopes.grad != 0).all()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert abs(losses[0] - math.log(256)) < 0.3
    assert sum(losses[-5:]) / 5 < losses[0] - 2.0
