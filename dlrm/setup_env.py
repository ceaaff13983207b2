"""Makes `.venv` with the pinned stack of constraints.txt: `python3 dlrm/setup_env.py`.

Run by every target of the Makefile, on Linux, WSL or macOS. Standard library only; any Python from
3.7 starts it, and an unsuitable one looks for a better one on PATH. When the environment is there
and nothing that made it has changed, it says so and ends at once.

The CPU or the CUDA form of torch, fbgemm and torchrec is chosen by what the machine has;
`DLRM_DEVICE=cpu` or `DLRM_DEVICE=cuda` decides by hand.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".setup-complete"  # holds the key of what was installed
OWNED = VENV / ".made-by-setup"  # this script made the folder, so it may make it again
LOG = VENV / "install.log"
INPUTS = ("pyproject.toml", "constraints.txt", "dlrm/setup_env.py")

TORCH, TORCHREC = "2.13.0", "1.8.0"
OLDEST, NEWEST = (3, 11), (3, 14)  # Pythons that the pinned torch has builds for
OLDEST_DRIVER = 580  # NVIDIA driver that CUDA 13, which torch 2.13 is built with, needs
GIGABYTES = {"cpu": 4, "cuda": 12}  # free disk the environment and its downloads take
TRIES = 3
NETWORK = re.compile(
    r"ConnectionError|NewConnection|Connection(?: was)? (?:refused|reset|aborted|broken)|timed out|"
    r"TimeoutError|name resolution|Name or service not known|Network is unreachable|"
    r"Max retries exceeded|ProxyError|IncompleteRead|RemoteDisconnected|SSLError|"
    r"50[0234] (?:Server Error|Bad Gateway|Service Unavailable)"
)


class SetupError(Exception):
    """The set-up cannot go on. The message says what happened and how to mend it."""


def say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


# ---------------------------------------------------------------------------- what to install


def driver_version() -> int | None:
    """Major version of the NVIDIA driver with a device to drive; None without, 0 if unknown."""
    if glob.glob("/dev/nvidia[0-9]*"):
        try:
            text = Path("/proc/driver/nvidia/version").read_text()
        except OSError:
            return 0
        found = re.search(r"\s(\d{3,})\.\d+", text)
        return int(found.group(1)) if found else 0
    if os.path.exists("/dev/dxg") and os.path.exists("/usr/lib/wsl/lib/libcuda.so.1"):
        return 0
    return None


def choose_device() -> tuple[str, str]:
    """('cpu' or 'cuda', the reason). Reads files only: no process is started."""
    wanted = os.environ.get("DLRM_DEVICE", "").strip().lower()
    if wanted in ("cpu", "cuda"):
        return wanted, f"DLRM_DEVICE={wanted}"
    if wanted not in ("", "auto"):
        raise SetupError(f"DLRM_DEVICE={wanted}: give cpu, cuda or auto")
    driver = driver_version()
    if driver is None:
        return "cpu", "no NVIDIA GPU found"
    if 0 < driver < OLDEST_DRIVER:
        return "cpu", (
            f"NVIDIA driver {driver} found, but torch {TORCH} needs {OLDEST_DRIVER} or later: "
            "update the driver to use the GPU"
        )
    return "cuda", f"NVIDIA GPU found, driver {driver or 'of unknown version'}"


def installed_key(device: str) -> str:
    """What the environment depends on: settings, pins, this script, place, device, interpreter."""
    digest = hashlib.sha256()
    for name in INPUTS:
        digest.update((ROOT / name).read_bytes())
    return f"{digest.hexdigest()}\n{device}\n{ROOT}\n{os.path.realpath(PYTHON)}\n"


def install_steps(device: str) -> list[tuple[str, list[str], list[str] | None]]:
    """(what, arguments for pip, arguments to take where there is no such release) in order."""
    plain, cpu = f"torch=={TORCH}", f"torch=={TORCH}+cpu"
    # != so that a CPU build at hand, which sorts above the plain release, is not taken
    wanted, instead = f"{plain},!={TORCH}+cpu", None
    if device == "cpu":
        # only on Linux is the plain release a CUDA build
        wanted, instead = (cpu, ["--no-deps", plain]) if sys.platform == "linux" else (plain, None)
    # its dependencies come with the rest, pinned
    steps = [(f"torch for {device}", ["--no-deps", wanted], instead)]
    # fbgemm has CUDA builds for x86-64 only
    whole = device == "cuda" and platform.machine() == "x86_64"
    extras = "all-cuda" if whole else "all"
    steps.append(("the rest", ["-c", "constraints.txt", "-e", f".[{extras}]"], None))
    if not whole:
        steps.append(("torchrec", ["--no-deps", f"torchrec=={TORCHREC}"], None))
    return steps


# ------------------------------------------------------------------------------ running pip


class Progress:
    """One short line at a time: on a terminal it is rewritten, elsewhere one every 15 seconds."""

    def __init__(self, what: str) -> None:
        self.what, self.count, self.doing = what, 0, "looking up"
        self.start = self.shown = time.monotonic()
        self.live = sys.stdout.isatty()
        self.ended = threading.Event()
        threading.Thread(target=self.keep_showing, daemon=True).start()

    def keep_showing(self) -> None:
        """pip is silent while it unpacks, which may take a minute."""
        while not self.ended.wait(1):
            self.show()

    def feed(self, line: str) -> None:
        word, _, rest = line.strip().partition(" ")
        if word == "Collecting":
            self.count += 1
            self.doing = "looking up " + re.split(r"[^\w.-]", rest)[0]
        elif word == "Downloading":
            self.doing = "downloading " + " ".join(rest.split()[:3]).rsplit("/", 1)[-1]
        elif line.startswith("Installing collected packages"):
            self.doing = f"unpacking {line.count(',') + 1} packages"
        self.show()

    def show(self) -> None:
        now = time.monotonic()
        if now - self.shown < (0.2 if self.live else 15):
            return
        self.shown = now
        line = f"set-up: {self.what}: {now - self.start:.0f} s, {self.doing}"
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            print("\r" + line[:width].ljust(width), end="", flush=True)
        else:
            print(line, flush=True)

    def close(self) -> None:
        self.ended.set()
        if self.live:
            print("\r" + " " * (shutil.get_terminal_size().columns - 1) + "\r", end="", flush=True)


def clean_environment() -> dict[str, str]:
    """The environment without what would send pip somewhere else than into `.venv`."""
    dropped = "PYTHONPATH PYTHONHOME __PYVENV_LAUNCHER__ PIP_USER PIP_TARGET PIP_PREFIX PIP_ROOT"
    dropped += " PIP_CONSTRAINT PIP_REQUIREMENT PIP_NO_DEPS"
    env = {name: value for name, value in os.environ.items() if name not in dropped.split()}
    return {**env, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


def run_logged(command: list[str], progress: Progress, lock: IO[bytes] | None) -> tuple[int, str]:
    """(exit status, output); the output goes to the log as it comes."""
    # The child holds the lock too: after a kill of this script alone, the next run waits for it.
    held = [lock.fileno()] if lock else []
    lines: list[str] = []
    with open(LOG, "a", encoding="utf-8") as log:
        log.write(f"$ {' '.join(command)}\n")
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            pass_fds=held,
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                log.write(line)
                log.flush()
                lines.append(line)
                progress.feed(line)
            return process.wait(), "".join(lines)
        finally:
            progress.close()
            if process.poll() is None:
                process.terminate()
                process.wait()


def pip_install(
    what: str, arguments: list[str], instead: list[str] | None, lock: IO[bytes] | None
) -> None:
    """Install, again after a network failure; `instead` where it fails for another reason."""
    base = [str(PYTHON), "-m", "pip", "install", "--no-compile", "--progress-bar", "off"]
    for attempt in range(1, TRIES + 1):
        status, output = run_logged([*base, *arguments], Progress(what), lock)
        if status == 0:
            return
        if not NETWORK.search(output):
            break
        if attempt < TRIES:
            say(f"{what}: the network failed; again in {5 * attempt} s ({attempt} of {TRIES})")
            time.sleep(5 * attempt)
    else:
        raise SetupError(
            "no package registry could be reached: check the network, the proxy (HTTPS_PROXY) and "
            f"`pip config list`, then run it again; the log is {LOG}"
        )
    if instead is not None:  # pip has several wordings for "no such release": any will do
        say(
            f"{what}: no CPU-only build for Python {platform.python_version()} in the registries "
            "here; taking the standard build, which runs on the CPU too but takes gigabytes"
        )
        pip_install(what, instead, None, lock)
        return
    tail = "".join(f"    {line}\n" for line in output.splitlines()[-15:])
    mend = "mend what it says and run it again"
    if "No space left on device" in output:
        mend = f"the disk is full: free some of {VENV.parent} or of TMPDIR and run it again"
    raise SetupError(f"pip could not install {what}:\n{tail}{mend}; the whole log is {LOG}")


# ----------------------------------------------------------------------- making the environment


def suitable(version: tuple[int, int]) -> bool:
    return OLDEST <= version <= NEWEST


def require_python() -> None:
    """Go on under a Python that the stack has builds for, another one of PATH if need be."""
    if suitable(sys.version_info[:2]):
        return
    have = platform.python_version()
    for minor in (13, 12, 11, 14):
        other = shutil.which(f"python3.{minor}")
        # a launcher may be on PATH with nothing behind it
        if other and subprocess.run([other, "-c", ""], capture_output=True).returncode == 0:
            say(f"Python {have} is outside 3.11 to 3.14; going on with {other}")
            os.execv(other, [other, *sys.argv])
    raise SetupError(
        f"Python {have} at {sys.executable} is outside 3.11 to 3.14, and PATH has none of them. "
        "Install one (Debian, Ubuntu: apt-get install python3.11 python3.11-venv; macOS: brew "
        "install python@3.12), or name one: make PYTHON=/path/to/python3.12 train"
    )


def make_venv(lock: IO[bytes] | None) -> None:
    """A fresh `.venv` of this Python, marked as ours before anything else is in it."""
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        package = f"python3.{sys.version_info[1]}-venv"
        raise SetupError(
            f"{sys.executable} cannot make environments: its venv or ensurepip module is missing. "
            f"Debian, Ubuntu: apt-get install {package}"
        )
    if VENV.exists():
        shutil.rmtree(VENV)
    VENV.mkdir()
    OWNED.touch()
    # From inside another environment, its base: the new one must not depend on the first.
    base = getattr(sys, "_base_executable", None) or sys.executable
    status, output = run_logged([base, "-m", "venv", str(VENV)], Progress("new environment"), lock)
    if status != 0:
        raise SetupError(f"{base} -m venv failed:\n{output}")


def prepare_venv(old: str, key: str, lock: IO[bytes] | None) -> None:
    """Decide what to do with what is there: make, mend, update or adopt `.venv`."""
    if VENV.is_symlink() or (VENV.exists() and not OWNED.exists()):
        works = (
            PYTHON.exists()
            and not subprocess.run(
                [str(PYTHON), "-c", f"import sys, pip; sys.exit(sys.version_info < {OLDEST})"],
                env=clean_environment(),
                capture_output=True,
            ).returncode
        )
        if not works:
            raise SetupError(
                f"{VENV} was not made by this script and has no working Python 3.11 or later with "
                "pip: move it away and run it again"
            )
        say(f"{VENV} was made by hand: installing into it")
    elif not VENV.exists():
        make_venv(lock)
    elif not old:
        say("the last set-up was cut short: making .venv again")
        make_venv(lock)
    elif old.split("\n")[1:] != key.split("\n")[1:]:
        say("the device, the folder or the Python of .venv changed: making it again")
        make_venv(lock)
    else:
        say("pyproject.toml, constraints.txt or the set-up changed: updating .venv")


def warn_of_shortages(device: str) -> None:
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < GIGABYTES[device]:
        say(f"warning: {free:.1f} GB of disk are free, {GIGABYTES[device]} may be needed")
    compilers = ("g++", "c++", "clang++")
    if not (os.environ.get("CXX") or any(map(shutil.which, compilers))):
        say(
            "warning: no C++ compiler found; training works, compiled kernels do not (Debian, "
            "Ubuntu: apt-get install g++; macOS: xcode-select --install)"
        )


def verify(device: str) -> str:
    """Import what was installed, once, and say which builds they are."""
    code = (
        "import platform, torch, numpy, polars, torch.version as v\n"
        "print(f'Python {platform.python_version()}, torch {torch.__version__}, ' "
        "+ (f'CUDA {v.cuda}' if v.cuda else 'CPU only'))"
    )
    done = subprocess.run(
        [str(PYTHON), "-c", code], cwd=ROOT, env=clean_environment(), capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SetupError(f"installed, but it does not import:\n{done.stderr}the log is {LOG}")
    if device == "cuda" and "CPU only" in done.stdout:
        raise SetupError(f"asked for CUDA, got {done.stdout.strip()}; use DLRM_DEVICE=cpu")
    return done.stdout.strip()


def open_lock() -> IO[bytes] | None:
    """Wait for another set-up of this checkout to end. Nothing is left behind when it does."""
    lock = open(ROOT / "pyproject.toml", "rb")  # noqa: SIM115 - held until the process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("another set-up of this folder is running: waiting for it")
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        return None  # a file system without locks
    return lock


def read_stamp() -> str:
    try:
        return STAMP.read_text()
    except OSError:
        return ""


def set_up() -> None:
    device, why = choose_device()
    if PYTHON.exists() and read_stamp() == installed_key(device):
        say(f".venv is ready, for {device} ({why})")
        return
    require_python()
    lock = open_lock()
    old, key = read_stamp(), installed_key(device)
    if PYTHON.exists() and old == key:  # another process made it while this one waited
        say(f".venv is ready, for {device} ({why})")
        return
    start = time.monotonic()
    hand = "" if why.startswith("DLRM_DEVICE") else "; DLRM_DEVICE=cpu|cuda decides by hand"
    say(f"{why}: installing for {device}{hand}")
    warn_of_shortages(device)
    prepare_venv(old, key, lock)
    STAMP.unlink(missing_ok=True)
    for what, arguments, instead in install_steps(device):
        say(f"installing {what}")
        pip_install(what, arguments, instead, lock)
    builds = verify(device)
    part = STAMP.with_name(STAMP.name + ".part")
    part.write_text(installed_key(device))
    os.replace(part, STAMP)
    say(f"ready in {time.monotonic() - start:.0f} s: {builds}")


def main() -> NoReturn:
    try:
        set_up()
    except (SetupError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("\nerror: stopped; run it again to start over", file=sys.stderr)
        sys.exit(130)
    sys.exit(0)


if __name__ == "__main__":
    main()
