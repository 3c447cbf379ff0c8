"""The peak memory of the same steps under settings of the allocator, which libraries read when they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flexnsa.lm.diagnosis.cases import Outcome
from flexnsa.lm.diagnosis.recipe import Recipe, take_steps
from flexnsa.lm.measure.table import format_table

_PEAKS = ("reserved_mib", "allocated_mib", "resident_mib")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome of the steps under each setting."""

    outcomes: dict[str, Outcome]

    @property
    def passed(self) -> bool:
        """Whether the steps passed under all settings."""
        return all(outcome.passed for outcome in self.outcomes.values())

    def sentence(self) -> str:
        """Name the setting with the lowest peak of the device's memory, or else the process's."""
        peaks = {name: outcome.values for name, outcome in self.outcomes.items() if outcome.passed}
        if not peaks:
            return "no setting came to its end."
        kind = next(kind for kind in _PEAKS if all(kind in values for values in peaks.values()))
        ordered = sorted(peaks, key=lambda name: peaks[name][kind])
        least, most = (peaks[ordered[at]] for at in (0, -1))
        speed = least["tokens_per_second"] / most["tokens_per_second"]
        return (
            f"{kind.removesuffix('_mib')} memory peaks lowest under {ordered[0]}: {least[kind]:,.0f} MiB at "
            f"{speed:.2f} times the speed of {ordered[-1]}, whose peak is {most[kind]:,.0f} MiB."
        )

    def table(self) -> str:
        """Return a table with a line for each setting."""
        kinds = [kind for kind in _PEAKS if any(kind in outcome.values for outcome in self.outcomes.values())]
        rows = [
            [
                name,
                outcome.status,
                *(f"{outcome.values[kind]:,.1f}" if outcome.passed else "" for kind in (*kinds, "tokens_per_second")),
                outcome.reason,
            ]
            for name, outcome in self.outcomes.items()
        ]
        peaks = [f"{kind.removesuffix('_mib')} MiB" for kind in kinds]
        return format_table(["peak of the steps", "", *peaks, "tokens/s", "because"], rows)

    def record(self) -> dict[str, Any]:
        """Return plain values."""
        return {"settings": {name: asdict(outcome) for name, outcome in self.outcomes.items()}}


def compare_allocators(
    recipe: Recipe, folder: Path, settings: Mapping[str, Mapping[str, str]], *, steps: int, seconds: float
) -> Comparison:
    """Take the same steps in new processes, with variables set in their environment.

    Args:
        recipe: model and training.
        folder: gets a folder for each setting.
        settings: variables, by the name of the setting.
        steps: number of steps under each setting.
        seconds: time limit of each.
    """
    return Comparison(
        {
            name: recipe.run(folder / str(number), take_steps, steps, seconds=seconds, variables=variables)
            for number, (name, variables) in enumerate(settings.items())
        }
    )
