"""Every recipe that is shipped works; every broken one is refused."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from glm_lora.arch.spec import BUILTIN, FULL
from glm_lora.config import SelectionConfig
from glm_lora.errors import ConfigError, TargetError
from glm_lora.targets.recipes import load_recipe
from glm_lora.targets.resolve import resolve
from tests.conftest import ROOT

FOLDER = ROOT / "adapters"
SITES = {
    "attn_mlp": 485,
    "attn_mlp_small_mlp": 485,
    "attn_only": 350,
    "dsa_only": 44,
    "kda_only": 306,
    "mlp_only": 135,
}


def test_all_shipped_recipes_are_known_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.toml")} == set(SITES)


@pytest.mark.parametrize("name", SITES)
def test_a_shipped_recipe(name: str) -> None:
    config = load_recipe(FOLDER / f"{name}.toml")
    assert resolve(FULL, "GLM-5.3-Flash", config).selection.num_sites == SITES[name]
    for model, spec in BUILTIN.items():
        resolution = resolve(spec, model, config)
        assert not [w for w in resolution.warnings if "removes nothing" in w]


def test_the_main_recipe_is_the_default() -> None:
    assert load_recipe(FOLDER / "attn_mlp.toml") == SelectionConfig()


def test_ranks_per_pattern(tmp_path: Path) -> None:
    config = load_recipe(FOLDER / "attn_mlp_small_mlp.toml")
    selection = resolve(FULL, "GLM-5.3-Flash", config).selection
    assert {(".mlp." in a.site.name, a.rank, a.alpha) for a in selection.adapters} == {
        (True, 8, 16.0),
        (False, 16, 32.0),
    }
    assert {a.scaling for a in selection.adapters} == {2.0}


def test_strings_and_lists_mean_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('target_modules = "attn, mlp"\nexclude_modules = "*.kv_b_proj,*.experts.*"')
    one = load_recipe(path)
    path.write_text(
        'target_modules = ["attn", "mlp"]\nexclude_modules = ["*.kv_b_proj", "*.experts.*"]'
    )
    assert resolve(FULL, "m", one) == resolve(FULL, "m", load_recipe(path))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "target_modules is missing"),
        ("[[[", "cannot be read"),
        ('target_modules = "attn"\ntarget_modules = "mlp"', "cannot be read"),
        ('target_modules = "attn"\ntarget_module = "x"', "Did you mean 'target_modules'"),
        ('target_modules = "attn"\n[ranks]\nq_proj = 8', "Did you mean 'rank'"),
        ('target_modules = "attn"\n[alpha]\nq_proj = 8', "unknown key 'alpha'"),
        ('target_modules = "attn"\nuse_rslora = true', "unknown key 'use_rslora'"),
        ("target_modules = 3", "a string or a list of strings"),
        ('target_modules = ["attn", 3]', "a string or a list of strings"),
        ('target_modules = "attn"\nlayers = [0]', "layers is"),
        ('target_modules = "attn"\nlora_rank = "8"', "lora_rank is '8'"),
        ('target_modules = "attn"\nlora_rank = 8.0', "lora_rank is 8.0"),
        ('target_modules = "attn"\nlora_rank = true', "lora_rank is True"),
        ('target_modules = "attn"\nlora_rank = 0', "lora_rank is 0"),
        ('target_modules = "attn"\nlora_alpha = nan', "lora_alpha is nan"),
        ('target_modules = "attn"\nlora_alpha = 0', "lora_alpha is 0"),
        ('target_modules = "attn"\nlora_dropout = 1.0', "lora_dropout is 1.0"),
        ('target_modules = "attn"\nrank = 8', "rank is 8"),
        ('target_modules = "attn"\n[rank]\nq_proj = "8"', "rank.q_proj is '8'"),
    ],
)
def test_a_broken_recipe(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_recipe(path)
    assert says in str(error.value) and str(path) in str(error.value)
    assert error.value.exit_code == 2


def test_a_runs_configuration_is_no_recipe_and_the_error_says_what_is(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('model_name = "tiny"\n[selection]\ntarget_modules = "attn"\n')
    with pytest.raises(ConfigError, match="target_modules is missing") as error:
        load_recipe(path)
    assert "at its top, without the [selection]" in error.value.next_step
    (example,) = re.findall(r"adapters/\S+\.toml", error.value.next_step)
    load_recipe(ROOT / example)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "binary.toml", tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            load_recipe(path)


def test_a_recipe_with_a_misspelt_target_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    shutil.copy(FOLDER / "kda_only.toml", path)
    path.write_text(path.read_text().replace('"kda"', '"kdb"'))
    with pytest.raises(TargetError, match="'kdb'"):
        resolve(FULL, "m", load_recipe(path))
