"""The exact reward, the registry, and the text that is scored."""

from __future__ import annotations

import pytest

from glm_lora.errors import DataError
from glm_lora.protocols import AdapterRef, Finish, Sample
from glm_lora.rl.rewards import Answer, make_reward, response_text


def answer(response, label="8", finish=Finish.STOP) -> Answer:
    return Answer("7+>", response, label, finish)


@pytest.mark.parametrize(
    ("response", "label", "finish", "value"),
    [
        ("8", "8", Finish.STOP, 1.0),
        (" 8\n", "8", Finish.STOP, 1.0),
        ("8", " 8", Finish.STOP, 1.0),
        ("8", "8", Finish.LENGTH, 0.0),
        ("8", "8", Finish.ABORT, 0.0),
        ("88", "8", Finish.STOP, 0.0),
        ("", "8", Finish.STOP, 0.0),
        ("8.0", "8", Finish.STOP, 0.0),
    ],
)
def test_exact(response, label, finish, value):
    reward = make_reward("exact")
    assert [s.value for s in reward.score([answer(response, label, finish)])] == [value]
    reward.close()


def test_exact_refuses_blank_labels():
    assert make_reward("exact").check_label(" \t") is not None
    assert make_reward("exact").check_label("8") is None


def test_unknown_reward():
    with pytest.raises(DataError, match=r"unknown reward 'exakt'.*Did you mean 'exact'"):
        make_reward("exakt")


@pytest.mark.parametrize(
    ("ids", "finish", "text"),
    [
        ((3, 4, 1), Finish.STOP, "3 4"),
        ((1,), Finish.STOP, ""),
        ((3, 1), Finish.LENGTH, "3 1"),
        ((3, 1, 1), Finish.STOP, "3 1"),
        ((3, 4), Finish.STOP, "3 4"),
        ((), Finish.ABORT, ""),
    ],
)
def test_the_stop_token_is_not_part_of_the_text(ids, finish, text):
    sample = Sample((2,), ids, (-1.0,) * len(ids), finish, AdapterRef("policy", 0))
    assert response_text(sample, lambda x: " ".join(map(str, x)), (1, 9)) == text
