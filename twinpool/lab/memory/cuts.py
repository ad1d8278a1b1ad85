"""What to change so that a plan fits: one change at a time, and what each of them saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from twinpool.core.errors import ConfigError
from twinpool.lab.memory.cache_format import FORMATS
from twinpool.lab.memory.planned_model import PlannedModel
from twinpool.lab.memory.term import TermName
from twinpool.lab.memory.worker_plan import HeldLoad, WorkerPlan, WorkerShape, plan_worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One change."""

    term: TermName  # that it changes first of all
    change: str
    saved_bytes: int  # on each rank
    is_enough: bool


def find_cuts(model: PlannedModel, plan: WorkerPlan) -> tuple[Cut, ...]:
    """Return changes to a plan that does not fit: those that are enough first, and of them the smallest.

    None of them makes another model of it: what they change is what a deployment may choose.
    """
    if plan.fits:
        return ()
    found = []
    for term, change, worker in _changes(model, plan):
        try:
            changed = plan_worker(model, worker)
        except ConfigError:  # ranks that do not divide the heads: no change that could be made
            continue
        saved = plan.missing_bytes - changed.missing_bytes if changed.missing_bytes else _saved(plan, changed)
        if saved > 0:
            found.append(Cut(term=term, change=change, saved_bytes=saved, is_enough=changed.fits))
    return tuple(sorted(found, key=lambda cut: (not cut.is_enough, _distance(cut, plan))))


def _saved(plan: WorkerPlan, changed: WorkerPlan) -> int:
    return max(plan.total_bytes - changed.total_bytes, plan.missing_bytes)


def _distance(cut: Cut, plan: WorkerPlan) -> int:
    return abs(cut.saved_bytes - plan.missing_bytes)


def _changes(model: PlannedModel, plan: WorkerPlan) -> Iterator[tuple[TermName, str, WorkerShape]]:
    worker, load = plan.worker, plan.worker.load
    if load is not None:
        yield from _smaller_loads(model, worker, load)
    size = plan.cache_bytes_that_fit
    if worker.cache_bytes is not None and size > 0:
        told = f"a KV cache of {size} bytes on each rank instead of {worker.cache_bytes}"
        yield TermName.CACHE, told, replace(worker, cache_bytes=size)
    if worker.dtype == "float32":
        yield TermName.WEIGHTS, "dtype bfloat16 instead of float32", replace(worker, dtype="bfloat16")
    if not model.is_served and worker.settings.form.element_bits > 8:
        told = f"a KV cache of fp8 instead of {worker.settings.form.name}"
        yield TermName.CACHE, told, replace(worker, cache_form=FORMATS["fp8"])
    ranks = _more_ranks(model, worker)
    yield TermName.WEIGHTS, f"{ranks} ranks instead of {worker.num_ranks}", replace(worker, num_ranks=ranks)
    engine, transfer = worker.engine, worker.transfer
    tokens = max(engine.max_sequences, engine.max_batch_tokens // 4)
    if tokens < engine.max_batch_tokens:
        told = f"engine.max_batch_tokens {tokens} instead of {engine.max_batch_tokens}"
        yield TermName.ACTIVATIONS, told, replace(worker, engine=replace(engine, max_batch_tokens=tokens))
    if plan.term(TermName.STAGING).num_bytes + plan.term(TermName.PEERS).num_bytes:
        credit = max(transfer.message_bytes, transfer.credit_bytes // 4)
        told = f"transfer.credit_bytes {credit} instead of {transfer.credit_bytes}"
        yield TermName.STAGING, told, replace(worker, transfer=replace(transfer, credit_bytes=credit))


def _smaller_loads(
    model: PlannedModel, worker: WorkerShape, load: HeldLoad
) -> Iterator[tuple[TermName, str, WorkerShape]]:
    def with_number(number: int) -> WorkerShape:
        return replace(worker, load=replace(load, num_conversations=number))

    def with_tokens(tokens: int) -> WorkerShape:
        return replace(worker, load=replace(load, num_tokens=tokens))

    number = _largest(load.num_conversations, lambda number: plan_worker(model, with_number(number)).fits)
    if number:
        told = f"{number} conversations instead of {load.num_conversations}"
        yield TermName.CACHE, told, with_number(number)
    tokens = _largest(load.num_tokens, lambda tokens: plan_worker(model, with_tokens(tokens)).fits)
    if tokens:
        told = f"conversations of {tokens} tokens instead of {load.num_tokens}"
        yield TermName.CACHE, told, with_tokens(tokens)


def _more_ranks(model: PlannedModel, worker: WorkerShape) -> int:
    """Return 2, 4 or 8 times the ranks, the least that fits; twice as many if none does."""
    for factor in (2, 4, 8):
        ranks = factor * worker.num_ranks
        try:
            if plan_worker(model, replace(worker, num_ranks=ranks)).fits:
                return ranks
        except ConfigError:  # they do not divide the heads
            break
    return 2 * worker.num_ranks


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number below ``limit`` that fits; 0 if none does."""
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
