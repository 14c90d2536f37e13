from __future__ import annotations

import socket
from pathlib import Path

import pytest

from slurmlet.base.errors import SiteError, UserError
from slurmlet.base.host_addresses import advertised_address, free_port, host_addresses

FIB_TRIE = """Local:
  +-- 0.0.0.0/0 3 0 5
     +-- 127.0.0.0/8 2 0 2
        +-- 127.0.0.0/31 1 0 0
           |-- 127.0.0.0
              /8 host LOCAL
           |-- 127.0.0.1
              /32 host LOCAL
        |-- 127.255.255.255
           /32 link BROADCAST
     +-- 192.0.2.0/24 2 0 2
        |-- 192.0.2.0
           /24 link UNICAST
        |-- 192.0.2.9
           /32 host LOCAL
        |-- 192.0.2.255
           /32 link BROADCAST
     |-- 198.51.100.4
        /32 host LOCAL
"""
IF_INET6 = """20010db8000000000000000000000005 02 40 00 80     eth0
fe800000000000000000000000000001 02 40 20 80     eth0
00000000000000000000000000000001 01 80 10 80       lo
"""


def test_addresses_are_those_another_host_could_dial(tmp_path: Path) -> None:
    (tmp_path / "fib_trie").write_text("Main:\n" + FIB_TRIE + FIB_TRIE)
    (tmp_path / "if_inet6").write_text(IF_INET6)
    assert host_addresses(tmp_path) == ["192.0.2.9", "198.51.100.4", "2001:db8::5"]


def test_a_host_without_ipv6_is_fine(tmp_path: Path) -> None:
    (tmp_path / "fib_trie").write_text(FIB_TRIE)
    assert host_addresses(tmp_path) == ["192.0.2.9", "198.51.100.4"]


def test_advertised_is_the_wanted_address_or_a_sensible_one() -> None:
    mine = ["192.0.2.9", "198.51.100.4", "2001:db8::5"]
    assert advertised_address(mine, "198.51.100.4") == "198.51.100.4"
    assert advertised_address(mine) == "192.0.2.9"
    with pytest.raises(UserError, match="not an address of this host"):
        advertised_address(mine, "203.0.113.1")
    with pytest.raises(SiteError):
        advertised_address(["2001:db8::5"])


def test_preferred_port_is_taken_only_when_free() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        held = holder.getsockname()[1]
        assert free_port("127.0.0.1", held) != held
        assert free_port("0.0.0.0", held) != held
    assert free_port("127.0.0.1", held) == held
