"""What went wrong, and where: the environment of a run, the first value that is not finite, ranks that stand still.

And cases, which try something in processes of their own, and what is looked at in them: gradients and memory, what a
step needs to fail, every combination of some settings.
"""

from flexnsa.diagnostics.bisection import Bisection, Trial, bisect
from flexnsa.diagnostics.cases import Outcome, run_case
from flexnsa.diagnostics.environment import append_environment, describe_environment, recorded_environment
from flexnsa.diagnostics.gradients import GradientTrace, trace_gradients
from flexnsa.diagnostics.matrix import Matrix, run_matrix
from flexnsa.diagnostics.non_finite import strict
from flexnsa.diagnostics.soaking import Sample, soak
from flexnsa.diagnostics.stacks import stacks_on_request
from flexnsa.diagnostics.watchdog import watchdog

__all__ = [
    "Bisection",
    "GradientTrace",
    "Matrix",
    "Outcome",
    "Sample",
    "Trial",
    "append_environment",
    "bisect",
    "describe_environment",
    "recorded_environment",
    "run_case",
    "run_matrix",
    "soak",
    "stacks_on_request",
    "strict",
    "trace_gradients",
    "watchdog",
]
