"""An AdapterState is a whole adapter: its selection, its tensors, its version and digest."""

import sys
from pathlib import Path

import glm_lora

root = Path(sys.argv[1] if len(sys.argv) > 1 else "example")

state: glm_lora.AdapterState = glm_lora.load_adapter(root / "run" / "adapter", "tiny")

# %% How far has each projection moved? B starts at zero.
for adapter in state.selection.adapters[:5]:
    a, b = state.tensors[adapter.a_key], state.tensors[adapter.b_key]
    print(f"{(b @ a).norm() * adapter.scaling:.4f}", adapter.site.name)
