#!/usr/bin/env bash
# compare.sh: every --logra.method on the demo's task, with equal data and seeds.
#
#   bash recipes/compare.sh [--study] [--seeds 1 2 42] [--steps 16] [--only NAME ...] [--out runs/compare]
#
# Trains each method once per seed with recipes/demo.sh, and prints a table (also OUT/table.md): pass@1 and pass@4 on
# held-out problems, trainer state, peak memory of the trainer process, seconds per update with its share of the rollout,
# bytes of all syncs. --study compares LoGRA's own choices instead, at equal KL budgets, with a picture (OUT/study.png);
# that is 162 runs. What has finished is not run again: after Ctrl-C the same command goes on. (It does not know of
# changes to the code: for those, another OUT.)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash recipes/cpu/env.sh
exec .venv/bin/python recipes/cpu/compare.py "$@"
