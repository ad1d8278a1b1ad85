"""How long one worker's steps take on this machine, and what they say of steps that were not measured.

python examples/calibrate_engine.py [MODEL]       # `twinpool calibrate` does the rest, and writes a profile
"""

import sys

from twinpool.lab import CalibrateConfig, calibrate_engine


def run(model: str) -> None:
    """Measure a few steps, print them, and predict one."""
    config = CalibrateConfig(
        model=model,
        kv_memory="64MiB",
        threads=1,
        workers=0,
        repeats=3,
        prompts=(8, 32, 64),
        cached=(32,),
        prompt_batches=(2,),
        decode_batches=(1, 4),
        contexts=(32, 128),
        transports=("tcp",),
    )
    found = calibrate_engine(config)
    for timing, error in found.step_errors():
        kind = "predicted" if timing.point.is_check else "fitted"
        print(f"{timing.point.name:40} {timing.median_s * 1e3:8.2f} ms, {kind} within {abs(error):.1%}")
    cost = found.profile(command="examples/calibrate_engine.py").cost_model()
    print(f"so a step of 2 decodes at 64 takes {cost.step_s([], 2, 128) * 1e3:.2f} ms")


if __name__ == "__main__":
    run(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct")
