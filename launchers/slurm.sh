#!/usr/bin/env bash
# Brings Ray up on the nodes of a Slurm job and calls the launcher there; Slurm ends it all.
#
#   sbatch --nodes 8 --gpus-per-node 4 --exclusive launchers/slurm.sh \
#     --model-name GLM-5.3-Flash --num-nodes 8 --num-gpus-per-node 4 ...
#
# Everything after the script's name goes to `train`. `--show` as the first argument prints the
# commands and runs nothing. Needs the same checkout and environment on every node (a shared disk).
#SBATCH --job-name=glm-lora
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:TERM@120
set -euo pipefail

show=false
if [[ "${1:-}" == "--show" ]]; then
  show=true
  shift
fi

die() {
  echo "slurm.sh: $*" >&2
  exit 2
}

[[ -n "${SLURM_JOB_NODELIST:-}" ]] || die "SLURM_JOB_NODELIST is not set; start it with sbatch"
# Slurm runs a copy of this script, so the checkout is where sbatch was called.
root="${SLURM_SUBMIT_DIR:-$PWD}"
[[ -f "$root/launchers/run_glm5_3_flash_lora.py" ]] || die "call sbatch in the checkout, not in $root"
python="$root/.venv/bin/python"
ray="$root/.venv/bin/ray"

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
((${#nodes[@]})) || die "the job has no nodes"
head="${nodes[0]}"
port=$((20000 + ${SLURM_JOB_ID:-0} % 20000))
gpus="${SLURM_GPUS_ON_NODE:-0}"

# Clients that are given an address use the token only when told to; `env`, because a job may keep
# its environment from its steps.
auth=(env "RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}")
# One step per node; --block keeps it in the foreground, so that Slurm ends it with the job.
head_step=(srun --nodes 1 --ntasks 1 --overlap --nodelist "$head"
  "${auth[@]}" "$ray" start --head --port "$port" --num-gpus "$gpus"
  --include-dashboard false --disable-usage-stats --block)
worker_step() {
  printf '%s\0' srun --nodes 1 --ntasks 1 --overlap --nodelist "$1" \
    "${auth[@]}" "$ray" start --address "$head:$port" --num-gpus "$gpus" --disable-usage-stats --block
}
train_step=(srun --nodes 1 --ntasks 1 --overlap --nodelist "$head"
  "${auth[@]}" "$python" "$root/launchers/run_glm5_3_flash_lora.py" train --launcher ray
  --ray-address "$head:$port" "$@")
status_step=(srun --nodes 1 --ntasks 1 --overlap --nodelist "$head"
  "${auth[@]}" "$ray" status --address "$head:$port")

if $show; then
  printf '%q ' "${head_step[@]}" && echo "&"
  for node in "${nodes[@]:1}"; do
    mapfile -d '' -t step < <(worker_step "$node")
    printf '%q ' "${step[@]}" && echo "&"
  done
  printf '%q ' "${train_step[@]}" && echo
  exit 0
fi

pids=()
# shellcheck disable=SC2317,SC2329 # called by the trap
end() {
  for pid in "${pids[@]}"; do
    kill -TERM "$pid" 2>/dev/null || true
  done
}
trap end EXIT

# The nodes share a token, so that no other job on the network can give this Ray commands.
"$ray" get-auth-token --generate >/dev/null
"${head_step[@]}" &
pids+=($!)
for _ in $(seq 60); do
  "${status_step[@]}" >/dev/null 2>&1 && break
  kill -0 "${pids[0]}" 2>/dev/null || die "Ray did not start on $head"
  sleep 2
done
for node in "${nodes[@]:1}"; do
  mapfile -d '' -t step < <(worker_step "$node")
  "${step[@]}" &
  pids+=($!)
done
for _ in $(seq 60); do
  up="$("${status_step[@]}" 2>/dev/null | grep -c '^ *1 node_' || true)"
  ((up >= ${#nodes[@]})) && break
  sleep 2
done

"${train_step[@]}" &
train=$!
# Preemption: the run gets the signal, saves and ends; then so does everything else.
trap 'kill -TERM "$train" 2>/dev/null || true' TERM
code=0
wait "$train" || code=$?
# A signal ends `wait` early; the run itself takes up to a minute.
while kill -0 "$train" 2>/dev/null; do
  code=0
  wait "$train" || code=$?
done
exit "$code"
