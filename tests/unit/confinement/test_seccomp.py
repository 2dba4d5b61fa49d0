"""The filter's program, run on made-up system calls by an interpreter of its few instructions."""

import errno
import struct
from pathlib import Path

import pytest

from computeshare.confinement import seccomp

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOWED, KILLED = "allowed", "killed"
SIGCHLD, CLONE_VM, CLONE_THREAD, CLONE_NEWUSER = 17, 0x100, 0x10000, 0x10000000
PROCESS = 4711


def verdict(
    call: str | int,
    *arguments: int,
    machine: str = "x86_64",
    contained: bool = False,
    forks: bool = False,
    arch: int = 0,
) -> str:
    """What the filter says to a call: `allowed`, `killed`, or the error's name."""
    code = seccomp.program(seccomp.rules(PROCESS, contained, forks), machine)
    number = call if isinstance(call, int) else seccomp._ALL[call][list(MACHINES).index(machine)]
    assert number is not None
    data = struct.pack("<IIQ6Q", number, arch or MACHINES[machine], 0, *arguments, *[0] * (6 - len(arguments)))
    value = interpreted([tuple(one) for one in struct.iter_unpack("=HBBI", code)], data)
    if value == 0x7FFF0000:
        return ALLOWED
    return KILLED if value == 0x80000000 else errno.errorcode[value & 0xFFFF]


def interpreted(code: list[tuple[int, ...]], data: bytes) -> int:
    at = held = 0
    while True:
        kind, if_true, if_false, value = code[at]
        at += 1
        match kind:
            case 0x20:
                (held,) = struct.unpack_from("<I", data, value)
            case 0x54:
                held &= value
            case 0x15:
                at += if_true if held == value else if_false
            case 0x35:
                at += if_true if held >= value else if_false
            case 0x06:
                return value
            case _:
                raise AssertionError(kind)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("contained", [True, False])
def test_networks_mounts_the_kernel_and_other_processes_are_refused(machine: str, contained: bool) -> None:
    for call in ("socket", "connect", "mount", "unshare", "bpf", "io_uring_setup", "ptrace", "memfd_create", "shmget"):
        assert verdict(call, machine=machine, contained=contained) == "EPERM"


@pytest.mark.parametrize("machine", MACHINES)
def test_no_process_leaves_its_session(machine: str) -> None:
    assert verdict("setsid", machine=machine, contained=True, forks=True) == "EPERM"


@pytest.mark.parametrize("machine", MACHINES)
def test_a_thread_is_started_and_a_process_only_with_permission(machine: str) -> None:
    assert verdict("clone", CLONE_VM | CLONE_THREAD, machine=machine) == ALLOWED
    assert verdict("clone", SIGCHLD, machine=machine) == "EPERM"
    assert verdict("clone", SIGCHLD, machine=machine, contained=True, forks=True) == ALLOWED
    for forks in (True, False):
        assert verdict("clone", SIGCHLD | CLONE_NEWUSER, machine=machine, contained=True, forks=forks) == "EPERM"
        assert verdict("clone", CLONE_NEWUSER | CLONE_THREAD, machine=machine, contained=True, forks=forks) == "EPERM"
        assert verdict("clone3", machine=machine, contained=True, forks=forks) == "ENOSYS"
    assert verdict("vfork") == verdict("fork") == "EPERM"


def test_arguments_decide_where_a_call_is_needed() -> None:
    assert verdict("socketpair", 1, 1 | 0x80000) == verdict("socketpair", 1, 5) == ALLOWED  # SOCK_CLOEXEC
    assert verdict("socketpair", 1, 2) == verdict("socketpair", 30, 1) == "EPERM"  # datagrams; TIPC
    assert verdict("ioctl", 0, 0x5401) == ALLOWED
    assert verdict("ioctl", 0, 0x5412) == verdict("ioctl", 0, 0x541C) == "EPERM"
    assert verdict("fcntl", 3, 1024, contained=True) == "EPERM" and verdict("fcntl", 3, 2, contained=True) == ALLOWED
    assert verdict("prctl", 15) == ALLOWED and verdict("prctl", 1) == "EPERM"


def test_without_namespaces_signals_limits_and_modes_stay_its_own() -> None:
    assert verdict("kill", PROCESS, 6) == verdict("tgkill", PROCESS, PROCESS + 1, 6) == verdict("kill", 0, 6) == ALLOWED
    for other in (1, 2**32 - 1, PROCESS + 1):  # the second is -1: every process of the user
        assert verdict("kill", other, 9) == verdict("prlimit64", other) == "EPERM"
        assert verdict("kill", other, 9, contained=True) == ALLOWED
    assert verdict("chmod") == verdict("fchmod") == verdict("utimensat") == "EPERM"
    assert verdict("fcntl", 3, 8) == "EPERM" and verdict("fcntl", 3, 1) == ALLOWED


def test_other_architectures_and_newer_calls_do_not_exist() -> None:
    assert verdict(1, arch=0x40000003) == KILLED  # i386's numbers mean other calls
    assert verdict(0x40000000 + 41) == verdict(600) == "ENOSYS"  # x32's socket
    assert verdict(0) == verdict(1) == ALLOWED


def test_the_numbers_are_those_of_the_kernels_headers() -> None:
    headers = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm-generic/unistd.h")
    compared = 0
    for column, path in enumerate(headers):
        lines = path.read_text().splitlines() if path.exists() else []
        known = {words[1]: words[2] for line in lines if len(words := line.split()) > 2 and words[0] == "#define"}
        for call, numbers in seccomp._ALL.items():
            stated = known.get(f"__NR_{call}", known.get(f"__NR3264_{call}", ""))
            if stated.isdigit():
                assert numbers[column] == int(stated), call
                compared += 1
    assert compared > 170 or not all(path.exists() for path in headers)
