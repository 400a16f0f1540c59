"""What ``targets`` prints is true, complete and readable by programs."""

from __future__ import annotations

import json

import pytest

from glm_lora.arch.projections import Status, all_params, all_sites, trainable_sites
from glm_lora.arch.spec import BUILTIN, FULL, TINY
from glm_lora.config import SelectionConfig
from glm_lora.errors import TargetError
from glm_lora.targets.matrix import readme
from glm_lora.targets.report import run_targets
from glm_lora.targets.support import Step
from tests.conftest import ROOT

FLASH = "GLM-5.3-Flash"
FOLDER = ROOT / "adapters"


def config(targets: str = "", excludes: str | None = None, **values: object) -> SelectionConfig:
    if targets:
        values |= {"target_modules": targets, "exclude_modules": excludes or ""}
    return SelectionConfig(**values)  # type: ignore[arg-type]


def report(model: str = FLASH, **values) -> dict:
    return json.loads(run_targets(model_name=model, config=config(**values), as_json=True))


def table(model: str = FLASH, **values) -> str:
    return run_targets(model_name=model, config=config(**values))


def explained(name: str, model: str = FLASH, **values) -> dict:
    text = run_targets(model_name=model, config=config(**values), as_json=True, explain=name)
    return json.loads(text)


def test_json_has_what_programs_need() -> None:
    found = report()
    assert found["model"] == FLASH
    assert found["num_sites"] == len(found["sites"]) == 485
    assert found["trainable_parameters"] == 65_955_840
    assert found["base_parameters"] == sum(p.numel for p in all_params(FULL).values())
    assert found["share_of_base"] == found["trainable_parameters"] / found["base_parameters"]
    assert found["bytes_bf16"] == 2 * 65_955_840
    assert found["warnings"] == []
    first = {k: v for k, v in found["sites"][3].items() if k in _KEYS}
    assert first == {
        "name": "model.language_model.layers.0.self_attn.forget_gate.f_a_proj",
        "disk_name": "model.language_model.layers.0.self_attn.f_a_proj",
        "sglang_name": "model.layers.0.self_attn.f_a_proj",
        "shape": [128, 4096],
        "kind": "replicated",
        "rank": 16,
    }


_KEYS = ("name", "disk_name", "sglang_name", "shape", "kind", "rank")


def test_projections_add_up() -> None:
    lines = report(targets="all", ranks={"*.mlp.*": 4})["projections"]
    assert sum(line["count"] for line in lines) == 485
    total = sum(line["parameters"] for line in lines)
    assert total == report(targets="all", ranks={"*.mlp.*": 4})["trainable_parameters"]
    for line in lines:
        rank_times_widths = line["rank"] * sum(line["shape"]) * line["count"]
        assert line["parameters"] == rank_times_widths
        assert line["bytes_bf16"] == 2 * rank_times_widths
    assert {line["rank"] for line in lines} == {4, 16}


def test_who_can_serve_what() -> None:
    served = {line["projection"]: line["served"] for line in report(targets="kda")["projections"]}
    for engine in (Step.EMBEDDED, Step.PEFT, Step.SGLANG_PLUGIN):
        assert all(verdicts[engine]["possible"] for verdicts in served.values())
    assert not any(verdicts[Step.SGLANG_STOCK]["possible"] for verdicts in served.values())
    assert all(verdicts[Step.SGLANG_STOCK]["reason"] for verdicts in served.values())


@pytest.mark.parametrize(
    ("targets", "leaf", "missing"),
    [
        ("q_proj,v_proj", "q_proj", "k_proj"),
        ("q_a_proj", "q_a_proj", "kv_a_proj_with_mqa"),
        ("*.shared_experts.gate_proj", "gate_proj", "up_proj"),
    ],
)
def test_a_part_of_a_fused_projection_cannot_be_served_alone(
    targets: str, leaf: str, missing: str
) -> None:
    found = report(targets=targets)
    (line,) = [p for p in found["projections"] if p["projection"] == leaf]
    assert line["served"][Step.PEFT]["possible"]
    assert not line["served"][Step.SGLANG_PLUGIN]["possible"]
    assert missing in line["served"][Step.SGLANG_PLUGIN]["reason"]
    assert any(f"serve {leaf} only together with" in w and missing in w for w in found["warnings"])


def test_different_ranks_are_explained() -> None:
    found = report(targets="all", ranks={"*.mlp.*": 8})
    (warning,) = found["warnings"]
    assert "ranks 8, 16" in warning and "padded with zeros to rank 16 with alpha 32" in warning


def test_the_table_for_people() -> None:
    text = table()
    assert text.isascii()
    for line in ("\nkda\n  q_proj", "\nshared_experts\n  gate_proj", "4096 x 16384", "all KDA"):
        assert line in text
    assert "485 sites in 45 of 45 layers, 65,955,840 trainable parameters" in text
    assert "served by: embedded, SGLang + plugin, PEFT" in text
    assert "warning" not in text
    assert max(map(len, text.split("\n\n")[1].splitlines())) <= 140


def test_warnings_and_layers_are_shown() -> None:
    text = table(targets="q_proj,k_proj,v_proj,o_proj", layers="0-5,7-8")
    assert "warning: the 2 DSA layers get only o_proj" in text
    assert "0-2,4-5,8" in text
    assert "warning: only 8 of 45 layers have an adapter" in text


def test_the_list_has_every_site_in_all_spellings() -> None:
    text = run_targets(model_name=FLASH, config=config(), list_sites=True)
    header, *lines = (line.split("\t") for line in text.splitlines())
    assert header == ["status", "rank", "kind", "shape", "transformers", "disk", "sglang"]
    count = {}
    for status, *_ in lines:
        count[status] = count.get(status, 0) + 1
    assert count["selected"] == 485
    assert count["frozen"] == 11 + 36_288
    assert {line[5] for line in lines} >= {s.disk_name for s in all_sites(FULL)}
    assert {line[4] for line in lines} >= {"lm_head", trainable_sites(FULL)[3].name}
    spelled = [line[6] for line in lines if line[6] != "-"]
    assert len(set(spelled)) == len(spelled) == len(all_sites(FULL))


def test_the_list_as_json() -> None:
    text = run_targets(model_name="tiny", config=config("kda"), list_sites=True, as_json=True)
    found = json.loads(text)
    statuses = {row["disk"]: row["status"] for row in found["table"]}
    assert statuses["model.language_model.layers.0.self_attn.q_proj"] == "selected"
    assert statuses["model.language_model.layers.3.self_attn.q_a_proj"] == Status.TRAINABLE
    assert statuses["model.language_model.layers.3.self_attn.kv_b_proj"] == Status.FROZEN
    assert statuses["model.language_model.layers.3.mlp.gate"] == Status.NOT_A_TARGET


@pytest.mark.parametrize(
    "name",
    [
        "model.language_model.layers.0.self_attn.forget_gate.f_a_proj",
        "model.language_model.layers.0.self_attn.f_a_proj",
        "model.layers.0.self_attn.f_a_proj",
        "f_a_proj",
        "*.forget_gate.f_a_proj",
    ],
)
def test_explain_takes_every_spelling(name: str) -> None:
    found = explained(name)
    assert found["name"] == "model.language_model.layers.0.self_attn.forget_gate.f_a_proj"
    assert found["on disk"] == "model.language_model.layers.0.self_attn.f_a_proj"
    assert found["status"] == "selected: rank 16, alpha 32, 67,584 parameters"
    assert found["included by"] == "attn" and found["excluded by"] == "nothing"
    assert "SGLang stock: no (" in found["served by"]


def test_explain_says_why_not() -> None:
    expert = explained("model.layers.3.mlp.experts[7.up_proj]")
    assert expert["status"] == "frozen" and "per-expert" in expert["reason"]
    assert expert["included by"] == "mlp" and expert["excluded by"] == "*.mlp.experts.*"
    assert "absorbs" in explained("kv_b_proj")["reason"]
    assert "indexer" in explained("*.indexer.wq_b")["reason"]
    assert "vision" in explained("*.visual.*")["reason"]
    assert "multi-token" in explained("*.layers.45.*")["reason"]
    outside = explained(
        "*.layers.3.self_attn.o_proj", targets="attn", excludes="*.kv_b_proj", layers="0"
    )
    assert outside["status"] == "trainable, not selected, outside --layers"


def test_explain_as_text() -> None:
    text = run_targets(model_name="tiny", config=config(), explain="b_proj")
    assert text.startswith("model.language_model.layers.0.self_attn.b_proj\n")
    assert "4 x 64 (out x in)" in text and "2 more sites" in text


@pytest.mark.parametrize("name", ["q_prj", "qkv_proj", ",", "x" * 10_000, "q\n", "*["])
def test_explaining_nonsense(name: str) -> None:
    with pytest.raises(TargetError) as error:
        run_targets(model_name="tiny", config=config(), explain=name)
    assert error.value.exit_code == 2


@pytest.mark.parametrize("model", list(BUILTIN))
def test_the_report_works_for_every_built_in_model(model: str) -> None:
    assert report(model)["num_sites"] in (43, 485)
    assert "total: " in table(model)


def test_the_share_of_tiny_is_of_its_own_size() -> None:
    found = report("tiny")
    assert found["base_parameters"] == sum(p.numel for p in all_params(TINY).values())


def test_the_readme_of_the_recipes_is_current() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert text == readme(FOLDER), "run: python adapters/make_readme.py"


def test_no_cell_of_the_support_matrix_is_without_reason() -> None:
    lines = readme(FOLDER).split("## Support matrix")[1].splitlines()
    cells = [c.strip() for line in lines if line.startswith("| `") for c in line.split("|")[3:-1]]
    assert len(cells) > 100
    assert all(c == "yes" or c.startswith(("yes: ", "no: ")) for c in cells)
    assert {c for c in cells if c.startswith("no")} and "no: " not in cells
