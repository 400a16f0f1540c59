"""Chat templates, stop tokens and decoding, on a real tokenizer built here."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from glm_lora.errors import DataError
from glm_lora.rl.chat import ChatFormat
from glm_lora.rl.data import load_prompts

SPECIAL = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"]
SPECIAL += ["<|observation|>", "<think>", "</think>"]
TEMPLATE = (
    "[gMASK]<sop><|system|>Reasoning Effort: {{ 'high' if enable_thinking else 'none' }}"
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)


def make_tokenizer(template: str | None):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    if template is not None:
        fast.add_special_tokens({"additional_special_tokens": SPECIAL})
        fast.chat_template = template
    return fast


@pytest.fixture
def folder(tmp_path):
    make_tokenizer(TEMPLATE).save_pretrained(tmp_path)
    return tmp_path


def test_text_and_messages_go_through_the_template(folder):
    chat = ChatFormat.load(folder, (3,))
    rendered = "[gMASK]<sop><|system|>Reasoning Effort: high<|user|>1+1?<|assistant|><think>"
    for prompt in ("1+1?", ({"role": "user", "content": "1+1?"},)):
        assert chat.render(prompt) == rendered
        ids = chat.encode(prompt)
        assert chat.decode(ids) == rendered
        # Special tokens are single tokens, and none is added around the template's own.
        markers = sum(rendered.count(s) for s in SPECIAL)
        assert len(ids) == markers + len("Reasoning Effort: high") + len("1+1?")
    assert f"prompt of {len(ids)} tokens: {list(ids)}" in chat.describe(ids)
    assert repr(rendered) in chat.describe(ids)


def test_role_markers_end_a_response(folder):
    tokenizer = make_tokenizer(TEMPLATE)
    names = ("<|endoftext|>", "<|user|>", "<|observation|>")
    markers = {tokenizer.convert_tokens_to_ids(name) for name in names}
    chat = ChatFormat.load(folder, (3,))
    assert set(chat.stop_token_ids) == {3, *markers} and len(markers) == 3
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 7]}))
    assert 7 in ChatFormat.load(folder, ()).stop_token_ids
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert 9 in ChatFormat.load(folder, ()).stop_token_ids


def test_without_a_template_text_is_taken_as_it_is(tmp_path):
    make_tokenizer(None).save_pretrained(tmp_path)
    chat = ChatFormat.load(tmp_path, (1,))
    assert chat.decode(chat.encode("7+>")) == "7+>" and len(chat.encode("7+>")) == 3
    assert chat.stop_token_ids == (1,)
    with pytest.raises(DataError, match="no chat template"):
        chat.encode(({"role": "user", "content": "7+>"},))
    with pytest.raises(DataError, match="names a token that ends a response"):
        ChatFormat.load(tmp_path, ())
    with pytest.raises(DataError, match=r"no checkpoint in .* no tokenizer"):
        ChatFormat.load(tmp_path / "none", (1,))


def test_a_row_the_template_refuses_is_a_bad_row(folder, tmp_path):
    chat = ChatFormat.load(folder, (3,))
    rows = [
        {"prompt": "fine", "label": "1"},
        {"prompt": [{"role": "tool", "content": "x"}], "label": "1"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"rows\.jsonl:2: the chat template refuses the messages"):
        load_prompts([str(path)], chat.encode)
    limit = len(chat.encode("fine"))
    assert len(load_prompts([str(path)], chat.encode, skip_bad_rows=True)) == 1
    with pytest.raises(DataError, match=f"the limit is {limit - 1}"):
        load_prompts([str(path)], chat.encode, max_prompt_tokens=limit - 1)
