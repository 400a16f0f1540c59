"""Matching equals fnmatch2 over the plain list of names, and order never matters."""

from __future__ import annotations

from dataclasses import replace

from fnmatch2 import fnmatchcase2
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from glm_lora.arch.projections import all_sites, trainable_sites
from glm_lora.arch.spec import FULL, TINY
from glm_lora.config import SelectionConfig
from glm_lora.errors import TargetError
from glm_lora.targets.matching import cells, match, names_site, split_items
from glm_lora.targets.resolve import resolve
from glm_lora.targets.selection import Selection, make_selection

# Twelve experts: numbers of one and two digits, some of which are layer numbers too.
SPEC = replace(TINY, n_routed_experts=12)
SITES = all_sites(SPEC)
NAMES = sorted({name for site in SITES for name in (site.name, site.disk_name)})

WILD = st.sampled_from(["*", "?", "**", "[0-4]", "[!1]", "[a-z]", "[.]", "[]x]"])
DIGITS = st.sampled_from(["0", "1", "3", "11", "1.", ".1", "01", ".1.", "s.1", "9"])


@st.composite
def globs(draw: st.DrawFn) -> str:
    """A name with pieces replaced by wildcards, digits or nothing: many match, many nearly do."""
    name = draw(st.sampled_from(NAMES))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(name)))
        stop = draw(st.integers(start, min(len(name), start + draw(st.integers(0, 40)))))
        piece = draw(st.one_of(WILD, WILD, DIGITS, st.just("")))
        name = name[:start] + piece + name[stop:]
    return name


def matched_names(pattern: str, spec=SPEC) -> set[str]:
    """Disk names that ``match`` selects, experts unfolded."""
    table = cells(spec)
    found: set[str] = set()
    for position, mask in match(pattern, spec).masks.items():
        assert 0 < mask <= table[position].full
        for member in range(table[position].size):
            if mask >> member & 1:
                found.add(table[position].member_name(1 << member))
    return found


@settings(max_examples=400)
@given(globs())
@example("*1*")
@example("*.experts.1.*")
@example("*.experts.01.*")
@example("*.experts.1*")
@example("*1.gate_proj")
@example("*.3.*")
@example("*.layers.3.mlp.experts.*.up_proj")
@example("*.experts.??.*")
@example("*.experts.[!1]*")
@example("*1*1*")
@example("*.11.*.1.*")
def test_a_glob_is_fnmatch2_over_the_site_list(pattern: str) -> None:
    try:
        items = split_items(pattern + ",*.*", "--target-modules")
    except TargetError:
        return
    assume(items[0] == pattern and ("." in pattern or set(pattern) & set("*?[")))
    expected = {
        site.disk_name
        for site in SITES
        if fnmatchcase2(site.name, pattern) or fnmatchcase2(site.disk_name, pattern)
    }
    assert matched_names(pattern) == expected
    assert {s.disk_name for s in SITES if names_site(pattern, s)} == expected


def test_folding_experts_at_full_size() -> None:
    sites = all_sites(FULL)
    for pattern in ("*.mlp.experts.*", "*.experts.17.*", "*7*", "*.experts.?.gate_proj", "*"):
        expected = {s.disk_name for s in sites if fnmatchcase2(s.disk_name, pattern)}
        expected |= {s.disk_name for s in sites if fnmatchcase2(s.name, pattern)}
        assert matched_names(pattern, FULL) == expected


WORDS = [
    *("kda", "dsa", "dense_mlp", "shared_experts", "attn", "mlp", "all"),
    *("q_proj", "b_proj", "o_proj", "f_a_proj", "*.layers.1.*", "*.layers.44.*", "*visual*"),
    *("*.self_attn.?_proj", "*.mlp.*", "*.up_proj"),
    *("*.self_attn.kv_b_proj", "*.mlp.experts.*", "*.experts.1.*"),
]
ITEMS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=5, unique=True)


def outcome(includes: list[str], excludes: list[str], layers: str):
    config = SelectionConfig(
        target_modules=",".join(includes), exclude_modules=",".join(excludes), layers=layers
    )
    try:
        resolution = resolve(SPEC, "small", config)
    except TargetError as error:
        return type(error)
    return resolution.selection, sorted(resolution.warnings), set(resolution.items)


@given(ITEMS, ITEMS | st.just([]), st.sampled_from(["", "0-2", "3"]), st.randoms())
def test_the_order_of_items_does_not_matter(includes, excludes, layers, random) -> None:
    first = outcome(includes, excludes, layers)
    random.shuffle(includes)
    random.shuffle(excludes)
    assert outcome(includes, excludes, layers) == first


@given(ITEMS, ITEMS | st.just([]))
def test_a_selection_is_what_its_items_say(includes, excludes) -> None:
    found = outcome(includes, excludes, "")
    if isinstance(found, type):
        return
    expected = [
        site
        for site in trainable_sites(SPEC)
        if any(names_site(i, site) for i in includes)
        and not any(names_site(e, site) for e in excludes)
    ]
    assert [a.site for a in found[0].adapters] == expected


@given(
    st.lists(st.sampled_from(trainable_sites(SPEC)), min_size=1, unique=True),
    st.integers(1, 512),
    st.floats(1e-3, 1e4),
    st.floats(0, 0.99),
    st.dictionaries(
        st.sampled_from([s.disk_name for s in trainable_sites(SPEC)]), st.integers(1, 512)
    ),
)
def test_selections_survive_json(sites, rank, alpha, dropout, ranks) -> None:
    selection = make_selection(
        "small", SPEC, sites, rank=rank, alpha=alpha, dropout=dropout, ranks=ranks
    )
    back = Selection.from_json(selection.to_json(), SPEC)
    assert back == selection and hash(back) == hash(selection) and back.hash == selection.hash
