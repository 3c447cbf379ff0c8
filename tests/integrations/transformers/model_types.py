"""Every causal model type of the installed transformers with flexnsa attention, beside its own, in eight calls.

    python -m tests.integrations.transformers.model_types [TYPE ...]

prints a row for each type, in three minutes for all. Models are random and tiny, with layers of every kind that the
type has, and all blocks are selected. A call is ``right`` where it gives what dense attention gives, in float32 to 1e-4
of the largest logit; ``refused`` where flexnsa raises an error that names the reason; ``dense fails`` where
transformers' own attention raises; ``WRONG`` where results differ, where another error is raised, or where a layer of
full attention did not attend by NSA.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, logging
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from flexnsa.transformers.choice import NAME, towers
from flexnsa.transformers.dropin import attention_forward
from flexnsa.transformers.local_layers import FULL, layer_type
from flexnsa.transformers.unsupported import attention_modules
from tests.integrations.transformers.families import ALL, in_steps, tokens
from tests.integrations.transformers.tiny_models import tiny_model

LENGTH, CUT, PADDING, NEW_TOKENS = 40, 25, 11, 5
LARGEST_DIFFERENCE = 1e-4

Result = Callable[[Any], Tensor]


def logits(model: Any, first: int = 0, last: int = LENGTH, rows: int = 1, **options: Any) -> Tensor:
    """Return the logits of the tokens from ``first`` to ``last``, which are always the same."""
    return model(input_ids=tokens(rows, LENGTH)[:, first:last], use_cache=False, **options).logits


def padded(rows: int, side: str) -> dict[str, Any]:
    """Return a mask of which one sequence is padded."""
    mask = torch.ones(rows, LENGTH, dtype=torch.int64)
    mask[-1, slice(PADDING) if side == "left" else slice(-PADDING, None)] = 0
    return {"attention_mask": mask}


def left_padded(model: Any) -> Tensor:
    """Return the logits of a batch of which one sequence is padded on the left."""
    got = logits(model, rows=2, **padded(2, "left"))
    return torch.cat((got[0], got[1, PADDING:]))


def right_padded(model: Any) -> Tensor:
    """Return the logits of a batch of which one sequence is padded on the right."""
    got = logits(model, rows=2, **padded(2, "right"))
    return torch.cat((got[0], got[1, :-PADDING]))


def packed(rows: int) -> Result:
    """Return a call with two documents in each sequence."""
    positions = torch.cat((torch.arange(CUT), torch.arange(LENGTH - CUT)))[None].expand(rows, -1)
    return lambda model: logits(model, rows=rows, position_ids=positions)


def apart(rows: int) -> Result:
    """Return a call with the same documents one by one."""

    def call(model: Any) -> Tensor:
        parts = ((0, CUT), (CUT, LENGTH))
        positions = [torch.arange(last - first).expand(rows, -1) for first, last in parts]
        each = [logits(model, *part, rows=rows, position_ids=ids) for part, ids in zip(parts, positions, strict=True)]
        return torch.cat(each, 1)

    return call


def generated(**options: Any) -> Result:
    """Return a call of greedy ``generate`` on a batch of which one sequence is padded, with all logits."""
    greedy = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    scored = {"output_logits": True, "return_dict_in_generate": True}

    def generate(model: Any) -> Tensor:
        out = model.generate(tokens(2, LENGTH), **padded(2, "left"), **greedy, **scored, **options)
        return torch.stack([*out.logits, torch.nn.functional.one_hot(out.sequences[:, -1], out.logits[0].shape[-1])])

    return generate


CALLS: dict[str, Result] = {
    "plain": logits,
    "left padding": left_padded,
    "right padding": right_padded,
    "packed": packed(1),
    "packed rows": packed(2),
    "chunks": lambda model: in_steps(model, tokens(1, LENGTH), 17, 31, LENGTH),
    "generate": generated(),
    "static cache": generated(cache_implementation="static", disable_compile=True),
}
APART = {"packed": apart(1), "packed rows": apart(2)}
"""What packed sequences are to equal, unless the dense model mixes documents too: then what it returns."""


@torch.no_grad()
def verdicts(model_type: str) -> dict[str, str]:
    """Judge a type in every call; see the module.

    Raises:
        RuntimeError: no tiny model of the type can be built.
    """
    model = tiny_model(model_type)
    want = {name: _attempt(call, model) for name, call in CALLS.items()}
    alone = {name: _attempt(call, model) for name, call in APART.items()}
    try:
        use_flexnsa(model)
    except Exception as error:
        return dict.fromkeys(CALLS, _name_error(error))
    return {name: _judge(call, model, want[name], alone.get(name)) for name, call in CALLS.items()}


def use_flexnsa(model: Any) -> None:
    """Attend by flexnsa from now on, to all blocks."""
    model.config.flexnsa = ALL
    model.set_attn_implementation({"text_config": NAME} if "text_config" in towers(model.config) else NAME)


@contextmanager
def counted_layers() -> Iterator[set[int]]:
    """Collect the layers of full attention that attend by flexnsa."""
    layers: set[int] = set()

    def attend(module: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_full(module):
            layers.add(id(module))
        return attention_forward(module, *args, **kwargs)

    AttentionInterface.register(NAME, attend)
    try:
        yield layers
    finally:
        AttentionInterface.register(NAME, attention_forward)


def _attempt(call: Result, model: Any) -> Tensor | Exception:
    try:
        return call(deepcopy(model))
    except Exception as error:  # whatever a model of any kind raises
        return error


def _judge(call: Result, model: Any, want: Tensor | Exception, alone: Tensor | Exception | None) -> str:
    if isinstance(want, Exception):
        return f"dense fails: {want!r}"
    with counted_layers() as layers:
        got = _attempt(call, model)
    if isinstance(got, Exception):
        return _name_error(got)
    own = model.config.get_text_config()
    expected = [module for module in attention_modules(model) if module.config is own and _is_full(module)]
    if len(layers) != len(expected):
        return f"WRONG: {len(layers)} of {len(expected)} layers attended by NSA"
    same = [want] if alone is None or isinstance(alone, Exception) else [alone, want]
    scale = max(1.0, float(want.abs().max()))
    difference = min(float((got - each).abs().max()) for each in same) / scale
    return "right" if difference < LARGEST_DIFFERENCE else f"WRONG: differs by {difference:.1e}"


def _is_full(module: Any) -> bool:
    """Return whether NSA is to act on a layer."""
    return getattr(module, "is_causal", True) and layer_type(module) in FULL


def _name_error(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1].filename
    kind = "refused" if isinstance(error, ValueError) and "flexnsa" in place else "WRONG"
    return f"{kind}: {error!r}" if kind == "WRONG" else f"{kind}: {error}"


def main(model_types: list[str]) -> int:
    """Print the table of these types, or of all, and the counts; return how many are wrong."""
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    print(f"{'':26}{'  '.join(CALLS)}")
    for model_type in model_types or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            found = verdicts(model_type)
        except RuntimeError as error:
            found = dict.fromkeys(CALLS, f"not built: {error}")
        short = {name: verdict.partition(":")[0] for name, verdict in found.items()}
        counts[_summary(set(short.values()))] += 1
        print(f"{model_type:26}{'  '.join(f'{short[name]:{len(name)}}' for name in found)}", flush=True)
        for verdict in dict.fromkeys(found.values()):
            reasons.update([verdict.partition(", got")[0]] if verdict.startswith("refused") else [])
            if verdict != "right":
                print(f"{'':26}{' '.join(verdict.split())[:170]}")
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    for reason, count in reasons.most_common():
        print(f"{count:4} {reason[:160]}")
    return counts["WRONG"]


def _summary(short: set[str]) -> str:
    """Return one verdict for all calls of a type, beside those in which dense attention fails."""
    judged = short - {"dense fails"}
    return "WRONG" if "WRONG" in short else " or ".join(sorted(judged, reverse=True)) or "dense fails"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
