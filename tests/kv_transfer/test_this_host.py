"""Who counts as a peer on this host."""

from __future__ import annotations

import os
import socket

import pytest

from kv_transfer.this_host import bound, host_id, is_own_user
from twinpool.core.errors import ConfigError


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


def test_a_name_is_kept_over_lives_on_this_host_and_taken_once() -> None:
    first, name = bound("", "here")
    with first:
        with pytest.raises(ConfigError, match="cannot be bound"):
            bound(f"here/{name}", "here")
        elsewhere, other = bound(f"there/{name}", "here")
        with elsewhere:
            assert other != name

    for address in (f"here/{name}", f"here/{name}/gpu-0"):
        again, same = bound(address, "here")
        with again:
            assert same == name
            assert again.getsockname() == b"\0" + name.encode()
