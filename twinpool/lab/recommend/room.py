"""Whether the workers of a layout can hold a model and the requests of a load, and what their caches are.

A worker of which only the profile is known has the KV cache that the profile says.  Where the model's config
and the memory of a GPU are known too, the memory plan of the worker decides.
"""

from __future__ import annotations

from collections.abc import Mapping

from twinpool.core.errors import ConfigError
from twinpool.core.layout import DTYPE_BYTES
from twinpool.core.ports import Role
from twinpool.lab.memory.bytes_text import bytes_text
from twinpool.lab.memory.planned_model import PlannedModel
from twinpool.lab.memory.worker_plan import WorkerPlan, WorkerShape, plan_worker
from twinpool.lab.profile.profile import Profile
from twinpool.lab.recommend.config import RecommendConfig
from twinpool.lab.recommend.layout import Group, Layout
from twinpool.lab.recommend.offered_load import OfferedLoad

_PEER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


class Room:
    """The memory of the workers of any layout.

    Args:
        config: The question.
        profiles: Of ``config.kinds``, by name.
        model: None: what the profiles say of their caches counts.

    Raises:
        ConfigError: The model is not that of a profile, or the memory of a GPU is not said.
    """

    def __init__(
        self, config: RecommendConfig, profiles: Mapping[str, Profile], *, model: PlannedModel | None
    ) -> None:
        self._config = config
        self._profiles = profiles
        self._model = model
        if model is not None:
            for kind in config.kinds:
                if not kind.memory_bytes:
                    raise ConfigError(
                        "kinds.memory_bytes", f"is missing for {kind.profile}: a model is planned"
                    )
                _check_same_model(model, profiles[kind.profile])

    def cache_bytes(self, layout: Layout, group: Group) -> int:
        """Return the KV cache of a worker, all ranks together; 0: as in its profile."""
        return 0 if self._model is None else self._plan(self._model, layout, group).kv_memory_bytes

    def misfit(self, layout: Layout, load: OfferedLoad) -> str:
        """Say why a layout cannot answer enough of a load at any rate; empty if its memory suffices."""
        if self._model is not None:
            for group in layout.groups:
                problem = self._plan_misfit(self._model, layout, group)
                if problem:
                    return problem
        longest, why = min(self._longest(layout, group) for group in layout.groups)
        sizes = [item.prompt_tokens + item.output_tokens for items in load.repeats for item in items]
        longer = sum(size > longest for size in sizes) / len(sizes)
        needed = self._config.percentile / 100.0 if self._config.has_limits else 1.0
        if 1.0 - longer < needed - 1e-9:
            return f"{why} {longest:,} tokens, and {longer:.0%} of the requests are longer"
        return ""

    def _longest(self, layout: Layout, group: Group) -> tuple[int, str]:
        """Return the longest request that a worker takes, prompt and answer, and what bounds it."""
        profile = self._profiles[group.kind.profile]
        block_tokens = self._config.engine.block_tokens
        rank_bytes = profile.layout(block_tokens=block_tokens).rank_block_bytes
        cache_bytes = self.cache_bytes(layout, group) or profile.kv_cache_bytes
        held = cache_bytes // (rank_bytes * profile.tp) * block_tokens
        limit = profile.model.max_tokens - 1
        if held < limit:
            return held, f"the KV cache of a {group.role} worker holds"
        return limit, "the model takes"

    def _plan(self, model: PlannedModel, layout: Layout, group: Group) -> WorkerPlan:
        peers = [other for other in layout.groups if other.role is _PEER.get(group.role)]
        return plan_worker(
            model,
            WorkerShape(
                role=group.role,
                memory_bytes=group.kind.memory_bytes,
                dtype=self._profiles[group.kind.profile].model.dtype,
                num_ranks=group.ranks,
                num_peers=sum(peer.workers for peer in peers),
                peer_ranks=max((peer.ranks for peer in peers), default=1),
                engine=self._config.engine,
            ),
        )

    def _plan_misfit(self, model: PlannedModel, layout: Layout, group: Group) -> str:
        try:
            plan = self._plan(model, layout, group)
        except ConfigError as error:  # its ranks do not divide the model
            return f"a {group.role} worker of {group.ranks} ranks: {error}"
        if plan.fits:
            return ""
        largest = max(plan.terms, key=lambda term: term.num_bytes)
        return (
            f"each rank of a {group.role} worker needs {bytes_text(plan.total_bytes)}, of which "
            f"{bytes_text(largest.num_bytes)} are {largest.name}, of {bytes_text(group.kind.memory_bytes)}"
        )


def _check_same_model(model: PlannedModel, profile: Profile) -> None:
    shape = profile.model
    told = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * DTYPE_BYTES[shape.dtype]
    settings = WorkerShape(role=Role.COLOCATED, memory_bytes=1, dtype=shape.dtype).settings
    kept = model.cache_shape().token_bytes(settings)
    if kept != told:
        raise ConfigError(
            "model", f"keeps {kept} bytes of KV per token, and that of profile {profile.name} keeps {told}"
        )
