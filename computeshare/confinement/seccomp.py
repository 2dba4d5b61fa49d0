"""The filter of system calls: refuses what neither Landlock nor bubblewrap does. Linux on x86_64 and aarch64.

It lists what is refused: torch needs most of the rest, and the other means decide which files can be opened. System
calls newer than this list do not exist for the process.
"""

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_* of <linux/audit.h>
_NEWEST = 470
"""System calls from this number on, and those of x32, do not exist."""

# Numbers on x86_64 and aarch64, from <asm/unistd.h>; None: the architecture has no such call.
_Numbers = dict[str, tuple[int | None, int | None]]
_NETWORK: _Numbers = {"socket": (41, 198), "connect": (42, 203), "bind": (49, 200)}
_MOUNTS: _Numbers = {
    **{"unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41)},
    **{"chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430)},
    **{"fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442)},
    **{"open_tree_attr": (467, 467)},
}
_KERNEL: _Numbers = {
    **{"init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104)},
    **{"kexec_file_load": (320, 294), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282)},
    **{"io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427)},
    **{"keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "quotactl": (179, 60)},
    **{"acct": (163, 89), "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "syslog": (103, 116)},
    **{"open_by_handle_at": (304, 265), "fanotify_init": (300, 262), "inotify_add_watch": (254, 27)},
}
_OTHER_PROCESSES: _Numbers = {
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272)},
    **{"process_madvise": (440, 440), "process_mrelease": (448, 448), "pidfd_getfd": (438, 438)},
}
_UNCOUNTED_MEMORY: _Numbers = {  # counts for no process, so the limits do not see it
    **{"memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196)},
    **{"semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180)},
}
_SESSIONS: _Numbers = {"setsid": (112, 157)}
"""A new session would get its own share of the CPU, whatever the priority of the one before (autogroups)."""
_NEVER: _Numbers = {**_NETWORK, **_MOUNTS, **_KERNEL, **_OTHER_PROCESSES, **_UNCOUNTED_MEMORY, **_SESSIONS}
_ATTRIBUTES: _Numbers = {  # a file's owner may change these whatever Landlock says
    **{"chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None)},
    **{"lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6)},
    **{"fsetxattr": (190, 7), "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15)},
    **{"fremovexattr": (199, 16), "removexattrat": (466, 466), "file_setattr": (469, 469), "utime": (132, None)},
    **{"utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88)},
}
_TO_OTHERS: _Numbers = {
    **{"tkill": (200, 130), "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "setpriority": (141, 140)},
    **{"pidfd_send_signal": (424, 424), "ioprio_set": (251, 30), "rt_sigqueueinfo": (129, 138)},
}
_TO_A_PROCESS: _Numbers = {  # their first argument is a process; 0 is the caller
    **{"kill": (62, 129), "tgkill": (234, 131), "prlimit64": (302, 261), "migrate_pages": (256, 238)},
    **{"move_pages": (279, 239), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274)},
    **{"sched_setparam": (142, 118), "sched_setaffinity": (203, 122)},
}
_WITH_ARGUMENTS: _Numbers = {
    **{"clone": (56, 220), "clone3": (435, 435), "fork": (57, None), "vfork": (58, None), "socketpair": (53, 199)},
    **{"fcntl": (72, 25), "ioctl": (16, 29), "prctl": (157, 167)},
}
_ALL: _Numbers = {**_NEVER, **_ATTRIBUTES, **_TO_OTHERS, **_TO_A_PROCESS, **_WITH_ARGUMENTS}

_CLONE_THREAD = 0x10000
_CLONE_NEW = 0x7E020000  # CLONE_NEWNS, CLONE_NEWCGROUP and so on
_F_SETOWN, _F_SETOWN_EX, _F_SETLEASE, _F_NOTIFY = 8, 15, 1024, 1026
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C  # both type into a terminal
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class SyscallRule:
    """Refuses a system call with `error`, whatever its arguments or by the bits `mask` of one of them."""

    call: str
    error: int = errno.EPERM
    argument: int | None = None
    mask: int = 0xFFFFFFFF
    but: tuple[int, ...] | None = None
    """Values of the argument that are allowed; all others are refused."""
    only: tuple[int, ...] = ()
    """Without `but`: values that are refused."""


def rules(process: int, contained: bool, forks: bool) -> Iterator[SyscallRule]:
    """The rules for a process.

    Args:
        process: its id.
        contained: whether it has namespaces of its own, and so sees neither other processes nor a foreign file that it
            could write to.
        forks: whether it may start others.
    """
    yield from map(SyscallRule, _NEVER)
    yield SyscallRule("socketpair", argument=0, but=(1,))  # AF_UNIX
    yield SyscallRule("socketpair", argument=1, mask=0xF, but=(1, 5))  # a datagram socket could send to any other
    yield SyscallRule("ioctl", argument=1, only=(_TIOCSTI, _TIOCLINUX))
    yield SyscallRule("prctl", argument=0, only=(_PR_SET_PDEATHSIG,))
    yield SyscallRule("fcntl", argument=1, only=(_F_SETLEASE, _F_NOTIFY))  # the first holds up whoever writes to a file
    yield SyscallRule("clone3", errno.ENOSYS)  # its flags lie in memory; the C library uses clone instead
    if forks:
        yield SyscallRule("clone", argument=0, mask=_CLONE_NEW, but=(0,))
    else:
        yield SyscallRule("clone", argument=0, mask=_CLONE_NEW | _CLONE_THREAD, but=(_CLONE_THREAD,))
        yield from (SyscallRule("fork"), SyscallRule("vfork"))
    if not contained:
        yield from map(SyscallRule, (*_ATTRIBUTES, *_TO_OTHERS))
        yield from (SyscallRule(call, argument=0, but=(0, process)) for call in _TO_A_PROCESS)
        yield SyscallRule("fcntl", argument=1, only=(_F_SETOWN, _F_SETOWN_EX))  # they have signals sent to others


_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06  # of <linux/bpf_common.h>
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000  # SECCOMP_RET_*
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # in struct seccomp_data

_Instruction = tuple[int, int, int, int]


def program(chosen: Iterator[SyscallRule], machine: str) -> bytes:
    """The rules as instructions of classic BPF, for the machine `x86_64` or `aarch64`."""
    code: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, 0, 1, _NEWEST),
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),
    ]
    column = list(_ARCHITECTURES).index(machine)
    for rule in chosen:
        number = _ALL[rule.call][column]
        if number is not None:
            body = _body(rule)
            code += [(_EQUAL, 0, len(body), number), *body]
    return b"".join(struct.pack("=HBBI", *one) for one in [*code, (_RETURN, 0, 0, _ALLOW)])


def _body(rule: SyscallRule) -> list[_Instruction]:
    """Instructions for a call whose number matches the rule: refuse it, or test its argument and reload the number."""
    refuse: _Instruction = (_RETURN, 0, 0, _ERROR | rule.error)
    if rule.argument is None:
        return [refuse]
    # the arguments used here have 32 bits, of which a little-endian machine keeps the lower half first
    code: list[_Instruction] = [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * rule.argument), (_AND, 0, 0, rule.mask)]
    values = rule.only if rule.but is None else rule.but
    after = len(values) - 1
    if rule.but is None:
        code += [(_EQUAL, after - at, 1 if at == after else 0, value) for at, value in enumerate(values)]
    else:
        code += [(_EQUAL, after - at + 1, 0, value) for at, value in enumerate(values)]
    return [*code, refuse, (_LOAD, 0, 0, _NUMBER_AT)]


class _Program(ctypes.Structure):
    _fields_ = (("count", ctypes.c_ushort), ("code", ctypes.c_char_p))


_SECCOMP = {"x86_64": 317, "aarch64": 277}


def is_known() -> bool:
    """Whether the filter can be made for this machine."""
    return platform.machine() in _SECCOMP


def install(contained: bool, forks: bool) -> None:
    """Put the filter on this process, for good; it may gain no privileges then (PR_SET_NO_NEW_PRIVS).

    Raises: OSError: the kernel takes no filter.
    """
    machine = platform.machine()
    code = program(rules(os.getpid(), contained, forks), machine)
    libc = ctypes.CDLL(None, use_errno=True)
    filled = _Program(len(code) // 8, code)
    mode, flags = 1, 4  # SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW: computing stays as fast as before
    if libc.syscall(_SECCOMP[machine], mode, flags, ctypes.byref(filled)):
        raise OSError(ctypes.get_errno(), "the kernel takes no filter of system calls")
