#!/usr/bin/env bash
# Everything this project measures on a GPU, in one command; see `benchmarks/gpu.sh --help`. Needs torch and triton alone.
set -euo pipefail
cd "$(dirname "$0")/.."
# A cache of its own, so that compile times are those of a first call.
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$(mktemp -d)}"
exec python3 -m benchmarks.attention.gpu "$@"
