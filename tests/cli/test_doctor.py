"""The doctor's verdicts follow from what was found."""

from __future__ import annotations

from typing import Any

import pytest

from twinpool.cli.doctor import judge

GPU = {"name": "H200", "free_bytes": 1, "total_bytes": 2}
NCCL: dict[str, Any] = {
    "version": "2.28.9",
    "files": ["/nccl/libnccl.so.2 (loaded)"],
    "packages": {"nvidia-nccl-cu13": "2.28.9"},
    "complaints": [],
}
CPU_ONLY: dict[str, Any] = {
    "packages": {"torch": "2", "ray": "2"},
    "torch": {"version": "2", "built for CUDA": None, "gpus": []},
    "nccl": {"version": None, "files": [], "packages": {}, "complaints": []},
    "driver": None,
    "compilers": {"cc": "/usr/bin/cc", "gcc": None, "clang": None},
    "port": {"number": 8000, "is_free": True},
}


@pytest.mark.parametrize(
    ("changes", "topic", "is_good", "why"),
    [
        ({}, "serve on cpu", True, "all packages load"),
        ({}, "serve on gpu", False, "built without CUDA"),
        ({"driver": "580"}, "serve on gpu", False, "built without CUDA although there is a driver"),
        ({"packages": {"ray": None}}, "serve on cpu", False, "missing: ray"),
        ({"torch": {"error": "torch does not load"}}, "serve on cpu", False, "torch does not load"),
        ({"torch": {"error": "torch does not load"}}, "serve on gpu", False, "torch does not load"),
        ({"torch": {"gpus": [GPU]}}, "serve on gpu", True, "1 x H200"),
        ({"torch": {"gpus": [GPU]}}, "two pools on gpus", False, "num_gpus: 0.5"),
        ({"torch": {"gpus": [GPU, GPU]}}, "two pools on gpus", True, "2 GPUs"),
        ({"torch": {"built for CUDA": "13"}}, "serve on gpu", False, "no NVIDIA driver"),
        ({}, "nccl", False, "not found"),
        ({"nccl": NCCL}, "nccl", True, "2.28.9, /nccl/libnccl.so.2 (loaded)"),
        (
            {"nccl": NCCL | {"complaints": ["torch was built with 2.27.3"]}},
            "nccl",
            False,
            "2.28.9, /nccl/libnccl.so.2 (loaded); torch was built with 2.27.3",
        ),
        ({"nccl": NCCL | {"version": None}}, "nccl", False, "not usable, /nccl/libnccl.so.2"),
        ({"port": {"number": 80, "is_free": False}}, "port", False, "80 is taken"),
        (
            {"compilers": {"cc": None, "gcc": "/bin/gcc", "clang": None}},
            "compile kernels",
            True,
            "is here",
        ),
        ({"compilers": {"cc": None, "gcc": None, "clang": None}}, "compile kernels", False, "no C compiler"),
    ],
)
def test_a_verdict_follows_from_what_was_found(
    changes: dict[str, Any], topic: str, is_good: bool, why: str
) -> None:
    verdict = judge(CPU_ONLY | changes)[topic]

    assert verdict[0] is is_good
    assert why in verdict[1]
