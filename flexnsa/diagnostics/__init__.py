"""What went wrong, and where: the environment of a run, the first value that is not finite, ranks that stand still."""

from flexnsa.diagnostics.environment import append_environment, describe_environment, recorded_environment
from flexnsa.diagnostics.non_finite import strict
from flexnsa.diagnostics.stacks import stacks_on_request
from flexnsa.diagnostics.watchdog import watchdog

__all__ = [
    "append_environment",
    "describe_environment",
    "recorded_environment",
    "stacks_on_request",
    "strict",
    "watchdog",
]
