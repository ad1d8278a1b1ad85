"""What a model needs on a prefill and on a decode worker, and how many conversations fit.

python examples/memory_plan.py [MODEL [MEMORY]]       # MODEL: alias, folder, config.json, .gguf or hub id
"""

import sys

from twinpool.checkpoints.resolve import resolve_config
from twinpool.core.ports import Role
from twinpool.core.units import parse_bytes
from twinpool.lab import WorkerShape, plan_memory, read_model


def run(name: str, memory: str) -> None:
    """Print the plan of one prefill and one decode worker, each on a GPU with so much memory."""
    model, memory_bytes = read_model(resolve_config(name)), parse_bytes(memory, field="MEMORY")
    workers = [
        WorkerShape(role=role, memory_bytes=memory_bytes, num_peers=1) for role in (Role.PREFILL, Role.DECODE)
    ]
    made = plan_memory(model, workers)
    for plan in made.workers:
        print(f"{plan.worker.role}: {plan.total_bytes:,} of {plan.worker.memory_bytes:,} bytes")
        for term in plan.terms:
            print(f"  {term.name:18}{term.num_bytes:16,}  {term.kind}: {term.source}")
        for (cell,) in plan.capacity.table(made.contexts, [1]):
            fit = plan.capacity.conversations(cell.num_tokens)
            print(f"  {fit} conversations of {cell.num_tokens} tokens fit, {cell.num_bytes:,} bytes each")


if __name__ == "__main__":
    defaults = ("smollm2-135m-instruct", "24GB")
    run(*sys.argv[1:3], *defaults[len(sys.argv) - 1 :])
