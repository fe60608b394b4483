#!/usr/bin/env bash
# demo.sh: LoGRA on a machine with nothing but Python: real OpenRLHF, DeepSpeed, vLLM and Ray on the CPU.
#
#   bash recipes/demo.sh [flags of the command line below, to change it]
#
# SEED   seed of the policy, the data and the run (default 42)
# RUN    folder for figures, pictures and the trained model (default runs/demo; replaced)
#
# Makes .venv and a warm-started policy (both once), trains the policy with `--logra.enable` on Reasoning-Gym problems
# through OpenRLHF's stock command line, and leaves figures and pictures in RUN. Ctrl-C stops everything.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

SEED=${SEED:-42}
[[ $SEED =~ ^[0-9]+$ ]] || { echo "demo.sh: SEED is '$SEED'; it must be a whole number" >&2; exit 2; }
RUN=${RUN:-runs/demo}
START=runs/cache/seed$SEED

bash recipes/cpu/env.sh
export PATH="$PWD/.venv/bin:$PATH" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=
python recipes/cpu/prepare.py --out "$START" --seed "$SEED"

if [ -e "$RUN" ] && [ ! -f "$RUN/train.log" ]; then
    echo "demo.sh: RUN is '$RUN', which exists and is no run of this script; choose another" >&2
    exit 2
fi
rm -rf "$RUN"
mkdir -p "$RUN"
begin=$SECONDS
# The stock command line; what is LoGRA's begins with --logra. Of the optimizers, adam does best on this task. Responses
# are so short that predicted KL is measured on 32 of them.
python -m openrlhf.cli.train_ppo_ray \
    --actor.model_name_or_path "$START/model" \
    --actor.num_nodes 1 \
    --actor.num_gpus_per_node 1 \
    --actor.adam.lr 1e-6 \
    --vllm.num_engines 1 \
    --vllm.enforce_eager \
    --ds.zero_stage 2 \
    --data.prompt_dataset "$START/train.jsonl" \
    --data.input_key prompt \
    --data.label_key label \
    --data.max_len 64 \
    --data.max_samples 3072 \
    --reward.remote_url recipes/cpu/reward.py \
    --rollout.batch_size 64 \
    --rollout.n_samples_per_prompt 8 \
    --rollout.max_new_tokens 16 \
    --rollout.micro_batch_size 128 \
    --train.batch_size 256 \
    --train.micro_batch_size 128 \
    --train.seed "$SEED" \
    --algo.advantage.estimator group_norm \
    --algo.kl.init_coef 0 \
    --eval.dataset "$START/eval.jsonl" \
    --eval.steps 24 \
    --eval.temperature 1.0 \
    --eval.n_samples_per_prompt 4 \
    --ckpt.output_dir "$RUN/model" \
    --ckpt.path "$RUN/checkpoints" \
    --ckpt.best_metric_key none \
    --logger.tensorboard_dir "$RUN/tensorboard" \
    --logra.enable \
    --logra.seed "$SEED" \
    --logra.optimizer adam \
    --logra.rank 8 \
    --logra.update_ratio 3e-3 \
    --logra.refresh_every 10 \
    --logra.kl.budget 2e-3 \
    --logra.kl.final_budget 5e-4 \
    --logra.kl.horizon 96 \
    --logra.kl.probe_responses 32 \
    --logra.sync.verify_every 1 \
    --logra.eval_at_start \
    "$@" \
    2>&1 | tee -i "$RUN/train.log"

python recipes/cpu/summarise.py "$RUN" --seconds $((SECONDS - begin)) --seed "$SEED"
openrlhf-logra report "$RUN"
