"""The memory of a deployment: a plan for each of its roles, and what may be said of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinpool.lab.memory.bytes_text import bytes_text
from twinpool.lab.memory.capacity import TableCell
from twinpool.lab.memory.cuts import Cut, find_cuts
from twinpool.lab.memory.planned_model import PlannedModel
from twinpool.lab.memory.worker_plan import WorkerPlan, WorkerShape, plan_worker

_CONVERSATIONS = (1, 4, 16, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What each worker of a deployment needs; all bytes are those of one rank."""

    model_name: str
    model: PlannedModel
    workers: tuple[WorkerPlan, ...]  # one of each role
    contexts: tuple[int, ...]  # tokens of a conversation: the rows of the table
    conversations: tuple[int, ...]  # how many at once: its columns

    @property
    def fits(self) -> bool:
        return all(worker.fits for worker in self.workers)

    def cuts(self, worker: WorkerPlan) -> tuple[Cut, ...]:
        """Return what would make a worker fit that does not."""
        return find_cuts(self.model, worker)

    def table(self, worker: WorkerPlan) -> tuple[tuple[TableCell, ...], ...]:
        """Return a row per context length and a cell per number of conversations."""
        return worker.capacity.table(self.contexts, self.conversations)

    def notes(self) -> tuple[str, ...]:
        """Say what a reader may not expect."""
        notes = []
        family = self.model.fields.family or "no family that it names"
        if not self.model.is_served:
            notes.append(f"this engine does not run {family}: the plan is of one that does")
        elif self.model.shape.has_windows:
            notes.append(
                "this engine keeps all tokens of layers with a window; without those that no layer sees any "
                f"more, {self._windowed()}"
            )
        for worker in self.workers:
            shape = worker.worker
            if self.model.is_served and shape.settings.form.name != shape.dtype:
                notes.append(f"this engine keeps KV as {shape.dtype}, not as {shape.settings.form.name}")
        return tuple(dict.fromkeys(notes))

    def _windowed(self) -> str:
        tokens, settings = self.contexts[-1], self.workers[0].worker.settings
        kept = self.model.shape.conversation_bytes(tokens, settings)
        whole = self.model.cache_shape().conversation_bytes(tokens, settings)
        return f"{tokens:,} tokens would take {bytes_text(kept)} instead of {bytes_text(whole)}"

    def to_json(self) -> dict[str, Any]:
        """Return everything, in exact bytes."""
        fields = self.model.fields
        return {
            "model": self.model_name,
            "family": fields.family,
            "is_served": self.model.is_served,
            "max_tokens": fields.max_tokens,
            "fits": self.fits,
            "notes": list(self.notes()),
            "workers": [self._worker_json(worker) for worker in self.workers],
        }

    def _worker_json(self, plan: WorkerPlan) -> Mapping[str, Any]:
        worker, capacity = plan.worker, plan.capacity
        return {
            "role": str(worker.role),
            "ranks": worker.num_ranks,
            "peers": worker.num_peers,
            "dtype": worker.dtype,
            "cache_format": worker.settings.form.name,
            "block_tokens": worker.settings.block_tokens,
            "memory_bytes": worker.memory_bytes,
            "total_bytes": plan.total_bytes,
            "fits": plan.fits,
            "missing_bytes": plan.missing_bytes,
            "terms": [
                {
                    "term": str(term.name),
                    "bytes": term.num_bytes,
                    "text": bytes_text(term.num_bytes),
                    "kind": str(term.kind),
                    "source": term.source,
                }
                for term in plan.terms
            ],
            "token_bytes": capacity.shape.token_bytes(worker.settings),
            "state_bytes": capacity.shape.state_bytes(worker.settings),
            "blocks": plan.num_blocks,
            "tokens": capacity.num_tokens,
            "table": [
                {
                    "context_tokens": row[0].num_tokens,
                    "conversations_that_fit": capacity.conversations(row[0].num_tokens),
                    "cells": [
                        {"conversations": cell.num_conversations, "bytes": cell.num_bytes, "fits": cell.fits}
                        for cell in row
                    ],
                }
                for row in self.table(plan)
            ],
            "cuts": [
                {
                    "term": str(cut.term),
                    "change": cut.change,
                    "saved_bytes": cut.saved_bytes,
                    "is_enough": cut.is_enough,
                }
                for cut in self.cuts(plan)
            ],
        }


def plan_memory(
    model: PlannedModel,
    workers: Sequence[WorkerShape],
    *,
    model_name: str = "",
    contexts: Sequence[int] = (),
    conversations: Sequence[int] = (),
) -> MemoryPlan:
    """Plan the memory of a deployment before anything of it is started.

    Args:
        model: As ``read_model`` or ``model_of`` give it.
        workers: One of each role.
        model_name: What a reader calls it.
        contexts: Tokens per conversation in the table; none: up to the longest that the model can have.
        conversations: How many at once in the table; none: 1, 4, 16 and 64.

    Raises:
        ModelError: The model cannot be planned; the message names the field.
        ConfigError: Ranks do not divide what they share, or a setting cannot work.
    """
    return MemoryPlan(
        model_name=model_name or model.fields.family,
        model=model,
        workers=tuple(plan_worker(model, worker) for worker in workers),
        contexts=tuple(contexts) or _contexts(model.fields.max_tokens or 32768),
        conversations=tuple(conversations) or _CONVERSATIONS,
    )


def _contexts(max_tokens: int) -> tuple[int, ...]:
    """Return up to four lengths, each four times the one before, the last as long as the model allows."""
    return tuple(
        length for length in (max_tokens // 64, max_tokens // 16, max_tokens // 4, max_tokens) if length
    )
