"""A search for the layer, the checkpointing and the branch that a step needs to fail or hang."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

from flexnsa.lm.diagnosis.cases import Outcome
from flexnsa.lm.measure.table import Report, format_table


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


@dataclass(frozen=True, kw_only=True)
class Bisection(Report):
    """What a step needs to fail, and each trial with its outcome; it has passed if the whole step does."""

    culprit: str
    trials: list[tuple[Trial, Outcome]]


def bisect(run: Callable[[Trial], Outcome], whole: Trial) -> Bisection:
    """Find what a step needs to fail.

    If it fails without checkpointing too, the search bisects the number of layers; else it halves the range of
    checkpointed layers as long as one half alone fails. Then it tries each branch alone.

    ``run`` runs a step, isolated and with a time limit, such as by :func:`flexnsa.lm.diagnosis.run_case`.
    """
    return _Search(run).find(whole)


@dataclass
class _Search:
    """The trials so far."""

    run: Callable[[Trial], Outcome]
    trials: dict[Trial, Outcome] = field(default_factory=dict)

    def find(self, whole: Trial) -> Bisection:
        if not self._fails(whole):
            return self._report("the step passes: there is nothing to find")
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
        return self._report(f"{culprit}; {self._branches(least)}" if least.branches else culprit)

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

    def _report(self, culprit: str) -> Bisection:
        trials = list(self.trials.items())
        rows = [
            [
                str(trial.num_layers),
                "{}:{}".format(*trial.checkpointed),
                "+".join(trial.branches),
                outcome.status,
                f"{outcome.seconds:.1f}",
                outcome.reason[:120],
            ]
            for trial, outcome in trials
        ]
        passed = trials[0][1].passed
        records = [asdict(trial) | asdict(outcome) for trial, outcome in trials]
        return Bisection(
            sentence=f"{culprit} ({len(trials)} trial{'s' * (len(trials) > 1)}).",
            table=format_table(["layers", "checkpointed", "branches", "", "seconds", "because"], rows),
            record={"culprit": culprit, "found": not passed, "trials": records},
            passed=passed,
            culprit=culprit,
            trials=trials,
        )
