"""What is recommended, and everything that it rests on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinpool.core.config import unbind
from twinpool.lab.profile.profile import Link
from twinpool.lab.recommend.config import RecommendConfig
from twinpool.lab.recommend.layout import Layout
from twinpool.lab.recommend.ranking import Entry, Ranking
from twinpool.lab.recommend.trials import Outcome
from twinpool.lab.recommend.verdict import Verdict
from twinpool.lab.recommend.what_if import WhatIf


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """A layout that was not simulated, since its memory does not suffice."""

    layout: Layout
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The answer to a question.

    Attributes:
        sources: Of the times of each profile.
        links: Over which workers of each profile send.
        evidence_rate: Requests per second at which the finalists were looked at; infinite: all at once.
        evidence: How they fared there, by layout, in the first repeat.
        doubts: Why the answer may be less sure than it sounds.
    """

    config: RecommendConfig
    sources: Mapping[str, str]
    links: Mapping[str, Link]
    ranking: Ranking
    verdict: Verdict
    misfits: tuple[Misfit, ...]
    evidence_rate: float
    evidence: Mapping[Layout, Outcome]
    what_ifs: tuple[WhatIf, ...]
    doubts: tuple[str, ...]
    own_rate: float  # requests per second of the workload as it was given
    num_simulations: int

    @property
    def layout(self) -> Layout:
        """The one that is recommended."""
        return self.verdict.chosen.layout

    @property
    def stays_colocated(self) -> bool:
        return self.verdict.stays_colocated

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values: equal questions give equal texts."""
        from twinpool.lab.recommend.words import answer_lines

        return {
            "layout": self.layout.name,
            "stays_colocated": self.stays_colocated,
            "reason": str(self.verdict.reason),
            "answer": list(answer_lines(self)),
            "config": unbind(self.config),
            "profiles": dict(self.sources),
            "links": {name: unbind(link) for name, link in self.links.items()},
            "own_rate": self.own_rate,
            "layouts": [
                *(_entry(entry, is_finalist=True) for entry in self.ranking.finalists),
                *(_entry(entry, is_finalist=False) for entry in self.ranking.others),
            ],
            "misfits": {misfit.layout.name: misfit.why for misfit in self.misfits},
            "evidence": {layout.name: _outcome(outcome) for layout, outcome in self.evidence.items()},
            "what_if": [_what_if(what_if) for what_if in self.what_ifs],
            "doubts": list(self.doubts),
            "simulations": self.num_simulations,
        }


def _entry(entry: Entry, *, is_finalist: bool) -> dict[str, Any]:
    layout = entry.layout
    return {
        "layout": layout.name,
        "pools": [
            {
                "role": str(group.role),
                "workers": group.workers,
                "profile": group.kind.profile,
                "gpus": group.gpus,
            }
            for group in layout.groups
        ],
        "gpus": layout.gpus,
        "cost": layout.cost,
        "watts": layout.watts,
        "requests_per_s": entry.mean,
        "by_repeat": list(entry.values),
        "is_below": entry.is_below,
        "is_finalist": is_finalist,
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    return {
        "requests_per_s": outcome.rate,
        "good_share": outcome.good_share,
        "ttft_s": outcome.ttft_s,
        "tpot_s": outcome.tpot_s,
        "busy": {str(role): share for role, share in outcome.busy.items()},
        "errors": outcome.num_errors,
        "kv_bytes": outcome.kv_bytes,
        "duration_s": outcome.duration_s,
    }


def _what_if(what_if: WhatIf) -> dict[str, Any]:
    verdict = what_if.verdict
    return {
        "what_if": what_if.name,
        "unit": what_if.unit,
        "layout": None if verdict is None else verdict.chosen.layout.name,
        "reason": None if verdict is None else str(verdict.reason),
        "value": None if verdict is None else verdict.chosen.mean,
        "value_of_present": None if what_if.present is None else what_if.present.mean,
        "changes": what_if.changes,
        "offered_rate": what_if.offered_rate,
    }
