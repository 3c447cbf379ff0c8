"""Diagnosis of runs: their environment, the first value that is not finite, ranks that make no progress.

Cases run in processes of their own: gradients, memory, what a step needs to fail, every combination of some settings.
"""

from flexnsa.lm.diagnosis.bisection import Bisection, Trial, bisect
from flexnsa.lm.diagnosis.cases import Outcome, run_case
from flexnsa.lm.diagnosis.environment import append_environment, describe_environment, recorded_environment
from flexnsa.lm.diagnosis.gradients import GradientTrace, trace_gradients
from flexnsa.lm.diagnosis.matrix import Matrix, run_matrix
from flexnsa.lm.diagnosis.memory import Sample, soak
from flexnsa.lm.diagnosis.non_finite import strict
from flexnsa.lm.diagnosis.selection import HeadSelection, trace_selection
from flexnsa.lm.diagnosis.stacks import stacks_on_request
from flexnsa.lm.diagnosis.watchdog import watchdog

__all__ = [
    "Bisection",
    "GradientTrace",
    "HeadSelection",
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
    "trace_selection",
    "watchdog",
]
