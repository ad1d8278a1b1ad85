"""The options of the commands.  Each option of `serve` and `worker` names the setting that it sets.

An option that is not given has no value here, so that the file under it, or the default, decides.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

_PATH = "path:"  # begins the dest of an option that sets a setting; the rest is its dotted path


def add_deployment(command: argparse.ArgumentParser) -> None:
    """Add the options of `serve`."""
    _add_file(command)
    pools = command.add_argument_group("pools")
    _set(pools, ("--prefill", "pools.prefill.workers", int, "N", "prefill workers (default: 1)"))
    _set(pools, ("--decode", "pools.decode.workers", int, "N", "decode workers (default: 1)"))
    _set(pools, ("--colocated", "pools.colocated.workers", int, "N", "workers that do both, instead"))
    for role in ("prefill", "decode", "colocated"):
        path, about = f"pools.{role}.tensor_parallel", f"ranks of each {role} worker (default: 1)"
        _set(pools, (f"--{role}-tensor-parallel", path, int, "N", about))
    _set(pools, ("--placement", "placement", str, "PACK|SPREAD", "of a pool's workers on the machines"))
    _set(pools, ("--ray-address", "ray_address", str, "ADDR", "a running Ray; none starts one here"))
    _set(pools, ("--join-host", "join_host", str, "HOST", "where workers find the router (127.0.0.1)"))
    _set(pools, ("--join-port", "join_port", int, "PORT", "the same (default: a free one)"))
    pools.add_argument(
        "--without-ray",
        dest=_PATH + "without_ray",
        action="store_const",
        const=True,
        help="start no workers; wait for those of `twinpool worker --join`",
    )
    http = command.add_argument_group("HTTP")
    _set(http, ("--host", "http.host", str, "HOST", "address to listen on (default: 127.0.0.1)"))
    _set(http, ("--port", "http.port", int, "PORT", "port to listen on (default: 8000; 0: a free one)"))
    _set(http, ("--api-key", "http.api_key", str, "KEY", "asked of every client (TWINPOOL_API_KEY)"))
    router = command.add_argument_group("router")
    _set(router, ("--policy", "router.policy", str, "NAME", "round_robin or least_loaded (default)"))
    security = _add_security(command)
    worker_cert = "of the workers that are started here"
    _set(security, ("--worker-tls-cert", "security.worker_tls_cert", str, "FILE", worker_cert))
    _set(security, ("--worker-tls-key", "security.worker_tls_key", str, "FILE", worker_cert))
    _add_engine(command)


def add_worker(command: argparse.ArgumentParser) -> None:
    """Add the options of `worker`."""
    _add_file(command)
    group = command.add_argument_group("worker")
    _set(group, ("--role", "role", str, "ROLE", "prefill, decode or colocated"))
    _set(group, ("--join", "join", str, "HOST:PORT", "the router's registry"))
    _set(group, ("--tensor-parallel", "tensor_parallel", int, "N", "ranks, all on this machine (default: 1)"))
    _set(group, ("--host", "host", str, "HOST", "address that the others reach (default: 127.0.0.1)"))
    _set(group, ("--port", "port", int, "PORT", "of the worker's services (default: a free one)"))
    _set(group, ("--worker-id", "worker_id", str, "ID", "unlike any other's (default: role, host, pid)"))
    _set(group, ("--drain", "drain_s", float, "S", "what SIGTERM leaves running requests (default: 30)"))
    _add_security(command)
    _add_engine(command)


def add_certs(command: argparse.ArgumentParser) -> None:
    """Add the options of `certs`."""
    command.add_argument("folder", metavar="DIR", help="where the files go; made if it is not there")
    command.add_argument(
        "--hosts", nargs="+", default=(), metavar="HOST", help="more names and addresses for the certificates"
    )
    command.add_argument(
        "--days", type=int, default=365, metavar="N", help="until they expire (default: %(default)s)"
    )
    how = command.add_mutually_exclusive_group()
    how.add_argument("--renew", action="store_true", help="make new certificates of the CA that is there")
    how.add_argument("--new-ca", action="store_true", help="replace the CA, the certificates and the secret")


def add_kv_bench(command: argparse.ArgumentParser) -> None:
    """Add the options of `kv-bench`; what is not given is not among the arguments."""
    what = command.add_argument_group("what is moved")
    size = what.add_mutually_exclusive_group()
    size.add_argument("--bytes", metavar="SIZE", help="of KV, as in 256KiB; whole tokens (default: 64MiB)")
    size.add_argument("--tokens", type=int, metavar="N", help="the same as a number of tokens")
    kv = what.add_mutually_exclusive_group()
    kv.add_argument("--layout", metavar="NAME", help="8b-bf16 (default) or smollm2-fp32, random numbers")
    kv.add_argument("--model", metavar="MODEL", help="KV of a prompt that this model has read instead")
    what.add_argument("--block-tokens", type=int, metavar="N", help="tokens per KV block (default: 16)")
    what.add_argument("--neighbours", action="store_true", help="blocks in order, as in a cache never used")
    what.add_argument("--compact", action="store_true", help="int8 on the wire")
    what.add_argument("--tp", metavar="P:D", help="ranks of the two workers (default: 1:1)")
    what.add_argument("--device", metavar="DEVICE", help="where the KV is: cpu (default) or cuda")
    how = command.add_argument_group("how")
    how.add_argument("--transports", metavar="A,B", help="in this order (default: all that work here)")
    how.add_argument("--message-bytes", metavar="SIZE", help="of one message (default: 2MiB)")
    how.add_argument("--repeat", type=int, metavar="N", help="medians of N (default: 7; 51 below 8 MiB)")
    how.add_argument("--timeout", type=float, metavar="S", help="of one transfer (default: 60)")
    link = command.add_argument_group("a link made slower than it is")
    link.add_argument("--bandwidth", metavar="SIZE", help="bytes per second, as in 125MB")
    link.add_argument("--latency", metavar="TIME", help="one way, as in 5ms")
    link.add_argument("--loss", type=float, metavar="SHARE", help="of packets, as in 0.01")
    link.add_argument("--seed", type=int, metavar="N", help="of losses, numbers and blocks (default: 0)")
    peers = command.add_argument_group("two machines")
    side = peers.add_mutually_exclusive_group()
    side.add_argument("--listen", metavar="HOST[:PORT]", help="be the decode side, once, for who connects")
    side.add_argument("--connect", metavar="HOST:PORT", help="be the prefill side, and measure")
    peers.add_argument("--wait", metavar="S", type=float, help="for the other side to come (default: 600)")
    command.add_argument("--json", metavar="FILE", help="write everything there; - is stdout, without tables")
    _add_security(command)
    command.set_defaults(set=[])


def add_plan(command: argparse.ArgumentParser) -> None:
    """Add the options of `plan`: a deployment as `serve` is told it, and what it has room for."""
    _add_file(command)
    pools = command.add_argument_group("pools")
    for role in ("prefill", "decode", "colocated"):
        _set(pools, (f"--{role}", f"pools.{role}.workers", int, "N", f"{role} workers"))
        path, about = f"pools.{role}.tensor_parallel", f"ranks of each {role} worker (default: 1)"
        _set(pools, (f"--{role}-tensor-parallel", path, int, "N", about))
    room = command.add_argument_group("room")
    room.add_argument("--memory", metavar="SIZE", help="free for each rank (default: as here and now)")
    room.add_argument("--reserve", metavar="SIZE", help="of it, for everything that is not ours")
    room.add_argument("--load", metavar="NxTOKENS", help="must fit: so many conversations of so many tokens")
    room.add_argument("--context", metavar="N,N", help="tokens of a conversation: the rows of the table")
    room.add_argument("--conversations", metavar="N,N", help="how many at once: its columns (1,4,16,64)")
    room.add_argument("--cache-format", metavar="NAME", help="of KV: fp8, int8, int4 or a dtype; as an if")
    room.add_argument("--parameters", metavar="COUNT", help="of a model that cannot be counted, as in 70B")
    command.add_argument("--measure", action="store_true", help="run it here, and show what it took beside")
    command.add_argument("--json", action="store_true", help="print everything as JSON")
    _add_engine(command)
    command.set_defaults(certs=None)


def add_bench(command: argparse.ArgumentParser) -> None:
    """Add the options of `bench`."""
    command.add_argument(
        "workload",
        nargs="?",
        help="KIND:KEY=VALUE,... with the kinds synthetic, trace, sharegpt and prompts, as in"
        " synthetic:prompt=lognormal(256),output=64,arrival=poisson(2),count=100",
    )
    _add_file(command)
    add_client(command)
    asking = command.add_argument_group("how the server is asked")
    _set(asking, ("--model", "bench.model", str, "NAME", "as the server calls it (default: its first)"))
    _set(asking, ("--endpoint", "bench.endpoint", str, "NAME", "completions (default) or chat"))
    _set(asking, ("--tokenizer", "bench.tokenizer", str, "MODEL", "makes prompts; default: the server's"))
    _set(asking, ("--timeout", "bench.timeout_s", float, "S", "for a whole answer (default: 600)"))
    _set(asking, ("--max-connections", "bench.max_connections", int, "N", "at one time (default: 4096)"))
    _set(asking, ("--cancel-share", "bench.cancel_share", float, "X", "of the clients leave (default: 0)"))
    _set(asking, ("--cancel-after", "bench.cancel_after_s", float, "S", "when they leave (default: 1)"))
    _set(asking, ("--warmup", "bench.warmup", int, "N", "requests that do not count (default: 1)"))
    for option, name, value, about in (
        ("--no-ignore-eos", "ignore_eos", False, "let answers end before they have their length"),
        (
            "--timelines",
            "timelines",
            True,
            "ask a Twinpool server for queue time and KV bytes of each request",
        ),
    ):
        dest = f"{_PATH}bench.{name}"
        asking.add_argument(option, dest=dest, action="store_const", const=value, help=about)
    command.add_argument("--speed", type=float, default=None, help="times the rate of the workload")
    command.add_argument("--ttft", default=None, metavar="TIME", help="limit of a good answer, as in 500ms")
    command.add_argument("--tpot", default=None, metavar="TIME", help="the same, per token after the first")
    command.add_argument("--out", default=None, metavar="DIR", help="for requests.jsonl and summary.json")
    command.add_argument("--json", action="store_true", help="print the summary as JSON")
    command.add_argument(
        "--write-workload", default=None, metavar="FILE", help="write the requests as a trace, and send none"
    )


def add_simulate(command: argparse.ArgumentParser) -> None:
    """Add the options of `simulate`."""
    command.add_argument("workload", nargs="?", help="as for `bench`")
    _add_file(command)
    workers = command.add_argument_group("workers")
    workers.add_argument("--layout", metavar="LAYOUT", help="as in 2P1D, 3C or 1P1D1C (default: 1P1D)")
    workers.add_argument("--profile", metavar="NAME", help="of each worker; or a path to a YAML file")
    workers.add_argument("--decode-profile", metavar="NAME", help="of decode workers, if another one")
    workers.add_argument("--profiles", action="store_true", help="list profiles and links, and exit")
    _set(workers, ("--policy", "simulation.router.policy", str, "NAME", "of the router"))
    _set(workers, ("--max-chunk-tokens", "engine.max_chunk_tokens", int, "N", "of one prompt in a step"))
    _set(workers, ("--max-batch-tokens", "engine.max_batch_tokens", int, "N", "most tokens of one step"))
    _set(workers, ("--max-sequences", "engine.max_sequences", int, "N", "most sequences of one step"))
    way = command.add_argument_group("the way between them")
    _set(way, ("--link", "simulation.transfer.link", str, "NAME", "between workers (ib_ndr_400g)"))
    way.add_argument("--bandwidth", metavar="SIZE", help="of a worker, a second, as in 25GB; else the link's")
    _set(way, ("--overlap", "simulation.transfer.overlap", str, "WHEN", "layers (default), steps or none"))
    command.add_argument("--speed", type=float, default=None, help="times the rate of the workload")
    command.add_argument("--ttft", default=None, metavar="TIME", help="limit of a good answer, as in 500ms")
    command.add_argument("--tpot", default=None, metavar="TIME", help="the same, per token after the first")
    command.add_argument("--out", default=None, metavar="DIR", help="for requests.jsonl and summary.json")
    command.add_argument("--json", action="store_true", help="print the summary as JSON")


def add_calibrate(command: argparse.ArgumentParser) -> None:
    """Add the options of `calibrate`."""
    _add_file(command)
    _add_engine(command)
    what = command.add_argument_group("what is measured")
    what.add_argument("--workers", type=int, default=None, metavar="N", help="at once, at most (1; 0: none)")
    what.add_argument("--repeats", type=int, default=None, metavar="N", help="of each (default: 5)")
    what.add_argument("--prompts", default=None, metavar="N,N", help="tokens of a prompt in one step")
    what.add_argument("--cached", default=None, metavar="N,N", help="tokens before it that are there already")
    what.add_argument("--prompt-batches", default=None, metavar="N,N", help="prompts in one step")
    what.add_argument("--decode-batches", default=None, metavar="N,N", help="sequences that decode")
    what.add_argument("--contexts", default=None, metavar="N,N", help="tokens that each of them attends to")
    what.add_argument("--transports", default=None, metavar="A,B", help="of KV (default: all that work here)")
    what.add_argument("--transfer-tokens", default=None, metavar="N,N", help="tokens of the KV that is moved")
    command.add_argument("--out", default="profile.yaml", metavar="FILE", help="(default: %(default)s)")


def add_recommend(command: argparse.ArgumentParser) -> None:
    """Add the options of `recommend`."""
    command.add_argument("workload", nargs="?", help="as for `bench`, with a count of a few hundred")
    _add_file(command)
    there = command.add_argument_group("what there is")
    there.add_argument(
        "--profile",
        action="append",
        default=[],
        metavar="NAME",
        help="of a worker that pools may be made of, with what each of its GPUs costs and has, "
        "as in NAME:cost=2.5,watts=700,memory=80GB; may be repeated",
    )
    _set(there, ("--gpus", "recommend.gpus", int, "N", "at most"))
    _set(there, ("--budget", "recommend.budget", float, "COST", "at most, in the unit of cost"))
    _set(there, ("--watts", "recommend.watts", float, "W", "at most"))
    there.add_argument("--model", default=None, help="plan the memory of each worker, by its config.json")
    _set(there, ("--link", "recommend.transfer.link", str, "NAME", "between workers (ib_ndr_400g)"))
    there.add_argument(
        "--bandwidth", metavar="SIZE", help="of a worker, a second, as in 25GB; else the link's"
    )
    wanted = command.add_argument_group("what is wanted")
    wanted.add_argument("--ttft", default=None, metavar="TIME", help="limit of an answer, as in 500ms")
    wanted.add_argument("--tpot", default=None, metavar="TIME", help="the same, per token after the first")
    _set(wanted, ("--percentile", "recommend.percentile", float, "P", "of requests within both (90)"))
    _set(wanted, ("--load", "recommend.load_rate", float, "RATE", "requests/s; else as many as can be"))
    _set(wanted, ("--repeats", "recommend.repeats", int, "N", "of the workload, by seed (3)"))
    wanted.add_argument("--no-mixed", action="store_true", help="no layouts of two pools beside colocated")
    wanted.add_argument("--no-what-if", action="store_true", help="do not ask again under other conditions")
    command.add_argument("--json", action="store_true", help="print everything as JSON")


def add_study(command: argparse.ArgumentParser) -> None:
    """Add the options that `sweep` and `compare` share."""
    load = command.add_argument_group("load")
    load.add_argument("--rates", default=None, metavar="A,B", help="requests per second, as in 1,2,4")
    load.add_argument(
        "--search",
        default=None,
        metavar="LEAST:MOST",
        help="instead: find the highest rate between these that enough requests of are within the limits",
    )
    load.add_argument("--share", type=float, default=0.9, help="that is enough (default: %(default)s)")
    load.add_argument(
        "--workload",
        default="synthetic:prompt=lognormal(256),output=lognormal(64)",
        help="as of `bench`; it is sent at each rate (default: %(default)s)",
    )
    load.add_argument("--ttft", required=True, metavar="TIME", help="limit of a good answer, as in 500ms")
    load.add_argument("--tpot", required=True, metavar="TIME", help="the same, per token after the first")
    load.add_argument("--cell", type=float, default=60.0, metavar="S", help="of sending (default: 60)")
    load.add_argument("--repeats", type=int, default=3, metavar="N", help="of each cell (default: 3)")
    load.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of an answer (default: 600)")
    load.add_argument(
        "--late-limit",
        default="25ms",
        metavar="TIME",
        help="a cell does not count if one request in a hundred is sent later (default: 25ms)",
    )
    command.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="SETTING",
        help="that may differ between arms beside roles, with * for any part; may be repeated",
    )
    command.add_argument(
        "--out", default="study", metavar="DIR", help="of the study; what is there is kept (default: study)"
    )
    command.add_argument("--no-report", action="store_true", help="measure only; `report` makes it later")
    command.add_argument("--url", default=None, help="of a running server; else one is started")
    command.add_argument("--api-key", default=None, help="if the server asks for one (TWINPOOL_API_KEY)")
    _add_file(command)
    _add_engine(command)


def add_client(command: argparse.ArgumentParser) -> None:
    """Add the options of commands that talk to a running server."""
    command.add_argument("--url", default=None, help="of the server (TWINPOOL_URL; http://127.0.0.1:8000)")
    command.add_argument("--api-key", default=None, help="if the server asks for one (TWINPOOL_API_KEY)")


def add_sampling(command: argparse.ArgumentParser) -> None:
    """Add the options of commands that generate."""
    command.add_argument("--max-tokens", type=int, default=256, help="of the answer (default: %(default)s)")
    command.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    command.add_argument("--top-p", type=float, default=None)
    command.add_argument("--seed", type=int, default=None)
    command.add_argument(
        "--stop", action="append", default=None, help="end before this text; may be repeated"
    )


def settings(args: argparse.Namespace) -> Mapping[str, Any]:
    """Return the settings that the command line gives, nested by their paths.

    Raises:
        ConfigError: A ``--set`` is none.
    """
    from twinpool.core.config import merge, nested, parse_yaml
    from twinpool.core.errors import ConfigError

    given: dict[str, Any] = {}
    for dest, value in vars(args).items():
        if dest.startswith(_PATH) and value is not None:
            given = merge(given, nested(dest.removeprefix(_PATH), value))
    for item in args.set:
        path, equals, text = item.partition("=")
        if not equals or not path:
            raise ConfigError("--set", f"{item!r} is not PATH=VALUE, as in engine.block_tokens=32")
        value = parse_yaml(f"value: {text}", source=f"--set {path}")["value"]
        given = merge(given, nested(path, value))
    return given


def _add_file(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--config", default=None, metavar="FILE", help="YAML with any of the settings; options go before it"
    )
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="any setting by its path, as in engine.block_tokens=32; may be repeated",
    )


def _add_security(command: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = command.add_argument_group("security")
    group.add_argument(
        "--certs", default=None, metavar="DIR", help="all files below, as `twinpool certs` made them"
    )
    _set(group, ("--secret-file", "security.secret_file", str, "FILE", "shared by router and workers"))
    _set(
        group, ("--tls-cert", "security.tls_cert", str, "FILE", "PEM; for router.twinpool or worker.twinpool")
    )
    _set(group, ("--tls-key", "security.tls_key", str, "FILE", "PEM; its private key"))
    _set(
        group,
        ("--tls-ca", "security.tls_ca", str, "FILE", "PEM; signed the certificates of router and workers"),
    )
    group.add_argument(
        "--insecure",
        dest=_PATH + "security.insecure",
        action="store_const",
        const=True,
        help="listen beyond this machine without secret and certificates",
    )
    return group


def _add_engine(command: argparse.ArgumentParser) -> None:
    model = command.add_argument_group("model and engine")
    _set(model, ("--model", "model", str, "MODEL", "alias, folder, .gguf file or hub id"))
    _set(model, ("--model-name", "model_name", str, "NAME", "what clients call it"))
    _set(model, ("--device", "device", str, "DEVICE", "cpu (default), cuda or cuda:N"))
    _set(model, ("--dtype", "dtype", str, "DTYPE", "auto, float32, bfloat16 or float16"))
    _set(model, ("--kv-memory", "kv_memory", str, "SIZE", "of a worker's KV cache, as in 2GiB"))
    _set(model, ("--threads", "threads", int, "N", "per worker on cpu (default: its share of the cores)"))
    _set(model, ("--block-tokens", "engine.block_tokens", int, "N", "tokens per KV block (default: 16)"))
    _set(model, ("--max-batch-tokens", "engine.max_batch_tokens", int, "N", "most tokens of one step"))
    _set(model, ("--max-chunk-tokens", "engine.max_chunk_tokens", int, "N", "most of one prompt in a step"))
    _set(model, ("--max-sequences", "engine.max_sequences", int, "N", "most sequences of one step"))
    _set(model, ("--scheduler", "engine.policy", str, "NAME", "decode_first (default) or prefill_first"))


Setting = tuple[
    str, str, Callable[[str], object], str, str
]  # option, path of the setting, type, metavar, help


def _set(group: argparse._ArgumentGroup, setting: Setting) -> None:
    option, path, kind, metavar, about = setting
    group.add_argument(option, dest=_PATH + path, type=kind, default=None, metavar=metavar, help=about)
