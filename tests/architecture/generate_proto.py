"""Generate twinpool/pb from proto/: `make proto` runs it, and a test compares what it would write.

Knows where both folders are and nothing of what the messages mean.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PROTO = REPOSITORY / "proto"
GENERATED = REPOSITORY / "twinpool" / "pb"


def generate_proto(root: Path) -> None:
    """Write the generated modules into ``root/twinpool/pb``, and only those that hold something.

    The mapping ``twinpool/pb=proto`` gives the modules absolute imports that fit their place.  A proto
    without a service gets no ``_grpc`` module: protoc would write one with nothing in it.  It runs in a
    process of its own: one that has loaded its library is aborted when it loads NIXL.

    Raises:
        subprocess.CalledProcessError: protoc objects to a proto.
    """
    sources = sorted(PROTO.glob("*.proto"))
    arguments = [
        f"-Itwinpool/pb={PROTO}",
        f"--python_out={root}",
        f"--pyi_out={root}",
        f"--grpc_python_out={root}",
        *(f"twinpool/pb/{source.name}" for source in sources),
    ]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments], check=True, timeout=60)
    for source in sources:
        if "\nservice " not in source.read_text(encoding="utf-8"):
            (root / "twinpool" / "pb" / f"{source.stem}_pb2_grpc.py").unlink()


if __name__ == "__main__":
    for stale in GENERATED.glob("*_pb2*"):
        stale.unlink()
    generate_proto(REPOSITORY)
