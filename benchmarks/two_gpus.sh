#!/bin/bash
# Every check that needs GPUs, on a machine with two of them and no network, within time limits.
#
#   bash benchmarks/two_gpus.sh STEP...
#
#   sites     install the wheels of WHEELS and unpack SGLang from BUNDLE (the others wait for it)
#   serve     SGLang on both GPUs, alone: sglang_h200.sh --tp 2
#   pair      GPU 0: sglang_train.py, the whole job; GPU 1: train_step.py beside transformers + PEFT
#   parallel  tests/gpu/multi_gpu.py on both: the bf16 oracle, the adapter's gather, KDA's kernel
#   sparse    the sparse attention: its kernels beside masks on GPU 0, its tests on GPU 1
#   kernels   the tests marked gpu, on one
#
# flash-linear-attention tunes its kernels on first use: 200 s for whole sequences, 180 s more for
# packed ones (4x2048), and as long again for the peer. Caches last as long as the machine.
#
# The machine's python3 brings torch, transformers, peft and pytest. BUNDLE (default .sglang) holds
# SGLang as *.tar.xz trees and wheels, WHEELS (default .whl) holds megatron-core, fla-core,
# flash-linear-attention, fnmatch2, pydantic and what they need. Results and logs go to OUT (default
# out), packed as all.tgz after every step. LIMIT is the seconds of one step (default 540).
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${OUT:-out}")
limit=${LIMIT:-540}
bundle=${BUNDLE:-.sglang}
wheels=${WHEELS:-.whl}
place=${TMPDIR:-/tmp}/glm-lora-two-gpus
site=$place/sglang
results=$place/results
export PYTHONUNBUFFERED=1 TRANSFORMERS_VERBOSITY=error
mkdir -p "$out" "$results" "$site"

install() {
  python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$@"
}

sites() {
  install "$place/packages" "$wheels"/*.whl
  # flash-linear-attention tunes its kernels for minutes: the toy of sglang_train.py does without.
  mapfile -t plain < <(find "$wheels" -type f -name '*.whl' ! -name 'fla*')
  install "$place/plain" "${plain[@]}"
  bash benchmarks/unpack_sglang.sh "$bundle" "$site"
  for wheel in "$wheels"/torch_memory_saver*.whl; do
    if [ -f "$wheel" ]; then install "$site" "$wheel"; fi
  done
  touch "$place/ready"
}

ready() {
  until [ -f "$place/ready" ]; do sleep 1; done
  export PYTHONPATH=$place/packages
  # Once: two programs would make the same links.
  CUDA_HOME=$(python3 -c 'from benchmarks.gpu_site import cuda_home; print(cuda_home() or "")')
  export CUDA_HOME
}

# The last lines of a command's log are shown; its end decides nothing but the table.
logged() {
  local name=$1 start=$SECONDS code=0
  shift
  timeout --kill-after 10 "$limit" "$@" >"$results/$name.log" 2>&1 || code=$?
  echo "== $name: exit $code after $((SECONDS - start)) s"
  tail -n 25 "$results/$name.log"
}

serve() {
  # SGLang refuses GPUs whose free memory differs: nothing else may run.
  SITE=$site OUT=$results/serve WORK=$place/serve logged serve \
    bash benchmarks/sglang_h200.sh "$bundle" --tp 2 --mem-fraction 0.8 --backends triton --syncs 10
}

pair() {
  CUDA_VISIBLE_DEVICES=0 PYTHONPATH=$place/plain logged sglang_train \
    python3 benchmarks/sglang_train.py --work "$place/train" --site "$site" --mem-fraction 0.8 \
    --engines sglang,embedded --lr 4e-4 --json "$results/sglang_train.json" &
  CUDA_VISIBLE_DEVICES=1 logged train_step \
    python3 benchmarks/train_step.py --sizes "${SIZES:-1x2048,1x8192}" --recompute full \
    --micro-batches 4 --peer hf-peft --repeats "${REPEATS:-7}" --json "$results/train_step.json" &
  wait
}

parallel() {
  logged parallel torchrun --nproc-per-node 2 --max-restarts 9 --master-port 29511 \
    tests/gpu/multi_gpu.py --json "$results/multi_gpu.json" --budget $((limit * 2 / 3)) \
    --only "${ONLY:-adapter,kda,oracle bf16}" --untuned
}

sparse() {
  CUDA_VISIBLE_DEVICES=0 logged sparse_kernel \
    python3 benchmarks/sparse_kernel.py --json "$results/sparse_h200.json" &
  CUDA_VISIBLE_DEVICES=1 logged sparse_tests python3 -m pytest -q -m gpu tests/gpu/test_sparse.py &
  wait
}

kernels() {
  CUDA_VISIBLE_DEVICES=0 logged kernels python3 -m pytest -q -m gpu tests/gpu \
    --ignore tests/gpu/test_sglang_h200.py
}

for step in "$@"; do
  case $step in
    sites) sites ;;
    serve | pair | parallel | sparse | kernels) ready; "$step" ;;
    *) echo "unknown step '$step': sites, serve, pair, parallel, sparse or kernels" >&2; exit 2 ;;
  esac
  tar czf "$out/all.tgz" -C "$results" .
done
