"""Machines and ranks that do not run the same thing are refused with every difference."""

from __future__ import annotations

import pytest

from glm_lora.arch.projections import trainable_sites
from glm_lora.arch.spec import TINY
from glm_lora.cluster.agreement import check_same_software, compare, installed, statement
from glm_lora.config import TrainConfig
from glm_lora.errors import ConfigError
from glm_lora.targets.selection import make_selection


def said(rank: int = 8, **changes):
    values = {"hf_checkpoint": "h", "ref_load": "r", "run_dir": "d", **changes}
    selection = make_selection("tiny", TINY, trainable_sites(TINY), rank=rank, alpha=16.0)
    return statement(TrainConfig.model_validate(values), selection)


def test_equal_ranks_pass_wherever_their_run_folder_is():
    compare([said(), said(run_dir="elsewhere")])


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (said(rank=4), "rank(s) 1 have another selection"),
        (said(seed=1), "rank(s) 1 have another configuration"),
    ],
)
def test_a_rank_that_differs_is_named(other, words):
    with pytest.raises(ConfigError) as caught:
        compare([said(), other])
    assert words in str(caught.value)


def test_every_package_that_differs_is_named():
    here = dict(installed())
    assert {"torch", "ray", "megatron-core", "glm-lora"} <= here.keys()
    there = here | {"torch": "2.0", "ray": "2.1"}
    with pytest.raises(ConfigError) as caught:
        check_same_software({"the driver": here, "machine 0 (a)": here, "machine 1 (b)": there})
    text = str(caught.value)
    assert "torch 2.0 on machine 1 (b)" in text and "ray 2.1 on machine 1 (b)" in text
    assert "machine 0" not in text


def test_two_wheels_of_one_version_are_told_apart(tmp_path):
    here = dict(installed())
    there = here | {"glm-lora": here["glm-lora"].replace("source ", "source f")}
    with pytest.raises(ConfigError, match="source f"):
        check_same_software({"the driver": here, "machine 0": there})
