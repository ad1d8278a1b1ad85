"""`twinpool ...`: reads the command line and calls the command; errors are one line.

Every command is imported only when it is called, so that `twinpool --help` is quick.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn, TypeAlias

from twinpool.cli import options
from twinpool.cli.exit_codes import FAILED, INTERRUPTED, USAGE
from twinpool.core.errors import ConfigError, ServingError
from twinpool.core.ports import Role

Commands: TypeAlias = "argparse._SubParsersAction[_Parser]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit code."""
    args = parser().parse_args(argv)
    try:
        module, _, function = args.run.partition(":")
        return int(getattr(import_module(f"twinpool.cli.{module}"), function)(args))
    except ServingError as error:
        print(f"twinpool: error: {_one_line(error)}", file=sys.stderr)
        return USAGE if isinstance(error, ConfigError) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output left
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return FAILED


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"twinpool: error: {message}; {self.prog} --help tells more", file=sys.stderr)
        sys.exit(USAGE)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; ``run`` of what it parses is MODULE:FUNCTION of this package."""
    root = _Parser(
        prog="twinpool",
        description="Serve a language model from a prefill pool and a decode pool, or colocated.",
        allow_abbrev=False,
    )
    commands: Commands = root.add_subparsers(metavar="COMMAND", required=True)
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
    options.add_certs(
        _add(
            commands, "certs", "make a private CA, certificates and a secret for a deployment", "certs:certs"
        )
    )
    _add_doctor(commands)
    options.add_bench(
        _add(
            commands, "bench", "send a workload to an OpenAI endpoint and measure the answers", "bench:bench"
        )
    )
    _add_kv_bench(commands)
    _add_sweep(commands)
    _add_compare(commands)
    _add_report(commands)
    options.add_calibrate(
        _add(
            commands,
            "calibrate",
            "measure this machine, and write a profile of it to simulate",
            "calibrate:calibrate",
        )
    )
    options.add_simulate(
        _add(commands, "simulate", "predict how workers would answer a workload", "simulate:simulate")
    )
    options.add_recommend(
        _add(
            commands,
            "recommend",
            "find the layout of some GPUs that answers most in time",
            "recommend:recommend",
        )
    )
    options.add_plan(
        _add(commands, "plan", "tell the memory of each role before anything is started", "plan:plan")
    )
    return root


def _add(commands: Commands, name: str, about: str, run: str, **more: Any) -> _Parser:
    command = commands.add_parser(
        name, help=about, description=f"{about[0].upper()}{about[1:]}.", allow_abbrev=False, **more
    )
    command.set_defaults(run=run)
    return command


def _add_serve(commands: Commands) -> None:
    command = _add(commands, "serve", "serve a model until Ctrl-C", "run:serve")
    options.add_deployment(command)
    command.add_argument("--print-config", action="store_true", help="print the settings as YAML, and exit")


def _add_worker(commands: Commands) -> None:
    command = _add(commands, "worker", "run one worker without Ray and join it to a router", "run:worker")
    options.add_worker(command)
    command.add_argument("--print-config", action="store_true", help="print the settings as YAML, and exit")


def _add_demo(commands: Commands) -> None:
    command = _add(
        commands, "demo", "watch two pools answer, and one engine give the same tokens", "demo:demo"
    )
    command.add_argument("--model", default=None, help="alias, folder, .gguf file or hub id")
    command.add_argument("--max-tokens", type=int, default=48, help="of each answer (default: %(default)s)")


def _add_complete(commands: Commands) -> None:
    command = _add(commands, "complete", "complete a prompt, or what stdin says", "ask:complete")
    command.add_argument("prompt", nargs="?", help="the prompt; read from stdin if it is left out or -")
    options.add_client(command)
    options.add_sampling(command)


def _add_chat(commands: Commands) -> None:
    command = _add(commands, "chat", "talk to the model", "ask:chat")
    command.add_argument("message", nargs="?", help="say this, print the answer and exit")
    command.add_argument("--system", default=None, help="what the model is told first")
    options.add_client(command)
    options.add_sampling(command)


def _add_status(commands: Commands) -> None:
    command = _add(commands, "status", "show the workers of a running server", "status:status")
    options.add_client(command)
    command.add_argument("--json", action="store_true", help="print everything as JSON")


def _add_scale(commands: Commands) -> None:
    command = _add(commands, "scale", "change how many workers a running server has", "scale:scale")
    for role in Role:
        command.add_argument(f"--{role}", type=int, default=None, metavar="N", help=f"{role} workers")
    options.add_client(command)


def _add_replace(commands: Commands) -> None:
    command = _add(commands, "replace", "drain a worker and start its successor", "scale:replace")
    command.add_argument("worker", help="its id, as `twinpool status` shows it")
    options.add_client(command)


def _add_role(commands: Commands) -> None:
    command = _add(commands, "role", "give a worker another role without a restart", "role:role")
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


def _add_models(commands: Commands) -> None:
    models = commands.add_parser("models", help="fetch models and list them", allow_abbrev=False)
    actions: Commands = models.add_subparsers(metavar="ACTION", required=True)
    pull = _add(actions, "pull", "fetch a model into the cache", "models:pull")
    pull.add_argument("model", nargs="?", default="smollm2-135m-instruct", help="alias, .gguf file or hub id")
    _add(actions, "list", "list what is in the cache", "models:list_models")


def _add_doctor(commands: Commands) -> None:
    command = _add(
        commands, "doctor", "show what this machine has and what that makes possible", "doctor:doctor"
    )
    command.add_argument("--port", type=int, default=8000, help="the port that serve would use")
    command.add_argument("--json", action="store_true", help="print everything as JSON")


def _add_kv_bench(commands: Commands) -> None:
    command = _add(
        commands,
        "kv-bench",
        "measure how fast KV moves, beside the bare link",
        "kv_bench:kv_bench",
        argument_default=argparse.SUPPRESS,
    )
    options.add_kv_bench(command)


def _add_sweep(commands: Commands) -> None:
    command = _add(
        commands, "sweep", "measure pool ratios of the same workers beside each other", "study:study"
    )
    command.add_argument("--workers", type=int, default=None, metavar="N", help="in every arm")
    command.add_argument("--ratios", default=None, metavar="P:D,P:D", help="(default: all of the workers)")
    command.add_argument("--colocated", action="store_true", help="compare with all of them colocated too")
    options.add_study(command)


def _add_compare(commands: Commands) -> None:
    command = _add(commands, "compare", "measure one pool ratio beside colocated serving", "study:study")
    command.add_argument("--ratio", dest="ratios", default="1:1", metavar="P:D", help="(default: 1:1)")
    options.add_study(command)
    command.set_defaults(workers=None, colocated=True)


def _add_report(commands: Commands) -> None:
    command = _add(commands, "report", "make the report of a sweep or a comparison anew", "study:report")
    command.add_argument("folder", metavar="DIR", help="of the study")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
