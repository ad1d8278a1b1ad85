"""Predicts what layouts of workers do on this machine, lets them do it, and tells how far off that was.

    python -m benchmarks.sim_accuracy [--folder sim-accuracy] [--for S] [--write]

Three colocated workers are calibrated (`twinpool calibrate`: at most one request each); that, and nothing of
the loads below, makes the predictions.  All is kept in the folder as it is measured, so it goes on where it
was stopped; `--for` bounds one sitting.  A folder of `make study` may be copied there as `three`: its cells
are some of these.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from rich.console import Console

from benchmarks.document import provenance, table, write_section
from twinpool.cli.study_watch import TerminalWatch
from twinpool.cluster.server_process import server_process
from twinpool.core.config import bind
from twinpool.lab.calibrate.accuracy import (
    Score,
    layout_name,
    mean_outcome,
    outcome_of,
    predict,
    rank_correlation,
)
from twinpool.lab.metrics.summary import Summary
from twinpool.lab.profile.profile import load_profile
from twinpool.lab.study.driver import StudyStopped
from twinpool.lab.study.folder import StudyFolder
from twinpool.lab.study.laboratory import Laboratory
from twinpool.lab.study.order import all_cells
from twinpool.lab.study.run import run_study
from twinpool.lab.study.settings import StudySettings

_RATES = "0.4,0.75,1.5"
_THREADS, _KV_MEMORY, _TRANSPORT = 1, "1GiB", "shm"
_RATIOS = {3: ["1:2", "2:1"], 2: ["1:1"]}
_NAMES = {2: "two", 3: "three"}
_WORKLOAD = {
    "kind": "synthetic",
    "prompt": "bimodal(48,512,long_share=0.25,spread=0.3)",
    "output": "uniform(12,36)",
    "arrival": "poisson(1)",
    "seed": 1,
    "start_s": 0.0,
    "speed": 1.0,
}
_LIMITS = {"ttft_s": 2.0, "tpot_s": 0.15}
_LIGHT = 0.9  # a load of which all layouts answer so much in time: throughput is then what was sent
_TARGETS = (0.10, 0.15, 0.05)  # throughput, TTFT, attainment; stated before anything was measured


def main() -> int:
    """Measure what is missing, and tell the errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default="sim-accuracy", type=Path)
    parser.add_argument("--for", dest="for_s", type=float, default=86400.0, help="seconds of this sitting")
    parser.add_argument("--cell", type=float, default=18.0, help="seconds for which a cell sends")
    parser.add_argument("--rates", default=_RATES, help="requests per second (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--predict-only", action="store_true", help="of what is measured already")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    profile = args.folder / "profile.yaml"
    if not profile.exists():
        _calibrate(profile)
        if args.for_s < 600.0:
            return 0  # a sitting of its own
    studies = {}
    for workers, name in _NAMES.items():
        path = args.folder / name
        studies[path] = _settings(args, workers)
        if not args.predict_only and not _measure(studies[path], path, args.for_s):
            return 1
    scores = [score for path, settings in studies.items() for score in _scores(settings, path, str(profile))]
    text = f"{_told(scores)}\n\nThe profile was {load_profile(str(profile)).source}."
    print(text)
    if args.write:
        write_section("simulator against life", f"{text}\n\n{provenance('benchmarks.sim_accuracy')}")
    return 0


def _calibrate(path: Path) -> None:
    command = ["calibrate", "--workers", "3", "--threads", str(_THREADS), "--kv-memory", _KV_MEMORY]
    subprocess.run([sys.executable, "-m", "twinpool", *command, "--out", str(path)], check=True)


def _settings(args: argparse.Namespace, workers: int) -> StudySettings:
    return bind(
        StudySettings,
        {
            "workers": workers,
            "ratios": _RATIOS[workers],
            "rates": [float(rate) for rate in args.rates.split(",")],
            "repeats": args.repeats,
            "cell_s": args.cell,
            "workload": _WORKLOAD,
            "bench": {"limits": _LIMITS, "late_limit_s": 0.1},
        },
        "study",
    )


def _measure(settings: StudySettings, path: Path, for_s: float) -> bool:
    """Measure the cells that are missing; return whether none is any more."""
    folder = StudyFolder(path)
    if set(all_cells(settings)) <= set(folder.measurements()):
        return True
    console = Console(stderr=True)
    options = ["--colocated", str(settings.workers), "--threads", str(_THREADS), "--kv-memory", _KV_MEMORY]
    timers: list[threading.Timer] = []

    def stop_in_time(laboratory: Laboratory) -> None:
        timers.append(threading.Timer(for_s, laboratory.stop))
        timers[0].daemon = True
        timers[0].start()

    try:
        with (
            server_process(options, say=lambda text: console.print(text, markup=False)) as url,
            TerminalWatch(console) as watch,
        ):
            run_study(settings, path, url=url, watch=watch, on_start=stop_in_time)
    except StudyStopped:
        console.print(f"{len(folder.measurements())} cells in {path}; the same command goes on", markup=False)
        return False
    finally:
        for timer in timers:
            timer.cancel()
    return True


def _scores(settings: StudySettings, path: Path, profile: str) -> Iterator[Score]:
    folder, limits = StudyFolder(path), settings.bench.limits
    there = folder.measurements()
    good = [cell for cell, measurement in there.items() if not measurement.problems]
    for rate in settings.rates:
        for arm in settings.arms:
            cells = [cell for cell in good if cell.arm == arm.name and cell.rate == rate]
            if cells:
                measured = [outcome_of(Summary(limits).add_all(folder.records(cell))) for cell in cells]
                predicted = [
                    predict(settings, arm, cell, profile=profile, transport=_TRANSPORT) for cell in cells
                ]
                yield Score(
                    layout=layout_name(arm),
                    rate=rate,
                    repeats=len(cells),
                    load=fmean(there[cell].bench["load_before"] for cell in cells),
                    measured=mean_outcome(measured),
                    predicted=mean_outcome(predicted),
                )


def _told(scores: list[Score]) -> str:
    rows = []
    for score in sorted(scores, key=lambda score: (score.rate, score.layout)):
        one, other = score.measured, score.predicted
        rows.append(
            [
                f"{score.layout} at {score.rate:g}/s, {score.repeats} times",
                f"{score.load:.1f}",
                f"{one.tokens_per_s:.1f}",
                f"{other.tokens_per_s:.1f}",
                f"{score.tokens_error:+.0%}",
                f"{one.ttft_s * 1e3:.0f}",
                f"{other.ttft_s * 1e3:.0f}",
                f"{score.ttft_error:+.0%}",
                f"{one.tpot_s * 1e3:.0f}",
                f"{other.tpot_s * 1e3:.0f}",
                f"{one.good_share:.0%}",
                f"{other.good_share:.0%}",
                f"{score.good_error * 100:+.0f}",
            ]
        )
    head = (
        "layout",
        "load before",
        "tok/s",
        "sim",
        "error",
        "TTFT p50 ms",
        "sim",
        "error",
        "TPOT p50 ms",
        "sim",
    )
    lines = [table((*head, "good", "sim", "points"), rows), ""]
    errors = [[abs(score.tokens_error), abs(score.ttft_error), abs(score.good_error)] for score in scores]
    for number, (name, target) in enumerate(
        zip(("throughput", "p50 TTFT", "SLO attainment"), _TARGETS, strict=True)
    ):
        met = sum(error[number] <= target for error in errors)
        worst = max(error[number] for error in errors)
        lines.append(f"- {name}: {met} of {len(errors)} within {target:.0%}; the worst {worst:.0%} off.")
    for rate in sorted({score.rate for score in scores}):
        of_rate = [score for score in scores if score.rate == rate]
        is_light = min(score.measured.good_share for score in of_rate) >= _LIGHT
        told = [
            f"{name} {_correlation(pairs)}"
            for name, pairs in (
                (
                    "throughput",
                    [(s.measured.tokens_per_s, s.predicted.tokens_per_s) for s in of_rate if not is_light],
                ),
                ("p50 TTFT", [(s.measured.ttft_s, s.predicted.ttft_s) for s in of_rate]),
                ("attainment", [(s.measured.good_share, s.predicted.good_share) for s in of_rate]),
            )
        ]
        lines.append(f"- order of {len(of_rate)} layouts at {rate:g}/s (Spearman): {', '.join(told)}.")
    return "\n".join(lines)


def _correlation(pairs: list[tuple[float, float]]) -> str:
    value = rank_correlation(pairs) if pairs else None
    return "has no order" if value is None else f"{value:+.2f}"


if __name__ == "__main__":
    sys.exit(main())
