"""Two steps of a small model, four in stages, on as many ranks as there are."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from flexnsa import MeanCompressor, MLPCompressor, NativeSparseAttention
from flexnsa.lm import Corpus, DecoderConfig, DecoderLM, StepResult, TrainConfig, Trainer
from flexnsa.lm.parallel import REDUCE_DTYPES, Ranks, joined_ranks
from flexnsa.lm.training.checkpoint import checkpoint_path, load_checkpoint, save_checkpoint
from tests.support.inputs import TINY

CPU = torch.device("cpu")
MODEL = DecoderConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, nsa=TINY)
TRAINING = TrainConfig(steps=4, batch_size=4, seq_len=48, warmup_steps=1, eval_sequences=4, clip=0.5)
STAGES: dict[str, Any] = {"steps": 4, "stages": ((12, 0.5), (24, 0.25), (48, 0.25)), "dense_stages": 1}
WARMED = STAGES | {"stages": ((24, 0.25), (48, 0.5), (48, 0.25)), "indexer_stages": 1}
WARMED |= {"nsa": replace(TINY, index_heads=2), "pack": True, "grad_accumulation": 2}
"""A step is dense, then indexers learn alone for two."""

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "packed": {"pack": True},
    "accumulated": {"batch_size": 1, "grad_accumulation": 8, "pack": True},
    "checkpointed": {"checkpointing": True, "pack": True},
    "stages": STAGES | {"nsa": replace(TINY, index_heads=2), "pack": True, "grad_accumulation": 2},
    "indexers alone": WARMED,
    "shared keys": {"shared_keys": True},
    "an indexer": {"nsa": replace(TINY, index_heads=1, index_block_size=2, index_stride=2), "pack": True},
    "a shared index": {
        "nsa": replace(TINY, num_selected_blocks=5, index_heads=1),
        "share_index": 2,
        "pack": True,
        "grad_accumulation": 2,
    },
    "an indexer, accumulated": {"nsa": replace(TINY, index_heads=2), "batch_size": 1, "grad_accumulation": 8},
    # A row a pass however many ranks: in bf16, a product of more rows is rounded another way.
    "mixed precision": {"precision": "bf16", "batch_size": 1, "grad_accumulation": 4},
}
ON_FOUR = ("packed", "accumulated", "stages")
"""The cases that four ranks train in, too."""
ON_TWO: dict[str, dict[str, Any]] = {
    "summed in bf16": {"reduce_dtype": "bf16"},
    "an indexer, compiled and checkpointed": {
        "nsa": replace(TINY, index_heads=1, index_block_size=2, index_stride=2),
        "compiled": (0,),
        "checkpointing": True,
    },
}
COMPILED = "an indexer, compiled and checkpointed"
"""What rank 0 of two in ddp compiles beside one that does not; of fsdp2, ranks that share tokens compile together."""


def corpus() -> Corpus:
    """Return random letters in paragraphs, most of a single letter and some longer than a row."""
    draws = random.Random(1)
    paragraphs = ("".join(draws.choices("abcdefgh", k=draws.choice([1, 1, 1, 60]))) for _ in range(400))
    text = torch.tensor(list("\n\n".join(paragraphs).encode()), dtype=torch.uint8)
    return Corpus(text, text[:2000].clone())


def share_keys(model: DecoderLM) -> DecoderLM:
    """Have the compressed branch compress the keys of the selected one, in every layer."""
    for layer in model.modules():
        if isinstance(layer, NativeSparseAttention):
            layer.w_k_cmp = layer.w_k_slc
    return model


def make_trainer(
    ranks: Ranks, *, shared_keys: bool = False, compiled: Sequence[int] = (), reduce_dtype: str = "fp32", **fields: Any
) -> Trainer:
    """Build a trainer from fields of its two configs; ``compiled`` are the ranks that compile its layers."""
    of_model = ("checkpointing", "dim", "gate", "nsa", "share_index")
    model = replace(MODEL, **{name: fields.pop(name) for name in of_model if name in fields})
    config = replace(TRAINING, **fields)
    if reduce_dtype != "fp32":
        ranks = type(ranks)(CPU, REDUCE_DTYPES[reduce_dtype])  # pyright: ignore[reportCallIssue]

    def make() -> DecoderLM:
        torch.manual_seed(config.seed)
        made = DecoderLM(model)
        return share_keys(made) if shared_keys else made

    trainer = Trainer(ranks.build(make, CPU), corpus(), config, ranks=ranks)
    if ranks.rank in compiled:
        counters.clear()
        torch.compiler.reset()
        ranks.compile(trainer.model, backend="aot_eager")
    return trainer


def train(ranks: Ranks, options: dict[str, Any]) -> dict[str, Any]:
    """Return the records of the steps, the validation loss, and the parameters before and after."""
    trainer = make_trainer(ranks, **{**options, "steps": options.get("steps", 2)})
    before = parameters(trainer)
    without: set[tuple[int, str]] = set()

    def look(*_: object) -> None:
        for name, parameter in trainer.parameters.items():
            if parameter.grad is None or not local(parameter.grad).any():
                without.add((trainer.step, name))

    trainer.optimizer.register_step_pre_hook(look)
    steps = [trainer.train_step() for _ in range(trainer.config.steps)]
    bits = trainer.validation_bits_per_byte()
    graphs = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return {
        "steps": steps,
        "bits": bits,
        "before": before,
        "after": parameters(trainer),
        "without gradient": {name for _, name in set.intersection(*ranks.gather(without))},
        "graphs": graphs,
    }


def meet_a_nan(ranks: Ranks) -> list[tuple[str, bool]]:
    """Have the last rank alone meet a NaN; return the error of each rank, and whether its parameters are unchanged."""
    trainer = make_trainer(ranks)
    trainer.train_step()
    before, loss = parameters(trainer), trainer.loss
    if ranks.rank == ranks.world_size - 1:
        trainer.loss = lambda batch, selection=None: loss(batch, selection) * torch.nan
    try:
        trainer.train_step()
        said = ""
    except FloatingPointError as error:
        said = str(error)
    after = parameters(trainer)
    everyone: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(everyone, (said, all(torch.equal(before[name], after[name]) for name in before)))
    return everyone


def go_on(ranks: Ranks, folder: Path, **options: Any) -> list[list[StepResult]]:
    """Return steps 2 and 3, taken without a stop and by a trainer that resumes from a checkpoint."""
    trainers = [make_trainer(ranks, **{"dim": 64, "pack": True, **options}) for _ in range(2)]
    for _ in range(2):
        trainers[0].train_step()
    path = checkpoint_path(folder, trainers[0])
    save_checkpoint(path, trainers[0])
    load_checkpoint(path, trainers[1])
    return [[trainer.train_step() for _ in range(2)] for trainer in trainers]


def build_with_buffers(ranks: Ranks) -> list[dict[str, torch.Tensor]]:
    """Return the buffers that each rank has of a model whose first layer draws two, one of them for no checkpoint."""

    def make() -> DecoderLM:
        made = DecoderLM(MODEL)
        made.layers[0].register_buffer("kept", torch.arange(5) + 10 * ranks.rank)
        made.layers[0].register_buffer("not_kept", torch.full((2, 3), 0.5 + ranks.rank), persistent=False)
        return made

    return ranks.gather(dict(ranks.build(make, CPU).named_buffers()))


def build_tied(ranks: Ranks) -> list[bool]:
    """Return for each rank whether a head that shares the embedding's weight still does, as drawn on rank 0."""

    def make() -> DecoderLM:
        torch.manual_seed(ranks.rank)
        made = DecoderLM(MODEL)
        made.head.weight = made.embedding.weight
        return made

    torch.manual_seed(0)
    drawn, built = DecoderLM(MODEL).embedding.weight, ranks.build(make, CPU)
    return ranks.gather(all(torch.equal(whole(one.weight), drawn) for one in (built.head, built.embedding)))


def generate_from_shards(ranks: Ranks) -> list[bool]:
    """Return for each rank whether a sharded model, which has not run yet, continues prompts as a whole one does."""

    def make() -> DecoderLM:
        torch.manual_seed(0)
        return DecoderLM(MODEL)

    prompts = torch.arange(20).view(2, 10)
    return ranks.gather(ranks.build(make, CPU).generate(prompts, 5) == make().generate(prompts, 5))


def reset_on_meta(ranks: Ranks) -> list[list[bool]]:
    """Return for each rank the compressors that start as the mean in a model that was sharded before its values."""
    with torch.device("meta"):
        made = DecoderLM(replace(MODEL, begin_as_mean=True))
    fully_shard(made, mesh=init_device_mesh("cpu", (ranks.world_size,)))
    made.to_empty(device="cpu").reset_parameters()
    keys, found = torch.randn(1, 2, 40, 8), []
    for name, compressor in made.named_modules():
        if name.rpartition(".")[2] in ("phi_k", "phi_v"):
            alone = MLPCompressor(2, 8, config=TINY)
            alone.load_state_dict({name: whole(x) for name, x in compressor.state_dict().items()})
            found.append(torch.allclose(alone(keys), MeanCompressor(2, 8, config=TINY)(keys), atol=1e-5))
    return ranks.gather(found)


@contextmanager
def saved_results(file: Path, parallel: str = "ddp") -> Iterator[tuple[Ranks, dict[Any, Any]]]:
    """Join the ranks, and save in the end what rank 0 has put into the results."""
    results: dict[Any, Any] = {}
    with joined_ranks(parallel, CPU) as ranks:
        yield ranks, results
        if ranks.rank == 0:
            torch.save(results, file)


def train_cases(file: Path, parallel: str) -> None:
    """Train in each way, resume from a checkpoint, and meet a NaN; save the results of rank 0."""
    with saved_results(file, parallel) as (ranks, results):
        names = (*CASES, "summed in bf16") if ranks.world_size == 2 else ON_FOUR
        names += (COMPILED,) if parallel == "ddp" else ()
        results |= {name: train(ranks, (CASES | ON_TWO)[name]) for name in names}
        ways: list[dict[str, Any]] = [{}, STAGES, WARMED | {"reduce_dtype": "bf16"}]
        ways = ways if ranks.world_size == 2 else ways[1:2]
        results["going on"] = [go_on(ranks, file.parent, **options) for options in ways]
        results["NaN"] = meet_a_nan(ranks)
        if parallel == "fsdp2":
            results["buffers"], results["tied"] = build_with_buffers(ranks), build_tied(ranks)
            results["reset on meta"], results["generated"] = reset_on_meta(ranks), generate_from_shards(ranks)


def parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return copies of all parameters, whole."""
    return {name: whole(value).clone() for name, value in trainer.model.state_dict().items()}


def local(value: torch.Tensor) -> torch.Tensor:
    """Return the part of this rank of what is sharded."""
    return value.to_local() if isinstance(value, DTensor) else value


def whole(value: torch.Tensor) -> torch.Tensor:
    """Gather what is sharded."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def messages(calls: dict[str, Callable[[], object]]) -> dict[str, str]:
    """Return the errors that calls raise for their arguments, by name."""
    said = {}
    for name, call in calls.items():
        try:
            call()
        except (TypeError, ValueError) as error:
            said[name] = str(error)
    return said
