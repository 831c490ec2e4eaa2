"""The spawner: a small process that starts a program in a sandbox for each request, so that no large process forks.

It is started once per worker, as a fresh interpreter without packages, and answers requests until its parent is gone.
For each request it forks. There are three processes per program:

    supervisor  a child of the spawner; it ends the program when it is told to, or when the worker is gone
    init        a child of the supervisor, and the first process of the program's own namespaces; when it ends, the
                kernel kills every process in them
    program     a child of init: a fresh interpreter

Each dies with its parent. The supervisor alone knows the request, so nothing of one program is left for the next.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from cohort.sandbox import kernel_calls
from cohort.sandbox.exchange import STOP_SECONDS
from cohort.sandbox.filter import build_filter
from cohort.sandbox.records import MAX_THREADS, ProgramLimits
from cohort.sandbox.root import DRIVER, HOME, PROGRAM, RootPlan, build_root, plan_root
from cohort.system.json_text import parse_json
from cohort.system.kernel import adopt_orphans, die_with_parent, list_children

NUM_FDS = 5  # with a request: control, and stdin, stdout, stderr and results of the program
PROGRAM_UID = 65534  # user and group of programs inside their namespace, and outside where the spawner is root
LOOK_SECONDS = 0.5  # how often the spawner looks whether its parent is there
EXTRA_SECONDS = 5.0  # after the time limit, when a supervisor ends the program by itself
MAX_FDS = 4096  # more than the spawner ever has open
STARTING = b"\n"  # written before the interpreter starts
_HOST_NAME = "sandbox"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramSpec:
    """A program to run."""

    isolated: bool
    limits: ProgramLimits
    source: bytes
    driver: bytes  # a program that loads `source` as a module; b"" = `source` runs itself
    plan: RootPlan
    fds: tuple[int, ...]  # stdin, stdout, stderr and results of the program


def main(arguments: list[str]) -> None:
    """Answers requests until the parent is gone. `arguments`: a socket's file descriptor, and folders to hide."""
    requests = socket.socket(fileno=int(arguments[0]))
    parent = os.getppid()
    # Limits of the worker are not for this process, which serves many answers.
    for which in (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_FSIZE):
        with suppress(ValueError, OSError):
            hard = resource.getrlimit(which)[1]
            resource.setrlimit(which, (hard, hard))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Supervisors that have ended are forgotten.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.umask(0o022)
    plan = plan_root(arguments[1:])
    with open(os.path.join(os.path.dirname(__file__), "driver.py"), "rb") as file:
        driver = file.read()
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    while os.getppid() == parent:
        if not poll.poll(LOOK_SECONDS * 1000):
            continue
        request, fds, _, _ = socket.recv_fds(requests, 1 << 16, NUM_FDS)
        if not request:
            return
        start_supervisor(requests, parse_json(request), fds, plan, driver)


def start_supervisor(requests: socket.socket, request: Any, fds: list[int], plan: RootPlan, driver: bytes) -> None:
    """Forks a supervisor for a request, and gives its user namespace the users that it may have."""
    own_pid = os.getpid()
    here, there = socket.socketpair()
    supervisor = os.fork()
    if supervisor == 0:
        here.close()
        requests.close()
        control = socket.socket(fileno=fds[0])
        try:
            answer = supervise(own_pid, control, there, request, (plan, driver, tuple(fds[1:])))
        except OSError as error:
            answer = {"error": describe(error)}
        with suppress(OSError):
            control.sendall(json.dumps(answer).encode())
        os._exit(0)
    there.close()
    for fd in fds:
        os.close(fd)
    with suppress(OSError):
        # At its end if the supervisor needs no user namespace, or has none.
        if here.recv(1):
            here.sendall(map_users(supervisor).encode() or b"ok")
    here.close()


def map_users(pid: int) -> str:
    """Gives the new user namespace of a process its users and groups. Returns what is wrong, "" if nothing is.

    Root maps itself, for the mounts, and an unprivileged user, for the program. Where that is not allowed, and for
    other users, the user of this process is the only one.
    """
    many = f"0 0 1\n{PROGRAM_UID} {PROGRAM_UID} 1\n"
    if os.geteuid() == 0:
        with suppress(OSError):
            _write(f"/proc/{pid}/uid_map", many)
            _write(f"/proc/{pid}/gid_map", many)
            return ""
    try:
        with suppress(OSError):
            _write(f"/proc/{pid}/setgroups", "deny")
        _write(f"/proc/{pid}/uid_map", f"{PROGRAM_UID} {os.geteuid()} 1\n")
        _write(f"/proc/{pid}/gid_map", f"{PROGRAM_UID} {os.getegid()} 1\n")
    except OSError as error:
        return describe(error)
    return ""


def _write(path: str, text: str) -> None:
    """Writes a file of the kernel with one call."""
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def describe(error: OSError) -> str:
    """Returns an error in one line."""
    return f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")


def supervise(
    spawner: int, control: socket.socket, users: socket.socket, request: Any, rest: tuple[Any, ...]
) -> dict[str, Any]:
    """Runs the program of a request and returns how it ended: status, cpu; nothing if it was killed; or error.

    `users` is connected with the spawner, for the users of the namespace; `rest` is plan, driver and the program's fds.
    Raises OSError if the sandbox cannot be made.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    plan, driver, fds = rest
    size = struct.unpack("!I", _read_exactly(control, 4))[0]
    spec = ProgramSpec(
        isolated=request["isolated"],
        limits=ProgramLimits(**request["limits"]),
        source=_read_exactly(control, size),
        driver=driver if request["driver"] else b"",
        plan=plan,
        fds=fds,
    )
    if spec.isolated:
        kernel_calls.leave_namespaces(kernel_calls.NEW_USER | kernel_calls.NEW_PIDS)
        users.sendall(b"u")
        if (answer := users.recv(1000)) != b"ok":
            raise OSError(1, f"users of the namespace: {answer.decode() or 'no answer'}")
    else:
        adopt_orphans()
    users.close()
    die_with_parent(spawner)
    folder = "" if spec.isolated else tempfile.mkdtemp(prefix="cohort-program-")
    try:
        return watch_program(control, spec, folder)
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _read_exactly(control: socket.socket, size: int) -> bytes:
    """Returns the next `size` bytes. Raises OSError if there are fewer."""
    data = bytearray()
    while len(data) < size:
        piece = control.recv(size - len(data))
        if not piece:
            raise OSError(32, "the worker is gone")
        data += piece
    return bytes(data)


def watch_program(control: socket.socket, spec: ProgramSpec, folder: str) -> dict[str, Any]:
    """Starts init and the program, and waits until they end or are to be ended. Returns what `supervise` does.

    `folder` is the home of a program that is not isolated.
    """
    # `setup` has STARTING when the program starts, and errors; `report` the program's end, `tie` nothing: its end
    # shows mine.
    setup, setup_in = os.pipe()
    report, report_in = os.pipe()
    tie, tie_in = os.pipe()
    init = os.fork()
    if init == 0:
        for fd in (setup, report, tie_in, control.fileno()):
            os.close(fd)
        run_init(spec, folder, setup_in, report_in, tie)
    for fd in (setup_in, report_in, tie, *spec.fds):
        os.close(fd)
    poll = select.poll()
    for fd in (control.fileno(), setup, report):
        poll.register(fd, select.POLLIN)
    received = {setup: b"", report: b""}
    deadline = time.monotonic() + STOP_SECONDS + EXTRA_SECONDS
    is_open = True
    while is_open and (rest := deadline - time.monotonic()) > 0:
        for fd, _ in poll.poll(rest * 1000):
            data = os.read(fd, 4096) if fd in received else b""
            if data:
                received[fd] += data
            elif fd == setup:
                poll.unregister(fd)
                # A space before the answer, which is JSON, says that the program has started, or that it failed to.
                control.sendall(b" ")
                deadline = time.monotonic() + spec.limits.wall_seconds + EXTRA_SECONDS
            else:
                is_open = False
    os.kill(init, signal.SIGKILL)
    # The kernel lets init end when all other processes of its namespace have ended.
    os.waitpid(init, 0)
    if not spec.isolated:
        end_orphans()
    if received[setup] != STARTING:
        # Also where a process of the sandbox was killed before the program was there: then the program has no outcome.
        error = received[setup].removeprefix(STARTING).decode(errors="replace")
        return {"error": error or "its first process was ended before the program started"}
    answer: dict[str, Any] = parse_json(received[report]) if received[report] else {}
    return answer


def end_orphans() -> None:
    """Kills the processes that a program without a sandbox left behind, as far as they became children of this one."""
    deadline = time.monotonic() + EXTRA_SECONDS
    while time.monotonic() < deadline and (children := list_children(os.getpid())):
        for child in children:
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def run_init(spec: ProgramSpec, folder: str, setup: int, report: int, tie: int) -> NoReturn:
    """Makes the sandbox, starts the program, waits for its end and reports it. Then everything in the sandbox ends."""
    try:
        if spec.isolated:
            isolate(spec)
        elif folder:
            _write_files(folder, spec)
        tie_to_supervisor(spec)
        # From here on this process dies with the supervisor. It may be dead already.
        if select.select([tie], [], [], 0)[0]:
            os._exit(0)
        program = os.fork()
        if program == 0:
            start_program(spec, folder, setup)
    except OSError as error:
        os.write(setup, describe(error).encode())
        os._exit(1)
    for fd in (setup, *spec.fds):
        os.close(fd)
    while True:
        pid, status, used = os.wait4(-1, 0)
        if pid == program:
            break
    answer = {"status": os.waitstatus_to_exitcode(status), "cpu": used.ru_utime + used.ru_stime}
    if not spec.isolated:
        with suppress(OSError):
            os.killpg(program, signal.SIGKILL)
    os.write(report, json.dumps(answer).encode())
    os._exit(0)


def tie_to_supervisor(spec: ProgramSpec) -> None:
    """Ties this process to the life of its parent and hides it from the program, where the system can do that."""
    if spec.isolated:
        kernel_calls.hide_from_debuggers()
        kernel_calls.die_with_parent_signal(signal.SIGKILL)
    else:
        die_with_parent(os.getppid())


def isolate(spec: ProgramSpec) -> None:
    """Moves this process, the first of a namespace of processes, into the sandbox, and takes all rights from it."""
    kinds = kernel_calls.NEW_MOUNTS | kernel_calls.NEW_NETWORK | kernel_calls.NEW_IPC
    kernel_calls.leave_namespaces(kinds | kernel_calls.NEW_UTS | kernel_calls.NEW_CGROUP)
    socket.sethostname(_HOST_NAME)
    files = {PROGRAM: spec.source} | ({DRIVER: spec.driver} if spec.driver else {})
    build_root(spec.plan, files, spec.limits.disk_mb)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(PROGRAM_UID, PROGRAM_UID, PROGRAM_UID)
        # Before the next call: a user other than root has no capabilities to drop.
        kernel_calls.drop_capability_bounds()
        os.setresuid(PROGRAM_UID, PROGRAM_UID, PROGRAM_UID)
    else:
        kernel_calls.drop_capability_bounds()
    kernel_calls.drop_capabilities()
    kernel_calls.forbid_new_privileges()


def _write_files(folder: str, spec: ProgramSpec) -> None:
    """Writes the files of a program that is not isolated into its folder."""
    for name, content in ((PROGRAM, spec.source), (DRIVER, spec.driver)):
        with open(folder + name, "wb") as file:
            file.write(content)


def start_program(spec: ProgramSpec, folder: str, setup: int) -> NoReturn:
    """Becomes the program: sets its files and limits, and starts a fresh interpreter."""
    try:
        # Away from the low numbers first, which some of them may have.
        moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, 16) for fd in (*spec.fds, setup)]
        for number, fd in enumerate(moved):
            # The last is closed when the program starts.
            os.dup2(fd, number, inheritable=fd != moved[-1])
        setup = len(spec.fds)
        os.closerange(setup + 1, MAX_FDS)
        os.setsid()
        os.chdir(folder or HOME)
        set_limits(spec)
        may_fork = spec.limits.processes > 0
        code = build_filter(os.uname().machine, may_fork) if spec.isolated else None
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        file = folder + (DRIVER if spec.driver else PROGRAM)
        command = [spec.plan.executable, "-s", "-S", "-P", "-B", "-X", "utf8", file]
        # Sets have the same order in every run.
        variables = {"HOME": folder or HOME, "PYTHONHASHSEED": "0"}
        if code is not None:
            kernel_calls.install_filter(code)
        os.write(setup, STARTING)
        os.execve(spec.plan.executable, command, variables)
    except OSError as error:
        os.write(setup, describe(error).encode())
        os._exit(1)


def set_limits(spec: ProgramSpec) -> None:
    """Limits what this process and the programs that it starts may use."""
    limits = spec.limits
    cpu = max(1, -int(-limits.cpu_seconds // 1))
    megabyte = 1 << 20
    # Beyond the first number of CPU seconds a signal comes that a program can ignore; beyond the second, the end.
    wanted = {
        resource.RLIMIT_CPU: (cpu, cpu + 1),
        resource.RLIMIT_AS: (limits.memory_mb * megabyte,) * 2,
        resource.RLIMIT_FSIZE: (limits.disk_mb * megabyte,) * 2,
        resource.RLIMIT_NOFILE: (limits.files,) * 2,
        resource.RLIMIT_CORE: (0, 0),
    }
    if spec.isolated and _counts_own_processes():
        wanted[resource.RLIMIT_NPROC] = (limits.processes + MAX_THREADS,) * 2
    for which, (soft, hard) in wanted.items():
        most = resource.getrlimit(which)[1]
        low = [value if most == resource.RLIM_INFINITY else min(value, most) for value in (soft, hard)]
        with suppress(ValueError):
            # macOS has no limit of memory that it would accept.
            resource.setrlimit(which, (low[0], low[1]))


def _counts_own_processes() -> bool:
    """Returns whether the kernel counts the processes of a user per user namespace: Linux since 5.14."""
    numbers = os.uname().release.split("-")[0].split(".")
    return tuple(int(n) for n in numbers[:2] if n.isdigit()) >= (5, 14)


if __name__ == "__main__":
    main(sys.argv[1:])
