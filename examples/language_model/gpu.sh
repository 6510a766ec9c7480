#!/usr/bin/env bash
# Run every program of this folder on this machine's GPUs, without a cluster: one rank on each GPU. Prints the last
# loss of each. With RANKS=2 on one GPU two ranks share it over gloo, which has only what DDP needs on GPUs.
#   examples/language_model/gpu.sh [program...]
set -uo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-python3}
ranks=${RANKS:-$("$python" -c 'import torch; print(torch.cuda.device_count())')}
[ "$ranks" -gt 0 ] || { echo "gpu.sh: torch sees no GPU; hint: run the jobs on CPUs: shoal run ddp.yaml" >&2; exit 2; }
export PYTHONPATH="$PWD/../../src${PYTHONPATH:+:$PYTHONPATH}" # ddp.py and fsdp2.py use shoal.runtime
saved=$(mktemp -d)
trap 'rm -rf "$saved"' EXIT
failed=0
for program in ${@:-ddp fsdp2 tp pp fsdp2_tp deepspeed_zero}; do
  mkdir "$saved/$program"
  if SHOAL_CHECKPOINT_DIR="$saved/$program" "$python" -m torch.distributed.run --standalone \
    --nproc-per-node "$ranks" "$program.py" >"$saved/out" 2>&1; then
    printf '%-15s %s ranks  %s\n' "$program" "$ranks" "$(grep '^step' "$saved/out" | tail -n 1)"
  else
    failed=1
    printf '%-15s %s ranks  failed: %s\n' "$program" "$ranks" "$(grep -E '^\[rank.*Error|needs' "$saved/out" | tail -n 1)"
  fi
done
exit "$failed"
