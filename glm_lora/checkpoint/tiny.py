"""The tiny model: a real 4-layer glm5_next, pre-trained here on a toy task in seconds.

The toy's prompts are a digit, a mark and ``>``. ``+`` asks for the next digit, ``-`` for the one
before, ``=`` for the digit itself (all modulo 10); ``?`` is ambiguous, its answer is one of the
three, a third each. Pre-training leaves ``?`` undecided, which is the headroom that reinforcement
learning then uses: its reward wants the digit itself.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from glm_lora.arch.spec import TINY, ModelSpec
from glm_lora.checkpoint.files import write_atomic
from glm_lora.checkpoint.hf_config import text_config, vision_config
from glm_lora.checkpoint.progress import Progress, Report, silent
from glm_lora.model.hf_hooks import mend_kda

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

PAD, EOS = 0, 1
CHARACTERS = "0123456789+-=?x>"
FIRST_CHARACTER = 2
UNKNOWN = FIRST_CHARACTER + len(CHARACTERS)
CLEAR_MARKS = "+-="
OPEN_MARK = "?"

STEPS = 200
BATCH = 64
LEARNING_RATE = 3e-3
LABEL_NOISE = 0.1


def answer(digit: int, mark: str) -> int:
    """The right digit for a clear mark (``+``, ``-`` or ``=``)."""
    return (digit + {"+": 1, "-": -1, "=": 0}[mark]) % 10


def encode(text: str) -> list[int]:
    """Token ids of a text made of the toy's characters; the tokenizer file does the same."""
    return [FIRST_CHARACTER + CHARACTERS.index(c) for c in text]


def build_model(spec: ModelSpec = TINY, seed: int = 0) -> torch.nn.Module:
    """A random transformers ``Glm5NextForConditionalGeneration`` of ``spec`` in fp32."""
    import torch
    from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

    config = Glm5NextConfig(
        text_config=text_config(spec),  # pyright: ignore[reportCallIssue]
        vision_config=vision_config(spec),  # pyright: ignore[reportCallIssue]
        language_model_only=True,  # pyright: ignore[reportCallIssue]
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Glm5NextForConditionalGeneration(config)
    mend_kda(model)
    return model


def pretrain(
    model: torch.nn.Module,
    seed: int,
    report: Report = silent,
    learning_rate: float = LEARNING_RATE,
) -> float:
    """Train ``model`` on the toy with next-token prediction; returns the last step's loss.

    Deterministic for one seed on one kind of processor (one thread, one CPU generator). The loss
    counts the answer digit and the end token only. Wider models want a lower ``learning_rate``.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(
        [p for n, p in model.named_parameters() if ".visual." not in n], lr=learning_rate
    )
    device = next(model.parameters()).device
    loss_value = float("nan")
    with _one_thread():
        model.train()
        for step in range(STEPS):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * min(1.0, 2 * (1 - step / STEPS))
            tokens_BL = _batch(generator).to(device)
            logits_BLV = model(input_ids=tokens_BL[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(
                logits_BLV[:, -2:].flatten(0, 1), tokens_BL[:, -2:].flatten()
            )
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
            optimizer.step()
            loss_value = float(loss.detach())
            report(Progress("pre-training", step + 1, STEPS, "steps"))
        model.eval()
    return loss_value


def accuracy(model: torch.nn.Module, mark: str) -> float:
    """Mean probability that ``model`` answers ``<digit><mark>>`` with the wanted digit and ends.

    For the ambiguous mark the wanted digit is the prompt's own.
    """
    import torch

    wanted = [d if mark == OPEN_MARK else answer(d, mark) for d in range(10)]
    rows = [[*encode(f"{d}{mark}>{w}"), EOS] for d, w in enumerate(wanted)]
    tokens = torch.tensor(rows, device=next(model.parameters()).device)
    with torch.no_grad(), _one_thread():
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits[:, -2:]
        logprobs = logits.log_softmax(-1).gather(-1, tokens[:, -2:, None]).sum((1, 2))
    return float(logprobs.exp().mean())


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, with padding, end and unknown tokens; no chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": PAD, "<eos>": EOS, "<unk>": UNKNOWN}
    vocabulary |= {c: FIRST_CHARACTER + i for i, c in enumerate(CHARACTERS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # pyright: ignore
    backend.decoder = decoders.Fuse()  # pyright: ignore
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=TINY.index_topk,
    )


def prompt_files(folder: Path) -> dict[str, Path]:
    """The task's files by name."""
    return {"prompts": folder / "prompts.jsonl", "eval": folder / "eval.jsonl"}


def changed_prompts(folder: Path) -> list[Path]:
    """The task's files that are there and hold something else than ``write_prompts`` writes."""
    return [
        path
        for path, text in _prompt_texts(folder).items()
        if path.exists() and path.read_bytes() != text.encode()
    ]


def write_prompts(folder: Path, keep: Collection[Path] = ()) -> None:
    """Write the task's JSONL files, but for those of ``keep``.

    ``prompts`` holds the ambiguous prompts that reinforcement learning uses, ``eval`` the clear
    ones, whose accuracy should not suffer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    changed = changed_prompts(folder)
    for path, text in _prompt_texts(folder).items():
        if path not in keep and (path in changed or not path.exists()):
            write_atomic(path, text)


def _prompt_texts(folder: Path) -> dict[Path, str]:
    prompts = [{"prompt": f"{d}{OPEN_MARK}>", "label": str(d)} for d in range(10)]
    clear = [
        {"prompt": f"{d}{mark}>", "label": str(answer(d, mark))}
        for mark in CLEAR_MARKS
        for d in range(10)
    ]
    files = prompt_files(folder)
    return {
        files[name]: "".join(json.dumps(row) + "\n" for row in rows)
        for name, rows in (("prompts", prompts), ("eval", clear))
    }


def _batch(generator: torch.Generator) -> torch.Tensor:
    """``BATCH`` sequences ``digit mark > answer <eos>`` as token ids ``[B, 5]``."""
    import torch

    def draw(high: int) -> torch.Tensor:
        return torch.randint(0, high, (BATCH,), generator=generator)

    digit, mark, hidden_mark, wrong = draw(10), draw(4), draw(3), draw(10)
    noisy = torch.rand(BATCH, generator=generator) < LABEL_NOISE
    shift = torch.tensor([1, -1, 0])[torch.where(mark < 3, mark, hidden_mark)]
    target = torch.where(noisy, wrong, (digit + shift) % 10)
    columns = [digit, mark + 10, torch.full((BATCH,), CHARACTERS.index(">")), target]
    tokens = torch.stack(columns, 1) + FIRST_CHARACTER
    return torch.cat([tokens, torch.full((BATCH, 1), EOS)], 1)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Small matrices are faster, and sums are the same everywhere, with a single thread."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
