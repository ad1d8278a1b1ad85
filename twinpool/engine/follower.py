"""The ranks of a worker behind the first: each computes what rank 0 plans, on its share of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from twinpool.engine.agreement import check_agreement
from twinpool.engine.kv_cache import KVCache
from twinpool.engine.load import LoadedModel
from twinpool.engine.plan import LayerHook
from twinpool.engine.rank_plan import RankPlan, decode
from twinpool.engine.rank_step import RankStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The KV of a sequence that is sent to another worker, as far as it is in this rank's cache."""

    request_id: str
    num_tokens: int  # tokens [0, num_tokens)
    blocks: tuple[int, ...]  # that hold them, by token position


RankWrittenHook = Callable[[int, tuple[Written, ...]], None]
"""``(layer, written)``: after each layer of a step with such sequences; in the thread that computes.  It must
not raise: a rank that fails ends the whole worker."""


class Follower:
    """One rank that is not rank 0; used by one thread.

    Args:
        loaded: The model, with the group.
        cache: Of the model's layout and this rank's heads.
        attention: A file name in twinpool/engine/attention, the same as rank 0's.

    Raises:
        ConfigError: There is no such attention kernel, or rank 0 has other settings.
        RankLost: Another rank is gone.
    """

    def __init__(self, loaded: LoadedModel, cache: KVCache, *, attention: str = "torch_sdpa") -> None:
        assert loaded.group.rank > 0, "rank 0 leads"
        self._group = loaded.group
        self._step = RankStep(loaded, cache, attention=attention)
        check_agreement(loaded, cache, attention=attention)

    @torch.inference_mode()
    def run(self, on_written: RankWrittenHook) -> None:
        """Compute one plan after the other until rank 0, or this rank, closes the group.

        Raises:
            RankLost: Another rank is gone, or a step failed here or there: the process is to end, and with
                it the worker.
        """
        while (data := self._group.next_plan()) is not None:
            with self._group.step():
                plan = decode(data)
                self._step.all_logits(self._step.forward(plan, _layer_hook(plan, on_written)))


def _layer_hook(plan: RankPlan, on_written: RankWrittenHook) -> LayerHook | None:
    written = tuple(
        Written(request_id=item.request_id, num_tokens=item.end_token, blocks=tuple(item.blocks.tolist()))
        for item in plan.items
        if item.request_id
    )
    return (lambda layer: on_written(layer, written)) if written else None
