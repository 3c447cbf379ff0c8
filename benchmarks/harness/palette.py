"""Okabe and Ito's colours for the colour-blind, and the style of every figure."""

from __future__ import annotations

from typing import Any

BLUE, ORANGE, GREEN, SKY, PURPLE, AMBER = "#0072B2", "#D55E00", "#009E73", "#56B4E9", "#CC79A7", "#E69F00"
GREY = "#555555"
STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "grid.color": "#e8e8e8",
    "axes.axisbelow": True,
}
"""Values for ``matplotlib.rcParams``."""
