"""The one object that says what is trained: a frozen, hashable, serialisable ``Selection``.

The trainable set, the sync payload, ``adapter_config.json`` and the checkpoint are computed from
it and checked against it. Its JSON form carries a schema version and two hashes: one of the facts
it was made from (so that a selection of another model is refused) and one of its own content (so
that a file edited by hand is refused).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from glm_lora.arch.projections import Site, trainable_sites
from glm_lora.arch.spec import ModelSpec
from glm_lora.errors import TargetError

SCHEMA = 1


@dataclass(frozen=True)
class SiteAdapter:
    """A selected site with the rank and alpha of its adapter."""

    site: Site
    rank: int
    alpha: float

    @property
    def scaling(self) -> float:
        """The factor on ``B A x``: alpha / rank (Hu et al. 2021, section 4.1)."""
        return self.alpha / self.rank

    @property
    def a_key(self) -> str:
        """Serving key of A, ``(rank, in_features)``."""
        return f"{self.site.disk_name}.lora_A.weight"

    @property
    def b_key(self) -> str:
        """Serving key of B, ``(out_features, rank)``."""
        return f"{self.site.disk_name}.lora_B.weight"


def facts_hash(spec: ModelSpec) -> str:
    """Hash of everything the facts table says about the trainable sites of ``spec``."""
    rows = [
        (s.name, s.disk_name, s.sglang_name, s.sglang_part, s.shape, s.kind, s.group)
        for s in trainable_sites(spec)
    ]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


@dataclass(frozen=True)
class Selection:
    """The sites that are trained, in model order, with their ranks.

    Args:
        model: Name of the model it was resolved for.
        facts: ``facts_hash`` of that model's spec.
        adapters: The selected sites; never empty.
        dropout: Probability of zeroing an adapter's input while training.
    """

    model: str
    facts: str
    adapters: tuple[SiteAdapter, ...]
    dropout: float = 0.0

    @property
    def rank(self) -> int:
        """The largest rank; engines pad every site to it."""
        return max(a.rank for a in self.adapters)

    @property
    def alpha(self) -> float:
        """The alpha that belongs to ``rank``; alpha/rank is the same on every site."""
        return self.rank * self.adapters[0].scaling

    @property
    def num_sites(self) -> int:
        """Number of adapted projections."""
        return len(self.adapters)

    @property
    def trainable_parameters(self) -> int:
        """Number of trainable parameters over all sites."""
        return sum(a.site.parameters(a.rank) for a in self.adapters)

    @property
    def hash(self) -> str:
        """Content hash: equal exactly when two selections train the same thing."""
        return hashlib.sha256(json.dumps(self._content()).encode()).hexdigest()

    def tensor_shapes(self) -> dict[str, tuple[int, int]]:
        """Full shape of every adapter tensor by serving key, in order."""
        shapes: dict[str, tuple[int, int]] = {}
        for a in self.adapters:
            shapes[a.a_key] = (a.rank, a.site.in_features)
            shapes[a.b_key] = (a.site.out_features, a.rank)
        return shapes

    def check_made_for(self, spec: ModelSpec) -> None:
        """Raise TargetError unless the selection was made for a model of ``spec``."""
        _check_facts(self.model, self.facts, spec)

    def _content(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "model": self.model,
            "facts": self.facts,
            "dropout": self.dropout,
            "sites": [[a.site.disk_name, a.rank, a.alpha] for a in self.adapters],
        }

    def to_json(self) -> str:
        """The JSON text that ``from_json`` reads back to an equal object."""
        return json.dumps({**self._content(), "hash": self.hash}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, spec: ModelSpec) -> Selection:
        """Read a selection that was made for ``spec``.

        Raises:
            TargetError: Not JSON, another schema, another model's facts, or edited by hand.
        """
        try:
            data = json.loads(text)
            stored, content = data["hash"], {k: v for k, v in data.items() if k != "hash"}
            schema = content["schema"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise TargetError(
                f"the selection is not readable ({error!r:.80})", "a selection.json"
            ) from error
        if schema != SCHEMA:
            raise TargetError(f"the selection has schema version {schema!r}", str(SCHEMA))
        if hashlib.sha256(json.dumps(content).encode()).hexdigest() != stored:
            raise TargetError(
                "the selection was changed after it was written (its hash differs)",
                "an unedited selection.json",
                "Resolve it again with glm-lora targets",
            )
        try:
            return cls._from_content(content, spec)
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, TargetError):
                raise
            raise TargetError(
                f"the selection does not hold what its schema says ({error!r:.80})",
                "a selection.json that this program wrote",
            ) from error

    @classmethod
    def _from_content(cls, content: Mapping[str, Any], spec: ModelSpec) -> Selection:
        model, facts, dropout = content["model"], content["facts"], content["dropout"]
        _check_facts(model, facts, spec)
        by_name = {s.disk_name: s for s in trainable_sites(spec)}
        adapters = tuple(
            SiteAdapter(by_name[n], rank, alpha) for n, rank, alpha in content["sites"]
        )
        _check_adapters(adapters)
        return cls(model, facts, adapters, dropout)


def _check_facts(model: str, facts: str, spec: ModelSpec) -> None:
    if facts != facts_hash(spec):
        raise TargetError(
            f"the selection was made for another model ({model})",
            "a selection for this model",
            "Resolve it again with glm-lora targets",
        )


def _check_adapters(adapters: tuple[SiteAdapter, ...]) -> None:
    if not adapters or len({a.site for a in adapters}) != len(adapters):
        raise ValueError("no site, or one twice")
    for adapter in adapters:
        if not _is_rank(adapter.rank):
            raise ValueError(f"rank {adapter.rank!r}")
        if not math.isclose(adapter.scaling, adapters[0].scaling, rel_tol=1e-12):
            raise ValueError("alpha/rank differs between sites")


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def make_selection(
    model: str,
    spec: ModelSpec,
    sites: Iterable[Site],
    *,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    ranks: Mapping[str, int] | None = None,
) -> Selection:
    """Build a selection from sites.

    Args:
        model: Name of the model.
        spec: Its dimensions.
        sites: The trainable sites to adapt, in any order.
        rank: Rank of A and B.
        alpha: Numerator of the scaling alpha / rank.
        dropout: Probability of zeroing an adapter's input while training.
        ranks: Own rank per disk name; alpha follows so that alpha / rank stays constant.

    Raises:
        TargetError: No site, or a rank, alpha or dropout out of range.
    """
    for value in (rank, *(ranks or {}).values()):
        if not _is_rank(value):
            raise TargetError(f"rank {value!r} of the adapter", "a positive whole number")
    if not (alpha > 0 and math.isfinite(alpha)):
        raise TargetError(f"alpha {alpha} of the adapter", "a positive number")
    if not 0 <= dropout < 1:
        raise TargetError(f"dropout {dropout}", "a number from 0 up to but not including 1")
    order = {s.disk_name: i for i, s in enumerate(trainable_sites(spec))}
    chosen = sorted(set(sites), key=lambda s: order[s.disk_name])
    if not chosen:
        raise TargetError("the selection is empty", "at least one trainable projection")
    alpha = float(alpha)
    scaling = alpha / rank
    adapters: list[SiteAdapter] = []
    for site in chosen:
        own = (ranks or {}).get(site.disk_name, rank)
        adapters.append(SiteAdapter(site, own, alpha if own == rank else scaling * own))
    return Selection(model, facts_hash(spec), tuple(adapters), float(dropout))
