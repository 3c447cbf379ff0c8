"""What went wrong, and where: the environment of a run, the first value that is not finite, ranks that stand still.

And cases, which try something in processes of their own, and what is looked at in them: gradients and memory.
"""

from flexnsa.diagnostics.cases import Outcome, run_case
from flexnsa.diagnostics.environment import append_environment, describe_environment, recorded_environment
from flexnsa.diagnostics.gradients import GradientTrace, trace_gradients
from flexnsa.diagnostics.non_finite import strict
from flexnsa.diagnostics.soaking import Sample, soak
from flexnsa.diagnostics.stacks import stacks_on_request
from flexnsa.diagnostics.watchdog import watchdog

__all__ = [
    "GradientTrace",
    "Outcome",
    "Sample",
    "append_environment",
    "describe_environment",
    "recorded_environment",
    "run_case",
    "soak",
    "stacks_on_request",
    "strict",
    "trace_gradients",
    "watchdog",
]
