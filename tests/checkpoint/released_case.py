"""A small model with ragged sizes, and a configuration to prepare it."""

from pathlib import Path

from glm_lora.arch.spec import ModelSpec
from glm_lora.config import PrepareConfig

SMALL = ModelSpec(
    num_hidden_layers=5,
    hidden_size=200,
    intermediate_size=300,
    moe_intermediate_size=72,
    vocab_size=96,
    num_attention_heads=4,
    q_lora_rank=136,
    kv_lora_rank=40,
    qk_nope_head_dim=24,
    v_head_dim=40,
    linear_num_heads=4,
    linear_head_dim=32,
    index_n_heads=8,
    index_head_dim=32,
    index_topk=64,
    index_kpool=4,
    n_routed_experts=6,
    num_experts_per_tok=2,
    pad_token_id=0,
    eos_token_ids=(1,),
)
"""No size of a quantised matrix is a multiple of 128; layers K K K D K, experts in 3 and 4."""


def case(root: Path, hf: Path, **changes: object) -> PrepareConfig:
    values: dict[str, object] = {
        "model_name": "small",
        "hf_checkpoint": hf,
        "ref_load": root / "base",
        "data_dir": root / "data",
        "task": "none",
    }
    return PrepareConfig.model_validate({**values, **changes})
