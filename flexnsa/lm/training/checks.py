"""Checks that model, text, hyper-parameters and processes fit each other."""

from __future__ import annotations

import torch

from flexnsa.lm.data.corpus import Corpus
from flexnsa.lm.model.config import DecoderConfig
from flexnsa.lm.training.config import TrainConfig
from flexnsa.parallel.chunks import check_chunks


def check_training(
    model: DecoderConfig,
    corpus: Corpus,
    config: TrainConfig,
    device: torch.device,
    world_size: int = 1,
    context_parallel: int = 1,
) -> None:
    """Check that model, text, hyper-parameters and processes fit each other.

    Of ``world_size`` processes, groups of ``context_parallel`` share the tokens of the same sequences.

    Raises:
        ValueError: the text is shorter than a sequence, the model's attention cannot be trained on the device, or
            processes cannot share the sequences of a step, in any stage, or of an evaluation, or their tokens, evenly.
    """
    corpus.require_rows(config.seq_len)
    if model.attention == "nsa" and model.impl in ("flex", "triton") and device.type == "cpu":
        lacks = "flex has no backward" if model.impl == "flex" else "triton has no kernels"
        raise ValueError(f"impl: expected 'auto' or 'sdpa' to train on a CPU, where {lacks}, got {model.impl!r}")
    check_dense_stages(model, config, context_parallel)
    if context_parallel > 1:
        _check_tokens(model, config, context_parallel)
    sharing = world_size // context_parallel
    rows = [
        ("batch_size", "batch_size * grad_accumulation", config.sequences_per_step),
        ("eval_sequences", "eval_sequences", config.eval_sequences),
        *(("stages", f"sequences of {x.seq_len} tokens", x.sequences_per_step) for x in config.by_stage().values()),
    ]
    for name, what, count in rows:
        if count % sharing:
            groups = "processes" if context_parallel == 1 else f"groups of {context_parallel} processes"
            raise ValueError(f"{name}: expected {what} to be a multiple of {sharing} {groups}, got {count}")


def check_cuda_graph(cuda_graph: bool, device: torch.device, world_size: int) -> None:
    """Check that a CUDA graph can have a step.

    Raises:
        ValueError: it cannot.
    """
    if cuda_graph and (device.type != "cuda" or world_size > 1):
        got = f"device {device.type!r} and {world_size} processes"
        raise ValueError(f"cuda_graph: expected a GPU and a single process with it, got {got}")


def check_dense_stages(model: DecoderConfig, config: TrainConfig, context_parallel: int = 1) -> None:
    """Check that a model can attend densely in the stages that are to, and has indexers for those that teach them.

    Raises:
        ValueError: it cannot.
    """
    attention, branches = model.attention, model.branches
    reasons = [
        ("dense_stages", f"with {attention=}, which is dense in all stages", attention != "nsa"),
        ("dense_stages", f"without the selected branch, of {branches=}", "slc" not in branches),
        ("dense_stages", f"with {context_parallel=}, which attends sparsely", context_parallel > 1),
        ("indexer_stages", "without index_heads, which indexers have", model.nsa.index_heads is None),
        ("indexer_stages", "without a dense stage before them", not config.dense_stages),
    ]
    for name, why, holds in reasons:
        number = getattr(config, name)
        if holds and number:
            raise ValueError(f"{name}: expected 0 {why}, got {number}")


def _check_tokens(model: DecoderConfig, config: TrainConfig, context_parallel: int) -> None:
    """Check that processes can share the tokens of sequences."""
    if model.attention != "nsa":
        raise ValueError(f"attention: expected 'nsa' with context_parallel, got {model.attention!r}")
    name = "stages" if config.stages else "seq_len"
    for stage in config.by_stage().values():
        check_chunks(name, stage.seq_len, 2 * context_parallel, model.nsa, model.branches)
