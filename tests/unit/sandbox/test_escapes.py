"""Programs that try to get out of the sandbox: they fail there, and the same programs succeed without one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import cohort
from cohort.sandbox import ProgramLimits, run, run_program
from cohort.system.kernel import is_process_alive, list_children
from tests.unit.sandbox.attacks import ATTACKS, ENDINGS, Attack

LIMITS = ProgramLimits(cpu_seconds=1, wall_seconds=3)
NAMES = [attack.name for attack in ATTACKS]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    """Yields what attacks are after, by the word that stands for it: servers, files, a secret, a process."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / ".ssh").mkdir()
    (folder / ".ssh" / "id_rsa").write_text("a private key")
    (folder / "run").mkdir()
    (folder / "run" / "metrics").write_text("1")
    (folder / "disk").mkdir()
    tcp = socket.create_server(("127.0.0.1", 0))
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    local = socket.socket(socket.AF_UNIX)
    # Paths of sockets must be short.
    path = f"/tmp/cohort-{os.getpid()}.sock"
    local.bind(path)
    local.listen()
    secret = os.open(folder / ".ssh" / "id_rsa", os.O_RDWR)
    os.pwrite(secret, b"a private secret", 0)
    os.set_inheritable(secret, True)

    def answer() -> None:
        """Answers every datagram, as a name server does."""
        while True:
            try:
                _, sender = udp.recvfrom(100)
                udp.sendto(b"address", sender)
            except OSError:
                return

    threading.Thread(target=answer, daemon=True).start()
    memory = f"/dev/shm/cohort-{os.getpid()}"
    yield {
        "TCP_PORT": tcp.getsockname()[1],
        "UDP_PORT": udp.getsockname()[1],
        "UNIX_PATH": repr(path),
        "KEY_FILE": repr(str(folder / ".ssh" / "id_rsa")),
        "RUN_FOLDER": repr(str(folder / "run")),
        "PACKAGE": repr(str(Path(cohort.__file__).parent)),
        "SHM_FILE": repr(memory),
        "SECRET_FD": secret,
        "FOLDERS": repr(["/box", "/tmp"]),
        "outside": str(folder / "disk"),
    }
    for server in (tcp, udp, local):
        server.close()
    os.close(secret)
    for left in (path, memory):
        Path(left).unlink(missing_ok=True)


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """Yields a process with a secret in its environment."""
    command = [sys.executable, "-S", "-c", "print(flush=True); import time; time.sleep(600)"]
    with subprocess.Popen(command, env={"KEY": "planted"}, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def fill_in(attack: Attack, planted: dict[str, object], victim: int) -> str:
    """Returns the program of an attack with what is planted in the place of its words."""
    source = attack.source.replace("VICTIM", str(victim))
    for word, value in planted.items():
        source = source.replace(word, str(value))
    return source


def count_processes() -> int:
    """Returns how many processes the spawner of this process has below it."""
    assert run._state.spawner is not None
    rest, count = [run._state.spawner.process.pid], -1
    while rest:
        count += 1
        rest += list_children(rest.pop())
    return count


def wait_for_silence() -> None:
    """Waits until the spawner has no processes below it. Fails if some stay."""
    deadline = time.monotonic() + 10
    while count := count_processes():
        assert time.monotonic() < deadline, f"{count} processes are left"
        time.sleep(0.01)


@pytest.mark.parametrize("attack", ATTACKS, ids=NAMES)
def test_an_attack_fails_in_the_sandbox(
    attack: Attack, planted: dict[str, object], victim: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY", "planted")
    (Path(str(planted["outside"])).parent / "run" / "victim").touch()
    done = run_program(fill_in(attack, planted, victim.pid), "", LIMITS)
    assert "ESCAPED" not in done.stdout, done
    # It ran: a program that did not start proves nothing.
    assert "SyntaxError" not in done.stderr and done.outcome in ("finished", "raised"), done
    assert victim.poll() is None
    run_folder = Path(str(planted["outside"])).parent / "run"
    assert sorted(p.name for p in run_folder.iterdir()) == ["metrics", "victim"]
    assert (run_folder / "metrics").read_text() == "1" and not list(Path(str(planted["outside"])).iterdir())
    wait_for_silence()


@pytest.mark.parametrize("attack", [a for a in ATTACKS if a.works_outside], ids=lambda attack: attack.name)
def test_the_same_attack_succeeds_without_a_sandbox(
    attack: Attack, planted: dict[str, object], victim: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    if attack.needs_root and os.geteuid() != 0:
        pytest.skip("only root can do this at all, with or without a sandbox")
    (tmp_path / "metrics").touch()
    (tmp_path / "victim").touch()
    own = {**planted, "FOLDERS": repr([str(tmp_path)]), "RUN_FOLDER": repr(str(tmp_path))}
    done = subprocess.run(
        [sys.executable, "-c", fill_in(attack, own, victim.pid)],
        env={**os.environ, "KEY": "planted"},
        close_fds=False,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "ESCAPED" in done.stdout, done


@pytest.mark.parametrize("name", ENDINGS)
def test_a_program_that_harms_itself_has_an_outcome(name: str) -> None:
    source, outcome = ENDINGS[name]
    began = time.monotonic()
    done = run_program(source, "", LIMITS)
    assert time.monotonic() - began < 20
    assert done.outcome == outcome or (outcome is None and done.outcome != "output"), done
    assert "ESCAPED" not in done.stdout
    assert len(done.stdout) <= LIMITS.output_bytes and len(done.stderr) <= LIMITS.output_bytes
    assert (done.explain() == "") == (done.outcome == "finished")
    wait_for_silence()
    assert run_program("print(1)").stdout == "1\n", "the sandbox works after it"


def test_a_fork_bomb_stays_small_and_ends() -> None:
    """With processes allowed, so that the filter of system calls does not stop it."""
    source = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    done = run_program(source, "", ProgramLimits(cpu_seconds=1, wall_seconds=2, processes=8))
    assert done.outcome == "time"
    wait_for_silence()


def test_processes_can_be_allowed() -> None:
    source = (
        "import os\npid = os.fork()\nif not pid:\n    print('child', flush=True)\n    os._exit(0)\nos.waitpid(pid, 0)"
    )
    assert run_program(source, "", ProgramLimits(processes=1)).stdout == "child\n"
    assert run_program(source).outcome == "raised"


def test_a_daemon_does_not_survive(tmp_path: Path) -> None:
    """A process that left its parent and its session ends with the program, which does not wait for it."""
    source = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        os.closerange(0, 100)\n        time.sleep(600)\n    os._exit(0)\nos.wait()\nprint('left')"
    )
    began = time.monotonic()
    done = run_program(source, "", ProgramLimits(processes=8))
    assert done.stdout == "left\n" and time.monotonic() - began < 5
    wait_for_silence()


def test_programs_share_nothing() -> None:
    assert run_program("open('/box/note', 'w').write('x')\nopen('/tmp/note', 'w').write('x')").outcome == "finished"
    assert run_program("import os\nprint(os.listdir('/box'), os.listdir('/tmp'))").stdout == "[] []\n"


def test_a_program_does_not_see_earlier_ones() -> None:
    """The spawner forks for every program. Nothing of a request may stay in its memory."""
    run_program("x = 'first-" + "program'", "first-input")
    assert run._state.spawner is not None
    pid = run._state.spawner.process.pid
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb") as memory:
        for line in maps:
            area, rights = line.split()[:2]
            if not rights.startswith("rw") or "[v" in line:
                continue
            start, end = (int(number, 16) for number in area.split("-"))
            memory.seek(start)
            content = memory.read(end - start)
            assert b"first-program" not in content and b"first-input" not in content


def test_everything_ends_with_the_worker(tmp_path: Path) -> None:
    """A worker that is killed leaves no spawner, no supervisor and no program."""
    script = (
        "import threading\nfrom cohort.sandbox import run\n"
        "run.find_missing()\nprint(run._state.spawner.process.pid, flush=True)\n"
        "run.run_program('import time; time.sleep(600)', '', run.ProgramLimits(wall_seconds=600))"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(cohort.__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=env) as worker:
        assert worker.stdout is not None
        spawner = int(worker.stdout.readline())
        deadline = time.monotonic() + 20
        below: list[int] = []
        while len(below) < 3 and time.monotonic() < deadline:
            below, rest = [], [spawner]
            while rest:
                children = list_children(rest.pop())
                below += children
                rest += children
        assert len(below) == 3, "supervisor, init and program"
        worker.kill()
        while any(map(is_running, (spawner, *below))) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not [pid for pid in (spawner, *below) if is_running(pid)]


def is_running(pid: int) -> bool:
    """Returns whether a process exists and is no zombie, which only waits for its parent to look."""
    if not is_process_alive(pid):
        return False
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_the_end_of_the_spawner_ends_the_program() -> None:
    results: list[object] = []

    def run_long() -> None:
        """Runs a program that is ended from outside."""
        try:
            results.append(run_program("import time; time.sleep(600)", "", ProgramLimits(wall_seconds=60)))
        except cohort.errors.SandboxError as error:  # type: ignore[attr-defined]
            results.append(error)

    run_program("")
    thread = threading.Thread(target=run_long)
    thread.start()
    assert run._state.spawner is not None
    spawner = run._state.spawner.process
    deadline = time.monotonic() + 20
    while not (below := list_children(spawner.pid)) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    rest = [*below]
    while rest:
        children = list_children(rest.pop())
        below += children
        rest += children
    spawner.kill()
    thread.join(30)
    assert isinstance(results[0], cohort.errors.SandboxError)  # type: ignore[attr-defined]
    while any(map(is_running, below)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in below if is_running(pid)]
    assert run_program("print(2)").stdout == "2\n", "a new spawner is started"
