"""The model card of an export: what it was trained on, what is adapted, how to load it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from glm_lora import __version__
from glm_lora.lora.serving import plain_number
from glm_lora.protocols import AdapterState

CARD_FILE = "README.md"
_LOADING = {
    "peft": """```python
from peft import PeftModel
from transformers import Glm5NextForConditionalGeneration

base = Glm5NextForConditionalGeneration.from_pretrained("{base}")
model = PeftModel.from_pretrained(base, "PATH_OF_THIS_FOLDER")
```""",
    "sglang": """Install `glm-lora` into SGLang's environment with
`pip install --no-deps glm-lora`: its plugin lets SGLang serve every adapted projection.

```
python -m sglang.launch_server --model-path {base} --enable-lora \\
  --disable-shared-experts-fusion --moe-runner-backend triton --lora-backend triton \\
  --max-lora-rank {rank} --lora-target-modules {targets} --lora-paths adapter=PATH_OF_THIS_FOLDER
```

Every request must name it: `"lora_path": "adapter"`.""",
    "merged": "A whole checkpoint: load it as the base.",
}


@dataclass(frozen=True)
class CardFacts:
    """What an export knows beside the adapter itself."""

    base_model: str
    """Name or folder of the base."""
    base_fingerprint: str = ""
    """Fingerprint of the base's weights."""
    license: str = "other"
    """License of this adapter, as an SPDX-like identifier."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The last values of the run's metrics."""


def model_card(state: AdapterState, facts: CardFacts, export_format: str) -> str:
    """Markdown with front matter for model hubs.

    Args:
        state: The exported adapter.
        facts: Base, license and metrics.
        export_format: ``peft``, ``sglang`` or ``merged``.
    """
    selection = state.selection
    groups: dict[str, dict[str, int]] = {}
    for a in selection.adapters:
        leaves = groups.setdefault(a.site.group, {})
        leaves[a.site.leaf] = leaves.get(a.site.leaf, 0) + 1
    table = "\n".join(
        f"| {group} | {', '.join(leaves)} | {sum(leaves.values())} |"
        for group, leaves in groups.items()
    )
    loading = _LOADING[export_format].format(
        base=facts.base_model,
        rank=selection.rank,
        targets=" ".join(sorted({a.site.leaf for a in selection.adapters})),
    )
    numbers = "\n".join(f"| {k} | {v:.6g} |" for k, v in sorted(facts.metrics.items()))
    metrics = f"\n## Metrics\n\n| metric | last value |\n|---|---|\n{numbers}\n" if numbers else ""
    return f"""---
base_model: {facts.base_model}
library_name: {"transformers" if export_format == "merged" else "peft"}
license: {facts.license}
tags:
- lora
- glm5_next
- reinforcement-learning
---
# LoRA adapter for {facts.base_model}

Trained with glm-lora {__version__}, version (optimizer steps) {state.version}.

| | |
|---|---|
| format | {export_format} |
| rank, alpha | {selection.rank}, {plain_number(selection.alpha)} |
| adapted projections | {selection.num_sites} |
| trainable parameters | {selection.trainable_parameters:,} |
| adapter digest | `{state.digest}` |
| selection | `{selection.hash}` |
| base fingerprint | {f"`{facts.base_fingerprint}`" if facts.base_fingerprint else "not recorded"} |

## Adapted projections

| group | projections | count |
|---|---|---|
{table}
{metrics}
## Loading

{loading}
"""
