"""Seccomp profiles: calls that are faked for a pod of one uid, and calls that RuntimeDefault forbids. Data and two rules.

RuntimeDefault is a list of what is forbidden, after the calls that container runtimes document as blocked by default:
what reaches the kernel itself, other namespaces, or the clock. Calls that a capability of the container is for are
allowed with that capability.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Iterable, List, Optional


# With one uid there is nobody else to become or to give a file to. Programs that try as root (package scripts, daemons
# dropping privileges) are told that it worked: Charliecloud's idea ("--seccomp"), which needs no helper process.
_FAKED = [
    *("chown", "chown32", "fchown", "fchown32", "fchownat", "lchown", "lchown32"),
    *("setgroups", "setgroups32", "setuid", "setuid32", "setgid", "setgid32"),
    *(
        "setreuid",
        "setreuid32",
        "setregid",
        "setregid32",
        "setresuid",
        "setresuid32",
        "setresgid",
        "setresgid32",
    ),
    *("setfsuid", "setfsuid32", "setfsgid", "setfsgid32"),
]
_S_IFCHR, _S_IFBLK, _S_IFMT = 0o020000, 0o060000, 0o170000

_FORBIDDEN = [
    # Keys are the user's, not the container's.
    *("add_key", "keyctl", "request_key"),
    *(
        "create_module",
        "get_kernel_syms",
        "query_module",
        "nfsservctl",
        "sysfs",
        "_sysctl",
        "uselib",
        "ustat",
    ),
    *("swapon", "swapoff", "kexec_load", "kexec_file_load", "vm86", "vm86old", "userfaultfd"),
    *("io_uring_setup", "io_uring_enter", "io_uring_register"),
]
_FORBIDDEN_WITHOUT = {
    "CAP_BPF": ["bpf"],
    "CAP_DAC_READ_SEARCH": ["open_by_handle_at"],
    "CAP_PERFMON": ["perf_event_open"],
    "CAP_SYS_ADMIN": [
        *(
            "mount",
            "umount",
            "umount2",
            "mount_setattr",
            "move_mount",
            "open_tree",
            "fsconfig",
            "fsmount",
            "fsopen",
        ),
        *("fspick", "setns", "unshare", "fanotify_init", "lookup_dcookie", "quotactl", "quotactl_fd"),
        *("setdomainname", "sethostname", "bpf", "perf_event_open", "syslog", "pivot_root"),
    ],
    "CAP_SYS_BOOT": ["reboot"],
    "CAP_SYS_CHROOT": ["chroot"],
    "CAP_SYS_MODULE": ["delete_module", "init_module", "finit_module"],
    "CAP_SYS_NICE": ["get_mempolicy", "mbind", "set_mempolicy", "set_mempolicy_home_node", "move_pages"],
    "CAP_SYS_PACCT": ["acct"],
    "CAP_SYS_PTRACE": ["kcmp", "pidfd_getfd", "process_madvise", "process_vm_readv", "process_vm_writev"],
    "CAP_SYS_RAWIO": ["iopl", "ioperm"],
    "CAP_SYS_TIME": [
        "settimeofday",
        "stime",
        "clock_settime",
        "clock_settime64",
        "clock_adjtime",
        "clock_adjtime64",
    ],
    "CAP_SYSLOG": ["syslog"],
}
_EPERM, _ENOSYS = 1, 38
# New mount, cgroup, UTS, IPC, user, PID and network namespaces.
_CLONE_FLAGS = 0x7E020000


def profile(*, fake: bool, restrict: bool, caps: Iterable[str] = ()) -> Optional[Dict[str, Any]]:
    """linux.seccomp of a bundle; None for a container that is free to call anything."""
    rules = (_faked() if fake else []) + (_forbidden(set(caps)) if restrict else [])
    if not rules:
        return None
    return {"defaultAction": "SCMP_ACT_ALLOW", "architectures": architectures(), "syscalls": rules}


def _faked() -> List[Dict[str, Any]]:
    succeed = {"action": "SCMP_ACT_ERRNO", "errnoRet": 0}
    rules: List[Dict[str, Any]] = [{"names": _FAKED, **succeed}]
    for name, argument in (("mknod", 1), ("mknodat", 2)):
        for kind in (_S_IFCHR, _S_IFBLK):
            test = {"index": argument, "value": _S_IFMT, "valueTwo": kind, "op": "SCMP_CMP_MASKED_EQ"}
            rules.append({"names": [name], "args": [test], **succeed})
    return rules


def _forbidden(caps: Any) -> List[Dict[str, Any]]:
    granted = {name for cap in caps for name in _FORBIDDEN_WITHOUT.get(cap, ())}
    held_back = [name for cap, names in _FORBIDDEN_WITHOUT.items() if cap not in caps for name in names]
    names = _FORBIDDEN + sorted({name for name in held_back if name not in granted})
    rules: List[Dict[str, Any]] = [{"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": _EPERM}]
    if "CAP_SYS_ADMIN" not in caps:
        rules += _no_new_namespaces()
    return rules


def _no_new_namespaces() -> List[Dict[str, Any]]:
    rules: List[Dict[str, Any]] = []
    for bit in range(32):
        flag = 1 << bit
        if flag & _CLONE_FLAGS:
            test = {"index": 0, "value": flag, "valueTwo": flag, "op": "SCMP_CMP_MASKED_EQ"}
            rules.append({"names": ["clone"], "args": [test], "action": "SCMP_ACT_ERRNO", "errnoRet": _EPERM})
    # Its flags lie in memory, where a filter cannot look: C libraries then fall back to clone.
    rules.append({"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": _ENOSYS})
    return rules


def architectures(machine: Optional[str] = None) -> List[str]:
    known = {
        "x86_64": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
        "aarch64": ["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"],
        "ppc64le": ["SCMP_ARCH_PPC64LE"],
    }
    return known.get(machine or os.uname().machine, [])
