"""The tiny checkpoint: what transformers reads, how well it answers, and its tokenizer."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from glm_lora.arch.spec import TINY, spec_from_dir
from glm_lora.checkpoint import tiny as toy
from glm_lora.checkpoint.prepare import PrepareResult
from tests.support import load_whole


@pytest.fixture(scope="module")
def model(tiny: PrepareResult) -> torch.nn.Module:
    return load_whole(tiny.hf_checkpoint).eval()


def test_headroom(model: torch.nn.Module) -> None:
    # A third of the ambiguous answers is the digit itself, less the label noise.
    assert 0.27 <= toy.accuracy(model, "?") <= 0.33
    # Clear marks are wrong only where the noise changed the label: 1 - 0.1 * 9 / 10 = 0.91.
    assert all(0.87 <= toy.accuracy(model, mark) <= 0.95 for mark in "+-=")


def test_the_spec_is_tiny(tiny: PrepareResult) -> None:
    assert spec_from_dir(tiny.hf_checkpoint) == TINY


def test_what_sglang_reads(tiny: PrepareResult) -> None:
    config = json.loads((tiny.hf_checkpoint / "config.json").read_text())
    assert config["language_model_only"] is True
    assert config["text_config"]["mhc"] is True
    assert config["text_config"]["index_kpool_compress"] is True
    assert config["text_config"]["model_type"] == "glm5_next_text"


def test_tokenizer(tiny: PrepareResult) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny.hf_checkpoint)
    assert tokenizer("7?>").input_ids == toy.encode("7?>")
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (TINY.pad_token_id, toy.EOS)
    for text in ("0123456789+-=?x>", "7?>7"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.decode([*toy.encode("7"), toy.EOS], skip_special_tokens=True) == "7"
    assert tokenizer("7!").input_ids == [*toy.encode("7"), tokenizer.unk_token_id]
    batch = tokenizer(["7", "7?>"], padding=True)
    assert batch["attention_mask"] == [[0, 0, 1], [1, 1, 1]]


def test_prompts(tiny: PrepareResult) -> None:
    def rows(path: Path) -> list[dict[str, str]]:
        return [json.loads(line) for line in path.read_text().splitlines()]

    prompts = rows(tiny.data["prompts"])
    assert [r["prompt"] for r in prompts] == [f"{d}?>" for d in range(10)]
    assert all(r["label"] == r["prompt"][0] for r in prompts)
    clear = {r["prompt"]: r["label"] for r in rows(tiny.data["eval"])}
    assert len(clear) == 30
    assert (clear["9+>"], clear["0->"], clear["4=>"]) == ("0", "9", "4")


def test_training_batches_follow_the_rule() -> None:
    tokens = toy._batch(torch.Generator().manual_seed(0))
    assert tokens.shape == (toy.BATCH, 5)
    assert bool((tokens[:, 3] != toy.EOS).all()) and bool((tokens[:, 4] == toy.EOS).all())
    texts = ["".join(toy.CHARACTERS[t - toy.FIRST_CHARACTER] for t in row[:4]) for row in tokens]
    clear = [t for t in texts if t[1] in "+-="]
    right = sum(toy.answer(int(t[0]), t[1]) == int(t[3]) for t in clear)
    assert {t[1] for t in texts} == set("+-=?") and 0.8 < right / len(clear) < 1


def test_the_same_seed_gives_the_same_model() -> None:
    first, second, other = (toy.build_model(seed=s).state_dict() for s in (3, 3, 4))
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
