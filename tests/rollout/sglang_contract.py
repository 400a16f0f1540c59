"""Run inside SGLang's environment: build its glm5_next with LoRA on CPU and measure every delta.

Usage: ``python sglang_contract.py CHECKPOINT ADAPTER [RANK RANKS]``; last line, a JSON object:
the modules LoRA wraps, each one's largest error against ``alpha/r B A x`` computed here from the
adapter's file, the buffers, how wrong loads are answered, and which parameters the checkpoint did
not fill. With RANKS tensor-parallel ranks, each is a process of its own with its part of a module.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    # SGLang asks for it while resolving flags; nothing here runs a kernel.
    torch.cuda.get_device_capability = lambda device=None: (9, 0)


def serve_nothing_but_the_model(checkpoint: str, rank: int, ranks: int):
    import sglang.srt.managers.scheduler  # noqa: F401  the plugin looks for it
    from sglang.srt.plugins import load_plugins

    from glm_lora.rollout.sglang_plugin.widths import TARGETS

    load_plugins()
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import prepare_server_args

    flags = ["--model-path", checkpoint, "--device", "cpu", "--dtype", "float32"]
    flags += ["--skip-tokenizer-init", "--attention-backend", "torch_native"]
    flags += ["--disable-shared-experts-fusion", "--moe-runner-backend", "triton"]
    flags += ["--sampling-backend", "pytorch", "--grammar-backend", "none"]
    flags += [
        "--disable-radix-cache",
        "--disable-cuda-graph",
        "--enable-lora",
        "--lora-backend",
        "torch_native",
    ]
    flags += ["--max-lora-rank", "8", "--max-loras-per-batch", "2"]
    flags += ["--lora-target-modules", *TARGETS, "--tp-size", str(ranks)]
    args = prepare_server_args(flags)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=rank, dp_rank=None))
    without_gpu_communicators(parallel_state.GroupCoordinator)
    parallel_state.init_distributed_environment(
        world_size=ranks,
        rank=rank,
        local_rank=rank,
        backend="gloo",
        distributed_init_method=f"file://{checkpoint}/.init{ranks}",
    )
    parallel_state.initialize_model_parallel()
    initialize_dp_attention(server_args=args)
    return args


def without_gpu_communicators(group):
    """Groups of several CPU processes use gloo alone; SGLang would open NCCL for them."""
    stock = group.__init__

    def __init__(self, *args, **kwargs):
        off = {
            k: False
            for k in kwargs
            if k.startswith("use_") and k != "use_message_queue_broadcaster"
        }
        stock(self, *args, **{**kwargs, **off})

    group.__init__ = __init__


def build_model(args, checkpoint: str):
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.models.glm5_next import Glm5NextForConditionalGeneration

    config = ModelConfig.from_server_args(args)
    model = Glm5NextForConditionalGeneration(config.hf_config)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data.fill_(float("nan"))
    from safetensors.torch import load_file

    files = sorted(Path(checkpoint).glob("*.safetensors"))
    model.load_weights(item for file in files for item in load_file(file).items())
    unfilled = [name for name, p in model.named_parameters() if bool(p.isnan().any())]
    return config, model.eval(), unfilled


def main(checkpoint: str, adapter: str, rank: int = 0, ranks: int = 1) -> dict:
    args = serve_nothing_but_the_model(checkpoint, rank, ranks)
    complete_cpu_backend()
    config, model, unfilled = build_model(args, checkpoint)
    from safetensors.torch import load_file
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.lora.lora_registry import LoRARef

    manager = LoRAManager(
        base_model=model,
        base_hf_config=config.hf_config,
        max_loras_per_batch=2,
        load_config=None,
        dtype=torch.float32,
        server_args=args,
        lora_backend="torch_native",
        max_lora_rank=8,
        target_modules=args.lora_target_modules,
    )
    tensors = load_file(Path(adapter) / "adapter_model.safetensors")
    settings = json.loads((Path(adapter) / "adapter_config.json").read_text())
    ref = LoRARef(lora_name="v1", lora_path="__tensor__", pinned=False)
    loaded = manager.load_lora_adapter_from_tensors(ref, tensors, settings)
    result = {"loaded": [loaded.success, loaded.error_message], "unfilled": unfilled}
    result["errors"], result["effects"] = deltas(
        manager, ref.lora_id, tensors, settings, rank, ranks
    )
    result["modules"] = sorted(n for layer in manager.lora_modules for n in layer)
    result["buffers"] = sorted(manager.memory_pool.A_buffer)
    result["refused"] = refusals(manager, tensors, settings)
    result["digest"] = getattr(manager.loras[ref.lora_id], "glm_lora_digest", "")
    return result


def complete_cpu_backend():
    """SGLang's CPU kernels want an argument that its replicated layers do not pass."""
    from sglang.srt.lora.backend.torch_backend import TorchNativeLoRABackend

    stock = TorchNativeLoRABackend.run_lora_b_sgemm

    def run_lora_b_sgemm(self, x, weights, output_offset_cpu=None, *args, **kwargs):
        if output_offset_cpu is None:
            output_offset_cpu = kwargs["output_offset"].cpu()
        return stock(self, x, weights, output_offset_cpu, *args, **kwargs)

    TorchNativeLoRABackend.run_lora_b_sgemm = run_lora_b_sgemm


def deltas(manager, uid, tensors, settings, rank, ranks):
    """Largest |SGLang's delta - alpha/r B A x| and largest |delta| per module, this rank's part.

    A column-parallel module has a part of every fused projection's rows, a row-parallel one takes
    a part of the input and adds up over the ranks, any other is whole on every rank.
    """
    manager.fetch_new_loras({uid, None})
    length = 5
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch = SimpleNamespace(
        lora_ids=[uid],
        batch_size=1,
        forward_mode=ForwardMode.EXTEND,
        extend_num_tokens=length,
        extend_seq_lens=torch.tensor([length], dtype=torch.int32),
        extend_seq_lens_cpu=[length],
        return_logprob=False,
        spec_info=None,
    )
    manager.prepare_lora_batch(batch)
    scale = settings["lora_alpha"] / settings["r"]
    parts = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
        "fused_qkv_a_proj_with_mqa": ["q_a_proj", "kv_a_proj_with_mqa"],
    }
    errors, effects = {}, {}
    torch.manual_seed(1)
    for layer in manager.lora_modules:
        for name, module in layer.items():
            base = module.base_layer
            prefix, leaf = name.replace("model.", "model.language_model.", 1).rsplit(".", 1)
            factors = [
                [tensors[f"{prefix}.{p}.lora_{f}.weight"].float() for f in "AB"]
                for p in parts.get(leaf, [leaf])
            ]
            full = torch.randn(length, factors[0][0].shape[1])
            mine = full.chunk(ranks, -1)[rank]
            by_row = mine.shape[1] == base.weight.shape[1] and ranks > 1
            x = mine.contiguous() if by_row else full
            with torch.no_grad():
                delta = module(x)[0] - base(x)[0]
                if by_row and not base.reduce_results:  # the layer adds up over the ranks later
                    torch.distributed.all_reduce(delta)
            expected = [scale * (full @ a.T) @ b.T for a, b in factors]
            if delta.shape[1] != sum(e.shape[1] for e in expected):
                expected = [e.chunk(ranks, -1)[rank] for e in expected]
            expected = torch.cat(expected, dim=-1)
            assert delta.shape == expected.shape, f"{name}: {delta.shape} {expected.shape}"
            errors[name] = float((delta - expected).abs().max())
            effects[name] = float(expected.abs().max())
    return errors, effects


def refusals(manager, tensors, settings):
    """What the load of spoiled adapters answers, by kind."""
    from sglang.srt.lora.lora_registry import LoRARef

    q = "model.language_model.layers.0.self_attn.q_proj.lora_A.weight"
    spoiled = {
        "misshapen": {**tensors, q: tensors[q][:, :-1].contiguous()},
        "unknown": {**tensors, q.replace("q_proj", "x_proj"): tensors[q]},
        "no B": {k: v for k, v in tensors.items() if k != q.replace("_A", "_B")},
        "no k": {k: v for k, v in tensors.items() if ".0.self_attn.k_proj" not in k},
        "value": {**tensors, q: tensors[q] + 1},
        "empty": {},
    }
    answers = {}
    for i, (kind, values) in enumerate(spoiled.items()):
        ref = LoRARef(lora_name=f"bad{i}", lora_path="__tensor__", pinned=False)
        answer = manager.load_lora_adapter_from_tensors(ref, values, settings)
        answers[kind] = [answer.success, answer.error_message]
    return answers


if __name__ == "__main__":
    print("\nRESULT " + json.dumps(main(*sys.argv[1:3], *map(int, sys.argv[3:5]))), flush=True)
