"""`kv-bench` from one network namespace to another: a cable between them, and what can befall it.

    python -m benchmarks.namespaces [--write]

Needs Linux with unshare, nsenter, ip and tc, and the right to make namespaces (root, or user namespaces).
The bandwidth is the kernel's (tbf), a partition swallows every packet (blackhole), and packets are lost by
nftables or iptables.  Delay comes from the shaper of kv-bench, since many kernels have no netem.

The first namespace is this process's own and the second one that of a child that waits for the end of its
standard input: whoever is killed, cable, namespaces and peers are gone with it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.document import provenance, table, write_section

TRANSPORTS = ("tcp", "grpc")
_TOOLS = ("unshare", "nsenter", "ip", "tc")
_INSIDE = "TWINPOOL_BENCHMARK_NAMESPACE"
_NEAR, _FAR = "10.77.0.1", "10.77.0.2"
_START_S, _RUN_S = 120.0, 600.0
_MBIT = 1e6 / 8  # bytes per second


class Missing(SystemExit):
    """This machine cannot do it; the message says why."""


@dataclass(frozen=True, slots=True)
class Network:
    """Two namespaces and the cable: `near` is in this one, `far` in that of ``holder``."""

    holder: int  # a process

    def far(self, *command: str) -> list[str]:
        """Return a command that runs in the other namespace."""
        return ["nsenter", "-t", str(self.holder), "-n", *command]

    def limit(self, megabits: int) -> None:
        """Let the cable carry so much in each direction."""
        shape = ["root", "tbf", "rate", f"{megabits}mbit", "burst", "256kb", "latency", "100ms"]
        _run(["tc", "qdisc", "replace", "dev", "near", *shape])
        _run(self.far("tc", "qdisc", "replace", "dev", "far", *shape))

    def free(self) -> None:
        """Let it carry what it can."""
        _run(["tc", "qdisc", "del", "dev", "near", "root"], may_fail=True)
        _run(self.far("tc", "qdisc", "del", "dev", "far", "root"), may_fail=True)

    def cut(self) -> None:
        """Let nothing through, and tell nobody."""
        _run(["tc", "qdisc", "replace", "dev", "near", "root", "blackhole"])
        _run(self.far("tc", "qdisc", "replace", "dev", "far", "root", "blackhole"))

    def lose(self, share: float) -> str:
        """Lose a share of the packets that arrive at the far end; return why that cannot be, or nothing."""
        if shutil.which("nft"):
            rule = (
                "add table ip lossy; add chain ip lossy in { type filter hook input priority 0; }; "
                f"add rule ip lossy in iifname far numgen random mod 100000 < {round(share * 1e5)} drop"
            )
            _run(self.far("nft", rule))
        elif shutil.which("iptables"):
            rule = f"-A INPUT -i far -m statistic --mode random --probability {share} -j DROP"
            _run(self.far("iptables", *rule.split()))
        else:
            return "neither nft nor iptables is here"
        return ""

    def sent_bytes(self) -> int:
        """Return what has left the near end so far."""
        counts = re.search(r"near:\s*(.*)", Path("/proc/self/net/dev").read_text())
        assert counts is not None, "the cable is there"
        return int(counts[1].split()[8])


@contextmanager
def network() -> Iterator[Network]:
    """Make the second namespace and the cable.

    Raises:
        Missing: The kernel does not let us.
    """
    holder = subprocess.Popen(["unshare", "-n", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        _wait_for_namespace(holder.pid)
        made = Network(holder.pid)
        _run(["ip", "link", "add", "near", "type", "veth", "peer", "name", "far"])
        _run(["ip", "link", "set", "far", "netns", str(holder.pid)])
        _run(["ip", "addr", "add", f"{_NEAR}/24", "dev", "near"])
        _run(made.far("ip", "addr", "add", f"{_FAR}/24", "dev", "far"))
        for device in ("lo", "near"):
            _run(["ip", "link", "set", device, "up"])
        for device in ("lo", "far"):
            _run(made.far("ip", "link", "set", device, "up"))
        made.limit(1000)
        made.cut()
        made.free()
        yield made
    finally:
        holder.kill()
        holder.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one run of `kv-bench` told, and what became of it."""

    rows: Sequence[dict[str, Any]]
    seconds: float


def kv_bench(net: Network, *options: str, partition_s: float = 0.0) -> Found:
    """Run both peers, each in its namespace; cut the cable for a while in the first transfer."""
    command = [sys.executable, "-m", "twinpool", "kv-bench"]
    peers = []
    try:
        listening = subprocess.Popen(
            net.far(*command, "--listen", _FAR, "--insecure", "--wait", f"{_START_S:g}"),
            stdout=subprocess.PIPE,
            text=True,
        )
        peers.append(listening)
        assert listening.stdout is not None
        address = listening.stdout.readline().rpartition(" ")[2].strip()
        started_s, sent_bytes = time.monotonic(), net.sent_bytes()
        measuring = subprocess.Popen(
            [*command, "--connect", address, "--json", "-", *options], stdout=subprocess.PIPE, text=True
        )
        peers.append(measuring)
        if partition_s:
            while net.sent_bytes() < sent_bytes + 4 * 2**20 and measuring.poll() is None:
                time.sleep(0.01)
            net.cut()
            time.sleep(partition_s)
            net.limit(100)
        report, _ = measuring.communicate(timeout=_RUN_S)
        return Found(rows=json.loads(report)["transports"], seconds=time.monotonic() - started_s)
    finally:
        for peer in peers:
            peer.kill()
            peer.wait()


def measure(net: Network) -> str:
    """Return what was found, as Markdown."""
    rows, notes = [], []

    def add(link: str, limit_bytes_s: float, *options: str) -> None:
        found = kv_bench(net, "--transports", ",".join(TRANSPORTS), *options)
        for row in found.rows:
            rate = row["gb_s"] * 1e9
            share = f"{rate / limit_bytes_s:.0%}" if limit_bytes_s else "-"
            rows.append(
                [link, row["transport"], f"{rate / 1e6:.1f}", share, f"{row['last_block_s'] * 1e3:.1f}"]
            )
            print(*rows[-1], sep="  ", flush=True)

    add("cable", 0.0)
    net.limit(1000)
    add("1 Gbit/s", 1000 * _MBIT, "--repeat", "3")
    add("1 Gbit/s, 5 ms by the shaper", 1000 * _MBIT, "--repeat", "3", "--latency", "5ms")
    net.limit(100)
    add("100 Mbit/s", 100 * _MBIT, "--bytes", "8MiB", "--repeat", "3")
    for transport in TRANSPORTS:
        notes += _partitions(net, transport)
    net.limit(1000)
    why_not = net.lose(0.001)
    if why_not:
        notes.append(f"Loss was not measured: {why_not}.")
    else:
        add("1 Gbit/s, 0.1 % lost", 1000 * _MBIT, "--repeat", "3")
    head = ["link", "transport", "MB/s", "of the link", "64 or 8 MiB, ms"]
    return table(head, rows) + "\n\n" + "\n".join(f"- {note}" for note in notes)


def _partitions(net: Network, transport: str) -> list[str]:
    options = ("--transports", transport, "--bytes", "16MiB", "--repeat", "1")
    (short,) = kv_bench(net, *options, partition_s=1.0).rows
    (long,) = kv_bench(net, *options, "--timeout", "3", partition_s=8.0).rows
    (after,) = kv_bench(net, *options).rows
    return [
        f"{transport}, cut for 1 s in the middle of a transfer: {_end_of(short)}.",
        f"{transport}, cut for 8 s where a transfer may take 3 s: {_end_of(long)}. "
        f"Afterwards: {_end_of(after)}.",
    ]


def _end_of(row: dict[str, Any]) -> str:
    return row["failed"] or "it goes on, and all bytes are right"


def _wait_for_namespace(pid: int) -> None:
    own = Path("/proc/self/ns/net").readlink()
    end_s = time.monotonic() + 10.0
    while Path(f"/proc/{pid}/ns/net").readlink() == own:
        if time.monotonic() > end_s:
            raise Missing("a second network namespace does not come up")
        time.sleep(0.01)


def _run(command: Sequence[str], *, may_fail: bool = False) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode and not may_fail:
        raise Missing(f"`{' '.join(command)}` fails: {done.stderr.strip() or done.stdout.strip()}")


def _enter() -> None:
    """Go on in a network namespace of our own, with the rights of root in it.

    Raises:
        Missing: That is not possible here.
    """
    if sys.platform != "linux":
        raise Missing("network namespaces are Linux's")
    absent = [tool for tool in _TOOLS if not shutil.which(tool)]
    if absent:
        raise Missing(f"not installed: {', '.join(absent)} (packages util-linux and iproute2)")
    _run(["unshare", "-rn", "true"])
    os.environ[_INSIDE] = "1"
    os.execvp("unshare", ["unshare", "-rn", sys.executable, "-m", "benchmarks.namespaces", *sys.argv[1:]])


def main() -> None:
    """Print what was found, and keep it in the document if that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    args = parser.parse_args()
    if _INSIDE not in os.environ:
        _enter()
    try:
        with network() as net:
            text = f"{measure(net)}\n\n{provenance('benchmarks.namespaces')}"
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    print(text)
    if args.write:
        write_section("namespaces", text)


if __name__ == "__main__":
    main()
