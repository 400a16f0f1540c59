"""Small models that between them take every path."""

from __future__ import annotations

from dataclasses import replace

from glm_lora.arch.spec import DENSE, DSA, KDA, SPARSE, TINY, ModelSpec

FOUR = replace(TINY, linear_lower_bound=-5.0)
"""K, K, K, D with dense, dense, dense, MoE."""

MOE_KDA = replace(
    TINY,
    layer_types=(KDA, DSA, KDA, KDA),
    mlp_layer_types=(SPARSE, DENSE, SPARSE, SPARSE),
    hc_sinkhorn_iters=20,
    n_group=2,
    topk_group=1,
)
"""MoE behind KDA, dense behind DSA, grouped routing, the full number of Sinkhorn steps."""

SHORT_INDEX = replace(
    TINY,
    num_hidden_layers=3,
    layer_types=(DSA, KDA, DSA),
    mlp_layer_types=(SPARSE, DENSE, SPARSE),
    index_topk=8,
    index_n_heads=16,
)
"""index_topk far below the tested lengths: the indexer really selects."""

ODD = ModelSpec(
    num_hidden_layers=2,
    hidden_size=48,
    intermediate_size=40,
    moe_intermediate_size=24,
    vocab_size=51,
    num_attention_heads=3,
    q_lora_rank=20,
    kv_lora_rank=12,
    qk_nope_head_dim=8,
    v_head_dim=10,
    linear_num_heads=5,
    linear_head_dim=6,
    linear_conv_kernel_dim=3,
    linear_lower_bound=-2.5,
    index_n_heads=8,
    index_head_dim=8,
    index_topk=12,
    index_kpool=3,
    n_routed_experts=6,
    num_experts_per_tok=3,
    n_shared_experts=2,
    norm_topk_prob=False,
    hc_mult=2,
    hc_sinkhorn_iters=3,
    swiglu_limit=0.5,
    pad_token_id=0,
    layer_types=(KDA, DSA),
    mlp_layer_types=(SPARSE, DENSE),
)
"""No dimension equals another; a SwiGLU limit low enough to clamp."""

ALL = {"four": FOUR, "moe_kda": MOE_KDA, "short_index": SHORT_INDEX, "odd": ODD}
