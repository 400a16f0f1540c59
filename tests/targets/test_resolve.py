"""The selection a user asks for is exactly the one that is made, or an error says why not."""

from __future__ import annotations

import pytest

from glm_lora.arch.projections import Status, all_sites, trainable_sites
from glm_lora.arch.spec import BUILTIN, FULL, TINY
from glm_lora.config import SelectionConfig
from glm_lora.errors import TargetError
from glm_lora.targets.resolve import Resolution, resolve

FLASH = "GLM-5.3-Flash"
SLICE = "GLM-5.3-Flash-4layer"


def select(targets: str, excludes: str = "", model: str = FLASH, **config: object) -> Resolution:
    values = SelectionConfig(
        target_modules=targets,
        exclude_modules=excludes,
        **config,  # type: ignore[arg-type]
    )
    return resolve(BUILTIN[model], model, values)


def leaves(resolution: Resolution) -> dict[str, int]:
    counts: dict[str, int] = {}
    for adapter in resolution.selection.adapters:
        counts[adapter.site.leaf] = counts.get(adapter.site.leaf, 0) + 1
    return counts


def refusal(targets: str, excludes: str = "", model: str = FLASH, **config: object) -> str:
    with pytest.raises(TargetError) as error:
        select(targets, excludes, model, **config)
    assert error.value.exit_code == 2
    return str(error.value)


@pytest.mark.parametrize(
    ("model", "sites", "parameters"),
    [(FLASH, 485, 65_955_840), (SLICE, 43, 7_195_648), ("tiny", 43, None)],
)
def test_the_recipe_selects_the_table(model: str, sites: int, parameters: int | None) -> None:
    resolution = resolve(BUILTIN[model], model, SelectionConfig())
    assert resolution.selection.num_sites == sites
    if parameters is not None:
        assert resolution.selection.trainable_parameters == parameters
    assert resolution.warnings == ()


def test_the_recipe_per_part() -> None:
    recipe = resolve(FULL, FLASH, SelectionConfig()).selection
    parameters: dict[str, int] = {}
    for adapter in recipe.adapters:
        part = "mlp" if ".mlp." in adapter.site.name else adapter.site.group
        parameters[part] = parameters.get(part, 0) + adapter.site.parameters(adapter.rank)
    assert parameters == {"kda": 42_649_600, "dsa": 8_560_640, "mlp": 14_745_600}


def test_all_is_every_trainable_site() -> None:
    chosen = [a.site for a in select("all").selection.adapters]
    assert chosen == list(trainable_sites(FULL))


def test_attention_and_mlp_without_excludes_fail_with_both_fixes() -> None:
    text = refusal("attn,mlp")
    assert "kv_b_proj" in text and "never called" in text
    assert "routed experts" in text
    assert '"*.self_attn.kv_b_proj,*.mlp.experts.*"' in text
    fixed = select("attn,mlp", "*.self_attn.kv_b_proj,*.mlp.experts.*")
    assert fixed.selection.num_sites == 485


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        ("kda", 306),
        ("dsa", 44),
        ("dense_mlp", 9),
        ("shared_experts", 126),
        ("kda,dsa,dense_mlp,shared_experts", 485),
        ("b_proj", 34),
        ("o_proj", 45),
        ("q_proj,k_proj,v_proj,o_proj", 147),
        ("*.self_attn.f_a_proj", 34),
        ("*.forget_gate.f_a_proj", 34),
        ("*.layers.3.self_attn.o_proj", 1),
        ("model.language_model.layers.3.self_attn.o_proj", 1),
        ("*.shared_experts.*", 126),
        ("*.mlp.gate_proj", 3),
        (" q_proj ,\tk_proj ", 68),
        ("q_proj,q_proj", 34),
    ],
)
def test_counts(targets: str, count: int) -> None:
    assert select(targets).selection.num_sites == count


def test_both_spellings_select_the_same() -> None:
    disk = select("*.self_attn.f_a_proj,*.self_attn.f_b_proj").selection
    memory = select("*.forget_gate.f_?_proj").selection
    assert disk == memory


def test_layers_narrow_the_selection() -> None:
    narrowed = select("kda,dsa", layers="0-3, 43").selection
    assert {a.site.layer for a in narrowed.adapters} == {0, 1, 2, 3, 43}
    assert narrowed.num_sites == 3 * 9 + 2 * 4


@pytest.mark.parametrize(
    "layers", ["4-2", "45", "0-45", "x", "1-", "-1", ",", "1.5", "0--2", "9" * 99]
)
def test_bad_layers(layers: str) -> None:
    assert "--layers" in refusal("attn", "*.kv_b_proj", layers=layers)


def test_an_include_that_the_layers_empty_is_said() -> None:
    resolution = select("kda,dsa", layers="0-2")
    assert resolution.selection.num_sites == 27
    assert any("'dsa'" in w and "0-2" in w for w in resolution.warnings)
    assert "layers 0-2" in refusal("dsa", layers="0-2")


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        ("*.self_attn.kv_b_proj", "absorbs kv_b_proj"),
        ("kv_b_proj", "absorbs kv_b_proj"),
        ("*.mlp.experts.0.gate_proj", "routed experts"),
        ("*.indexer.wq_b", "the indexer only picks tokens"),
        ("mlp.gate", "router"),
        ("conv1d", "convolution"),
        ("q_conv1d", "convolution"),
        ("A_log", "decay parameter"),
        ("dt_bias", "decay parameter"),
        ("o_norm", "normalisation"),
        ("hc_attn_fn", "hyper-connection"),
        ("*.attn_hc.fn", "hyper-connection"),
        ("lm_head", "output head"),
        ("embed_tokens", "embeddings"),
        ("visual.blocks.0.attn.qkv", "vision tower"),
        ("*.visual.*", "vision tower"),
        ("layers.45.*", "multi-token-prediction"),
        ("*.layers.45.self_attn.o_proj", "multi-token-prediction"),
    ],
)
@pytest.mark.parametrize("model", list(BUILTIN))
@pytest.mark.parametrize("excludes", ["", "*.mlp.experts.*,*.self_attn.kv_b_proj"])
def test_what_cannot_be_trained_is_refused_with_its_reason(
    item: str, reason: str, model: str, excludes: str
) -> None:
    text = refusal(item, excludes, model)
    assert repr(item) in text and reason in text
    assert repr(item) in refusal(f"q_proj,{item}", excludes, model)


def test_a_frozen_target_names_the_exclude_that_fixes_it() -> None:
    text = refusal("gate_proj,up_proj,down_proj")
    assert '--exclude-modules "*.mlp.experts.*"' in text
    assert select("gate_proj,up_proj,down_proj", "*.mlp.experts.*").selection.num_sites == 135


@pytest.mark.parametrize(
    ("item", "near"),
    [
        ("q_prj", "'q_proj'"),
        ("atn", "'attn'"),
        ("Q_proj", "'q_proj'"),
        ("*.self_attn.q_prj", "'*.self_attn.q_proj'"),
        ("*.self_atn.q_proj", "'*.self_attn.q_proj'"),
        ("self_attn.q_proj", "'*.self_attn.q_proj'"),
        ("layers.3.self_attn.o_proj", "'*.layers.3.self_attn.o_proj'"),
        ("model.layers.0.self_attn.o_proj", "'model.language_model.layers.0.self_attn.o_proj'"),
        ("*.layers.0.self_attn.o_proj.weight", "'*.layers.0.self_attn.o_proj'"),
        (
            "base_model.model.model.language_model.layers.0.self_attn.o_proj",
            "'model.language_model.layers.0.self_attn.o_proj'",
        ),
        ("*.self_attn.qkv_proj", "q_proj,k_proj,v_proj"),
        ("qkv_proj", "q_proj,k_proj,v_proj"),
        ("fused_qkv_a_proj_with_mqa", "q_a_proj,kv_a_proj_with_mqa"),
    ],
)
def test_near_names_are_suggested(item: str, near: str) -> None:
    assert near in refusal(f"o_proj,{item}")


def test_a_name_of_the_full_model_only() -> None:
    text = refusal("*.layers.7.self_attn.o_proj", model="tiny")
    assert "tiny" in text and "layers 0 to 3" in text and "GLM-5.3-Flash" in text
    assert "GLM-5.3-Flash" in refusal("layers.7.self_attn.o_proj", model="tiny")


def test_excludes_must_name_something_in_the_full_model() -> None:
    assert "'q_proj'" in refusal("attn", "q_prj")
    assert "'*.mlp.expert.*'" in refusal("attn,mlp", "*.mlp.expert.*")
    resolution = select("kda", "*.visual.*,lm_head,*.layers.44.*,*.mlp.experts.*", "tiny")
    nothing = [w for w in resolution.warnings if "removes nothing" in w]
    assert len(nothing) == 4


def test_an_exclude_that_takes_everything_is_an_error() -> None:
    assert "takes out all" in refusal("q_proj", "*.self_attn.*")
    assert "takes out all" in refusal("kda", "*")


@pytest.mark.parametrize("pattern", ["*", "**", "*.*", "*proj*"])
def test_a_glob_for_everything_meets_the_frozen_projections(pattern: str) -> None:
    text = refusal(pattern)
    assert "kv_b_proj" in text and "*.mlp.experts.*" in text


@pytest.mark.parametrize(
    "item",
    [
        "",
        " ",
        ",",
        " , ,\t",
        "*[ab",
        "*]",
        "[]",
        "[!]",
        "*.[q,k]_proj",
        "q" * 10_000,
        "*a" * 5_000,
        "*" * 10_000,
        "q_proj\n",
        "q_proj\n,k_proj",
        "*.self_attn\n.q_proj",
        "q proj",
        "q_pr\u043ej",
        "\uff51_proj",
        "*.self_attn/q_proj",
        "self_attn\\q_proj",
        "(q|k)_proj",
        ".*q_proj$",
        "q_proj\0",
        "\u2028",
    ],
)
def test_bad_items(item: str) -> None:
    for text in (refusal(item, "kv_b_proj"), refusal("kda", item) if item else refusal(item)):
        assert len(text) < 500


def test_a_lookalike_is_named() -> None:
    assert "CYRILLIC SMALL LETTER O" in refusal("q_pr\u043ej")


def test_warnings_tell_what_is_left_out() -> None:
    (partial,) = select("q_proj,k_proj,v_proj,o_proj").warnings
    assert "11 DSA layers get only o_proj" in partial
    assert any(
        "f_a_proj is adapted without f_b_proj in 34 layers" in w
        for w in select("f_a_proj").warnings
    )
    assert any("11 of 45 layers" in w for w in select("dsa").warnings)
    assert select("kda").warnings == ()


def test_the_counts_of_each_item() -> None:
    resolution = select("attn,mlp", "*.mlp.experts.*,*.self_attn.kv_b_proj")
    assert [(i.item, i.matched, i.effective) for i in resolution.items] == [
        ("attn", 361, 350),
        ("mlp", 135 + 36_288, 135),
        ("*.mlp.experts.*", 36_288, 36_288),
        ("*.self_attn.kv_b_proj", 11, 11),
    ]


def test_the_site_list_of_the_full_model() -> None:
    sites = all_sites(FULL)
    assert len(sites) == len({s.disk_name for s in sites}) == 485 + 11 + 36_288
    assert sum(s.status is Status.TRAINABLE for s in sites) == 485


def test_ranks_per_pattern_keep_alpha_over_rank() -> None:
    chosen = select("kda,dense_mlp", ranks={"*.mlp.*": 8, "o_proj": 32}).selection
    ranks = {(a.site.leaf, a.rank, a.alpha) for a in chosen.adapters}
    assert {("gate_proj", 8, 16.0), ("o_proj", 32, 64.0), ("q_proj", 16, 32.0)} <= ranks
    assert chosen.rank == 32 and chosen.alpha == 64.0


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ({"q_prj": 8}, "'q_proj'"),
        ({"dsa": 8}, "no selected projection"),
        ({"q_proj": 0}, "rank of 1 or more"),
        ({"q_proj": -4}, "rank of 1 or more"),
        ({"q_proj": 8, "*.self_attn.*": 4}, "two ranks"),
        ({"q_proj,k_proj": 8}, "one group"),
        ({"": 8}, "names nothing"),
    ],
)
def test_bad_ranks(ranks: dict[str, int], says: str) -> None:
    assert says in refusal("kda", ranks=ranks)


def test_a_model_without_moe_takes_the_recipe() -> None:
    assert resolve(TINY.first_layers(3), "cut", SelectionConfig()).selection.num_sites == 36
