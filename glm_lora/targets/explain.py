"""Everything known about one name: what it is, what selected it, and who can serve it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from glm_lora.arch.foreign import non_targets
from glm_lora.arch.naming import Spelling, spell, translate
from glm_lora.arch.projections import Site, Status, all_sites
from glm_lora.arch.spec import ModelSpec
from glm_lora.errors import ModelError
from glm_lora.targets.matching import names_site, split_items
from glm_lora.targets.refusals import LIST_THEM, name_of, unmatched
from glm_lora.targets.resolve import EXCLUDE, INCLUDE, Resolution
from glm_lora.targets.support import PROJECTION_ROWS, SERVING, missing_parts, verdict

OPTION = "--explain"


@dataclass(frozen=True)
class Explanation:
    """What is known about one name."""

    title: str
    facts: dict[str, str]

    def as_text(self) -> str:
        """Lines for a terminal."""
        width = max(map(len, self.facts))
        lines = [f"  {key.ljust(width)}  {value}" for key, value in self.facts.items()]
        return "\n".join([self.title, *lines])

    def as_object(self) -> dict[str, Any]:
        """A JSON object."""
        return {"name": self.title, **self.facts}


def explain(name: str, resolution: Resolution, spec: ModelSpec) -> Explanation:
    """Explain a full name in any spelling, a leaf name or a glob (its first site stands for all).

    Raises:
        TargetError: The name means nothing.
    """
    exact = _exact(name, spec)
    if exact is not None:
        return _explain_site(exact, 1, resolution, spec)
    (item,) = split_items(name, OPTION)[:1]
    sites = [s for s in all_sites(spec) if names_site(item, s)]
    if sites:
        return _explain_site(sites[0], len(sites), resolution, spec)
    for other in non_targets(spec):
        if named := name_of(item, other):
            facts = {
                "on disk": other.names[-1],
                "status": Status.NOT_A_TARGET.value,
                "reason": other.reason,
            }
            return Explanation(named, facts)
    raise unmatched(item, OPTION, spec, resolution.selection.model)


def _exact(name: str, spec: ModelSpec) -> Site | None:
    for spelling in Spelling:
        try:
            disk = translate(name, spelling, Spelling.DISK)
        except ModelError:
            continue
        found = next((s for s in all_sites(spec) if s.disk_name == disk), None)
        if found is not None:
            return found
    return None


def _explain_site(site: Site, count: int, resolution: Resolution, spec: ModelSpec) -> Explanation:
    attention = "KDA" if spec.is_kda(site.layer) else "DSA"
    mlp = "MoE" if spec.is_moe(site.layer) else "dense MLP"
    facts = {
        "on disk": site.disk_name,
        "in SGLang": spell(site, Spelling.SGLANG),
        "layer": f"{site.layer} ({attention}, {mlp})",
        "group": site.group,
        "shape": f"{site.out_features} x {site.in_features} (out x in)",
        "cut by TP": site.kind.value,
        "status": _status(site, resolution),
    }
    if site.reason:
        facts["reason"] = site.reason
    for option, words in ((INCLUDE, "included by"), (EXCLUDE, "excluded by")):
        items = [i.item for i in resolution.items if i.option == option]
        facts[words] = ", ".join(i for i in items if names_site(i, site)) or "nothing"
    if site.status is Status.TRAINABLE:
        facts["served by"] = _served(site, resolution)
    if count > 1:
        facts["also"] = f"{count - 1} more sites of this name. {LIST_THEM}"
    return Explanation(site.name, facts)


def _status(site: Site, resolution: Resolution) -> str:
    for adapter in resolution.selection.adapters:
        if adapter.site == site:
            parameters = site.parameters(adapter.rank)
            return (
                f"selected: rank {adapter.rank}, alpha {adapter.alpha:g}, {parameters:,} parameters"
            )
    if site.status is not Status.TRAINABLE:
        return site.status.value
    outside = "" if site.layer in resolution.layers else ", outside --layers"
    return f"{site.status.value}, not selected{outside}"


def _served(site: Site, resolution: Resolution) -> str:
    missing = missing_parts(resolution.selection).get((site.group, site.leaf), ())
    row = PROJECTION_ROWS[site.group, site.leaf]
    verdicts = {step: verdict(row, step, missing) for step in SERVING}
    return "; ".join(
        f"{step.value}: {v.word}" + (f" ({v.reason})" if v.reason else "")
        for step, v in verdicts.items()
    )
