"""A worker whose engine hangs, as a GPU can, while the process speaks on: nobody waits for it for ever."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.chaos.callers import Ask, Caller
from tests.cluster.servers import free_port, serving
from tests.patience import until

HANGS = """
import sys, time
from twinpool.engine.runner import TorchRunner
TorchRunner.run = lambda *_: time.sleep(3600)
from twinpool.cli import main
sys.exit(main())
"""
WORKS = "import sys; from twinpool.cli import main; sys.exit(main())"
ASK = Ask(prompt="is anybody there?", max_tokens=8)


@contextmanager
def worker(program: str, name: str, model: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """Run a colocated worker that gives itself up after two seconds without a step."""
    place = ("--role", "colocated", "--worker-id", name, "--join", f"127.0.0.1:{port}")
    options = ("--threads", "1", "--kv-memory", "8MiB", "--set", "hung_s=2")
    process = subprocess.Popen(
        [sys.executable, "-c", program, "worker", "--model", str(model), *place, *options],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_requests_on_an_engine_that_hangs_go_elsewhere_and_its_process_ends(slow_model: Path) -> None:
    with ExitStack() as stack:
        port = free_port()
        hung = stack.enter_context(worker(HANGS, "hung", slow_model, port))
        options = ("--without-ray", "--colocated", "1", "--join-port", str(port))
        server = stack.enter_context(serving(slow_model, *options, "--set", "router.stalled_after_s=0.5"))
        caller = Caller(server.client)
        call = caller.call(ASK)
        assert until(lambda: caller.workers()["hung"]["state"] == "stalled", within_s=10.0)
        assert not caller.is_ready()

        stack.enter_context(worker(WORKS, "works", slow_model, port))

        assert hung.wait(20.0) == 1
        assert hung.stderr is not None
        assert "hung: the engine has work and has taken no step for " in hung.stderr.read()
        call.join()
        caller.learn([ASK])
        assert caller.is_right(call), call.describe()
        assert "hung" not in caller.workers()
