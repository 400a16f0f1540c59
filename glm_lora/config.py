"""Strict, frozen configurations; the resolved copy is saved with each run as ``config.toml``.

One class per concern, a doc line under each field. An unknown key is an error with the nearest
name. Nothing here imports torch. Defaults are the recipe's; ``TINY_DEFAULTS`` holds what the
embedded tiny model changes.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from glm_lora.errors import ConfigError, did_you_mean

DEFAULT_MODEL = "GLM-5.3-Flash-4layer"
RECIPE_TARGETS = "attn,mlp"
RECIPE_EXCLUDES = "*.mlp.experts.*,*.self_attn.kv_b_proj"

T = TypeVar("T", bound=BaseModel)


class _Strict(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=False,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


class SelectionConfig(_Strict):
    """What is adapted, and with which rank."""

    target_modules: str = RECIPE_TARGETS
    """Groups, leaf names or globs, separated by commas."""
    exclude_modules: str = RECIPE_EXCLUDES
    """Groups, leaf names or globs to take out again."""
    layers: str = ""
    """Layer ranges such as 0-11,44; empty means all."""
    lora_rank: int = Field(default=16, ge=1)
    """Rank of A and B."""
    lora_alpha: float = Field(default=32.0, gt=0)
    """The adapter's output is scaled by alpha / rank."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapters' inputs while training."""
    ranks: dict[str, int] = Field(default_factory=dict)
    """Rank per group or glob (recipe files only); alpha/rank stays constant."""


class ParallelConfig(_Strict):
    """How the trainer's ranks share the model; data parallelism takes what is left."""

    tensor_model_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share each projection."""
    pipeline_model_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share the layers."""
    expert_model_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share the routed experts."""
    sequence_parallel: bool = True
    """Cut activations along the sequence between tensor-parallel regions (only when TP > 1)."""
    pipeline_layers: tuple[int, ...] = ()
    """Layers per pipeline stage; empty splits them evenly with the remainder on the last stages."""
    recompute: Literal["full", "mlp", "attention", "none"] = "full"
    """Which part of each layer is run again in the backward pass instead of kept (never of the
    last layer, whose backward pass comes next)."""
    dsa_backend: Literal["auto", "sdpa", "triton"] = "auto"
    """Sparse attention above index_topk tokens: sdpa masks all keys, triton reads the chosen ones
    (CUDA in bfloat16, gradients summed in no fixed order); auto takes the faster one by length."""
    max_tokens_per_gpu: int = Field(default=8192, ge=1)
    """Token budget of one micro-batch."""
    drift_check_interval: int = Field(default=10, ge=0)
    """Compare replicated factors over their ranks every N steps; 0 never."""


class OptimizerConfig(_Strict):
    """AdamW on the adapters' fp32 masters."""

    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the rate after the warm-up."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the rate rises linearly from zero."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.98, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0 turns clipping off."""


class AlgorithmConfig(_Strict):
    """Advantages and loss."""

    advantage: Literal["grpo", "grpo_no_std", "rloo", "dr_grpo"] = "grpo"
    """How rewards of a group become advantages."""
    loss_aggregation: Literal["token-mean", "sequence-mean", "constant"] = "token-mean"
    """How token losses are averaged; constant divides by the length limit (Dr. GRPO)."""
    clip_low: float = Field(default=0.2, ge=0)
    """Lower clip distance of the probability ratio."""
    clip_high: float = Field(default=0.28, ge=0)
    """Upper clip distance of the probability ratio."""
    dual_clip: float = Field(default=0.0, ge=0)
    """Bound on the loss of negative advantages (above 1); 0 turns it off."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL term to the base (the same model with adapters off)."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    updates_per_rollout: int = Field(default=1, ge=1)
    """Optimizer steps on each batch of samples."""
    importance_cap: float = Field(default=0.0, ge=0)
    """Cap of the trainer/engine importance weight; 0 turns the correction off."""
    truncated: Literal["keep", "mask"] = "keep"
    """Whether responses cut at the length limit count in the loss."""
    dynamic_sampling_limit: int = Field(default=0, ge=0)
    """Extra rounds to replace groups with equal rewards; 0 keeps them."""


class RolloutConfig(_Strict):
    """Prompts, sampling and reward."""

    rollout_engine: Literal["embedded", "sglang"] = "sglang"
    """embedded: transformers + PEFT; sglang: a server."""
    num_rollout: int = Field(default=20, ge=1)
    """Number of rollouts, each followed by training."""
    rollout_batch_size: int = Field(default=16, ge=1)
    """Prompts per rollout."""
    n_samples_per_prompt: int = 8
    """Samples per prompt, at least 2: the group of GRPO."""
    rollout_max_response_len: int = Field(default=4096, ge=1)
    """Token limit of a response."""
    rollout_max_prompt_len: int | None = Field(default=None, ge=1)
    """Token limit of a prompt after the chat template; longer rows cannot be used."""
    rollout_temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the trainer's log-probabilities use the same."""
    rollout_shuffle: bool = True
    """Shuffle the prompts anew in every epoch."""
    prompt_data: tuple[str, ...] = ()
    """JSONL or parquet files; FILE@WEIGHT mixes several."""
    input_key: str = "prompt"
    """Field that holds the prompt."""
    label_key: str = "label"
    """Field that holds the expected answer."""
    metadata_key: str = "metadata"
    """Optional field passed on to the reward."""
    skip_bad_rows: bool = False
    """Leave rows out that cannot be used, and say how many, instead of stopping."""
    reward: str = "dapo"
    """exact, math, dapo, FILE.py or an http(s) URL."""
    reward_timeout: float = Field(default=10.0, gt=0, le=86400)
    """Seconds one scoring call may take."""
    overlong_buffer_len: int = Field(default=0, ge=0)
    """Tokens before the response limit over which a penalty on length grows; 0 turns it off."""
    overlong_penalty: float = Field(default=1.0, gt=0)
    """Size of the full penalty on length."""
    rollout_timeout: float = Field(default=3600.0, gt=0)
    """Seconds an engine may take for its samples; then it is restarted and they are redone."""
    enable_r3: bool = False
    """Replay the engine's expert choices in the trainer."""
    async_level: int = Field(default=0, ge=0, le=1)
    """1 samples the next batch while the present one trains."""
    logprob_diff_limit: float | None = Field(default=None, gt=0)
    """Stop when trainer and engine differ by more; default 0.05 in bf16, 1e-3 in fp32."""
    eval_prompt_data: tuple[str, ...] = ()
    """Prompt files to evaluate on during training."""
    eval_interval: int = Field(default=0, ge=0)
    """Evaluate every N rollouts; 0 never."""

    @field_validator("n_samples_per_prompt")
    @classmethod
    def _a_group(cls, value: int) -> int:
        if value < 2:  # every kind of advantage, with a learning signal of exactly zero
            raise ValueError(
                "2 or more: an advantage compares the samples of one prompt, and a single one "
                "teaches nothing"
            )
        return value


class SglangConfig(_Strict):
    """The SGLang engine; only with --rollout-engine sglang."""

    sglang_python: str = ""
    """Interpreter of the environment SGLang is installed in; needed to start servers."""
    rollout_engine_urls: tuple[str, ...] = ()
    """Running servers to use instead of starting some."""
    rollout_engine_key_file: Path | None = None
    """File that holds the API key of those servers; needed when they ask for one."""
    rollout_num_engines: int = Field(default=0, ge=0)
    """Engines to start; 0 starts as many as the GPUs allow (one without GPUs)."""
    rollout_num_gpus_per_engine: int = Field(default=1, ge=1)
    """Tensor-parallel GPUs of each server; the recipes take 4 for the slice, 8 for the model."""
    rollout_num_gpus: int = Field(default=0, ge=0)
    """GPUs of the servers' own; 0 lets them share the trainer's."""
    sglang_mem_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of the GPU memory for weights and cache; 0 leaves it to SGLang."""
    sglang_lora_backend: Literal["triton", "csgmv"] = "triton"
    """SGLang's LoRA kernels."""
    sglang_colocated: bool = False
    """The servers give their memory back while the trainer works (the recipes' default)."""
    sglang_flags: tuple[str, ...] = ()
    """SGLang's own flags: --sglang-NAME VALUE on the command line passes --NAME VALUE."""


class TrainConfig(_Strict):
    """Everything ``train`` needs; saved as the run's ``config.toml``."""

    model_name: str = DEFAULT_MODEL
    """A built-in model, or the name of a prepared one."""
    hf_checkpoint: Path
    """Folder with config.json and tokenizer (and weights for the embedded engine)."""
    ref_load: Path
    """The torch_dist base."""
    run_dir: Path
    """Run folder."""
    seed: int = Field(default=0, ge=0)
    """Seeds adapters, data order and sampling."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute dtype of base and activations."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the trainer computes; auto takes CUDA where it is."""
    launcher: Literal["ray", "torchrun", "inline"] = "ray"
    """Who starts the processes."""
    ray_address: str = ""
    """A running Ray cluster to join; empty starts a local one."""
    num_nodes: int = Field(default=1, ge=1)
    """Machines."""
    num_gpus_per_node: int = Field(default=1, ge=1)
    """Trainer ranks per machine."""
    save_interval: int = Field(default=10, ge=0)
    """Checkpoint every N rollouts; 0 only at the end."""
    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints kept."""
    keep_every: int = Field(default=0, ge=0)
    """Keep the checkpoint of every N-th rollout for good, too; 0 keeps none."""
    max_restarts: int = Field(default=3, ge=0)
    """Restarts after lost processes (ray): engines in place, the trainer from its checkpoint."""
    step_timeout: float = Field(default=3600.0, gt=0)
    """Seconds one call to the trainer may take (ray); then its processes count as lost."""
    lora_adapter_path: Path | None = None
    """Folder of an adapter (PEFT or SGLang names) to start from instead of zero."""
    init: Literal["base", "random"] = "base"
    """random: no base is read, every rank makes its weights from the seed, as prepare does."""
    tensorboard: bool = True
    """Write TensorBoard event files to the run's logs folder."""
    wandb: bool = False
    """Send metrics to Weights & Biases."""
    selection: SelectionConfig = SelectionConfig()
    """What is adapted."""
    parallel: ParallelConfig = ParallelConfig()
    """How ranks share the work."""
    offload_train_target: Literal["cpu", "disk"] = "cpu"
    """Where a colocated trainer keeps its base while the engine works; disk is a mapped file."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantages and loss."""
    rollout: RolloutConfig = RolloutConfig()
    """Prompts, sampling and reward."""
    sglang: SglangConfig = SglangConfig()
    """The SGLang engine."""

    @property
    def world_size(self) -> int:
        """Trainer ranks over all machines."""
        return self.num_nodes * self.num_gpus_per_node


class PrepareConfig(_Strict):
    """Everything ``prepare`` needs."""

    model_name: str = DEFAULT_MODEL
    """A built-in model: GLM-5.3-Flash, GLM-5.3-Flash-4layer or tiny."""
    hf_checkpoint: Path
    """Folder of the Hugging Face checkpoint; read when it is there, else downloaded or made."""
    ref_load: Path
    """The torch_dist base to write."""
    data_dir: Path
    """Folder for datasets."""
    repo: str = "zai-org/GLM-5.3-Flash"
    """Hub repository of the weights, used when hf_checkpoint does not exist."""
    revision: str = "main"
    """Branch, tag or commit of the repository."""
    task: Literal["dapo-math-17k", "gsm8k", "none"] = "dapo-math-17k"
    """Dataset to fetch beside the weights (tiny brings its own)."""
    init: Literal["base", "random"] = "base"
    """random: weights from the seed with the exact shapes, no source checkpoint."""
    seed: int = Field(0, ge=0)
    """Seeds tiny's pre-training and random weights."""
    num_layers: int | None = Field(None, ge=1)
    """Keep only the first N layers; default is what the model name says."""
    workers: int = Field(0, ge=0)
    """Processes that convert; 0 takes the processors there are, at most 8. torchrun's ranks win."""
    to_hf: Path | None = None
    """Write the base back as a Hugging Face checkpoint (bfloat16) into this folder."""
    verify: bool = False
    """Read a finished base again and compare every checksum."""
    force: bool = False
    """Build again what is there already."""
    dry_run: bool = False
    """Say what would be read, written and downloaded; do nothing."""


TINY_DEFAULTS: dict[str, dict[str, Any]] = {
    "": {"dtype": "float32", "device": "cpu"},
    "selection": {"lora_rank": 8, "lora_alpha": 16.0},
    "optimizer": {"lr": 3e-3},
    "parallel": {"recompute": "none"},
    "rollout": {
        "num_rollout": 60,
        "rollout_max_response_len": 2,
        "reward": "exact",
        "rollout_engine": "embedded",
    },
}


def build(cls: type[T], values: Mapping[str, Any], source: str = "the options") -> T:
    """Validate ``values`` as ``cls``.

    Raises:
        ConfigError: An unknown key (with the nearest name) or a value out of range.
    """
    try:
        return cls.model_validate(dict(values))
    except ValidationError as error:
        raise _as_config_error(cls, error, source) from None


def _as_config_error(cls: type[BaseModel], error: ValidationError, source: str) -> ConfigError:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        names = _field_names(cls, first["loc"][:-1])
        return ConfigError(
            f"unknown key {where!r} in {source}",
            "one of " + ", ".join(names),
            did_you_mean(str(first["loc"][-1]), names),
        )
    if first["type"] == "missing":
        return ConfigError(f"{where} is missing in {source}")
    return ConfigError(
        f"{where} is {first['input']!r} in {source}",
        first["msg"].removeprefix("Input should be ").removeprefix("Value error, "),
    )


def _field_names(cls: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    owner: type[BaseModel] = cls
    for part in path:
        inner = owner.model_fields[str(part)].annotation
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        owner = inner
    return list(owner.model_fields)


def to_toml(config: BaseModel) -> str:
    """The TOML text that ``from_toml`` reads back to an equal configuration."""
    return _table(config.model_dump(mode="json", exclude_none=True), ())


def _table(values: Mapping[str, Any], path: tuple[str, ...]) -> str:
    lines = [f"[{'.'.join(path)}]"] if path else []
    # JSON's strings, numbers, booleans and flat arrays are TOML values as they are.
    lines += [f"{_key(k)} = {json.dumps(v)}" for k, v in values.items() if not isinstance(v, dict)]
    text = "\n".join(lines) + "\n"
    for key, value in values.items():
        if isinstance(value, dict):
            text += "\n" + _table(value, (*path, _key(key)))  # pyright: ignore[reportUnknownArgumentType]
    return text


def _key(name: str) -> str:
    return name if name.replace("_", "").isalnum() and name.isascii() else json.dumps(name)


def from_toml(cls: type[T], path: Path) -> T:
    """Read a configuration file; ConfigError names the file, the key and what is wrong."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist", "a TOML file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", "a TOML file") from error
    return build(cls, values, str(path))
