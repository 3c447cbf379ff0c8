"""The compressed branch as interleaved plain attention: by torch's flash kernel on a CPU, by cuDNN on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flexnsa import NativeSparseAttention, NSAConfig
from flexnsa.attention import reference
from flexnsa.attention.cudnn import compressed as cudnn
from flexnsa.attention.implementations import CUDNN
from flexnsa.attention.seam import Call, CompressedBranch, given
from flexnsa.geometry import num_compressed
from flexnsa.layers.projection import is_plain, project, project_together
from flexnsa.positions import Positions
from tests.support.comparison import assert_as_exact_as_plain
from tests.support.inputs import SMALL

NO_OVERLAP = NSAConfig(compress_block_size=4, compress_stride=4, select_block_size=16)
CASES = [
    pytest.param(SMALL, 11, 2, 1, id="one run, and no more"),
    pytest.param(SMALL, 13, 2, 1, id="one run and two tokens"),
    pytest.param(SMALL, 75, 6, 2, id="whole runs"),
    pytest.param(SMALL, 77, 6, 2, id="two tokens over"),
    pytest.param(SMALL, 64, 4, 4, id="a head each"),
    pytest.param(NSAConfig(), 131, 16, 1, id="the paper's blocks"),
    pytest.param(NO_OVERLAP, 50, 4, 2, id="blocks side by side"),
]


def everything(branch: CompressedBranch, tensors: dict[str, Tensor], call: Call) -> dict[str, Tensor]:
    """Output, log-sum-exp and the gradients of both; tokens that see nothing have no gradient of their lse."""
    q, k, v, *upstream = (x.detach().clone(memory_format=torch.preserve_format) for x in tensors.values())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse, _ = branch(q, k, v, call)
    lse = given(lse)
    value = (out * upstream[0]).sum() + (lse.masked_fill(lse == -torch.inf, 0) * upstream[1]).sum()
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *torch.autograd.grad(value, leaves)), strict=True))


def draw(config: NSAConfig, seq_len: int, heads: int, kv_heads: int, device: str = "cpu") -> dict[str, Tensor]:
    """Queries in the order of a projection, ``(B, S, H, D)``; in fp32."""
    generator = torch.Generator().manual_seed(0)
    length = num_compressed(seq_len, config)
    shapes = {"q": (heads, seq_len), "k": (kv_heads, length), "v": (kv_heads, length), "upstream": (heads, seq_len)}
    drawn = {
        name: torch.randn(2, length, heads, 16, generator=generator).transpose(1, 2)
        for name, (heads, length) in shapes.items()
    }
    drawn["upstream of lse"] = torch.randn(2, heads, seq_len, generator=generator)
    return {name: x.to(device) for name, x in drawn.items()}


@pytest.mark.parametrize(("config", "seq_len", "heads", "kv_heads"), CASES)
def test_interleaved_causal_attention_is_the_compressed_branch(
    config: NSAConfig, seq_len: int, heads: int, kv_heads: int
) -> None:
    tensors, call = draw(config, seq_len, heads, kv_heads), Call(config, 0.25)
    doubles = {name: x.double() for name, x in tensors.items()}
    assert_as_exact_as_plain(
        everything(cudnn.compressed, tensors, call),
        everything(reference.compressed, tensors, call),
        everything(reference.compressed, doubles, call),
        factor=3,
    )


def test_queries_that_are_no_rows_give_what_rows_give() -> None:
    tensors, call = draw(SMALL, 77, 6, 2), Call(SMALL, 0.25)
    columns = {name: x.mT.contiguous().mT for name, x in tensors.items()}
    expected = everything(cudnn.compressed, tensors, call)
    for name, x in everything(cudnn.compressed, columns, call).items():
        torch.testing.assert_close(x, expected[name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("config", "seq_len", "heads", "kv_heads"), CASES[2:])  # cuDNN takes no single query and key
def test_cudnn_on_a_gpu(config: NSAConfig, seq_len: int, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    tensors, call = draw(config, seq_len, heads, kv_heads, "cuda"), Call(config, 0.25)
    rounded = {name: x.to(dtype) for name, x in tensors.items()}
    assert_as_exact_as_plain(
        everything(cudnn.compressed, rounded, call),
        everything(reference.compressed, rounded, call),
        everything(reference.compressed, {name: x.double() for name, x in rounded.items()}, call),
        factor=3,
    )


def test_only_a_gpu_takes_it_and_only_what_it_knows() -> None:
    tensors = draw(SMALL, 77, 4, 2)
    assert not cudnn.fits(tensors["q"].bfloat16(), tensors["v"].bfloat16(), Call(SMALL, 0.25))


@pytest.mark.gpu
def test_gradients_do_not_depend_on_where_those_of_the_output_lie() -> None:
    tensors = {name: x.bfloat16() for name, x in draw(NSAConfig(), 257, 4, 2, "cuda").items()}
    call = Call(NSAConfig(), 0.25)
    expected = everything(cudnn.compressed, tensors, call)
    upstream = tensors["upstream"]
    for other in (upstream.contiguous(), upstream.mT.contiguous().mT, upstream.flip(2).flip(2)):
        got = everything(cudnn.compressed, tensors | {"upstream": other}, call)
        for name, x in expected.items():
            torch.testing.assert_close(got[name], x, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.gpu
def test_a_compiled_call_and_an_eager_one_agree() -> None:
    call = Call(NSAConfig(), 0.125)
    shapes = {"q": (2, 4, cudnn.LEAST_LENGTH + 5, 64), "k": (2, 2, 1023, 64), "v": (2, 2, 1023, 64)}
    q, k, v = (torch.randn(x, dtype=torch.bfloat16, device="cuda", requires_grad=True) for x in shapes.values())

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return CUDNN.compressed(q * 1.0, k * 1.0, v * 1.0, call).out

    upstream = torch.randn(shapes["q"], dtype=torch.bfloat16, device="cuda")
    results = [
        (out := run(q, k, v), *torch.autograd.grad(out, (q, k, v), upstream))
        for run in (attend, torch.compile(attend, fullgraph=True, dynamic=True))
    ]
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_what_is_left_to_flex() -> None:
    length = cudnn.LEAST_LENGTH
    q, v = (torch.empty(1, 2, x, 64, dtype=torch.bfloat16, device="cuda") for x in (length, length // 4))
    call = Call(SMALL, 0.25)
    assert cudnn.fits(q, v, call)
    assert not cudnn.fits(q.float(), v.float(), call)
    assert not cudnn.fits(q, v[..., :32], call)
    assert not cudnn.fits(q[:, :, 1:], v, call)
    assert not cudnn.fits(q, v, replace(call, positions=Positions.of_sequence(length, q.device)))
    assert not cudnn.fits(q, v, replace(call, score_mod=lambda score, *_: score))
    torch.use_deterministic_algorithms(True)
    try:
        assert not cudnn.fits(q, v, call)
    finally:
        torch.use_deterministic_algorithms(False)


def test_one_product_gives_what_many_give_and_leaves_hooks_alone() -> None:
    layer = NativeSparseAttention(32, 6, 2, 8, config=SMALL)
    linears = [module for module in layer.modules() if isinstance(module, torch.nn.Linear)][:8]
    assert len(linears) == 8
    x = torch.randn(2, 10, 32)
    together = project_together(x, [linear.weight for linear in linears])
    for got, linear in zip(together, linears, strict=True):
        torch.testing.assert_close(got, linear(x), rtol=1e-5, atol=1e-6)
        assert got.stride(1) % 64 == 0
    seen: list[object] = []
    linears[1].register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    assert project(x, linears)[1] is seen[0]


def plain() -> torch.nn.Linear:
    return torch.nn.Linear(4, 4, bias=False)


def hooked() -> torch.nn.Linear:
    linear = plain()
    linear.register_forward_hook(lambda *_: None)
    return linear


def patched() -> torch.nn.Linear:
    linear = plain()
    linear.forward = torch.relu
    return linear


class Packed(torch.Tensor):
    """Numbers that only the product itself knows how to read, as of a quantized weight."""


def packed() -> torch.nn.Linear:
    linear = plain()
    linear.weight = torch.nn.Parameter(linear.weight.detach().as_subclass(Packed))
    return linear


@pytest.mark.parametrize("make", [hooked, patched, packed, lambda: torch.nn.Linear(4, 4)])
def test_only_plain_maps_share_a_product(make: Callable[[], torch.nn.Linear]) -> None:
    assert is_plain(plain())
    assert not is_plain(make())
