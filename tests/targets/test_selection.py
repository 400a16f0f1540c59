"""A selection is one value: hashable, written and read exactly, refused when it is not ours."""

from __future__ import annotations

import hashlib
import json
import pickle
from dataclasses import replace
from typing import Any

import pytest

from glm_lora.arch.projections import trainable_sites
from glm_lora.arch.spec import FULL, TINY
from glm_lora.errors import TargetError
from glm_lora.targets.selection import Selection, make_selection

SITES = trainable_sites(TINY)
WHOLE = make_selection("tiny", TINY, SITES, rank=8, alpha=16)


def forged(**changes: Any) -> str:
    """A selection file with changes and a matching hash, as someone with a script would make it."""
    content = {k: v for k, v in json.loads(WHOLE.to_json()).items() if k != "hash"} | changes
    stamp = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps({**content, "hash": stamp})


def refusal(text: str, spec=TINY) -> str:
    with pytest.raises(TargetError) as error:
        Selection.from_json(text, spec)
    assert error.value.exit_code == 2
    return str(error.value)


def test_it_is_a_value() -> None:
    again = make_selection("tiny", TINY, reversed(SITES), rank=8, alpha=16.0)
    assert again == WHOLE and hash(again) == hash(WHOLE) and again.hash == WHOLE.hash
    assert pickle.loads(pickle.dumps(WHOLE)) == WHOLE
    with pytest.raises(AttributeError):
        WHOLE.dropout = 0.5  # type: ignore[misc]


def test_shapes_and_counts() -> None:
    shapes = WHOLE.tensor_shapes()
    assert len(shapes) == 2 * 43
    assert sum(a * b for a, b in shapes.values()) == WHOLE.trainable_parameters
    name = "model.language_model.layers.0.self_attn.f_a_proj"
    assert shapes[f"{name}.lora_A.weight"] == (8, 64)
    assert shapes[f"{name}.lora_B.weight"] == (16, 8)


def test_json_round_trip() -> None:
    back = Selection.from_json(WHOLE.to_json(), TINY)
    assert back == WHOLE and back.hash == WHOLE.hash


def test_what_it_trains_decides_its_hash() -> None:
    others = [
        make_selection("tiny", TINY, SITES[1:], rank=8, alpha=16),
        make_selection("tiny", TINY, SITES, rank=4, alpha=16),
        make_selection("tiny", TINY, SITES, rank=8, alpha=8),
        make_selection("tiny", TINY, SITES, rank=8, alpha=16, dropout=0.1),
        make_selection("tiny", TINY, SITES, rank=8, alpha=16, ranks={SITES[0].disk_name: 4}),
    ]
    assert len({WHOLE.hash, *(o.hash for o in others)}) == 6


def test_another_model_is_refused() -> None:
    assert "another model (tiny)" in refusal(WHOLE.to_json(), FULL)
    assert "another model" in refusal(WHOLE.to_json(), replace(TINY, hidden_size=128))


@pytest.mark.parametrize(
    ("old", "new"),
    [('"dropout": 0.0', '"dropout": 0.1'), ("q_proj", "k_proj"), ("16.0", "32.0"), ("8,", "9,")],
)
def test_a_file_edited_by_hand_is_refused(old: str, new: str) -> None:
    text = WHOLE.to_json()
    assert old in text
    assert "changed after it was written" in refusal(text.replace(old, new, 1))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "3", '"x"', "{}", '{"hash": 1}', "[" * 100_000]
)
def test_other_text_is_refused(text: str) -> None:
    assert "not readable" in refusal(text)


def test_another_schema_is_refused() -> None:
    assert "schema version 2" in refusal(forged(schema=2))


@pytest.mark.parametrize(
    "changes",
    [
        {"sites": []},
        {"sites": 3},
        {"sites": [["model.language_model.layers.9.self_attn.q_proj", 8, 16.0]]},
        {"sites": [["model.language_model.layers.3.self_attn.kv_b_proj", 8, 16.0]]},
        {"sites": [[SITES[0].disk_name, 8]]},
        {"sites": [[SITES[0].disk_name, 0, 16.0]]},
        {"sites": [[SITES[0].disk_name, "8", 16.0]]},
        {"sites": [[SITES[0].disk_name, 8, 16.0]] * 2},
        {"sites": [[SITES[0].disk_name, 8, 16.0], [SITES[1].disk_name, 8, 8.0]]},
    ],
)
def test_a_forged_file_is_refused(changes: dict[str, Any]) -> None:
    assert "does not hold what its schema says" in refusal(forged(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": 0},
        {"rank": -1},
        {"rank": True},
        {"rank": 1.5},
        {"alpha": 0},
        {"alpha": -1.0},
        {"alpha": float("nan")},
        {"alpha": float("inf")},
        {"dropout": 1.0},
        {"dropout": -0.1},
        {"sites": []},
        {"ranks": {SITES[0].disk_name: 0}},
    ],
)
def test_bad_values(changes: dict[str, Any]) -> None:
    values: dict[str, Any] = {"sites": SITES, "rank": 8, "alpha": 16.0} | changes
    with pytest.raises(TargetError):
        make_selection("tiny", TINY, values.pop("sites"), **values)
