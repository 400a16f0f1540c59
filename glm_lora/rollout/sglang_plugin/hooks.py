"""Hooks in SGLang's scheduler process: per-layer widths, no expert buffers, strict loading.

All of them act on models of class ``Glm5NextForConditionalGeneration`` only; other models are
served as by stock SGLang.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable
from typing import Any

from glm_lora import __version__
from glm_lora.fingerprint import TensorRecord, fingerprint, record_of
from glm_lora.rollout.sglang_plugin import DIGEST_KEY, REPORT_KEY, PluginError
from glm_lora.rollout.sglang_plugin.widths import (
    TARGETS,
    adapter_shapes,
    any_widths,
    fused_parts,
    module_names,
    spec_of,
)

ARCHITECTURE = "Glm5NextForConditionalGeneration"
MARK = "glm_lora_spec"
"""Attribute of a prepared model: its dimensions."""
_MANAGER = "sglang.srt.lora.lora_manager.LoRAManager"
_ADAPTER = "sglang.srt.lora.lora.LoRAAdapter"
_POOL = "sglang.srt.lora.mem_pool.LoRAMemoryPool"
_WORKER = "sglang.srt.managers.tp_worker.BaseTpWorker"
_STATE = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"
_SHOWN = 5


def install() -> None:
    """Register all hooks with SGLang's registry, which applies them after the plugins ran.

    Raises:
        PluginError: A hooked function does not exist.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pyright: ignore[reportMissingImports]

    for target, hook, kind in (
        (f"{_MANAGER}.__init__", prepare_then_init, HookType.AROUND),
        (f"{_POOL}._has_moe_module", has_moe_module, HookType.AROUND),
        (f"{_ADAPTER}._process_weight", record_weight, HookType.BEFORE),
        (f"{_ADAPTER}._normalize_weights", check_weights, HookType.BEFORE),
        (f"{_WORKER}.load_lora_adapter_from_tensors", survive_mismatch, HookType.AROUND),
        (_STATE, add_report, HookType.AFTER),
    ):
        require(target)
        HookRegistry.register(target, hook, kind)


def require(target: str) -> None:
    """PluginError unless the dotted name ``target`` can be resolved to a callable."""
    owner, name = target.rsplit(".", 1)
    try:
        found = callable(getattr(pkgutil.resolve_name(owner), name))
    except (ImportError, AttributeError) as error:
        raise PluginError(f"SGLang has no {target} ({error})") from error
    if not found:
        raise PluginError(f"SGLang's {target} is not callable")


def prepare_then_init(
    original: Callable[..., None], manager: Any, base_model: Any, *args: Any, **kwargs: Any
) -> None:
    """Prepare the model before SGLang's LoRA manager looks at it."""
    if type(base_model).__name__ == ARCHITECTURE:
        prepare(base_model)
    original(manager, base_model, *args, **kwargs)
    if hasattr(base_model, MARK):
        check_wrapped(manager)


def prepare(model: Any) -> None:
    """Give one glm5_next model the widths and the list of modules that LoRA wraps.

    Raises:
        PluginError: The model lacks a module that carries a site (for example because SGLang
            fused it), or has another width.
    """
    config = model.config
    is_kda = [bool(config.is_kda_layer(i)) for i in range(config.num_hidden_layers)]
    spec = spec_of(config.to_dict(), is_kda)
    names = module_names(spec)
    present = {name for name, _ in model.named_modules()}
    layers = {n.split(".")[2] for n in present if n.startswith("model.layers.")}
    missing = sorted(n for n in names if n.split(".")[2] in layers and n not in present)
    if missing:
        raise PluginError(
            f"the model has no modules {', '.join(missing[:_SHOWN])} ({len(missing)} in all). "
            "Start the server with --enable-lora and --disable-shared-experts-fusion."
        )
    setattr(model, MARK, spec)
    model.supported_lora_modules = sorted({n.rsplit(".", 1)[-1] for n in names})
    model.get_hidden_dim = lambda module_name, layer_idx: any_widths(spec, module_name, layer_idx)
    model.should_apply_lora = names.__contains__


def check_wrapped(manager: Any) -> None:
    """PluginError unless LoRA wraps exactly the targeted modules of the model."""
    spec = getattr(manager.base_model, MARK)
    wrapped = {name for layer in manager.lora_modules for name in layer}
    present = {n.split(".")[2] for n, _ in manager.base_model.named_modules() if ".layers." in n}
    expected = {
        n
        for n in module_names(spec)
        if n.rsplit(".", 1)[-1] in manager.target_modules and n.split(".")[2] in present
    }
    if wrapped != expected:
        odd = sorted(wrapped ^ expected)
        raise PluginError(
            f"LoRA wraps {len(wrapped)} modules; expected {len(expected)}. First difference: "
            f"{odd[0]}."
        )


def has_moe_module(original: Callable[[Any], bool], base_model: Any) -> bool:
    """No buffers for routed experts: they are frozen, and would take gigabytes."""
    return False if hasattr(base_model, MARK) else original(base_model)


def record_weight(adapter: Any, name: str, loaded_weight: Any) -> None:
    """Note each tensor as it is received, before SGLang fuses and renames it."""
    if getattr(adapter.base_model, MARK, None) is None:
        return
    if not hasattr(adapter, "glm_lora_records"):
        object.__setattr__(adapter, "glm_lora_records", [])
    key = name.removeprefix("base_model.model.")
    adapter.glm_lora_records.append(record_of(key, loaded_weight))


def check_weights(adapter: Any) -> None:
    """Refuse an adapter that stock SGLang would accept now and fail on at the first request.

    Raises:
        ValueError: Unknown, unpaired or misshapen tensors, a part of a fused projection without
            the others, or another digest than the configuration names. SGLang reports the text as
            the reason why the load failed and goes on serving.
    """
    spec = getattr(adapter.base_model, MARK, None)
    if spec is None:
        return
    records: list[TensorRecord] = getattr(adapter, "glm_lora_records", [])
    problems = find_problems(records, adapter_shapes(spec, adapter.config.r), fused_parts(spec))
    digest = fingerprint(records)
    expected = adapter.config.hf_config.get(DIGEST_KEY, digest)
    if expected != digest:
        problems.append(f"received digest {digest[:16]}, sent {str(expected)[:16]}")
    if problems:
        more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ValueError("glm-lora: " + "; ".join(problems[:_SHOWN]) + more)
    object.__setattr__(adapter, "glm_lora_digest", digest)


def find_problems(
    records: list[TensorRecord],
    shapes: dict[str, tuple[int, int]],
    parts: dict[str, tuple[str, ...]],
) -> list[str]:
    """What is wrong with the received tensors, one text each; empty when nothing is."""
    if not records:
        return ["no tensors"]
    received = {r.key for r in records}
    problems = [f"{r.key} is no tensor of this model" for r in records if r.key not in shapes]
    problems += [
        f"{r.key} has shape {list(r.shape)} instead of {list(shapes[r.key])}"
        for r in records
        if r.key in shapes and r.shape != shapes[r.key]
    ]
    for names in parts.values():
        tensors = [f"{n}.lora_{f}.weight" for n in names for f in "AB"]
        missing = [t for t in tensors if t not in received]
        if missing and len(missing) < len(tensors):
            problems.append(f"{missing[0]} is missing")
    return problems


def survive_mismatch(original: Callable[..., Any], worker: Any, request: Any) -> Any:
    """Turn SGLang's checksum exception, which ends the server, into a refused load."""
    try:
        return original(worker, request)
    except RuntimeError as error:
        if not re.match(r"\[LORA-CHECK\]", str(error)):
            raise
        manager = worker.model_runner.lora_manager
        return manager.create_lora_update_result(success=False, error_message=str(error))


def add_report(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Add what this plugin did in this scheduler to the state that ``/server_info`` shows."""
    manager = getattr(scheduler.tp_worker.model_runner, "lora_manager", None)
    report: dict[str, Any] = {"version": __version__, "prepared": False, "targets": list(TARGETS)}
    if manager is not None:
        report["prepared"] = hasattr(manager.base_model, MARK)
        report["target_modules"] = sorted(manager.target_modules)
        report["max_lora_rank"] = manager.max_lora_rank
        report["modules"] = sum(len(layer) for layer in manager.lora_modules)
        report["adapters"] = {
            manager.lora_refs[uid].lora_name: {
                "digest": getattr(adapter, "glm_lora_digest", ""),
                "num_tensors": len(getattr(adapter, "glm_lora_records", ())),
            }
            for uid, adapter in manager.loras.items()
            if uid in manager.lora_refs
        }
    result.internal_state[REPORT_KEY] = report
    return result
