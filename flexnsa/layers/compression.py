"""Compression: one key (or value) for every block of ``l`` tokens, a new block every ``d`` (section 3.3.1, Eq. 7).

All compressors map ``(B, Hkv, S, D)`` to ``(B, Hkv, N, D)``, each head separately with the same weights. ``d`` divides
``l``, so a block consists of ``l / d`` segments. A linear projection of overlapping blocks is then a sum of projections
of segments. Each is computed once, and the blocks are never stored.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexnsa.attention.step import CompressorWeights
from flexnsa.config import NSAConfig, num_compressed
from flexnsa.layers.projection import by_rows, has_no_hooks, is_dense, is_plain, multiply, weight_of
from flexnsa.layers.sharding import whole, write
from flexnsa.primitives import (
    check_integers,
    check_like_weight,
    check_positive_int,
    check_tensor,
    check_type,
    is_exporting,
    may_look,
)


def _segments(x: Tensor, config: NSAConfig) -> Tensor:
    """Split the tokens of ``(..., S, D)`` into segments of ``d``, ``(..., S // d + 1, d, D)``; zeros fill the last.

    With two segments of padding no slice ever spans a whole dimension. One that sometimes did would make
    ``torch.compile`` of dynamic lengths build a second graph. An exporter would have to prove it for all lengths.
    """
    stride = config.compress_stride
    if is_exporting():
        return _windows(F.pad(x, (0, 0, 0, stride)), stride)
    count = x.shape[-2] // stride + 1
    return torch.unflatten(F.pad(x, (0, 0, 0, 2 * stride))[..., : count * stride, :], -2, (count, stride))


def _windows(x: Tensor, size: int) -> Tensor:
    """Split ``(..., S, D)`` into ``(..., S // size, size, D)``, for exporters: backward takes longer than of a view.

    It puts no condition on ``S``, which would have to be proved for all lengths, nor does a copy on how it is stored.
    """
    return torch.transpose_copy(x.unfold(-2, size, size), -2, -1)


def _add_neighbours(parts: Tensor, count: int) -> Tensor:
    """Sum the parts of ``count`` blocks: ``parts[..., s, p, :]`` is segment ``s`` as part ``p`` of block ``s - p``."""
    first, *others = (parts[..., p : p + count, p, :] for p in range(parts.shape[-2]))
    return sum(others, first)


def _blocks(x: Tensor, first_tokens: Tensor, config: NSAConfig) -> Tensor:
    """Gather the blocks of packed documents, which may start anywhere, ``(B, Hkv, N, l, D)``."""
    token = first_tokens[..., None] + torch.arange(config.compress_block_size, device=x.device)
    index = token.flatten().view(token.shape[0], 1, -1, 1).to(torch.int64).expand(-1, x.shape[1], -1, x.shape[3])
    tokens = x.gather(2, index)
    if is_exporting():
        return _windows(tokens, config.compress_block_size)
    return torch.unflatten(tokens, 2, token.shape[1:])


def average_blocks(x: Tensor, first_tokens: Tensor | None, config: NSAConfig) -> Tensor:
    """Average the blocks of ``x (B, Hkv, S, D)``, which start every ``d`` or at ``first_tokens (B, N)``."""
    if first_tokens is not None:
        return _blocks(x, first_tokens, config).mean(3)
    return _join_means(_segments(x, config).mean(3), x.shape[2], config)


def average_cached_blocks(x: Tensor, config: NSAConfig) -> Tensor:
    """Average the blocks of cached keys ``x (B, Hkv, S, D)`` like :func:`average_blocks`, without padding them.

    With few queries a padded copy of all keys would take longer than everything else. The price is a second graph when
    ``torch.compile`` takes dynamic lengths.
    """
    stride = config.compress_stride
    count = x.shape[2] // stride
    segments = torch.unflatten(x[:, :, : count * stride], 2, (count, stride))
    means = torch.sum(segments, 3) / stride  # Tensor.mean in bf16 takes a CPU eight times as long
    return _join_means(means, x.shape[2], config)


def _join_means(means: Tensor, num_tokens: int, config: NSAConfig) -> Tensor:
    """Average the means of segments, ``(B, Hkv, S // d or more, D)``, into the means of blocks."""
    size = config.compress_block_size // config.compress_stride
    parts = means.unsqueeze(-2).expand(*means.shape[:-1], size, -1)
    return _add_neighbours(parts, num_compressed(num_tokens, config)) / size


class Compressor(nn.Module):
    """What all compressors share: the sizes that they are called with, and how they start."""

    begins_as_mean = False

    def __init__(self, num_kv_heads: int, head_dim: int, *, config: NSAConfig) -> None:
        super().__init__()
        check_positive_int("num_kv_heads", num_kv_heads)
        check_positive_int("head_dim", head_dim)
        check_type("config", config, NSAConfig)
        self.shape, self.config = (num_kv_heads, head_dim), config

    def reset_parameters(self) -> None:
        """Initialise the weights, as the mean if that was chosen before."""
        for child in self.children():
            child.reset_parameters()  # pyright: ignore[reportCallIssue]
        if self.begins_as_mean:
            self.begin_as_mean()

    def begin_as_mean(self) -> None:
        """Initialise the weights, if there are any, as the mean of a block, also whenever they are reset."""


class MeanCompressor(Compressor):
    """Compressor that averages each block, without parameters.

    Args:
        num_kv_heads: ``Hkv``.
        head_dim: ``D`` of the keys or values to compress.
        config: provides ``l`` and ``d``.

    Raises:
        TypeError: an argument has the wrong type, here or in a call.
        ValueError: a size is out of range; in a call, a tensor has the wrong shape, dtype or device.
    """

    def forward(self, x: Tensor, first_tokens: Tensor | None = None) -> Tensor:
        """Compress ``(B, Hkv, S, D)`` to ``(B, Hkv, N, D)``; blocks start every ``d`` or at ``first_tokens (B, N)``."""
        check_input(x, first_tokens, self.shape, self.config)
        return average_blocks(x, first_tokens, self.config)


class LinearCompressor(Compressor):
    """Compressor that maps each block, with intra-block position encoding added, to one vector by a learned matrix.

    Arguments and errors are those of :class:`MeanCompressor`.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, *, config: NSAConfig) -> None:
        super().__init__(num_kv_heads, head_dim, config=config)
        self.project = BlockLinear(head_dim, head_dim, config)

    def forward(self, x: Tensor, first_tokens: Tensor | None = None) -> Tensor:
        """Compress ``(B, Hkv, S, D)`` to ``(B, Hkv, N, D)``; blocks start every ``d`` or at ``first_tokens (B, N)``."""
        check_input(x, first_tokens, self.shape, self.config, weight_of(self.project))
        return self.project(x, first_tokens)

    @torch.no_grad()
    def begin_as_mean(self) -> None:
        """Initialise the weights as the mean of a block, also whenever they are reset."""
        self.project.position.zero_()
        write(self.project.weight, self.project.mean_weight())
        self.begins_as_mean = True


class MLPCompressor(Compressor):
    """Compressor that maps each block, with intra-block position encoding added, to one vector by a two-layer MLP.

    It is the paper's choice. ``hidden_dim`` defaults to ``4 * head_dim``; other arguments and errors are those of
    :class:`MeanCompressor`.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, *, config: NSAConfig, hidden_dim: int | None = None) -> None:
        super().__init__(num_kv_heads, head_dim, config=config)
        hidden_dim = 4 * head_dim if hidden_dim is None else hidden_dim
        check_positive_int("hidden_dim", hidden_dim)
        self.project = BlockLinear(head_dim, hidden_dim, config)
        self.out = nn.Linear(hidden_dim, head_dim, bias=False)

    def forward(self, x: Tensor, first_tokens: Tensor | None = None) -> Tensor:
        """Compress ``(B, Hkv, S, D)`` to ``(B, Hkv, N, D)``; blocks start every ``d`` or at ``first_tokens (B, N)``."""
        check_input(x, first_tokens, self.shape, self.config, weight_of(self.project))
        return by_rows(self.out, F.silu(self.project(x, first_tokens)))

    @torch.no_grad()
    def begin_as_mean(self) -> None:
        """Initialise the weights so that the output is the mean of a block, also whenever they are reset.

        ``silu(x) - silu(-x)`` is ``x``, so two hidden units carry one component of the mean. The other hidden units
        keep their weights, with output weights of 0 until training changes these.

        Raises:
            ValueError: ``hidden_dim`` is less than ``2 * head_dim``.
        """
        hidden_dim, dim = self.project.weight.shape[0], self.out.weight.shape[0]
        if hidden_dim < 2 * dim:
            raise ValueError(f"hidden_dim: expected at least 2 * head_dim = {2 * dim} to be a mean, got {hidden_dim}")
        spare = whole(self.project.weight)[2 * dim :]
        mean, one = self.project.mean_weight().to(spare), torch.eye(dim)
        self.project.position.zero_()
        write(self.project.weight, torch.cat((mean, -mean, spare)))
        write(self.out.weight, torch.cat((one, -one, torch.zeros(dim, hidden_dim - 2 * dim)), 1))
        self.begins_as_mean = True


class BlockLinear(nn.Module):
    """Linear projection of whole blocks ``(l, D)`` plus position encoding, computed segment by segment."""

    def __init__(self, head_dim: int, out_dim: int, config: NSAConfig) -> None:
        super().__init__()
        self.config = config
        self.position = nn.Parameter(torch.empty(config.compress_block_size, head_dim))
        self.weight = nn.Parameter(torch.empty(out_dim, config.compress_block_size * head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weights."""
        nn.init.normal_(self.position, std=0.02)
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def mean_weight(self) -> Tensor:
        """Return the weight ``(D, l * D)`` that maps a block to its mean where ``position`` is 0."""
        length, dim = self.position.shape
        return torch.eye(dim).repeat(1, length) / length

    def forward(self, x: Tensor, first_tokens: Tensor | None) -> Tensor:
        """Map ``(B, Hkv, S, D)`` to ``(B, Hkv, N, out_dim)``; blocks start every ``d`` or at ``first_tokens``."""
        if first_tokens is None:
            return map_blocks(x, self.position, self.weight, self.config)
        position = F.linear(self.position.flatten(), self.weight)
        return multiply(_blocks(x, first_tokens, self.config).flatten(3), self.weight) + position


def map_blocks(x: Tensor, position: Tensor, weight: Tensor, config: NSAConfig) -> Tensor:
    """Map ``(B, Hkv, S, D)`` to ``(B, Hkv, N, out_dim)``; or several, which are stacked as are their weights."""
    parts = config.compress_block_size // config.compress_stride
    of_parts = torch.unflatten(weight, -1, (parts, -1)).transpose(-3, -2).flatten(-3, -2)  # (parts * out, d * D)
    mapped = torch.unflatten(multiply(_segments(x, config).flatten(-2), of_parts), -1, (parts, -1))
    of_position = multiply(position.flatten(-2)[..., None, None, None, :], weight)
    return _add_neighbours(mapped, num_compressed(x.shape[-2], config)) + of_position


def as_phi(compressor: object) -> CompressorWeights | None:
    """Return the weights of a compressor, or None where calling it does anything else than compute with them."""
    if not isinstance(compressor, nn.Module) or not all(map(has_no_hooks, compressor.modules())):
        return None
    if type(compressor) is MeanCompressor:
        return CompressorWeights("mean")
    if not isinstance(compressor, LinearCompressor | MLPCompressor) or type(compressor) not in COMPRESSORS.values():
        return None
    project = compressor.project
    if type(project) is not BlockLinear or not all(map(is_dense, (project.position, project.weight))):
        return None
    if isinstance(compressor, LinearCompressor):
        return CompressorWeights("linear", project.position, project.weight)
    if not is_plain(compressor.out):
        return None
    return CompressorWeights("mlp", project.position, project.weight, compressor.out.weight)


COMPRESSORS = {"mean": MeanCompressor, "linear": LinearCompressor, "mlp": MLPCompressor}


def check_input(
    x: Tensor, first_tokens: Tensor | None, shape: tuple[int, int], config: NSAConfig, weight: Tensor | None = None
) -> None:
    """Check what a compressor of so many heads of such a dimension is called with."""
    heads, dim = shape
    if weight is None:
        check_tensor("x", x, ("B", heads, "S", dim))
    else:
        check_like_weight("x", x, ("B", heads, "S", dim), weight)
    if first_tokens is None:
        return
    check_integers("first_tokens", first_tokens, (x.shape[0], "N"), like=x, as_of="x")
    last = x.shape[2] - config.compress_block_size
    if may_look(first_tokens) and not ((first_tokens >= 0) & (first_tokens <= last)).all():
        raise ValueError(f"first_tokens: expected blocks within the {x.shape[2]} tokens of x, 0 .. {last}, got others")
