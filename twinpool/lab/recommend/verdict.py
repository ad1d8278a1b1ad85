"""What follows from a ranking: two pools, or stay colocated, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from twinpool.lab.recommend.ranking import Entry, Ranking


class Reason(StrEnum):
    """Why a layout is chosen."""

    SPLIT_IS_BETTER = "split_is_better"  # by more than the spread, or no colocated layout fits
    COLOCATED_IS_BEST = "colocated_is_best"
    NO_DIFFERENCE = "no_difference"  # the best one does not stand out from colocated
    COLOCATED_SUFFICES = "colocated_suffices"  # it answers the load that is to be answered
    SPLIT_SUFFICES = "split_suffices"  # it answers that load in every repeat, and no colocated one does
    NOTHING_SERVES = "nothing_serves"  # no layout meets the limits at any rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A choice; whoever stays colocated needs a reason to leave, not one to stay."""

    chosen: Entry
    reason: Reason

    @property
    def stays_colocated(self) -> bool:
        return self.chosen.layout.is_colocated and self.reason is not Reason.NOTHING_SERVES


def judge(ranking: Ranking, *, precision: float, load_rate: float = 0.0) -> Verdict:
    """Choose a layout.

    Args:
        precision: A lead up to this share is none, since rates are told no better.
        load_rate: That is to be answered; 0: as much as can be.
    """
    best, colocated = ranking.best, ranking.colocated
    if best.mean == 0.0:
        return Verdict(chosen=colocated or best, reason=Reason.NOTHING_SERVES)
    enough = [entry for entry in ranking.finalists if load_rate and not entry.misses(load_rate)]
    staying = next((entry for entry in enough if entry.layout.is_colocated), None)
    if enough and staying is None:
        return Verdict(chosen=enough[0], reason=Reason.SPLIT_SUFFICES)
    if staying is not None and staying is not best:
        return Verdict(chosen=staying, reason=Reason.COLOCATED_SUFFICES)
    if colocated is None:
        return Verdict(chosen=best, reason=Reason.SPLIT_IS_BETTER)
    if best is colocated:
        return Verdict(chosen=best, reason=Reason.COLOCATED_IS_BEST)
    lead = best.against(colocated)
    if lead.differs and (lead.change is None or lead.change > precision * 1.001):
        return Verdict(chosen=best, reason=Reason.SPLIT_IS_BETTER)
    return Verdict(chosen=colocated, reason=Reason.NO_DIFFERENCE)
