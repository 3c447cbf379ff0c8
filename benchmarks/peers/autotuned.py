"""Kernels that Triton tunes: all their configurations compiled at once, instead of one after the other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any


def compile_configs_at_once(workers: int) -> None:
    """Change Triton's tuner, in this process, so that it compiles what it is about to try in ``workers`` threads."""
    import triton
    from triton.runtime.autotuner import Autotuner

    tune, seen = Autotuner.run, set[tuple[Any, ...]]()

    def compile_and_tune(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        values = self.nargs | kwargs
        key = (id(self), *(values.get(name) for name in self.keys))
        if len(self.configs) > 1 and key not in seen:
            seen.add(key)
            with ThreadPoolExecutor(workers) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
                for config in self.prune_configs(kwargs):
                    self.fn.run(*args, **kwargs | {"warmup": True}, **config.all_kwargs())
        return tune(self, *args, **kwargs)

    Autotuner.run = compile_and_tune
