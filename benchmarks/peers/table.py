"""Who is measured, by kind and name, and what sets each apart."""

from __future__ import annotations

from benchmarks.peers import ours
from benchmarks.peers.fla import FLA
from benchmarks.peers.flash_nsa import FLASH_NSA
from benchmarks.peers.problem import Adapter
from benchmarks.peers.sparse_triton import SPARSE_TRITON
from flexnsa import NSAConfig

PEERS = {peer.name: peer for peer in (FLA, SPARSE_TRITON, FLASH_NSA)}
OURS = "flexnsa"
SAME_SIZES = NSAConfig(compress_block_size=64, compress_stride=64)

TABLE: dict[str, dict[str, Adapter]] = {
    "selected": {OURS: ours.selected} | {name: peer.selected for name, peer in PEERS.items()},
    "whole": {
        OURS: ours.three_branches,
        f"{OURS}, no window": ours.without_window(),
        f"{OURS}, no window, l = d = 64": ours.without_window(SAME_SIZES),
        **{name: peer.whole for name, peer in PEERS.items()},
    },
}
DIFFERENCES = {
    OURS: "All three branches, each with keys and values of its own, those of the compressed branch given.",
    f"{OURS}, no window": "Compressed and selected branch of one key and value, averaged within; the gates' sigmoid "
    "too. No other window can run without another package: this is what the others compare with.",
    f"{OURS}, no window, l = d = 64": "The same with the sizes of fla.",
    **{name: peer.differences for name, peer in PEERS.items()},
}


def missing() -> list[str]:
    """Names of peers that are not installed."""
    return [name for name, peer in PEERS.items() if not peer.is_installed]
