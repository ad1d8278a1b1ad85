"""A plan beside what workers take that run as it says: real ones, each in a process of its own, here.

A prefill worker and a decode worker send each other KV; a colocated one is alone.  First their resident
memory is read, then the same requests are traced.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from twinpool.core.errors import ConfigError
from twinpool.core.ports import Role
from twinpool.core.secret import Secret
from twinpool.core.security import Trust
from twinpool.core.tls import Party
from twinpool.lab.memory.measuring.child import MeasuredChild, measured_child
from twinpool.lab.memory.measuring.settings import MeasuredWorker, Measurement
from twinpool.lab.memory.measuring.traffic import Sizes, send_colocated, send_disaggregated
from twinpool.lab.memory.memory_plan import MemoryPlan
from twinpool.lab.memory.worker_plan import WorkerPlan


async def measure_plan(made: MemoryPlan, folder: Path, *, device: str = "cpu") -> Mapping[Role, Measurement]:
    """Run one worker of each role as planned, and return what each has taken.

    Args:
        made: Of a model that our engine runs, for workers of one rank.
        folder: Of that model, with its weights.
        device: ``cpu``, ``cuda`` or ``cuda:N``; all of them share it.

    Raises:
        ConfigError: The plan is not of such workers, or too small to measure.
        ServingError: A worker does not start, or a request fails.
    """
    _check(made)
    found: dict[Role, Measurement] = {}
    for group in _groups(made.workers):
        async with _running(group, folder, device) as children:
            await _send(made, group, children, salt="resident")
            for role, child in children.items():
                found[role] = await child.measure()
            for child in children.values():
                await child.trace()
            await _send(made, group, children, salt="traced")
            for role, child in children.items():
                traced = await child.measure()
                found[role] = replace(found[role], activation_bytes=traced.activation_bytes)
    return found


def _check(made: MemoryPlan) -> None:
    if not made.model.is_served:
        raise ConfigError("--measure", f"this engine does not run {made.model.fields.family}")
    for plan in made.workers:
        worker = plan.worker
        if worker.num_ranks > 1:
            raise ConfigError("--measure", f"{worker.num_ranks} ranks; workers of one rank are measured")
        if worker.settings.form.name != worker.dtype:
            raise ConfigError("--cache-format", "this engine keeps KV in the dtype of the model")
        if worker.cache_bytes is None and worker.load is None:
            raise ConfigError(
                "--kv-memory", "is missing: to measure all that is left would fill this machine"
            )
        if not plan.fits:
            raise ConfigError("--measure", f"{plan.missing_bytes} bytes are missing for {worker.role}")


def _groups(workers: Sequence[WorkerPlan]) -> list[list[WorkerPlan]]:
    """Return who runs at the same time: a pair, or one that is alone."""
    pair = [plan for plan in workers if plan.worker.role is not Role.COLOCATED]
    alone = [[plan] for plan in workers if plan.worker.role is Role.COLOCATED]
    return ([pair] if pair else []) + alone


@asynccontextmanager
async def _running(
    plans: Sequence[WorkerPlan], folder: Path, device: str
) -> AsyncIterator[dict[Role, MeasuredChild]]:
    secret = Secret.random()
    trust = Trust(party=Party.ROUTER, secret=secret)
    async with AsyncExitStack() as stack:
        children = {}
        for plan in plans:
            worker = plan.worker
            settings = MeasuredWorker(
                folder=str(folder),
                role=worker.role,
                device=device,
                dtype=worker.dtype,
                cache_bytes=plan.capacity.cache_bytes,
                threads=worker.num_threads,
                secret=secret.key.hex(),
                engine=worker.engine,
                transfer=worker.transfer,
            )
            children[worker.role] = await stack.enter_async_context(measured_child(settings, trust))
        yield children


async def _send(
    made: MemoryPlan, plans: Sequence[WorkerPlan], children: Mapping[Role, MeasuredChild], *, salt: str
) -> None:
    tokens = min((plan.num_blocks or 0) * plan.worker.engine.block_tokens for plan in plans)
    sizes = Sizes(
        num_tokens=tokens,
        max_model_tokens=made.model.fields.max_tokens or tokens,
        vocab_size=made.model.fields.vocab_size,
        engine=plans[0].worker.engine,
        salt=salt,
    )
    if Role.COLOCATED in children:
        await send_colocated(sizes, children[Role.COLOCATED].decode)
        return
    prefill, decode = children[Role.PREFILL], children[Role.DECODE]
    await send_disaggregated(sizes, prefill.prefill, decode.decode, sender_id=prefill.worker_id)
