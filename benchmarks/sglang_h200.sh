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
mkdir -p "$out" "$site" "$work"
for file in "$bundle"/*.tar.xz "$bundle"/*.whl; do
  [ -f "$file" ] || continue
  mark="$site/.done-$(basename "$file")"
  [ -f "$mark" ] && continue
  case "$file" in
    *.tar.xz)
      if command -v xz >/dev/null; then xz -dc -T0 "$file" | tar xf - -C "$site"
      else python3 -c 'import sys,tarfile; tarfile.open(sys.argv[1],"r:xz").extractall(sys.argv[2],filter="fully_trusted")' "$file" "$site"; fi ;;
    *.whl) python3 -m pip install -q --no-index --no-deps --no-compile --target "$site" "$file" ;;
  esac
  touch "$mark"
done
# Another interpreter than the default where it is needed: PYTHON=...
exec "${PYTHON:-python3}" benchmarks/sglang_h200.py --work "$work" --site "$site" \
  --json "$out/sglang_h200.json" --logs "$out/logs" "$@"
