"""Finds the layout that answers most of a workload within limits, by simulating each one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

from twinpool.core.errors import ConfigError
from twinpool.lab.memory.planned_model import PlannedModel
from twinpool.lab.profile.profile import Profile, load_profile
from twinpool.lab.recommend.budget import list_layouts
from twinpool.lab.recommend.config import RecommendConfig
from twinpool.lab.recommend.doubts import find_doubts
from twinpool.lab.recommend.layout import Layout
from twinpool.lab.recommend.offered_load import OfferedLoad, offer
from twinpool.lab.recommend.ranking import Entry, Ranking, rank
from twinpool.lab.recommend.recommendation import Misfit, Recommendation
from twinpool.lab.recommend.room import Room
from twinpool.lab.recommend.search import LEAST_RATE
from twinpool.lab.recommend.trials import Outcome, Trial, TrialCounter, Trials
from twinpool.lab.recommend.verdict import judge
from twinpool.lab.recommend.what_if import WhatIf, double_load, lengthen_prompts, measure_of, slow_link
from twinpool.lab.simulate.config import Transfer
from twinpool.lab.workload.workload import Workload


def recommend_layout(
    workload: Workload,
    config: RecommendConfig,
    *,
    model: PlannedModel | None = None,
    on_trial: Callable[[Trial], None] | None = None,
) -> Recommendation:
    """Recommend a layout: a ratio of two pools, a mix with colocated workers, or to stay colocated.

    Each layout is offered the same requests at rates of one grid, and its highest rate is found by halving.
    A layout costs one simulation if it does not come near the best ones, and if it does, some 20 at most for
    each repeat.  Equal questions have equal answers.

    Args:
        workload: What comes; its rate is only where the search begins.
        config: What there is, and what is wanted.
        model: To plan the memory of each worker; None: what the profiles say counts.
        on_trial: Told of each simulation as it begins.

    Raises:
        ConfigError: A profile or the link is not right, profiles are of different models, there are too many
            layouts or none, or the workload has too few requests.
    """
    profiles = _profiles(config)
    links = {name: config.transfer.resolve(profile.transfers) for name, profile in profiles.items()}
    load = offer(workload, repeats=config.repeats, needs_rate=config.has_limits)
    room = Room(config, profiles, model=model)
    layouts, misfits = _fitting(config, profiles, room, load)
    counter = TrialCounter(on_trial)

    def trials_of(offered: OfferedLoad, transfer: Transfer, what_if: str) -> Trials:
        return Trials(
            config,
            offered,
            transfer=transfer,
            cache_bytes=room.cache_bytes,
            counter=counter,
            what_if=what_if,
        )

    trials = trials_of(load, config.transfer, "")
    near = config.load_rate or load.own_rate or 1.0
    ranking = rank(layouts, measure_of(config, trials), repeats=config.repeats, near=near)
    verdict = judge(ranking, precision=config.precision, load_rate=config.load_rate)
    rate = (ranking.best.mean or LEAST_RATE) if config.has_limits else math.inf
    evidence = _evidence(trials, ranking, rate) if config.has_limits else {}
    what_ifs: list[WhatIf] = []
    if config.has_what_if and ranking.best.mean > 0.0:
        ask = partial(lengthen_prompts, misfit=room.misfit)
        if config.has_limits:
            what_ifs.append(double_load(config, trials, ranking, verdict.chosen))
        what_ifs.append(ask(config, layouts, load=load, trials_of=trials_of, chosen=verdict.chosen))
        if not all(layout.is_colocated for layout in layouts):
            what_ifs.append(slow_link(config, layouts, load=load, trials_of=trials_of, chosen=verdict.chosen))
    return Recommendation(
        config=config,
        sources={name: profile.source for name, profile in profiles.items()},
        links=links,
        ranking=ranking,
        verdict=verdict,
        misfits=tuple(misfits),
        evidence_rate=rate,
        evidence=evidence,
        what_ifs=tuple(what_ifs),
        doubts=find_doubts(config, load, ranking, profiles=profiles, links=links),
        own_rate=load.own_rate,
        num_simulations=counter.num_trials,
    )


def _profiles(config: RecommendConfig) -> Mapping[str, Profile]:
    profiles: dict[str, Profile] = {}
    for kind in config.kinds:
        if kind.profile in profiles:
            raise ConfigError("recommend.kinds", f"{kind.profile} stands twice")
        profiles[kind.profile] = load_profile(kind.profile)
    first = next(iter(profiles.values()))
    for name, profile in profiles.items():
        if profile.model != first.model:
            raise ConfigError(
                "recommend.kinds", f"{name} is of {profile.model.name}, and others are of {first.model.name}"
            )
    return profiles


def _fitting(
    config: RecommendConfig, profiles: Mapping[str, Profile], room: Room, load: OfferedLoad
) -> tuple[list[Layout], list[Misfit]]:
    layouts: list[Layout] = []
    misfits: list[Misfit] = []
    for layout in list_layouts(config, [profiles[kind.profile].tp for kind in config.kinds]):
        if len(layouts) + len(misfits) >= config.max_layouts:
            raise ConfigError(
                "recommend.max_layouts",
                f"more than {config.max_layouts} are possible: name fewer profiles or leave out mixed ones",
            )
        why = room.misfit(layout, load)
        if why:
            misfits.append(Misfit(layout=layout, why=why))
        else:
            layouts.append(layout)
    if misfits and not layouts:
        raise ConfigError("recommend.kinds", f"no layout fits; {misfits[0].layout.name}: {misfits[0].why}")
    if not layouts:
        raise ConfigError("recommend.gpus", "there is not enough for one worker of any kind")
    return layouts, misfits


def _evidence(trials: Trials, ranking: Ranking, rate: float) -> dict[Layout, Outcome]:
    looked_at: list[Entry | None] = [ranking.best, ranking.runner_up, ranking.colocated]
    layouts = dict.fromkeys(entry.layout for entry in looked_at if entry is not None)
    return {layout: trials.outcome(layout, 0, rate) for layout in layouts}
