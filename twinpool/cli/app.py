"""`twinpool ...`: reads the command line and calls the command; errors are one line.

Every command is imported only when it is called, so that `twinpool --help` is quick.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn, TypeAlias

from twinpool.cli import options
from twinpool.core.errors import ConfigError, ServingError
from twinpool.core.ports import Role

_EXIT_USAGE, _EXIT_FAILED = 2, 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit code."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except ServingError as error:
        print(f"twinpool: error: {_one_line(error)}", file=sys.stderr)
        return _EXIT_USAGE if isinstance(error, ConfigError) else _EXIT_FAILED
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output left
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _EXIT_FAILED


Commands: TypeAlias = "argparse._SubParsersAction[_Parser]"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"twinpool: error: {message}", file=sys.stderr)
        sys.exit(_EXIT_USAGE)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="twinpool",
        description="Serve a language model from a prefill pool and a decode pool, or colocated.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_serve(commands)
    _add_worker(commands)
    _add_demo(commands)
    _add_complete(commands)
    _add_chat(commands)
    _add_status(commands)
    _add_scale(commands)
    _add_replace(commands)
    _add_role(commands)
    _add_models(commands)
    _add_certs(commands)
    _add_doctor(commands)
    _add_bench(commands)
    _add_kv_bench(commands)
    _add_sweep(commands)
    _add_compare(commands)
    _add_report(commands)
    _add_calibrate(commands)
    _add_simulate(commands)
    _add_recommend(commands)
    _add_plan(commands)
    return parser


def _add_serve(commands: Commands) -> None:
    command = commands.add_parser("serve", help="serve a model until Ctrl-C", allow_abbrev=False)
    options.add_deployment(command)
    command.add_argument("--print-config", action="store_true", help="print the settings as YAML, and exit")
    command.set_defaults(run=_serve)


def _add_worker(commands: Commands) -> None:
    command = commands.add_parser(
        "worker", help="run one worker without Ray and join it to a router", allow_abbrev=False
    )
    options.add_worker(command)
    command.add_argument("--print-config", action="store_true", help="print the settings as YAML, and exit")
    command.set_defaults(run=_worker)


def _add_demo(commands: Commands) -> None:
    command = commands.add_parser(
        "demo", help="watch two pools answer, and one engine give the same tokens", allow_abbrev=False
    )
    command.add_argument("--model", default=None, help="alias, folder, .gguf file or hub id")
    command.add_argument("--max-tokens", type=int, default=48, help="of each answer (default: %(default)s)")
    command.set_defaults(run=_demo)


def _add_complete(commands: Commands) -> None:
    command = commands.add_parser(
        "complete", help="complete a prompt, or what stdin says", allow_abbrev=False
    )
    command.add_argument("prompt", nargs="?", help="the prompt; read from stdin if it is left out or -")
    options.add_client(command)
    options.add_sampling(command)
    command.set_defaults(run=_complete)


def _add_chat(commands: Commands) -> None:
    command = commands.add_parser("chat", help="talk to the model", allow_abbrev=False)
    command.add_argument("message", nargs="?", help="say this, print the answer and exit")
    command.add_argument("--system", default=None, help="what the model is told first")
    options.add_client(command)
    options.add_sampling(command)
    command.set_defaults(run=_chat)


def _add_status(commands: Commands) -> None:
    command = commands.add_parser("status", help="show the workers of a running server", allow_abbrev=False)
    options.add_client(command)
    command.add_argument("--json", action="store_true", help="print everything as JSON")
    command.set_defaults(run=_status)


def _add_scale(commands: Commands) -> None:
    command = commands.add_parser(
        "scale", help="change how many workers a running server has", allow_abbrev=False
    )
    for role in Role:
        command.add_argument(f"--{role}", type=int, default=None, metavar="N", help=f"{role} workers")
    options.add_client(command)
    command.set_defaults(run=_scale)


def _add_replace(commands: Commands) -> None:
    command = commands.add_parser(
        "replace", help="drain a worker and start its successor", allow_abbrev=False
    )
    command.add_argument("worker", help="its id, as `twinpool status` shows it")
    options.add_client(command)
    command.set_defaults(run=_replace)


def _add_role(commands: Commands) -> None:
    command = commands.add_parser(
        "role", help="give a worker another role without a restart", allow_abbrev=False
    )
    command.add_argument("worker", help="its id, as `twinpool status` shows it")
    command.add_argument("role", choices=[role.value for role in Role], help="what it is to be")
    command.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="for what it runs to end; then that goes on elsewhere (default: 30)",
    )
    command.add_argument("--clear-cache", action="store_true", help="it forgets the KV of earlier requests")
    command.add_argument(
        "--force", action="store_true", help="also if nobody could answer meanwhile or afterwards"
    )
    options.add_client(command)
    command.set_defaults(run=_role)


def _add_models(commands: Commands) -> None:
    models = commands.add_parser("models", help="fetch models and list them", allow_abbrev=False)
    actions = models.add_subparsers(metavar="ACTION", required=True)
    pull = actions.add_parser("pull", help="fetch a model into the cache", allow_abbrev=False)
    pull.add_argument("model", nargs="?", default="smollm2-135m-instruct", help="alias, .gguf file or hub id")
    pull.set_defaults(run=_pull)
    listing = actions.add_parser("list", help="list what is in the cache", allow_abbrev=False)
    listing.set_defaults(run=_list)


def _add_certs(commands: Commands) -> None:
    command = commands.add_parser(
        "certs", help="make a private CA, certificates and a secret for a deployment", allow_abbrev=False
    )
    options.add_certs(command)
    command.set_defaults(run=_certs)


def _add_doctor(commands: Commands) -> None:
    command = commands.add_parser(
        "doctor", help="show what this machine has and what that makes possible", allow_abbrev=False
    )
    command.add_argument("--port", type=int, default=8000, help="the port that serve would use")
    command.add_argument("--json", action="store_true", help="print everything as JSON")
    command.set_defaults(run=_doctor)


def _add_bench(commands: Commands) -> None:
    command = commands.add_parser(
        "bench", help="send a workload to an OpenAI endpoint and measure the answers", allow_abbrev=False
    )
    options.add_bench(command)
    command.set_defaults(run=_bench)


def _add_simulate(commands: Commands) -> None:
    command = commands.add_parser(
        "simulate", help="predict how workers would answer a workload", allow_abbrev=False
    )
    options.add_simulate(command)
    command.set_defaults(run=_simulate)


def _add_calibrate(commands: Commands) -> None:
    command = commands.add_parser(
        "calibrate", help="measure this machine, and write a profile of it to simulate", allow_abbrev=False
    )
    options.add_calibrate(command)
    command.set_defaults(run=_calibrate)


def _add_recommend(commands: Commands) -> None:
    command = commands.add_parser(
        "recommend", help="find the layout of some GPUs that answers most in time", allow_abbrev=False
    )
    options.add_recommend(command)
    command.set_defaults(run=_recommend)


def _add_kv_bench(commands: Commands) -> None:
    command = commands.add_parser(
        "kv-bench",
        help="measure how fast KV moves, beside the bare link",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    options.add_kv_bench(command)
    command.set_defaults(run=_kv_bench)


def _add_plan(commands: Commands) -> None:
    command = commands.add_parser(
        "plan", help="tell the memory of each role before anything is started", allow_abbrev=False
    )
    options.add_plan(command)
    command.set_defaults(run=_plan)


def _add_sweep(commands: Commands) -> None:
    command = commands.add_parser(
        "sweep", help="measure pool ratios of the same workers beside each other", allow_abbrev=False
    )
    command.add_argument("--workers", type=int, default=None, metavar="N", help="in every arm")
    command.add_argument("--ratios", default=None, metavar="P:D,P:D", help="(default: all of the workers)")
    command.add_argument("--colocated", action="store_true", help="compare with all of them colocated too")
    options.add_study(command)
    command.set_defaults(run=_study)


def _add_compare(commands: Commands) -> None:
    command = commands.add_parser(
        "compare", help="measure one pool ratio beside colocated serving", allow_abbrev=False
    )
    command.add_argument("--ratio", dest="ratios", default="1:1", metavar="P:D", help="(default: 1:1)")
    options.add_study(command)
    command.set_defaults(run=_study, workers=None, colocated=True)


def _add_report(commands: Commands) -> None:
    command = commands.add_parser(
        "report", help="make the report of a sweep or a comparison anew", allow_abbrev=False
    )
    command.add_argument("folder", metavar="DIR", help="of the study")
    command.set_defaults(run=_report)


def _serve(args: argparse.Namespace) -> int:
    from twinpool.cli import run

    return run.serve(args)


def _worker(args: argparse.Namespace) -> int:
    from twinpool.cli import run

    return run.worker(args)


def _demo(args: argparse.Namespace) -> int:
    from twinpool.cluster import demo

    return demo.run_demo(model=args.model, max_tokens=args.max_tokens)


def _complete(args: argparse.Namespace) -> int:
    from twinpool.cli import ask

    return ask.complete(args)


def _chat(args: argparse.Namespace) -> int:
    from twinpool.cli import ask

    return ask.chat(args)


def _status(args: argparse.Namespace) -> int:
    from twinpool.cli import status

    return status.status(args)


def _scale(args: argparse.Namespace) -> int:
    from twinpool.cli import scale

    return scale.scale(args)


def _replace(args: argparse.Namespace) -> int:
    from twinpool.cli import scale

    return scale.replace(args)


def _role(args: argparse.Namespace) -> int:
    from twinpool.cli import role

    return role.role(args)


def _pull(args: argparse.Namespace) -> int:
    from twinpool.cli import models

    return models.pull(args.model)


def _list(args: argparse.Namespace) -> int:
    from twinpool.cli import models

    return models.list_models()


def _certs(args: argparse.Namespace) -> int:
    from twinpool.cli import certs

    return certs.certs(args)


def _doctor(args: argparse.Namespace) -> int:
    from twinpool.cli import doctor

    return doctor.doctor(args)


def _bench(args: argparse.Namespace) -> int:
    from twinpool.cli import bench

    return bench.bench(args)


def _calibrate(args: argparse.Namespace) -> int:
    from twinpool.cli import calibrate

    return calibrate.calibrate(args)


def _simulate(args: argparse.Namespace) -> int:
    from twinpool.cli import simulate

    return simulate.simulate(args)


def _recommend(args: argparse.Namespace) -> int:
    from twinpool.cli import recommend

    return recommend.recommend(args)


def _kv_bench(args: argparse.Namespace) -> int:
    from twinpool.cli import kv_bench

    return kv_bench.kv_bench(args)


def _plan(args: argparse.Namespace) -> int:
    from twinpool.cli import plan

    return plan.plan(args)


def _study(args: argparse.Namespace) -> int:
    from twinpool.cli import study

    return study.study(args)


def _report(args: argparse.Namespace) -> int:
    from twinpool.cli import study

    return study.report(args)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
