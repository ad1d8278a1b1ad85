"""Who counts as a peer on this host."""

from __future__ import annotations

import os
import socket

import pytest

from kv_transfer.this_host import host_id, is_own_user


def test_root_is_no_peer_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = socket.socketpair()
    with here, there:
        assert is_own_user(here)
        assert is_own_user(there)
        monkeypatch.setattr("os.geteuid", lambda: 12345)  # the other end is whoever runs this, often root
        assert not is_own_user(here)


def test_a_host_is_named_by_its_boot_and_by_what_must_be_shared() -> None:
    spaces = {name: str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in ("net", "pid")}  # noqa: PTH116

    boot, net = host_id("net").split(".")

    assert (len(boot), net) == (32, spaces["net"])
    assert host_id("net", "pid") == f"{boot}.{spaces['net']}.{spaces['pid']}"
