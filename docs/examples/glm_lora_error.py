"""Every error has four parts, and is the standard-library error it replaces too."""

import glm_lora

try:
    glm_lora.resolve_targets("GLM-5.3-Flash", target_modules="attn", exclude_modules="")
except glm_lora.GlmLoraError as error:
    print("what:", error.what)
    print("expected:", error.expected)
    print("next:", error.next_step)
    print("a ValueError:", isinstance(error, ValueError))
