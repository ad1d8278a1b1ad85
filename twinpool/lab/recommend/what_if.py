"""Whether the choice stays when the load, the prompts or the link are not as they are thought to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from twinpool.lab.recommend.config import RecommendConfig
from twinpool.lab.recommend.layout import Layout
from twinpool.lab.recommend.measures import AnsweredRate, HighestRate
from twinpool.lab.recommend.offered_load import OfferedLoad
from twinpool.lab.recommend.ranking import Entry, Ranking, rank
from twinpool.lab.recommend.trials import Trials
from twinpool.lab.recommend.verdict import Verdict, judge
from twinpool.lab.simulate.config import Transfer

LOAD_FACTOR, PROMPT_FACTOR, LINK_FACTOR = 2, 2, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The same question under another condition.

    Attributes:
        unit: Of the values of its entries.
        present: The layout chosen without the condition, as it fares under it; None if it no longer fits.
        verdict: None if no layout fits any more.
    """

    name: str
    unit: str
    present: Entry | None
    verdict: Verdict | None
    offered_rate: float = 0.0  # of another load, requests per second; 0: the highest rate is looked for

    @property
    def changes(self) -> bool:
        """Whether another layout would be chosen."""
        if self.verdict is None or self.present is None:
            return True
        return self.verdict.chosen.layout != self.present.layout


def measure_of(config: RecommendConfig, trials: Trials) -> HighestRate | AnsweredRate:
    """Return what layouts are compared by."""
    return HighestRate(trials) if config.has_limits else AnsweredRate(trials)


def double_load(config: RecommendConfig, trials: Trials, ranking: Ranking, chosen: Entry) -> WhatIf:
    """Offer the finalists twice the load that is to be answered, else twice what the chosen one can."""
    rate = LOAD_FACTOR * (config.load_rate or chosen.mean)
    entries = []
    for entry in ranking.finalists:
        shares = [trials.outcome(entry.layout, repeat, rate).good_share for repeat in range(config.repeats)]
        entries.append(Entry(layout=entry.layout, values=tuple(share * rate for share in shares)))
    entries.sort(key=lambda entry: -entry.mean)
    verdict = judge(Ranking(finalists=tuple(entries), others=()), precision=config.precision)
    return WhatIf(
        name=f"{LOAD_FACTOR} times the load",
        unit="answered in time, requests/s",
        present=next(entry for entry in entries if entry.layout == chosen.layout),
        verdict=verdict,
        offered_rate=rate,
    )


def lengthen_prompts(
    config: RecommendConfig,
    layouts: Sequence[Layout],
    *,
    load: OfferedLoad,
    trials_of: Callable[[OfferedLoad, Transfer, str], Trials],
    misfit: Callable[[Layout, OfferedLoad], str],
    chosen: Entry,
) -> WhatIf:
    """Rank all layouts again, with longer prompts."""
    name = f"prompts {PROMPT_FACTOR} times as long"
    longer = load.with_longer_prompts(PROMPT_FACTOR)
    fitting = [layout for layout in layouts if not misfit(layout, longer)]
    return _again(config, fitting, trials_of(longer, config.transfer, name), name, chosen)


def slow_link(
    config: RecommendConfig,
    layouts: Sequence[Layout],
    *,
    load: OfferedLoad,
    trials_of: Callable[[OfferedLoad, Transfer, str], Trials],
    chosen: Entry,
) -> WhatIf:
    """Rank all layouts again, with a slower link."""
    name = f"a link {LINK_FACTOR} times slower"
    slower = replace(config.transfer, slowdown=config.transfer.slowdown * LINK_FACTOR)
    return _again(config, layouts, trials_of(load, slower, name), name, chosen)


def _again(
    config: RecommendConfig, layouts: Sequence[Layout], trials: Trials, name: str, chosen: Entry
) -> WhatIf:
    unit = "requests/s"
    if not layouts:
        return WhatIf(name=name, unit=unit, present=None, verdict=None)
    measure = measure_of(config, trials)
    ranking = rank(layouts, measure, repeats=config.repeats, near=chosen.mean or 1.0)
    verdict = judge(ranking, precision=config.precision, load_rate=config.load_rate)
    present = next(
        (entry for entry in (*ranking.finalists, *ranking.others) if entry.layout == chosen.layout),
        None,
    )
    if present is not None and present.is_below:
        present = Entry(layout=present.layout, values=(measure.value(present.layout, 0, near=present.mean),))
    return WhatIf(name=name, unit=unit, present=present, verdict=verdict)
