"""A Selection is frozen, hashable by content, and says every name and shape."""

import glm_lora

selection = glm_lora.resolve_targets("tiny", target_modules="dsa", exclude_modules="", lora_rank=4)

# %% Each site under its names, with its shape
for adapter in selection.adapters:
    site = adapter.site
    print(site.name, site.disk_name, site.shape, adapter.rank)

# %% Two selections train the same thing exactly when their hashes are equal
same = glm_lora.resolve_targets("tiny", target_modules="dsa", exclude_modules="", lora_rank=4)
print(selection.hash == same.hash)
