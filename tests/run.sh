#!/usr/bin/env bash
# run.sh: make the environment if needed and run the tests.
#
#   bash tests/run.sh [--full] [pytest arguments]
#
# --full runs the full products of combinations where the default runs covering sets. Exit code: pytest's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" = --full ]; then
    export LOGRA_FULL=1
    shift
fi
bash recipes/cpu/env.sh

export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
# Every process of a run imports the same thousands of modules: let the first one leave bytecode for the others.
export PYTHONDONTWRITEBYTECODE=
# Ray and vLLM start helpers by name.
export PATH="$PWD/.venv/bin:$PATH"
# Two at a time: a run of the whole stack leaves a third of two cores idle. tests/integration/conftest.py says which.
exec .venv/bin/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder "$@"
