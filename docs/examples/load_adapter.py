"""Read an exported adapter back: PEFT's and SGLang's files hold the same tensors."""

import sys
from pathlib import Path

import glm_lora

root = Path(sys.argv[1] if len(sys.argv) > 1 else "example")

peft = glm_lora.load_adapter(root / "adapter-peft", "tiny")
sglang = glm_lora.load_adapter(root / "adapter-sglang", "tiny")
print(len(peft.tensors), "tensors, equal:", peft.digest == sglang.digest)
