"""The filter: run by the kernel for what a program sees, and by a small BPF machine here for the other architecture."""

from __future__ import annotations

import ctypes
import errno
import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest

from slurmlet.podnet.fast import seccomp_filter

from .substituted import World, compiled, needs_notifications, world

__all__ = ["compiled", "world"]
ALLOW, NOTIFY, ERRNO = 0x7FFF0000, 0x7FC00000, 0x00050000


def verdict(
    known: seccomp_filter.Machine,
    number: int,
    *arguments: int,
    arch: int | None = None,
    make: Callable[[seccomp_filter.Machine], bytes] = seccomp_filter.program,
) -> int:
    """What the program returns for one call."""
    audit = known.audit_arch if arch is None else arch
    data = struct.pack("=iIQ6Q", number, audit, 0, *(*arguments, *[0] * (6 - len(arguments))))
    instructions = list(struct.iter_unpack("=HBBI", make(known)))
    at = value = 0
    while True:
        code, yes, no, operand = instructions[at]
        if code == 0x06:
            return operand
        if code == 0x20:
            value = struct.unpack_from("=I", data, operand)[0]
        elif code == 0x54:
            value &= operand
        else:
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
            at += yes if holds else no
        at += 1


@pytest.fixture(params=["x86_64", "aarch64"])
def known(request: pytest.FixtureRequest) -> seccomp_filter.Machine:
    return seccomp_filter.machine(request.param)


class TestProgram:
    @pytest.mark.parametrize(
        "name", ["bind", "listen", "connect", "accept", "accept4", "getsockname", "getpeername"]
    )
    def test_asks_about_every_call_that_names_a_socket(
        self, known: seccomp_filter.Machine, name: str
    ) -> None:
        assert verdict(known, known.numbers[name], 3) == NOTIFY

    @pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
    @pytest.mark.parametrize("flags", [0, socket.SOCK_NONBLOCK, socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC])
    @pytest.mark.parametrize("protocol", [0, socket.IPPROTO_TCP])
    def test_asks_about_tcp_sockets(
        self, known: seccomp_filter.Machine, family: int, flags: int, protocol: int
    ) -> None:
        assert verdict(known, known.numbers["socket"], family, socket.SOCK_STREAM | flags, protocol) == NOTIFY

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            ((socket.AF_INET, socket.SOCK_DGRAM, 0), ALLOW),
            ((socket.AF_INET, socket.SOCK_RAW, 1), ALLOW),
            ((socket.AF_UNIX, socket.SOCK_STREAM, 0), ALLOW),
            ((socket.AF_NETLINK, socket.SOCK_RAW, 0), ALLOW),
            ((socket.AF_INET, socket.SOCK_STREAM, 132), ALLOW),
            ((socket.AF_INET, socket.SOCK_STREAM, 262), ERRNO | errno.EPROTONOSUPPORT),
        ],
    )
    def test_leaves_other_sockets_alone(
        self, known: seccomp_filter.Machine, arguments: Any, expected: int
    ) -> None:
        assert verdict(known, known.numbers["socket"], *arguments) == expected

    @pytest.mark.parametrize(("name", "flags_at"), [("sendto", 3), ("sendmsg", 2), ("sendmmsg", 3)])
    def test_sending_is_free_but_may_not_connect(
        self, known: seccomp_filter.Machine, name: str, flags_at: int
    ) -> None:
        arguments = [5] * 6
        arguments[flags_at] = socket.MSG_NOSIGNAL
        assert verdict(known, known.numbers[name], *arguments) == ALLOW
        arguments[flags_at] |= 0x20000000
        assert verdict(known, known.numbers[name], *arguments) == ERRNO | errno.EOPNOTSUPP

    def test_options_are_free_but_fast_open(self, known: seccomp_filter.Machine) -> None:
        number = known.numbers["setsockopt"]
        assert verdict(known, number, 3, socket.IPPROTO_TCP, socket.TCP_NODELAY) == ALLOW
        assert verdict(known, number, 3, socket.SOL_SOCKET, 30) == ALLOW
        assert verdict(known, number, 3, socket.IPPROTO_TCP, 30) == ERRNO | errno.ENOPROTOOPT

    def test_io_uring_does_not_exist(self, known: seccomp_filter.Machine) -> None:
        assert verdict(known, known.numbers["io_uring_setup"]) == ERRNO | errno.ENOSYS

    def test_other_calls_pass(self, known: seccomp_filter.Machine) -> None:
        assert verdict(known, 0) == ALLOW
        assert verdict(known, 3, arch=known.compat.audit_arch) == ALLOW
        # The numbers of one machine mean nothing on another.
        assert verdict(known, known.numbers["connect"], arch=known.compat.audit_arch) == ALLOW

    @pytest.mark.parametrize("name", ["bind", "listen", "connect", "accept4"])
    def test_asks_about_32_bit_calls_that_name_a_socket(
        self, known: seccomp_filter.Machine, name: str
    ) -> None:
        assert verdict(known, known.compat.numbers[name], 3, arch=known.compat.audit_arch) == NOTIFY

    @pytest.mark.parametrize(("name", "flags_at"), [("sendto", 3), ("sendmsg", 2), ("sendmmsg", 3)])
    def test_32_bit_programs_may_send_but_not_connect_by_it(
        self, known: seccomp_filter.Machine, name: str, flags_at: int
    ) -> None:
        arch, number = known.compat.audit_arch, known.compat.numbers[name]
        arguments = [5] * 6
        arguments[flags_at] = socket.MSG_NOSIGNAL
        assert verdict(known, number, *arguments, arch=arch) == ALLOW
        arguments[flags_at] |= 0x20000000
        assert verdict(known, number, *arguments, arch=arch) == ERRNO | errno.EOPNOTSUPP

    def test_32_bit_options_and_rings(self, known: seccomp_filter.Machine) -> None:
        arch, numbers = known.compat.audit_arch, known.compat.numbers
        option = numbers["setsockopt"]
        assert verdict(known, option, 3, socket.IPPROTO_TCP, 30, arch=arch) == ERRNO | errno.ENOPROTOOPT
        assert verdict(known, option, 3, socket.IPPROTO_TCP, socket.TCP_NODELAY, arch=arch) == ALLOW
        assert verdict(known, numbers["io_uring_setup"], arch=arch) == ERRNO | errno.ENOSYS

    def test_asks_about_socketcall_but_for_the_data_path(self) -> None:
        known = seccomp_filter.machine("x86_64")
        verdicts = {number: verdict(known, 102, number, arch=0x40000003) for number in range(21)}
        asked = {number for number, found in verdicts.items() if found == NOTIFY}
        # bind, connect, listen, accept, sendto, setsockopt, sendmsg, accept4, sendmmsg
        assert asked == {2, 3, 4, 5, 11, 14, 16, 18, 20}
        assert {found for number, found in verdicts.items() if number not in asked} == {ALLOW}

    @pytest.mark.parametrize("number", [41, 42, 44, 49, 50, 288, 425, 518, 538, 541])
    def test_x32_programs_have_no_sockets(self, number: int) -> None:
        known = seccomp_filter.machine("x86_64")
        assert verdict(known, number | 0x40000000) == ERRNO | errno.ENOSYS
        assert verdict(known, 0x40000000) == ALLOW

    def test_a_machine_that_nobody_has_written_down_has_no_calls(self, known: seccomp_filter.Machine) -> None:
        assert verdict(known, known.numbers["connect"], arch=0x80000016) == ERRNO | errno.ENOSYS

    def test_on_the_hosts_network_only_what_names_the_other_end(self, known: seccomp_filter.Machine) -> None:
        asked = {
            name
            for name, number in known.numbers.items()
            if verdict(known, number, make=seccomp_filter.program_from_host) == NOTIFY
        }
        assert asked == {"connect", "getpeername"}
        others = {
            verdict(known, number, make=seccomp_filter.program_from_host)
            for name, number in known.numbers.items()
            if name not in asked
        }
        assert others == {ALLOW}
        connect = known.numbers["connect"]
        assert verdict(known, connect, arch=0x40000003, make=seccomp_filter.program_from_host) == ALLOW

    def test_no_call_has_two_meanings(self, known: seccomp_filter.Machine) -> None:
        for numbers in (known.numbers, known.compat.numbers):
            assert len(set(numbers.values())) == len(numbers)


def test_an_unknown_machine_says_so() -> None:
    with pytest.raises(OSError, match="vax"):
        seccomp_filter.machine("vax")


@needs_notifications
class TestKernel:
    def test_refuses_what_would_go_around_it(self, world: World) -> None:
        def program() -> Any:
            libc = ctypes.CDLL(None, use_errno=True)
            codes = []
            with socket.socket() as sock:
                for act in (
                    lambda: sock.sendto(b"x", 0x20000000, ("127.0.0.1", 80)),
                    lambda: sock.setsockopt(socket.IPPROTO_TCP, 30, 1),
                    lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262),
                ):
                    try:
                        act()
                    except OSError as error:
                        codes.append(error.errno)
            assert libc.syscall(425, 8, None) == -1
            return [*codes, ctypes.get_errno()]

        expected = [errno.EOPNOTSUPP, errno.ENOPROTOOPT, errno.EPROTONOSUPPORT, errno.ENOSYS]
        assert world.one.run(program) == expected
