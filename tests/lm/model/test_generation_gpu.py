"""Generation on a GPU: steps in one CUDA graph draw the tokens of eager steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from flexnsa.lm import DecoderConfig, DecoderLM, DecodingSession, Sampling
from flexnsa.lm.dense.cache import attend_cached
from tests.support.inputs import SMALL

pytestmark = pytest.mark.gpu

GREEDY = Sampling(temperature=0)
LENGTHS = (70, 1, 33, 9)
KINDS = [(attention, dtype) for attention in ("nsa", "dense") for dtype in (torch.float32, torch.bfloat16)]


def make_model(attention: str, dtype: torch.dtype = torch.float32) -> DecoderLM:
    """A model whose predictions are not all alike: large embeddings and logits."""
    torch.manual_seed(1)
    heads = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 32}
    model = DecoderLM(DecoderConfig(dim=128, num_layers=3, **heads, nsa=SMALL, attention=attention)).eval()  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        model.head.weight.mul_(20)
    return model.to("cuda", dtype)


def prompts(seed: int = 3) -> Tensor:
    return torch.randint(256, (4, 70), generator=torch.Generator().manual_seed(seed)).cuda()


def lengths() -> Tensor:
    return torch.tensor(LENGTHS, device="cuda")


@pytest.mark.parametrize(("attention", "dtype"), KINDS)
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(top_k=40, top_p=0.95)])
def test_64_tokens_of_a_graph_are_those_of_eager_steps(attention: str, dtype: torch.dtype, sampling: Sampling) -> None:
    model = make_model(attention, dtype)
    graph, eager, alone = (
        model.generate(prompts(), 64, lengths=lengths(), sampling=sampling, steps=steps, group=group)
        for steps, group in (("graph", 8), ("eager", 8), ("eager", 1))
    )
    assert graph == eager == alone
    assert min(map(len, graph)) == 64


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_512_tokens_of_a_graph_are_those_of_whole_sequences(attention: str) -> None:
    model = make_model(attention)
    cached, uncached = (
        model.generate(prompts(), 512, lengths=lengths(), sampling=GREEDY, cached=cached) for cached in (True, False)
    )
    assert cached == uncached


def test_a_seed_repeats_itself_and_another_does_not() -> None:
    session = DecodingSession(make_model("nsa"), 4, 128)
    one, again, other = (session.generate(prompts(), 30, lengths=lengths(), seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other
    assert one == session.model.generate(prompts(), 30, lengths=lengths(), seed=1)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_session_serves_other_prompts_and_longer_ones(attention: str) -> None:
    model = make_model(attention)
    session = DecodingSession(model, 4, 80, sampling=GREEDY)
    for seed, count in ((1, 11), (2, 9), (3, 100)):  # the last doubles the room twice
        rows = session.generate(prompts(seed), count, lengths=lengths())
        assert rows == model.generate(prompts(seed), count, lengths=lengths(), sampling=GREEDY, steps="eager")
    assert session.max_seq_len == 320


def test_a_session_that_grows_between_two_steps_goes_on() -> None:
    model = make_model("nsa")
    expected = torch.tensor(model.generate(prompts(), 20, lengths=lengths(), steps="eager"))
    session = DecodingSession(model, 4, 75)
    drawn = [session.prefill(prompts(), lengths()), *(session.step(count) for count in (4, 8, 7))]
    assert torch.equal(torch.cat([tokens for tokens, _ in drawn], dim=1), expected)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_2000_steps_allocate_nothing_and_compile_nothing(attention: str) -> None:
    session = DecodingSession(make_model(attention), 4, 70 + 2010)
    session.prefill(prompts(), lengths())
    session.step(8)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(250):
            session.step(8)
    assert torch.cuda.memory_allocated() == before


def test_rows_end_at_stops_within_a_group() -> None:
    model = make_model("nsa")
    free = model.generate(prompts(), 30, lengths=lengths(), sampling=GREEDY)
    stops = [tuple(free[0][10:13]), free[2][5]]
    options = {"lengths": lengths(), "sampling": GREEDY, "stop_tokens": stops}
    assert model.generate(prompts(), 30, **options) == model.generate(prompts(), 30, group=1, steps="eager", **options)


def test_a_prediction_that_is_no_number_is_told() -> None:
    model = make_model("nsa")
    with torch.no_grad():
        model.head.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match=r"logits: expected finite numbers, got \[nan"):
        model.generate(prompts(), 20, lengths=lengths())


@pytest.mark.parametrize("tokens", [(0, 4, 299, 64), (77,)], ids=len)
@pytest.mark.parametrize("groups", [1, 6, 8])
def test_one_dense_query_a_row_is_attended_to_by_flash_as_by_a_mask(groups: int, tokens: tuple[int, ...]) -> None:
    position = torch.tensor(tokens, device="cuda")[:, None]
    k, v = torch.randn(2, len(tokens), 2, 301, 64, device="cuda", dtype=torch.bfloat16).unbind()
    q = torch.randn(len(tokens), 2 * groups, 1, 64, device="cuda", dtype=torch.bfloat16)
    visible = (torch.arange(301, device="cuda") <= position)[:, None, None]
    exact, plain = (
        F.scaled_dot_product_attention(
            q.to(dtype), *(x.to(dtype).repeat_interleave(groups, dim=1) for x in (k, v)), attn_mask=visible
        )
        for dtype in (torch.float64, torch.bfloat16)
    )
    error, allowed = ((x.double() - exact).norm() for x in (attend_cached(q, k, v, position), plain))
    assert error <= 2 * allowed
