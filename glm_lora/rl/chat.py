"""Prompts as the model wants them: chat template, stop tokens, and text back from tokens.

A model with a chat template gets every prompt through it, thinking on; plain text becomes one user
message. A tokenizer without a template (the tiny model's) gets the text as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from glm_lora.config import RolloutConfig
from glm_lora.errors import DataError
from glm_lora.protocols import SamplingParams
from glm_lora.rl.data import Messages

ROLE_MARKERS = ("<|endoftext|>", "<|user|>", "<|observation|>")
"""Tokens that end a turn of GLM: there is no end-of-turn token, the next role begins instead."""


class ChatFormat:
    """Turns prompts into tokens and responses into text.

    Args:
        tokenizer: A transformers tokenizer.
        stop_token_ids: Tokens that end a response.
    """

    def __init__(self, tokenizer: Any, stop_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self.stop_token_ids: tuple[int, ...] = tuple(sorted(set(stop_token_ids)))

    @classmethod
    def load(cls, folder: Path, eos_token_ids: Sequence[int]) -> ChatFormat:
        """The format of the checkpoint in ``folder``.

        Args:
            folder: Folder with the tokenizer (and ``generation_config.json``).
            eos_token_ids: The end tokens that ``config.json`` names.

        Raises:
            DataError: The tokenizer cannot be loaded, or nothing would end a response.
        """
        from transformers import AutoTokenizer

        if not folder.is_dir():
            # transformers would take the path for the name of a repository.
            raise DataError(
                f"there is no checkpoint in {folder}, so no tokenizer either",
                "a folder with the model's tokenizer files",
                "Run glm-lora prepare, or name the folder (--hf-checkpoint, --model-dir)",
            )
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise DataError(
                f"the tokenizer in {folder} cannot be loaded: {error}",
                "the tokenizer files of the checkpoint",
            ) from error
        stops = {*eos_token_ids, *_generation_stops(folder), *_role_markers(tokenizer)}
        if not stops:
            raise DataError(
                f"nothing in {folder} names a token that ends a response",
                "eos_token_id in config.json or generation_config.json",
            )
        return cls(tokenizer, stops)

    def sampling(self, rollout: RolloutConfig, seed: int = 0) -> SamplingParams:
        """How a run samples in this format."""
        return SamplingParams(
            max_new_tokens=rollout.rollout_max_response_len,
            temperature=rollout.rollout_temperature,
            stop_token_ids=self.stop_token_ids,
            seed=seed,
        )

    @property
    def has_template(self) -> bool:
        """Whether prompts go through a chat template."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    def render(self, prompt: str | Messages) -> str:
        """The text that the model reads, special tokens spelled out.

        Raises:
            DataError: Messages without a template, or messages the template refuses.
        """
        if isinstance(prompt, str):
            if not self.has_template:
                return prompt
            prompt = ({"role": "user", "content": prompt},)
        if not self.has_template:
            raise DataError("the prompt is a list of messages but the model has no chat template")
        try:
            return self._tokenizer.apply_chat_template(
                [dict(m) for m in prompt],
                add_generation_prompt=True,
                tokenize=False,
                enable_thinking=True,
            )
        except TemplateError as error:
            raise DataError(f"the chat template refuses the messages: {error}") from error

    def encode(self, prompt: str | Messages) -> tuple[int, ...]:
        """Tokens of a prompt; the template's own special tokens are the only ones added."""
        return tuple(self._tokenizer.encode(self.render(prompt), add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens, special ones spelled out (rewards look for ``</think>``)."""
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def describe(self, ids: Sequence[int]) -> str:
        """A prompt exactly as the model gets it, for the log: tokens, then text."""
        return f"prompt of {len(ids)} tokens: {list(ids)}\nas text: {self.decode(ids)!r}"


def _generation_stops(folder: Path) -> tuple[int, ...]:
    try:
        config = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ()
    value = config.get("eos_token_id") if isinstance(config, dict) else None
    if isinstance(value, int):
        return (value,)
    return tuple(value) if isinstance(value, list) else ()


def _role_markers(tokenizer: Any) -> list[int]:
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[marker] for marker in ROLE_MARKERS if marker in vocabulary]
