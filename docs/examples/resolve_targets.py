"""What would be trained? No weights, no GPU, no torch."""

import glm_lora

# %% The recipe's selection on the whole model
selection = glm_lora.resolve_targets("GLM-5.3-Flash")
print(selection.num_sites, "projections,", f"{selection.trainable_parameters:,} parameters")

# %% A wrong name is an error that knows the right one
try:
    glm_lora.resolve_targets("GLM-5.3-Flash", target_modules="q_prj")
except glm_lora.GlmLoraError as error:
    print(error)
