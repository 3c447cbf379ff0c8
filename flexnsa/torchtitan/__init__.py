"""NSA for torchtitan, by one override: ``--override.imports 'flexnsa.torchtitan.native_sparse_attention={...}'``."""

from __future__ import annotations

from typing import Any

from flexnsa.torchtitan.named import named_override
from flexnsa.torchtitan.options import Options
from flexnsa.torchtitan.override import Part, Plan, adapted


@named_override(Part, "Native Sparse Attention in the place of dense attention")
def native_sparse_attention(part: Any, *, name: str, names: tuple[str, ...], options: dict[str, Any]) -> Any:
    """Return what a part of a run's config becomes with NSA layers; torchtitan calls this.

    Args:
        part: attention of a layer, or a setting that has to fit it.
        name: of the part.
        names: of all parts.
        options: fields of :class:`Options` but ``sizes``, and of :class:`flexnsa.NSAConfig`.

    Raises:
        TypeError: an option is not of its kind.
        ValueError: there is no such option, or it does not fit the model, or another setting of the run.
    """
    return adapted(part, name, Plan.of(Options.of(options), names))


__all__ = ["Options", "native_sparse_attention"]
