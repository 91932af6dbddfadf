"""The warm process: started by exec, confined once, then forking one confined child per program.

It never sees a program or a test: these travel in sealed memory files that only the child reads, so that a later child
finds nothing of them in the memory that it inherits. It takes orders over a socket and, per child, over a lifeline: a
byte means kill, its closing too (the client died); the exit report goes back over it.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import gc
import importlib
import importlib.util
import json
import os
import resource
import select
import signal
import socket
import sys
from typing import Any, NoReturn

from . import canary, candidate, codec, judge, landlock, namespaces, privileges, runtime, seccomp, syscalls
from .libc import PR_SET_DUMPABLE, PR_SET_PDEATHSIG, prctl

# Imported before the first fork, so that programs need not open files for them (where opening is forbidden, these are
# all that programs have), and import them at no cost.
_PRELOADED = """
    abc argparse array ast base64 binascii bisect builtins calendar cmath codecs collections collections.abc contextlib
    contextvars copy csv dataclasses datetime decimal difflib enum errno fractions functools gc getpass graphlib hashlib
    heapq hmac html inspect io itertools json keyword linecache locale logging math numbers operator os os.path pprint
    queue random re sched secrets select shlex signal statistics string struct sys tempfile textwrap threading time
    timeit token tokenize traceback types typing unicodedata uuid warnings weakref zlib ctypes resource shutil socket
    platform pickle copyreg reprlib opcode dis zoneinfo
"""
# Also imported where opening files is forbidden: they cost more than they are used.
_PRELOADED_WITHOUT_OPEN = """
    asyncio concurrent.futures unittest doctest multiprocessing xml.etree.ElementTree xml.dom.minidom gzip bz2 lzma
    zipfile tarfile glob fnmatch html.parser html.entities pathlib subprocess urllib.parse ipaddress optparse cmd pdb
    bdb code codeop configparser email http.client stringprep colorsys mmap fileinput filecmp getopt gettext ssl sqlite3
    plistlib quopri wave netrc mimetypes imaplib smtplib socketserver tracemalloc cProfile pstats profile symtable
    sysconfig site runpy pkgutil importlib.resources importlib.metadata zipimport faulthandler curses.ascii
    encodings.idna encodings.latin_1 encodings.ascii encodings.utf_16 encodings.utf_32 encodings.cp1252 encodings.cp437
    encodings.utf_8_sig encodings.hex_codec encodings.rot_13 encodings.base64_codec encodings.unicode_escape
    encodings.raw_unicode_escape encodings.punycode
"""
_MAX_DESCRIPTORS = 1024
_KINDS = {"script": candidate.run_script, "calls": candidate.serve_calls}


class Layers:
    """What confines the children; filled in once at the start.

    Attributes:
        report: {layer: None if in force, else why not}.
        own_uid: the children share their user id with nothing outside, so that their number can be limited.
        address_space: bytes that the server itself takes; a child's limit comes on top.
    """

    def __init__(self) -> None:
        self.server_pid = 0
        self.report: dict[str, str | None] = {}
        self.ruleset: landlock.Ruleset | None = None
        self.readable: tuple[str, ...] = ()
        self.filters: dict[bool, seccomp.Template] = {}
        self.in_namespace = False
        self.own_uid = False
        self.address_space = 0


def preload(modules: list[str], packages: list[str], path: list[str]) -> list[str]:
    """Import modules; return the folders of the packages. Afterwards only the standard library can be found."""
    folders: list[str] = []
    standard = [entry for entry in sys.path if entry and os.path.basename(entry) not in ("site-packages",)]
    sys.path[:] = [*standard, *path]
    for name in packages:
        module = importlib.import_module(name)
        folders += [os.path.realpath(folder) for folder in getattr(module, "__path__", ())]
        libraries = [folder + ".libs" for folder in folders]  # where wheels keep their shared libraries
        folders += [folder for folder in libraries if os.path.isdir(folder)]
    sys.path[:] = standard
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # Fills the import system's directory listings, which a child may not read itself.
    for name in ("no_such_module", "encodings.no_such_module"):
        importlib.util.find_spec(name)
    return folders


def confine(config: dict[str, Any], package_folders: list[str], control: socket.socket) -> Layers:
    """Enter the namespaces, change the user and prepare what each child puts on; missing layers are reported.

    Args:
        config: ``disabled`` names layers to leave out (for tests).
        package_folders: further trees that programs may read.
        control: kept open in the server only.
    """
    layers, disabled = Layers(), set(config["disabled"])
    needed = runtime.find(tuple(package_folders))
    layers.address_space = privileges.address_space_bytes()
    layers.report["seccomp"] = "disabled by the caller" if "seccomp" in disabled else seccomp.available()
    for name in ("namespaces", "landlock"):
        layers.report[name] = "disabled by the caller" if name in disabled else None
    uid = None if "uid" in disabled else privileges.unused_uid()
    inside = (os.getuid(), os.getgid()) if uid is None else (uid, uid)
    if layers.report["namespaces"] is None:
        layers.report["namespaces"] = namespaces.probe(*inside, needed)
    if layers.report["namespaces"] is None:
        namespaces.enter(*inside, needed, control.fileno())
        layers.in_namespace = layers.own_uid = True
        layers.report["own uid"] = None
    else:
        layers.report["own uid"] = _change_uid(uid, needed)
        layers.own_uid = layers.report["own uid"] is None
    layers.server_pid = os.getpid()
    folder = "/scratch" if layers.in_namespace else config["folder"]
    os.chdir(folder)
    _prepare_children(layers, needed, folder)
    return layers


def _change_uid(uid: int | None, needed: runtime.Runtime) -> str | None:
    """Become an unused user if this is root and the runtime stays readable; return None, or why that was not done."""
    if uid is None:
        return "not root, so the user id cannot change"
    reason = privileges.blocked_as(uid, needed.readable)
    if reason is None:
        privileges.become(uid)
    return reason


def _prepare_children(layers: Layers, needed: runtime.Runtime, folder: str) -> None:
    if layers.report["landlock"] is None:
        layers.readable = (*needed.readable, folder)
        try:
            layers.ruleset = landlock.Ruleset(layers.readable)
        except OSError as error:
            layers.report["landlock"] = f"the kernel offers none ({error.strerror})"
    machine = syscalls.this_machine()
    if layers.report["seccomp"] is None and machine is not None:
        paths = layers.in_namespace or layers.ruleset is not None
        layers.filters[False] = seccomp.Template(machine, paths=paths, scratch=False)
        layers.filters[True] = seccomp.Template(machine, paths=paths, scratch=paths)
    if layers.report["seccomp"] is None and not layers.filters:
        layers.report["seccomp"] = "no filter for this machine"


def _take_descriptors(targets: list[int], received: list[int], null: int) -> None:
    """Place received descriptors at their target numbers, /dev/null at what is left of 0 to 2, and close the rest."""
    sources = {
        target: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 256) for target, fd in zip(targets, received, strict=True)
    }
    for standard in (0, 1, 2):
        sources.setdefault(standard, fcntl.fcntl(null, fcntl.F_DUPFD_CLOEXEC, 256))
    for target, fd in sources.items():
        os.dup2(fd, target)
    highest = max(sources)
    for number in range(3, highest):
        if number not in sources:
            with contextlib.suppress(OSError):
                os.close(number)
    os.closerange(highest + 1, _MAX_DESCRIPTORS)


def _read_payload(fd: int) -> bytes:
    parts = []
    os.lseek(fd, 0, os.SEEK_SET)
    while part := os.read(fd, 1 << 20):
        parts.append(part)
    return b"".join(parts)


def _child(order: dict[str, Any], received: list[int], layers: Layers, null: int) -> NoReturn:
    """Put on every layer, then run what the order says; never returns."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != layers.server_pid:
        os._exit(0)
    os.setsid()
    payload = _read_payload(received[0])
    lifeline = max(order["targets"], default=2) + 1
    targets, sources = [*order["targets"], lifeline], [*received[2:], received[1]]
    if layers.ruleset is not None:
        targets.append(lifeline + 1)
        sources.append(layers.ruleset.fd)
        layers.ruleset.fd = lifeline + 1
    _take_descriptors(targets, sources, null)
    try:
        _confine_child(order["limits"], layers)
    except BaseException as error:
        os.write(lifeline, f"failed: {error!r}".encode()[:1000])
        os._exit(0)
    # All layers are on. The client takes an end before this message for a fault of ours, and learns the process id as
    # seen from outside from the credentials that come with it.
    os.write(lifeline, b"running")
    os.close(lifeline)
    kind = order["kind"]
    if kind in _KINDS:
        _KINDS[kind](payload.decode("utf-8", "surrogatepass"))
    elif kind == "judge":
        judge.run(json.loads(payload))
    elif kind == "canary":
        codec.send(candidate.CHANNEL, canary.run(json.loads(payload)))
    os._exit(0)


def _confine_child(limits: dict[str, int], layers: Layers) -> None:
    scratch = limits["scratch_bytes"] > 0
    if scratch:
        if not layers.in_namespace:
            raise PermissionError("a writable scratch folder needs namespaces")
        folder = namespaces.private_scratch(limits["scratch_bytes"], limits["scratch_files"])
        os.chdir(folder)
        if layers.ruleset is not None:
            # A rule for the folder below the mount does not hold for what is mounted there.
            os.close(layers.ruleset.fd)
            layers.ruleset = landlock.Ruleset(layers.readable, (folder,))
    privileges.set_limits(
        cpu_s=limits["cpu_s"],
        address_space=layers.address_space + limits["memory_bytes"],
        file_bytes=limits["scratch_bytes"],
        open_files=limits["open_files"],
        threads=512 if layers.own_uid else None,
    )
    privileges.drop_capabilities()
    if layers.ruleset is not None:
        layers.ruleset.enforce()
        os.close(layers.ruleset.fd)
    prctl(PR_SET_DUMPABLE, 0)
    if layers.filters:
        layers.filters[scratch].install(os.getpid())


class Server:
    """Takes orders, forks, reaps and reports, one thing at a time."""

    def __init__(self, control: socket.socket, layers: Layers) -> None:
        self._control = control
        self._layers = layers
        self._null = os.open("/dev/null", os.O_RDWR) if os.path.exists("/dev/null") else os.pipe()[1]
        self._lifelines: dict[int, tuple[socket.socket, int]] = {}  # descriptor: (lifeline, process)
        self._poll = select.poll()
        wake_read, wake_write = os.pipe()
        for fd in (wake_read, wake_write):
            os.set_blocking(fd, False)
        self._wake = wake_read
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._poll.register(control.fileno(), select.POLLIN)
        self._poll.register(wake_read, select.POLLIN)

    def run(self) -> None:
        """Serve until the client hangs up; then kill every child."""
        while True:
            ready = [fd for fd, _ in self._poll.poll()]
            # In this order: reaping closes descriptors, and an order may get one of the same number.
            for fd in ready:
                if fd in self._lifelines:
                    self._kill(fd)
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
                self._reap()
            if self._control.fileno() in ready and not self._take_order():
                return

    def _take_order(self) -> bool:
        fds = array.array("i")
        message, ancillary, _, _ = self._control.recvmsg(
            4096, socket.CMSG_SPACE(16 * fds.itemsize), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        if not message:
            for _, process in self._lifelines.values():
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGKILL)
            return False
        self._fork(json.loads(message), list(fds))
        return True

    def _fork(self, order: dict[str, Any], received: list[int]) -> None:
        try:
            process = os.fork()
        except OSError:
            process = -1
        if process == 0:
            try:
                _child(order, received, self._layers, self._null)
            finally:
                os._exit(72)
        for fd in (received[0], *received[2:]):
            os.close(fd)
        lifeline = socket.socket(fileno=received[1])
        if process < 0:
            lifeline.close()  # without a report: the client takes it for a fault of ours
            return
        self._lifelines[lifeline.fileno()] = (lifeline, process)
        self._poll.register(lifeline.fileno(), select.POLLIN)

    def _kill(self, fd: int) -> None:
        """Kill a child: its client asked for it or is gone. The report follows when it is reaped."""
        lifeline, process = self._lifelines[fd]
        self._poll.unregister(fd)
        with contextlib.suppress(OSError):
            lifeline.recv(16)  # closing with unread data would cost the client the report
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)

    def _reap(self) -> None:
        while True:
            try:
                process, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if process == 0:
                return
            for fd, (lifeline, owner) in list(self._lifelines.items()):
                if owner == process:
                    report = {"status": status, "cpu_s": usage.ru_utime + usage.ru_stime, "rss_kib": usage.ru_maxrss}
                    with contextlib.suppress(OSError):
                        lifeline.send(json.dumps(report).encode())
                    with contextlib.suppress(KeyError):
                        self._poll.unregister(fd)
                    lifeline.close()
                    del self._lifelines[fd]


def main() -> None:
    """Set up and serve on the socket whose descriptor the configuration names."""
    config = json.loads(sys.argv[1])
    control = socket.socket(fileno=config["control"])
    os.set_inheritable(config["control"], False)
    sys.argv[:] = ["program.py"]
    # Closing "all the rest" must be cheap, also where it has to be done one by one.
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_DESCRIPTORS, _MAX_DESCRIPTORS))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")  # the kernel should take a program before it takes the trainer
    os.environ.pop("LD_LIBRARY_PATH", None)  # the interpreter needed it to start; programs do not
    with contextlib.suppress(OSError):
        os.setsid()
    folders = preload(_PRELOADED.split(), config["packages"], config["package_path"])
    layers = confine(config, folders, control)
    if not (layers.in_namespace or layers.ruleset):
        preload(_PRELOADED_WITHOUT_OPEN.split(), [], [])
    gc.collect()
    gc.freeze()
    control.send(json.dumps({"layers": layers.report, "preloaded": len(sys.modules)}).encode())
    Server(control, layers).run()
