"""The model behind the embedded engine: transformers' glm5_next with one stock PEFT adapter.

It shares no code with the trainer's model, so that equal log-probabilities mean something. The
text model is called directly (prompts hold no images), and the vision tower is dropped after load.

Shape legend: B rows, S tokens of one forward pass, V vocabulary, H hidden size, R routed experts
kept per token, L MoE layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from torch import nn
from transformers import Cache, DynamicCache, Glm5NextForConditionalGeneration
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextTopkRouter

from glm_lora.arch.spec import spec_from_dir
from glm_lora.errors import MAKE_AGAIN, CheckpointError, RolloutError, SyncError
from glm_lora.model.hf_hooks import mend_kda
from glm_lora.targets.selection import Selection

_SLOT = "default"
"""PEFT's name of the one adapter; the served name and version are kept by the engine."""


class PeftPolicy:
    """A frozen base with one adapter that can be replaced and switched off.

    Args:
        hf_checkpoint: Folder with ``config.json`` and safetensors.
        selection: The projections that the adapter covers.
        dtype: Compute dtype of the base; parameters that must stay fp32 do.
        device: Where it computes.

    Raises:
        CheckpointError: The folder holds no loadable checkpoint, or weights are missing in it.
        TargetError: The selection was made for another model.
        RolloutError: PEFT adapted other modules than the selection names.
    """

    def __init__(
        self,
        hf_checkpoint: Path,
        selection: Selection,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.spec = spec_from_dir(hf_checkpoint)
        selection.check_made_for(self.spec)
        self.selection = selection
        self.device = torch.device(device)
        self.dtype = dtype
        base = _load_base(Path(hf_checkpoint), dtype)
        base.to(self.device)  # pyright: ignore[reportArgumentType]
        with torch.random.fork_rng(devices=[]):  # PEFT draws initial values that are never used
            self._peft: PeftModel = get_peft_model(base, _lora_config(selection))
        self._peft.requires_grad_(False).eval()
        mend_kda(self._peft)
        self._text = base.model.language_model
        self._cache_argument = cache_argument(self._text)
        self._head = base.lm_head
        self._layers = self._adapted_modules()
        self._routers = [m for m in base.modules() if isinstance(m, Glm5NextTextTopkRouter)]
        self._host_copy: dict[str, torch.Tensor] = {}

    def _adapted_modules(self) -> dict[str, LoraLayer]:
        """The LoRA modules by serving name; exactly the selected sites, or RolloutError."""
        inner = self._peft.get_base_model()
        found = {name: m for name, m in inner.named_modules() if isinstance(m, LoraLayer)}
        wanted = {a.site.name: a.site.disk_name for a in self.selection.adapters}
        if found.keys() != wanted.keys():
            odd = sorted(found.keys() ^ wanted.keys())
            raise RolloutError(
                f"PEFT adapted {len(found)} modules, first difference {odd[0]}",
                f"the {len(wanted)} selected projections",
            )
        return {disk: found[name] for name, disk in wanted.items()}

    def _slots(self) -> dict[str, nn.Linear]:
        """The A and B modules by serving key, in the selection's order."""
        slots: dict[str, nn.Linear] = {}
        for adapter in self.selection.adapters:
            layer = self._layers[adapter.site.disk_name]
            slots[adapter.a_key] = layer.lora_A[_SLOT]  # pyright: ignore[reportArgumentType]
            slots[adapter.b_key] = layer.lora_B[_SLOT]  # pyright: ignore[reportArgumentType]
        return slots

    def load_adapter(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the adapter by ``tensors`` (serving keys, full shapes, any float dtype).

        Raises:
            SyncError: A key or shape is missing, unknown or wrong; the old adapter stays.
        """
        shapes = self.selection.tensor_shapes()
        if shapes.keys() != tensors.keys():
            odd = sorted(shapes.keys() ^ tensors.keys())
            raise SyncError(
                f"the adapter sent has {len(tensors)} tensors, first difference {odd[0]}",
                f"the {len(shapes)} tensors of the selection",
            )
        for key, shape in shapes.items():
            if tuple(tensors[key].shape) != shape:
                raise SyncError(f"{key} has shape {tuple(tensors[key].shape)}", str(shape))
        for key, module in self._slots().items():
            # A copy in the sender's dtype: what lies here is what was sent, bit for bit.
            copy = tensors[key].detach().to(self.device, copy=True)
            module.weight = nn.Parameter(copy, requires_grad=False)

    def adapter_tensors(self) -> dict[str, torch.Tensor]:
        """The adapter as the forward pass sees it now, by serving key."""
        return {key: module.weight.data for key, module in self._slots().items()}

    @contextmanager
    def adapter(self, active: bool) -> Iterator[None]:
        """Run the body with the adapter on, or with the plain base."""
        if active:
            yield
        else:
            with self._peft.disable_adapter():
                yield

    @contextmanager
    def recorded_routing(self, record: list[torch.Tensor] | None) -> Iterator[None]:
        """Append the experts of every MoE call in the body to ``record``: ``[B * S, R]`` each."""
        if record is None:
            yield
            return

        def note(module: nn.Module, args: Any, output: Any) -> None:
            record.append(output[2])

        handles = [router.register_forward_hook(note) for router in self._routers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def num_moe_layers(self) -> int:
        """MoE layers of the model: the length of one token's routing record."""
        return len(self._routers)

    def new_cache(self) -> Cache:
        """An empty cache for prefill and decoding."""
        return DynamicCache(config=self._text.config)

    def select_rows(self, cache: Cache, rows: torch.Tensor) -> None:
        """Keep the given rows of a cache, in that order; a row may be repeated."""
        cache.reorder_cache(rows)  # pyright: ignore[reportArgumentType]

    def hidden(
        self, ids_BS: torch.Tensor, mask_BS: torch.Tensor | None, cache: Cache | None = None
    ) -> torch.Tensor:
        """Final hidden states ``[B, S, H]``; padding must be on the left and masked out.

        Padding on the right would enter the recurrent state that decoding continues from.
        """
        output = self._text(
            input_ids=ids_BS,
            attention_mask=mask_BS,
            use_cache=cache is not None,
            **{self._cache_argument: cache},
        )
        return output.last_hidden_state

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits ``[..., V]`` of hidden states ``[..., H]``."""
        return self._head(hidden).float()

    def release(self) -> None:
        """Drop the device copy of all weights; the base keeps the host copy made the first time."""
        if self.device.type == "cpu":
            return
        adapters = {id(m.weight) for m in self._slots().values()}
        for name, tensor in self._weights():
            if name not in self._host_copy or id(tensor) in adapters:
                self._host_copy[name] = tensor.data.cpu()
            tensor.data = self._host_copy[name]

    def resume(self) -> None:
        """Bring the weights back to the device."""
        if self.device.type == "cpu":
            return
        for _, tensor in self._weights():
            tensor.data = tensor.data.to(self.device)

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._peft.named_parameters()
        yield from self._peft.named_buffers()


def cache_argument(text_model: nn.Module) -> str:
    """What the text model calls its cache.

    transformers renamed it within 5.x, and a model swallows keywords that it does not know: under
    the wrong name it would start every token with an empty cache and say nothing.

    Raises:
        RolloutError: It has none of the known names.
    """
    known = inspect.signature(type(text_model).forward).parameters
    for name in ("cache", "past_key_values"):
        if name in known:
            return name
    raise RolloutError(
        f"{type(text_model).__name__}.forward takes no cache: {', '.join(known)}",
        "an argument cache or past_key_values",
        "Install a transformers between 5.16 and the one in constraints.txt",
    )


def _load_base(folder: Path, dtype: torch.dtype) -> Glm5NextForConditionalGeneration:
    try:
        loaded: Any = Glm5NextForConditionalGeneration.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, local_files_only=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} cannot be loaded: {error}",
            "a Hugging Face checkpoint of glm5_next",
            MAKE_AGAIN,
        ) from error
    model, info = loaded
    missing = [k for k in info["missing_keys"] if ".visual." not in k]
    if missing or info.get("mismatched_keys"):
        odd = sorted(missing) or sorted(map(str, info["mismatched_keys"]))
        raise CheckpointError(
            f"{folder} has no usable weight for {odd[0]} ({len(odd)} in all)",
            "every parameter of the text model",
            MAKE_AGAIN,
        )
    model.model.visual = nn.Identity()  # prompts are text; the tower would only hold memory
    return model


def _lora_config(selection: Selection) -> LoraConfig:
    names = [a.site.name for a in selection.adapters]
    odd = {a.site.name: a for a in selection.adapters if a.rank != selection.rank}
    return LoraConfig(
        r=selection.rank,
        lora_alpha=selection.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=0.0,
        # One anchored expression: a list would match by suffix.
        target_modules="|".join(name.replace(".", r"\.") for name in names),
        rank_pattern={name: a.rank for name, a in odd.items()},
        alpha_pattern={name: a.alpha for name, a in odd.items()},
    )
