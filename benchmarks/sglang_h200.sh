#!/bin/bash
# The whole SGLang check on one GPU: unpack SGLang from a bundle folder, then run sglang_h200.py.
#   bash benchmarks/sglang_h200.sh [BUNDLE] [options of sglang_h200.py]
# BUNDLE (default .sglang) holds *.tar.xz trees and *.whl files. Results go to $OUT (default out).
set -euo pipefail
cd "$(dirname "$0")/.."
bundle=.sglang
if [ $# -gt 0 ] && [ -d "$1" ]; then bundle=$1; shift; fi
out=${OUT:-out}
site=${SITE:-${TMPDIR:-/tmp}/glm-lora-sglang}
work=${WORK:-${TMPDIR:-/tmp}/glm-lora-h200}
mkdir -p "$out" "$work"
bash benchmarks/unpack_sglang.sh "$bundle" "$site"
# Another interpreter than the default where it is needed: PYTHON=...
exec "${PYTHON:-python3}" benchmarks/sglang_h200.py --work "$work" --site "$site" \
  --json "$out/sglang_h200.json" --logs "$out/logs" "$@"
