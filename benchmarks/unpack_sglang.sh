#!/bin/bash
# Unpack SGLang into a folder, each file once.
#   bash benchmarks/unpack_sglang.sh BUNDLE SITE
# BUNDLE holds *.tar.xz trees and *.whl files; SITE becomes a folder for PYTHONPATH.
set -euo pipefail
bundle=$1
site=$2
mkdir -p "$site"
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
