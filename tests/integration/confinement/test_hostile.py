"""Recipes that try to get out, by each method that works here."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from computeshare.confinement import methods
from computeshare.confinement.methods import Method
from computeshare.confinement.process import start
from computeshare.confinement.scratch import temporary
from computeshare.confinement.watch import watch

TRY = """
import ctypes, os, signal, socket, subprocess, sys
from pathlib import Path

libc = ctypes.CDLL(None, use_errno=True)

def refused(do, *arguments):
    try:
        print("DONE", do, arguments, do(*arguments))
    except OSError as error:
        print("refused", error)

def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)
"""
METHODS = methods.available()


@pytest.fixture(params=METHODS, ids=lambda method: method.name)
def by(request: pytest.FixtureRequest) -> Method:
    found: Method = request.param
    return found


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home with a key and a token, as this process has it."""
    for name in ("home/.ssh/id_ed25519", "home/.local/share/computeshare/token"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("secret")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COMPUTESHARE_HOME", str(tmp_path / "home/.local/share/computeshare"))
    monkeypatch.setenv("COMPUTESHARE_TOKEN", "secret")
    return tmp_path / "home"


@pytest.fixture
def scratch() -> Iterator[Path]:
    with temporary() as folder:
        yield folder


def run(by: Method, scratch: Path, program: str, *arguments: object, **options: object) -> str:
    """What a confined Python prints, both streams."""
    argv = [sys.executable, "-P", "-c", TRY + program, *map(str, arguments)]
    process = start(argv, scratch=scratch, by=by, **options)  # type: ignore[arg-type]
    try:
        return process.communicate(timeout=120)[0].decode()
    finally:
        process.kill()


def test_a_method_works_on_this_machine() -> None:
    """Else none of these tests would run."""
    assert sys.platform != "linux" or {method.name for method in METHODS} >= {"landlock"}


@pytest.mark.slow
def test_torch_computes_inside(by: Method, scratch: Path) -> None:
    program = (
        "import torch, computeshare.training.replica; x = torch.ones(300, 300); print('sum', float((x @ x).sum()))"
    )
    assert run(by, scratch, program) == "sum 27000000.0\n"


def test_joblib_is_silent(by: Method, scratch: Path) -> None:
    program = "import warnings; warnings.simplefilter('always'); import joblib; print('imported')"
    assert run(by, scratch, program) == "imported\n"


def test_it_reads_the_readable_and_no_secret(by: Method, scratch: Path, home: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.txt").write_text("data")
    program = """
home, data = sys.argv[1:]
print("data", (Path(data) / "a.txt").read_text(), bool(Path("/etc/passwd").read_text()))
for name in (".ssh/id_ed25519", ".local/share/computeshare/token"):
    refused(Path(home, name).read_text)
for name in ("", ".ssh", ".."):
    refused(os.listdir, Path(home, name))
refused(Path("/etc/shadow").read_text)
print([word for word in (*os.environ, *os.environ.values()) if "COMPUTESHARE" in word or "secret" in word])
"""
    told = run(by, scratch, program, home, tmp_path / "data", readable=(tmp_path / "data",)).splitlines()
    assert told[0] == "data data True" and told[-1] == "[]"
    listed = [line for line in told[1:-1] if not line.startswith("refused")]
    assert "secret" not in "".join(told) and not [line for line in listed if "id_ed25519" in line or "token" in line]


SOCKETS = """
port, path, name = sys.argv[1:]
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK):
        refused(socket.socket, family, kind)
refused(socket.create_connection, ("127.0.0.1", int(port)))
refused(socket.getaddrinfo, "computeshare.example", 80)
refused(socket.socketpair, socket.AF_UNIX, socket.SOCK_DGRAM)
one, other = socket.socketpair()
for address in (path, "\\0" + name):
    refused(one.connect, address)
one.sendall(b"x")
print("pair", other.recv(1))
"""


def test_it_opens_no_socket_and_reaches_no_server(by: Method, scratch: Path, tmp_path: Path) -> None:
    """A broker on loopback, a desktop's bus in a folder, and one under an abstract name."""
    path, name = tmp_path / "bus", f"computeshare-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as broker, socket.socket(socket.AF_UNIX) as bus:
        bus.bind(str(path))
        bus.listen()
        told = run(by, scratch, SOCKETS, broker.getsockname()[1], path, name, readable=(tmp_path / "bus",)).splitlines()
    assert told[-1] == "pair b'x'" and len(told) == 14
    assert [line for line in told[:-1] if not line.startswith("refused")] == []


SHELLS = """
refused(os.fork)
refused(os.forkpty)
refused(subprocess.run, ["/bin/sh", "-c", "echo out"])
refused(os.posix_spawn, "/bin/sh", ["sh", "-c", "echo out"], {})
print("system", os.system("echo out") != 0)
import multiprocessing
refused(multiprocessing.get_context("fork").Process(target=print, args=("out",)).start)
refused(call, "syscall", 56 if os.uname().machine == "x86_64" else 220, signal.SIGCHLD, 0, 0, 0, 0)
"""


def test_it_starts_no_other_process(by: Method, scratch: Path) -> None:
    told = run(by, scratch, SHELLS).splitlines()
    assert [line for line in told if not line.startswith("refused")] == ["system True"] and len(told) == 7


def test_a_shell_that_it_becomes_is_confined(by: Method, scratch: Path, home: Path) -> None:
    program = "os.execv('/bin/sh', ['sh', '-c', 'echo here; read x < $0; echo $x; echo x > $0', sys.argv[1]])"
    told = run(by, scratch, program, home / ".ssh/id_ed25519")
    assert told.startswith("here\n") and "secret" not in told and (home / ".ssh/id_ed25519").read_text() == "secret"


def test_with_permission_it_starts_a_compiler_where_all_end_with_it(by: Method, scratch: Path) -> None:
    argv = [sys.executable, "-P", "-c", "import subprocess; subprocess.run(['sh', '-c', 'echo ran; exec sleep 1000'])"]
    process = start(argv, scratch=scratch, by=by, forks=True)
    assert process.stdout
    if by.forks:
        assert process.stdout.readline() == b"ran\n"
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 3
        process.kill()
        psutil.wait_procs(family, 10)
        assert not [one for one in family if one.is_running()]
    else:
        assert b"PermissionError" in process.stdout.read()


def test_it_begins_no_session_and_so_keeps_its_priority(by: Method, scratch: Path) -> None:
    program = """
refused(os.setsid)
refused(lambda: subprocess.run(["true"], start_new_session=True))
refused(Path("/proc/self/autogroup").write_text, "-20")
refused(os.nice, -1)
"""
    for forks in (False, by.forks):
        told = run(by, scratch, program, forks=forks).splitlines()
        assert len(told) == 4 and all(line.startswith("refused") for line in told), told


WRITES = """
home, data, package = map(Path, sys.argv[1:])
for folder in (home, data, package, Path(sys.prefix), Path("/tmp"), Path("/dev/shm"), Path("/usr"), Path("/")):
    refused((folder / "new").write_text, "x")
    refused((folder / "new").mkdir)
    refused((folder / "new").symlink_to, "/etc")
kept = data / "a.txt"
refused(kept.write_text, "x")
refused(os.truncate, kept, 0)
refused(os.open, kept, os.O_RDONLY | os.O_TRUNC)
refused(os.unlink, kept)
refused(os.rename, kept, "mine")
refused(os.link, kept, "mine")
refused(os.rename, "own", kept)
refused(os.chmod, kept, 0o777)
refused(os.utime, kept, (0, 0))
refused(os.chmod, home, 0o777)
refused(os.chown, home, os.getuid(), os.getgid())
with kept.open() as file:
    refused(os.fchmod, file.fileno(), 0)
    refused(os.setxattr, file.fileno(), "user.mine", b"x")
os.symlink(home, "out")
refused(Path("out/new").write_text, "x")
refused(os.memfd_create, "uncounted")
"""


def test_it_writes_in_its_folder_alone(by: Method, scratch: Path, home: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    kept = tmp_path / "data/a.txt"
    kept.write_text("data")
    kept.chmod(0o640)
    (scratch / "own").write_text("own")
    package = Path(methods.__file__).parent
    told = run(by, scratch, WRITES, home, tmp_path / "data", package, readable=(tmp_path / "data",)).splitlines()
    assert [line for line in told if not line.startswith("refused")] == [] and len(told) == 39
    assert (kept.read_text(), kept.stat().st_mode & 0o777) == ("data", 0o640)


KERNEL = """
for path in Path("paths").read_text().split("\\n"):
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        print("OPENED", path)
    except OSError:
        pass
for number in range(1, 50):
    for name in ("mem", "oom_score_adj"):
        try:
            os.close(os.open(f"/proc/{number}/{name}", os.O_WRONLY))
            print("OPENED", number, name)
        except OSError:
            pass
print("end")
"""


@pytest.mark.parametrize("gpu", [False, True])
def test_it_changes_no_setting_of_the_kernel(by: Method, scratch: Path, gpu: bool) -> None:
    """A pattern for core dumps in /proc/sys, say, is a command that root runs: root's recipes could write it."""
    tops = ("/proc/sys", "/proc/irq", "/proc/bus", "/sys/kernel", "/sys/fs", "/sys/power", "/sys/devices/system")
    walked = (f"{folder}/{name}" for top in tops for folder, _, names in os.walk(top) for name in names)
    paths = ["/proc/sysrq-trigger", *(path for path in walked if "\n" not in path)]
    assert "/proc/sys/kernel/core_pattern" in paths
    (scratch / "paths").write_text("\n".join(paths))
    assert run(by, scratch, KERNEL, gpu=gpu) == "end\n"


OTHERS = """
parent, victim = map(int, sys.argv[1:])
for number in (parent, victim):
    refused(call, "ptrace", 16, number, 0, 0)
    refused(os.kill, number, signal.SIGKILL)
    refused(call, "sched_setaffinity", number, 8, ctypes.byref(ctypes.c_uint64(1)))
    for name in ("environ", "mem", "maps", "fd/0", "root/etc/shadow"):
        refused(os.open, f"/proc/{number}/{name}", os.O_RDONLY)
    import resource
    refused(resource.prlimit, number, resource.RLIMIT_CPU, (1, 1))
refused(os.setpriority, os.PRIO_PROCESS, victim, 19)
refused(os.pidfd_open, victim)
refused(call, "syscall", 310 if os.uname().machine == "x86_64" else 270, victim, 0, 0, 0, 0, 0)
refused(call, "unshare", 0x10000000)
try:
    os.kill(-1, signal.SIGTERM)
except OSError:
    pass
print("alive")
"""


def test_it_reaches_no_other_process(by: Method, scratch: Path) -> None:
    with subprocess.Popen(["sleep", "1000"]) as victim:
        told = run(by, scratch, OTHERS, os.getpid(), victim.pid).splitlines()
        assert victim.poll() is None and os.getpriority(os.PRIO_PROCESS, victim.pid) == os.getpriority(0, 0)
        victim.kill()
    assert [line for line in told if not line.startswith("refused")] == ["alive"] and len(told) == 23


def test_it_has_no_rights_to_gain(by: Method, scratch: Path) -> None:
    told = run(by, scratch, "print(Path('/proc/self/status').read_text())")
    about = dict(line.split(":\t", 1) for line in told.strip().splitlines())
    assert {about[name].strip("0") for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {""}
    assert (about["NoNewPrivs"], about["Seccomp"]) == ("1", "2")


def test_it_inherits_the_descriptors_named_and_no_other(by: Method, scratch: Path, home: Path) -> None:
    secret = os.open(home / ".ssh/id_ed25519", os.O_RDONLY)
    os.set_inheritable(secret, True)
    reader, writer = os.pipe()
    try:
        told = run(
            by,
            scratch,
            "print(os.listdir('/proc/self/fd')); os.write(int(sys.argv[1]), b'x')",
            writer,
            pass_fds=(writer,),
        )
        assert set(eval(told)) <= {"0", "1", "2", str(writer), "3", "4"} - {str(secret)}
        assert os.read(reader, 1) == b"x"
    finally:
        for number in (secret, reader, writer):
            os.close(number)


def test_it_types_into_no_terminal(by: Method, scratch: Path) -> None:
    leader, terminal = os.openpty()
    try:
        program = "import fcntl, termios\nrefused(fcntl.ioctl, int(sys.argv[1]), termios.TIOCSTI, b'x')"
        assert run(by, scratch, program, terminal, pass_fds=(terminal,)).startswith("refused")
    finally:
        os.close(leader)
        os.close(terminal)


def watched(by: Method, scratch: Path, program: str, **options: object) -> tuple[str, str]:
    """How a confined Python ended, and what it printed."""
    limits = {name: options.pop(name) for name in ("memory_bytes", "scratch_bytes") if name in options}
    given = {name: value for name, value in limits.items() if name == "memory_bytes"}
    process = start([sys.executable, "-P", "-c", TRY + program], scratch=scratch, by=by, **given, **options)  # type: ignore[arg-type]
    watching = watch(process, scratch=scratch, **limits)  # type: ignore[arg-type]
    try:
        told = process.communicate(timeout=120)[0].decode()
    finally:
        process.kill()
    return watching.why(), told


def test_it_allocates_no_more_than_allowed(by: Method, scratch: Path) -> None:
    why, told = watched(by, scratch, "x = bytearray(50 << 30)", memory_bytes=1 << 30)
    assert why == "ended with exit code 1" and "MemoryError" in told


def test_shared_memory_is_counted_too(by: Method, scratch: Path) -> None:
    program = """
import mmap
for piece in range(800):
    held = mmap.mmap(-1, 64 << 20)
    for at in range(0, 64 << 20, 4096):
        held[at] = 1
    globals()[f"held{piece}"] = held
"""
    why, _ = watched(by, scratch, program, memory_bytes=300 << 20)
    assert why.startswith("was killed: it took ") and why.endswith(" of the 315 MB of memory allowed")


def test_it_fills_no_disk(by: Method, scratch: Path) -> None:
    one_file = """
with open("large", "wb") as file:
    for _ in range(100):
        file.write(bytes(1 << 20))
"""
    why, told = watched(by, scratch, one_file, file_bytes=20 << 20)
    assert why == "ended with exit code 1" and "File too large" in told
    assert (scratch / "large").stat().st_size == 20 << 20
    many = """
import time
for number in range(100):
    Path(f"large{number}").write_bytes(bytes(10 << 20))
    time.sleep(0.1)
"""
    why, _ = watched(by, scratch, many, scratch_bytes=50 << 20)
    assert why.startswith("was killed: it wrote ") and why.endswith(" of the 52 MB allowed")


@pytest.mark.slow
def test_a_hidden_folder_ends_it(by: Method, scratch: Path) -> None:
    program = """
import time
os.mkdir("hidden", 0o300)
os.mkdir("deep")
for _ in range(5000):
    os.chdir("deep")
    os.mkdir("deep")
time.sleep(100)
"""
    why, _ = watched(by, scratch, program)
    assert why.startswith("was killed: it wrote a folder that cannot be looked into")


@pytest.mark.slow
def test_threads_without_end_are_stopped(by: Method, scratch: Path) -> None:
    program = """
import threading, time
threading.stack_size(64 << 10)
for _ in range(20000):
    threading.Thread(target=time.sleep, args=(1000,)).start()
"""
    why, _ = watched(by, scratch, program)
    assert why.startswith("was killed: it started ")


def test_processes_without_end_are_stopped(by: Method, scratch: Path) -> None:
    program = """
import time
for _ in range(4096):  # by one process: where root runs the tests, no limit of the system holds those that all fork
    try:
        if not os.fork():
            break
    except BlockingIOError:
        break
time.sleep(20)
"""
    why, _ = watched(by, scratch, program, forks=True)
    assert why.startswith("was killed: it started ") if by.forks else why == "ended with exit code 1"


PARENT = """
import subprocess, sys
from pathlib import Path
from computeshare.confinement import methods
from computeshare.confinement.process import start
by = next(one for one in methods.available() if one.name == sys.argv[1])
program = "import signal, time; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); time.sleep(1000)"
start([sys.executable, "-P", "-c", program], scratch=Path(sys.argv[2]), by=by)
sys.stdin.read()
"""


def command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended
        return []


def test_it_dies_with_its_parent(by: Method, scratch: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, by.name, str(scratch)], stdin=subprocess.PIPE)
    deadline = time.monotonic() + 60
    family: list[psutil.Process] = []
    while not any("-P" in command(one) and "-S" not in command(one) for one in family):  # the launcher has -S
        assert time.monotonic() < deadline
        time.sleep(0.05)
        family = psutil.Process(parent.pid).children(recursive=True)
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(family, 10)
    assert alive == []


def test_where_the_system_ends_nothing_with_its_parent_a_process_outside_does() -> None:
    """For macOS; what it is to end takes no part in that."""
    program = """
import sys, time
from computeshare.confinement.launcher import _end_with
_end_with(int(sys.argv[1]))
print("on", flush=True)
time.sleep(1000)
"""
    with subprocess.Popen(["sleep", "1000"]) as parent:
        ended = subprocess.Popen([sys.executable, "-c", program, str(parent.pid)], stdout=subprocess.PIPE)
        assert ended.stdout and ended.stdout.readline() == b"on\n" and ended.poll() is None
        parent.kill()
        parent.wait()
        assert ended.wait(30) == -9


ORDINARY_USER = """
import sys
root, packages, secret = sys.argv[1:]
sys.path[:0] = [root, packages]
from pathlib import Path
from computeshare.confinement import methods
from computeshare.confinement.process import start
from computeshare.confinement.scratch import temporary
for by in methods.available():
    with temporary() as scratch:
        program = "import os, sys; open('own', 'w').write('x'); print(os.getuid(), flush=True); open(sys.argv[1])"
        process = start([sys.executable, "-P", "-c", program, secret], scratch=scratch, by=by)
        told = process.communicate()[0].decode().split()
        print(by.name, told[0], told[-1] == repr(secret))
"""


def test_it_needs_no_rights_of_root(tmp_path: Path) -> None:
    """The other tests run with the rights of whoever runs them; this one as nobody."""
    python = "/usr/bin/python3"
    if os.geteuid() != 0 or not Path(python).exists():
        pytest.skip("another user needs root to become one, and a Python that all may run")
    with tempfile.NamedTemporaryFile() as secret:
        Path(secret.name).chmod(0o644)
        packages, root = Path(psutil.__file__).parent.parent, Path(methods.__file__).parents[2]
        command = [
            "setpriv",
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            "env",
            "-i",
            python,
            "-c",
            ORDINARY_USER,
        ]
        done = subprocess.run(
            [*command, root, packages, secret.name], capture_output=True, text=True, timeout=60, check=True
        )
    assert done.stdout.splitlines() == [f"{method.name} 65534 True" for method in METHODS]
