"""SGLang's own environment, a tiny llama for its CPU server, and a selection of llama's sites."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from glm_lora.arch.projections import Kind, Site, Status
from glm_lora.rollout.sglang_server import ServerOptions
from glm_lora.targets.selection import Selection, SiteAdapter

ROOT = Path(__file__).resolve().parents[2]
SHIM = Path(__file__).parent / "sglang_cpu_shim"
PYTHON = Path(os.environ.get("GLM_LORA_SGLANG_PYTHON", ROOT / ".venv-sglang/bin/python"))
CPU_ENV = {
    "PYTHONPATH": str(SHIM),
    "GLM_LORA_SGLANG_CPU": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
# Later flags replace the ones that only a GPU understands.
CPU_FLAGS = [
    "--device",
    "cpu",
    "--attention-backend",
    "torch_native",
    "--disable-cuda-graph",
    "--disable-overlap-schedule",
    "--mem-fraction-static",
    "0.2",
    "--max-total-tokens",
    "2048",
    "--sampling-backend",
    "pytorch",
    "--kv-cache-dtype",
    "auto",
    "--moe-runner-backend",
    "auto",
    "--context-length",
    "256",
]
HIDDEN, HEADS, LAYERS, MLP, VOCAB = 64, 4, 2, 96, 128


def llama_checkpoint(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
    model.save_pretrained(folder)
    return folder


def llama_selection(rank: int = 4) -> Selection:
    shapes = {f"self_attn.{p}_proj": (HIDDEN, HIDDEN) for p in "qkvo"}
    shapes |= {f"mlp.{p}_proj": (MLP, HIDDEN) for p in ("gate", "up")}
    shapes["mlp.down_proj"] = (HIDDEN, MLP)
    adapters = []
    for layer in range(LAYERS):
        for path, shape in shapes.items():
            name = f"model.layers.{layer}.{path}"
            site = Site(
                name=name,
                disk_name=name,
                sglang_name=name,
                sglang_part="",
                layer=layer,
                leaf=path.rsplit(".", 1)[-1],
                group="llama",
                shape=shape,
                kind=Kind.COLUMN,
                status=Status.TRAINABLE,
            )
            adapters.append(SiteAdapter(site, rank, 2.0 * rank))
    return Selection("llama", "", tuple(adapters))


def llama_options(folder: Path, checkpoint: Path) -> ServerOptions:
    return ServerOptions(
        checkpoint=checkpoint,
        selection=llama_selection(),
        python=str(PYTHON),
        work_dir=folder,
        dtype="float32",
        lora_backend="torch_native",
        passed=tuple(CPU_FLAGS),
        env=CPU_ENV,
    )
