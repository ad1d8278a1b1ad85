"""A recommendation in plain words, each sentence with the numbers it rests on."""

from __future__ import annotations

from collections.abc import Iterator

from twinpool.lab.recommend.config import RecommendConfig
from twinpool.lab.recommend.ranking import Entry
from twinpool.lab.recommend.recommendation import Recommendation
from twinpool.lab.recommend.trials import Outcome
from twinpool.lab.recommend.verdict import Reason
from twinpool.lab.recommend.what_if import WhatIf
from twinpool.lab.study.findings.words import ms

_AMPLE = 2.0  # times the load


def answer_lines(found: Recommendation) -> Iterator[str]:
    """Yield the answer, then its margin, its cause, and whether it would stay."""
    yield _choice(found) + _load(found)
    yield from _margin(found)
    yield from _cause(found)
    for what_if in found.what_ifs:
        yield _what_if(found, what_if)


def question_text(config: RecommendConfig) -> str:
    """Say what makes a layout a good one."""
    limits = config.limits
    if limits.ttft_s is None:
        return "most requests per second if all are sent at once"
    tpot = "" if limits.tpot_s is None else f" and {ms(limits.tpot_s)} per token after it"
    return (
        f"highest rate at which {config.percentile:g} % of the requests have their first token within "
        f"{ms(limits.ttft_s)}{tpot}"
    )


def spread_text(entry: Entry) -> str:
    """Return the mean, and the least and the largest value where there are several."""
    if entry.is_below:
        return f"below {entry.mean:.3g}"
    low, high = min(entry.values), max(entry.values)
    if len(entry.values) == 1:
        return f"{entry.mean:.3g}"
    return f"{entry.mean:.3g} ({low:.3g} to {high:.3g})"


def _choice(found: Recommendation) -> str:
    chosen, best, reason = found.verdict.chosen, found.ranking.best, found.verdict.reason
    name, value = chosen.layout.name, f"{spread_text(chosen)} requests/s"
    if reason is Reason.NOTHING_SERVES:
        return _nothing(found)
    if reason is Reason.COLOCATED_SUFFICES:
        return (
            f"Stay colocated: {name} answers {found.config.load_rate:.3g} requests/s, and up to {value}. "
            f"Above that, {best.layout.name} would answer up to {spread_text(best)}."
        )
    if reason is Reason.NO_DIFFERENCE:
        return (
            f"Stay colocated: {name} answers {value}, and the best other layout, {best.layout.name}, "
            f"{spread_text(best)}: no difference beyond the spread."
        )
    if reason is Reason.COLOCATED_IS_BEST:
        return f"Stay colocated: {name} answers most, {value}."
    colocated = found.ranking.colocated
    if reason is Reason.SPLIT_SUFFICES:
        text = f"Split: {name} answers {found.config.load_rate:g} requests/s in every repeat, up to {value}"
        if colocated is not None and colocated.mean:
            return f"{text}; {colocated.layout.name} does not, with {spread_text(colocated)}."
    else:
        text = f"Split: {name} answers most, {value}"
    if colocated is None:
        return f"{text}; no colocated layout fits."
    if not colocated.mean:
        return f"{text}; {colocated.layout.name} meets the limits at no rate."
    gain = best.mean / colocated.mean - 1.0
    return f"{text}, {gain:.0%} more than {colocated.layout.name} with {spread_text(colocated)}."


def _load(found: Recommendation) -> str:
    """Say how the choice stands to the load that is to be answered, if that is not said yet."""
    chosen, load_rate = found.verdict.chosen, found.config.load_rate
    if not load_rate or found.verdict.reason is Reason.NOTHING_SERVES:
        return ""
    num_missed = chosen.misses(load_rate)
    if num_missed:
        return (
            f" It does not answer the load of {load_rate:g} requests/s in {num_missed} of "
            f"{len(chosen.values)} repeats."
        )
    times = chosen.mean / load_rate
    if times < _AMPLE:
        return ""
    return f" That is {times:.2g} times the load of {load_rate:g} requests/s: fewer GPUs may do."


def _nothing(found: Recommendation) -> str:
    layout = found.verdict.chosen.layout
    outcome = found.evidence.get(layout)
    text = "No layout meets the limits at any rate"
    if outcome is None or outcome.ttft_s is None:
        return f"{text}."
    return f"{text}: even alone on {layout.name}, a request has {_latencies(outcome, found.config)}."


def _margin(found: Recommendation) -> Iterator[str]:
    best, second = found.ranking.best, found.ranking.runner_up
    if second is None or found.verdict.reason is Reason.NOTHING_SERVES:
        return
    comparison = best.against(second)
    lead = "more than nothing" if comparison.change is None else f"{comparison.change:.1%} more"
    sure = "" if comparison.differs else ", which is within the spread"
    yield (
        f"Margin: {best.layout.name} has {spread_text(best)}, {lead} than the runner-up {second.layout.name} "
        f"with {spread_text(second)}{sure}."
    )


def _cause(found: Recommendation) -> Iterator[str]:
    if found.verdict.reason is Reason.NOTHING_SERVES:
        return
    for layout, outcome in found.evidence.items():
        busy = ", ".join(f"{role} {share:.0%}" for role, share in outcome.busy.items())
        yield (
            f"At {outcome.rate:.3g} requests/s {layout.name} answers {outcome.good_share:.1%} of the first "
            f"repeat in time: {_latencies(outcome, found.config)}; busy: {busy}."
        )


def _latencies(outcome: Outcome, config: RecommendConfig) -> str:
    parts = []
    for name, value, limit in (
        ("TTFT", outcome.ttft_s, config.limits.ttft_s),
        ("TPOT", outcome.tpot_s, config.limits.tpot_s),
    ):
        if value is not None and limit is not None:
            parts.append(f"{name} {ms(value)} (limit {ms(limit)})")
    return f"p{config.percentile:g} " + " and ".join(parts)


def _what_if(found: Recommendation, what_if: WhatIf) -> str:
    verdict, present = what_if.verdict, what_if.present
    if verdict is None:
        return f"With {what_if.name}: no layout fits into memory."
    if verdict.reason is Reason.NOTHING_SERVES:
        return f"With {what_if.name}: no layout meets the limits at any rate."
    other = f"{verdict.chosen.layout.name}, with {spread_text(verdict.chosen)}"
    if verdict.reason is Reason.NO_DIFFERENCE:
        other += ", from which no other stands out"
    if present is None:
        return f"With {what_if.name}: {found.layout.name} does not fit any more; the choice is {other}."
    if what_if.offered_rate:
        offered = f"{what_if.offered_rate:.3g} requests/s"
        mine = f"{found.layout.name} answers {spread_text(present)} of {offered} in time"
    else:
        mine = f"{found.layout.name} answers up to {spread_text(present)} requests/s"
    if not what_if.changes:
        return f"With {what_if.name}: {mine}; the same choice."
    return f"With {what_if.name}: {mine}; the choice is {other}."
