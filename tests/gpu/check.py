"""`make gpu-check`: what no machine without a GPU can show, in a few minutes, as a table and as JSON.

Without a GPU every step is skipped and the exit code is 0; `--device cpu` rehearses them on the CPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tests.gpu.steps import Skip, Step, steps

_MEASUREMENTS = Path(__file__).parents[2] / "docs" / "measurements"
_NUM_TOKENS = 8192  # 256 MiB of KV


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one step went."""

    step: str
    result: str  # ok, skipped or failed
    detail: str
    gb_per_s: float | None
    seconds: float


def main(arguments: list[str] | None = None) -> int:
    """Run all steps; the exit code tells whether one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0", help="cpu rehearses the check")
    parser.add_argument("--tokens", type=int, default=_NUM_TOKENS, help="of each transfer")
    parser.add_argument("--out", type=Path, help=f"folder of the JSON (on a GPU: {_MEASUREMENTS})")
    args = parser.parse_args(arguments)
    has_device = args.device == "cpu" or torch.cuda.is_available()
    outcomes = []
    for name, step in steps(args.device):
        outcomes.append(_run(name, step, args) if has_device else _skipped(name, "no GPU"))
        print(_line(outcomes[-1]), flush=True)
    out = args.out or (None if args.device == "cpu" else _MEASUREMENTS)
    if has_device and out is not None:
        print(_write(out, args.device, outcomes))
    return int(any(outcome.result == "failed" for outcome in outcomes))


def _run(name: str, step: Step, args: argparse.Namespace) -> Outcome:
    started_s = time.monotonic()
    try:
        found = step(args.device, args.tokens)
    except Skip as reason:
        return _skipped(name, str(reason))
    except Exception as error:
        traceback.print_exc()
        detail, speed, result = f"{type(error).__name__}: {error}", None, "failed"
    else:
        detail, speed, result = found.detail, found.gb_per_s, "ok"
    seconds = round(time.monotonic() - started_s, 1)
    return Outcome(step=name, result=result, detail=detail, gb_per_s=speed, seconds=seconds)


def _skipped(name: str, reason: str) -> Outcome:
    return Outcome(step=name, result="skipped", detail=reason, gb_per_s=None, seconds=0.0)


def _line(outcome: Outcome) -> str:
    speed = "" if outcome.gb_per_s is None else f"{outcome.gb_per_s:8.2f} GB/s"
    result = f"skipped: {outcome.detail}" if outcome.result == "skipped" else outcome.result
    detail = "" if outcome.result == "skipped" else outcome.detail
    return f"{outcome.step:<58}{result:<10}{speed:<16}{detail}".rstrip()


def _write(folder: Path, device: str, outcomes: list[Outcome]) -> Path:
    """Write what was found, under the date and the name of the device."""
    name = (
        platform.processor() or platform.machine() if device == "cpu" else torch.cuda.get_device_name(device)
    )
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{today}-{name.lower().replace(' ', '-')}.json"
    machine = {
        "date": today,
        "device": name,
        "gpus": torch.cuda.device_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    path.write_text(
        json.dumps({**machine, "steps": [asdict(outcome) for outcome in outcomes]}, indent=2) + "\n"
    )
    return path


if __name__ == "__main__":
    sys.exit(main())
