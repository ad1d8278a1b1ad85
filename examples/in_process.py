"""A router, a prefill and a decode worker in one Python process: no Ray, no gRPC, no HTTP.

python examples/in_process.py [MODEL [PROMPT]]        # MODEL: alias, folder, .gguf file or hub id
"""

import asyncio
import sys
from contextlib import aclosing
from pathlib import Path

from local_worker import LocalWorker

from kv_transfer.hub import Hub
from router.config import RouterConfig
from router.router import Router
from router.workers import WorkerPool
from twinpool.checkpoints.resolve import resolve_model
from twinpool.core.clock import SystemClock
from twinpool.core.ports import Role
from twinpool.core.request import Request, SamplingParams
from twinpool.core.timeline import RequestTimeline
from twinpool.engine.load import load_model
from twinpool.text.tokenizer import Tokenizer


async def run(folder: Path, prompt: str) -> None:
    """Print the greedy answer to ``prompt`` and the way it took."""
    clock, config, model, hub = SystemClock(), RouterConfig(), load_model(folder), Hub()
    roles = (Role.PREFILL, Role.DECODE)
    workers = {str(role): await LocalWorker.start(model, role, hub) for role in roles}
    pool = WorkerPool(config, clock=clock, connect=lambda info: workers[info.worker_id].ports)
    stays = [asyncio.create_task(worker.join(pool)) for worker in workers.values()]
    router, tokenizer = Router(config, pool=pool, clock=clock), Tokenizer.load(folder)
    request = Request(
        request_id="",
        prompt_ids=tuple(tokenizer.encode(prompt, add_special_tokens=True)),
        sampling=SamplingParams(seed=0, max_tokens=24, temperature=0.0),
        timeout_s=60.0,
    )
    timeline = RequestTimeline("example", clock)
    async with aclosing(router.generate(request, timeline)) as outputs:
        ids = [output.token_id async for output in outputs]
    print(tokenizer.decode(ids, skip_special_tokens=True))
    print(f"path {timeline.path}, KV moved: {timeline.kv_bytes} bytes, outcome: {timeline.outcome}")
    for stay in stays:
        stay.cancel()
    await router.close()
    await pool.close()  # closes the workers too: to the pool they are its connections


if __name__ == "__main__":
    defaults = ("smollm2-135m-instruct", "The capital of France is")
    model, prompt = (*sys.argv[1:3], *defaults[len(sys.argv) - 1 :])
    asyncio.run(run(resolve_model(model, progress=print), prompt))
