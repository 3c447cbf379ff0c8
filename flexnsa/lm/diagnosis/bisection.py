"""A search for the layer, the checkpointing and the branch that a step needs to fail or hang."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from flexnsa.lm.diagnosis.cases import Outcome
from flexnsa.lm.measure.table import format_table


@dataclass(frozen=True, slots=True)
class Trial:
    """The parts of the model that a step uses.

    Args:
        num_layers: number of layers, from the first.
        checkpointed: half-open range of layers that are recomputed in backward.
        branches: branches of each layer; empty for dense attention.
    """

    num_layers: int
    checkpointed: tuple[int, int]
    branches: tuple[str, ...]

    def name(self) -> str:
        """Return a name for a folder."""
        first, last = self.checkpointed
        return f"layers-{self.num_layers}_checkpointed-{first}-{last}_{'-'.join(self.branches)}"


@dataclass(frozen=True, slots=True)
class Bisection:
    """The culprit, and each trial with its outcome."""

    culprit: str
    trials: list[tuple[Trial, Outcome]]

    @property
    def found(self) -> bool:
        """Whether the step fails at all."""
        return not self.trials[0][1].passed

    def sentence(self) -> str:
        """Name what the step needs to fail."""
        count = len(self.trials)
        return f"{self.culprit} ({count} trial{'s' * (count > 1)})."

    def table(self) -> str:
        """Return a table with a line for each trial."""
        rows = [
            [
                str(trial.num_layers),
                "{}:{}".format(*trial.checkpointed),
                "+".join(trial.branches),
                outcome.status,
                f"{outcome.seconds:.1f}",
                outcome.reason[:120],
            ]
            for trial, outcome in self.trials
        ]
        return format_table(["layers", "checkpointed", "branches", "", "seconds", "because"], rows)

    def record(self) -> dict[str, Any]:
        """Return plain values."""
        trials = [asdict(trial) | asdict(outcome) for trial, outcome in self.trials]
        return {"culprit": self.culprit, "found": self.found, "trials": trials}


def bisect(run: Callable[[Trial], Outcome], whole: Trial) -> Bisection:
    """Find what a step needs to fail.

    If it fails without checkpointing too, the search bisects the number of layers; else it halves the range of
    checkpointed layers as long as one half alone fails. Then it tries each branch alone.

    Args:
        run: runs a step, isolated and with a time limit, such as by :func:`flexnsa.lm.diagnosis.run_case`.
        whole: the step that fails.
    """
    return _Search(run).find(whole)


@dataclass
class _Search:
    """The trials so far."""

    run: Callable[[Trial], Outcome]
    trials: dict[Trial, Outcome] = field(default_factory=dict)

    def find(self, whole: Trial) -> Bisection:
        if not self._fails(whole):
            return self._found("the step passes: there is nothing to find")
        plain = replace(whole, checkpointed=(0, 0))
        if self._fails(plain):
            least = self._fewest_layers(plain)
            culprit = f"layer {least.num_layers - 1} {self._does(least)}, checkpointed or not"
            if least.num_layers == 1:
                culprit += ", or what lies around the layers"
        else:
            least = self._shortest_range(whole)
            first, last = least.checkpointed
            layers = f"layer {first}" if last - first == 1 else f"layers {first} to {last - 1}, no half of which alone"
            culprit = f"checkpointing of {layers} {self._does(least)}"
        return self._found(f"{culprit}; {self._branches(least)}" if least.branches else culprit)

    def _fails(self, trial: Trial) -> bool:
        if trial not in self.trials:
            self.trials[trial] = self.run(trial)
        return not self.trials[trial].passed

    def _does(self, trial: Trial) -> str:
        outcome = self.trials[trial]
        return f"{'hangs' if outcome.status == 'over time' else 'fails'} ({outcome.reason})"

    def _fewest_layers(self, failing: Trial) -> Trial:
        """Bisect the number of layers: with one layer less than the result, the step passes."""
        passes = 0
        while failing.num_layers - passes > 1:
            trial = replace(failing, num_layers=(passes + failing.num_layers) // 2)
            if self._fails(trial):
                failing = trial
            else:
                passes = trial.num_layers
        return failing

    def _shortest_range(self, failing: Trial) -> Trial:
        """Halve the range as long as one half fails alone."""
        while True:
            first, last = failing.checkpointed
            middle = (first + last) // 2
            halves = [(first, middle), (middle, last)] if last - first > 1 else []
            half = next((half for half in halves if self._fails(replace(failing, checkpointed=half))), None)
            if half is None:
                return failing
            failing = replace(failing, checkpointed=half)

    def _branches(self, failing: Trial) -> str:
        """Name the branches that fail alone."""
        if len(failing.branches) == 1:
            return f"branch {failing.branches[0]}, the only one"
        alone = [tag for tag in failing.branches if self._fails(replace(failing, branches=(tag,)))]
        if len(alone) == len(failing.branches):
            return "each branch alone does"
        return f"of the branches {' and '.join(alone)} alone" if alone else "no branch does alone"

    def _found(self, culprit: str) -> Bisection:
        return Bisection(culprit, list(self.trials.items()))
