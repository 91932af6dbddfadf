"""Attacks as programs: each is bounded, and aims only at what the stage of the test made for it.

A program prints GOT-IN when its act has succeeded. ``$name`` is filled in from the stage (see ``stage.py``): a folder with
a secret file, a victim process, listeners. ``needs`` says when the act works at all without a sandbox: "" always,
"root", or "maybe" where the kernel may lack the call (its positive control is then reported and not required).
"""

# ruff: noqa: E501  # programs as data
from __future__ import annotations

from typing import NamedTuple

from trl_grpo_ext.rewards.sandbox.guest import syscalls


class Attack(NamedTuple):
    """One attack."""

    name: str
    source: str
    needs: str = ""


PREAMBLE = """
import ctypes, os, sys, socket, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def sc(number, *arguments):
    packed = [a if isinstance(a, (bytes, ctypes.Array, ctypes.Structure)) or a is None else ctypes.c_long(a) for a in arguments]
    result = libc.syscall(ctypes.c_long(number), *packed)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
def got(*what):
    os.write(1, ("GOT-IN " + " ".join(map(str, what)) + "\\n").encode())
folder, secret_file, victim = "$folder", "$secret_file", $victim
"""

_FILES = {
    "read a secret file": "got(open(secret_file).read())",
    "read a system file": "got(open('/etc/passwd').read()[:4])",
    "list a folder": "got(os.listdir(folder))",
    "list /etc": "assert 'passwd' in os.listdir('/etc'); got()",
    "list the cgroup file system": "got(os.listdir('/sys/fs/cgroup')[:3])",
    "write into a folder": "open(folder + '/new', 'w').write('x'); got()",
    "write into the temporary folder": "open('/tmp/$word', 'w').write('x'); os.unlink('/tmp/$word'); got()",
    "write into shared memory": "open('/dev/shm/$word', 'w').write('x'); os.unlink('/dev/shm/$word'); got()",
    "write into the working folder": "open('here-$word', 'w').write('x'); os.unlink('here-$word'); got()",
    "append to a file": "open(folder + '/log', 'a').write('x'); got()",
    "truncate a file by path": "os.truncate(folder + '/log', 0); got()",
    "delete a file": "os.unlink(folder + '/log'); got()",
    "rename a file": "os.rename(folder + '/log', folder + '/moved'); got()",
    "change a file's mode": "os.chmod(folder + '/log', 0o600); got()",
    "change a file's dates": "os.utime(folder + '/log', (1, 1)); got()",
    "set an extended attribute": "os.setxattr(folder + '/log', 'user.x', b'1'); got()",
    "make a folder": "os.mkdir(folder + '/sub'); got()",
    "make a fifo": "os.mkfifo(folder + '/fifo'); got()",
    "make a hard link": "os.link(secret_file, folder + '/link'); got()",
    "read through a symbolic link of its own": """
os.symlink(secret_file, 'link-$word')
try: got(open('link-$word').read())
finally: os.unlink('link-$word')
""",
    "race links in the working folder": """
for _ in range(200):
    try:
        os.symlink(secret_file, 'race-$word')
        got(open('race-$word').read())
        break
    except PermissionError: pass
    finally:
        try: os.unlink('race-$word')
        except OSError: pass
""",
    "climb out of the working folder": "got(open('../' * 30 + secret_file.lstrip('/')).read())",
    "read by a raw openat": """
fd = sc($nr_openat, -100, secret_file.encode(), 0, 0)
got(os.read(fd, 100))
""",
    "read by openat2": """
how = (ctypes.c_uint64 * 3)(0, 0, 0)
fd = sc(437, -100, secret_file.encode(), how, 24)
got(os.read(fd, 100))
""",
    "read through an O_PATH descriptor": """
fd = os.open(folder, os.O_PATH)
got(os.read(os.open('secret', os.O_RDONLY, dir_fd=fd), 100))
""",
    "map a secret file": """
import mmap
with open(secret_file, 'rb') as file: got(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)[:8])
""",
    "watch a folder": """
fd = sc($nr_inotify, 0)
sc($nr_inotify_add, fd, folder.encode(), 2)
got()
""",
}

_PROC = {
    "read another process's environment": "got(open(f'/proc/{victim}/environ').read())",
    "read the parent's environment": "got(open(f'/proc/{os.getppid()}/environ').read()[:9])",
    "see the trainer's environment": "assert '$secret' in str(dict(os.environ)); got()",
    "find the trainer's environment in its own memory": """
blob = open('/proc/self/environ', 'rb').read()
assert b'$secret' in blob; got()
""",
    "list processes": "assert str(victim) in os.listdir('/proc'); got()",
    "read another process's command line": "got(open(f'/proc/{victim}/cmdline').read())",
    "read another process's memory": """
class Vec(ctypes.Structure): _fields_ = [('base', ctypes.c_void_p), ('len', ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(16)
here, there = Vec(ctypes.addressof(buffer), 16), Vec($victim_address, 16)
n = sc($nr_process_vm_readv, victim, ctypes.addressof(here), 1, ctypes.addressof(there), 1, 0)
got(buffer.raw)
""",
    "write another process's memory": """
class Vec(ctypes.Structure): _fields_ = [('base', ctypes.c_void_p), ('len', ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(b'overwritten')
here, there = Vec(ctypes.addressof(buffer), 8), Vec($victim_address, 8)
sc($nr_process_vm_writev, victim, ctypes.addressof(here), 1, ctypes.addressof(there), 1, 0); got()
""",
    "trace another process": "sc($nr_ptrace, 0x4206, victim, 0, 0); got(); sc($nr_ptrace, 17, victim, 0, 0)",
    "take a descriptor of another process": "fd = sc(434, victim, 0); got(sc(438, fd, 0, 0))",
}

_NETWORK = {
    "connect over TCP": "socket.create_connection(('127.0.0.1', $tcp_port), 2).send(b'x'); got()",
    "send over UDP": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', $udp_port)); got()",
    "connect to an abstract unix socket": "socket.socket(socket.AF_UNIX).connect('\\0$abstract'); got()",
    "connect to a unix socket": "socket.socket(socket.AF_UNIX).connect(folder + '/socket'); got()",
    "open a netlink socket": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).bind((0, 0)); got()",
    "listen on a port": "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); got()",
    "open an IPv6 socket": "socket.socket(socket.AF_INET6, socket.SOCK_DGRAM); got()",
    "open a packet socket": "socket.socket(17, socket.SOCK_RAW); got()",
    "resolve a name": "socket.getaddrinfo('localhost', 80); socket.socket(socket.AF_INET); got()",
}

_PROCESSES = {
    "fork": """
for _ in range(20):
    if os.fork() == 0: os._exit(0)
    os.wait()
got()
""",
    "fork by a raw clone": """
child = sc($nr_clone, 17, 0, 0, 0, 0)
if child == 0: os._exit(0)
got()
""",
    "fork by clone3": """
args = (ctypes.c_uint64 * 8)(0, 0, 0, 0, 17, 0, 0, 0)
child = sc(435, args, 64)
if child == 0: os._exit(0)
got()
""",
    "run a shell": "import subprocess; got(subprocess.check_output('echo hello', shell=True))",
    "become another program": "os.execv('/bin/echo', ['echo', 'GOT-IN'])",
    "spawn by posix_spawn": "os.posix_spawn('/bin/true', ['true'], {}); got()",
    "leave an orphan behind": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3): os.close(fd)
        open(folder + '/orphan', 'w').write('x')
        time.sleep(2)
    os._exit(0)
os.wait(); time.sleep(0.3)
got()
""",
    "leave an orphan that holds the output": """
if os.fork() == 0:
    os.setsid(); time.sleep(1); got('late'); os._exit(0)
""",
    "start 300 threads": """
import threading
threading.stack_size(65536)
gate = threading.Event()
alive = [threading.Thread(target=gate.wait, daemon=True) for _ in range(300)]
for thread in alive: thread.start()
time.sleep(0.3)
if threading.active_count() > 300: got()
gate.set()
""",
    "run a file made in memory": """
fd = sc($nr_memfd_create, b'x', 0)
os.write(fd, open('/bin/echo', 'rb').read())
os.execve(fd, ['echo', 'GOT-IN'], {})
""",
    "make a namespace": "sc($nr_unshare, 0x10000000); got()",
    "make a namespace for a thread": """
stack = ctypes.create_string_buffer(65536)
sc($nr_clone, 0x10000000 | 17, 0, 0, 0, 0) or os._exit(0)
got()
""",
    "enter a namespace": """
fd = os.open(f'/proc/{victim}/ns/user', os.O_RDONLY); got()
""",
}

_RESOURCES = {
    "allocate a gigabyte": "x = bytearray(1 << 30); got()",
    "map a shared gigabyte": "import mmap; m = mmap.mmap(-1, 1 << 30); got()",
    "grow a file in memory": "fd = os.memfd_create('x'); os.ftruncate(fd, 1 << 30); got()",
    "write a large file": """
with open('large-$word', 'wb') as file:
    for _ in range(16): file.write(b'x' * (1 << 20))
os.unlink('large-$word'); got()
""",
    "write many files": """
for i in range(50): open(f'many-$word-{i}', 'w').write('x' * 1000)
for i in range(50): os.unlink(f'many-$word-{i}')
got()
""",
    "flood standard output": "[os.write(1, b'y' * 65536) for _ in range(512)]; got()",
    "flood standard error": "[os.write(2, b'y' * 65536) for _ in range(512)]; got()",
    "hoard descriptors": "fds = [os.pipe() for _ in range(200)]; got(len(fds))",
    "loop for ever": "end = time.process_time() + 2\nwhile time.process_time() < end: pass\ngot()",
    "loop for ever ignoring signals": """
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
end = time.process_time() + 2
while time.process_time() < end: pass
got()
""",
    "loop inside C": "sum(range(300_000_000)); got()",
    "sleep": "time.sleep(5); got()",
    "loop in four threads": """
import threading
def burn():
    end = time.process_time() + 2
    while time.process_time() < end: pass
alive = [threading.Thread(target=burn) for _ in range(4)]
[t.start() for t in alive]; [t.join() for t in alive]; got()
""",
    "lift its own limits": """
import resource
for name in ('RLIMIT_AS', 'RLIMIT_CPU', 'RLIMIT_FSIZE', 'RLIMIT_NOFILE'):
    try: resource.setrlimit(getattr(resource, name), (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except (ValueError, OSError): pass
x = bytearray(1 << 30)
end = time.process_time() + 2
while time.process_time() < end: pass
got()
""",
    "lock memory": "m = ctypes.create_string_buffer(65536); assert libc.mlock(m, 65536) == 0; got()",
    "make shared memory that stays": "i = sc($nr_shmget, 0, 4096, 0o1600); got(i); libc.shmctl(i, 0, None)",
    "make a semaphore that stays": "i = sc($nr_semget, 0, 1, 0o1600); got(i); sc($nr_semctl, i, 0, 0)",
    "make a message queue that stays": "i = sc($nr_msgget, 0, 0o1600); got(i); sc($nr_msgctl, i, 0, 0)",
}

_SIGNALS = {
    "kill another process": "os.kill(victim, 9); got()",
    "kill another process's group": "os.killpg(victim, 9); got()",
    "kill by tkill": "sc($nr_tkill, victim, 9); got()",
    "kill by tgkill": "sc($nr_tgkill, victim, victim, 9); got()",
    "kill by a queued signal": """
info = ctypes.create_string_buffer(128)
ctypes.c_int.from_buffer(info, 0).value = 9
ctypes.c_int.from_buffer(info, 8).value = -1
sc($nr_rt_sigqueueinfo, victim, 9, info); got()
""",
    "kill through a process descriptor": "fd = os.pidfd_open(victim); sc(424, fd, 9, 0, 0); got()",
    "kill through a pipe's owner": """
import fcntl
r, w = os.pipe()
fcntl.fcntl(r, fcntl.F_SETOWN, victim)
fcntl.fcntl(r, 10, 9)
fcntl.fcntl(r, fcntl.F_SETFL, fcntl.fcntl(r, fcntl.F_GETFL) | os.O_ASYNC)
os.write(w, b'x'); time.sleep(0.2); got()
""",
    "signal the parent": "import signal; os.kill(os.getppid(), signal.SIGCONT); got()",
    "slow another process down (scheduler)": "os.sched_setscheduler(victim, os.SCHED_IDLE, os.sched_param(0)); got()",
    "slow another process down (priority)": "os.setpriority(os.PRIO_PROCESS, victim, 19); got()",
    "bind another process to a processor": "os.sched_setaffinity(victim, {0}); got()",
    "change another process's input/output priority": "sc($nr_ioprio_set, 1, victim, 3 << 13); got()",
    "change another process's limits": """
import resource
resource.prlimit(victim, resource.RLIMIT_CORE, (0, 0)); got()
""",
}

_KERNEL = {
    "make an io_uring": "p = ctypes.create_string_buffer(120); got(sc(425, 4, p))",
    "use the keyring": "sc($nr_add_key, b'user', b'$word', b'x', 1, -2); got()",
    "handle page faults": "got(sc($nr_userfaultfd, 1))",
    "splice": "r, w = os.pipe(); sc($nr_vmsplice, w, 0, 0, 0); got()",
    "make a timer descriptor": "got(sc($nr_timerfd, 1, 0))",
    "change its personality": "sc($nr_personality, 0x0040000); got()",
    "install a filter of its own": "sc($nr_seccomp, 2, 0, (ctypes.c_uint32 * 1)(0x7FFF0000)); got()",
    "compare kernel objects": "sc($nr_kcmp, os.getpid(), victim, 0, 1, 1); got()",
}

_INHERITED = {
    "find an inherited descriptor": """
import fcntl, select
for fd in range(3, 1024):
    try:
        if select.select([fd], [], [], 0)[0] and b'$secret' in os.read(fd, 100): got()
    except (OSError, ValueError): pass
""",
}

_ROOT = {
    "use the BPF call": "a = ctypes.create_string_buffer(128); ctypes.memmove(a, bytes([2,0,0,0,4,0,0,0,4,0,0,0,1]), 13); got(sc($nr_bpf, 0, a, 72))",
    "open a raw device": "got(len(open('/dev/$disk', 'rb').read(16)))",
    "raise its own priority": "os.setpriority(os.PRIO_PROCESS, 0, -5); got()",
    "become a real-time process": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)); got()",
    "read the kernel's log": "b = ctypes.create_string_buffer(4096); got(sc($nr_syslog, 3, b, 4096))",
    "open a file by its handle": """
handle = ctypes.create_string_buffer(140)
ctypes.c_uint.from_buffer(handle, 0).value = 128
mount = ctypes.c_int()
sc($nr_name_to_handle, -100, secret_file.encode(), handle, ctypes.addressof(mount), 0)
root = os.open('/', os.O_RDONLY)
got(os.read(sc($nr_open_by_handle, root, handle, 0), 100))
""",
    "change its root": "os.chroot('/tmp'); got()",
    "become another user": "os.setuid(12345); got()",
}

# Machine code that makes a call through a door the filter's numbers do not cover; x86-64 only.
_FOREIGN_CALLS = {
    "call through the 32-bit door": """
import mmap
code = b'\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3'  # mov eax, 20 (getpid); int 0x80; ret
page = mmap.mmap(-1, 4096, prot=7)
page.write(code)
call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
result = call()
if result > 0: got(result)
""",
    "call through the x32 door": "got(sc(0x40000000 | 39))",
}

_NUMBERS = {
    "inotify": (253, 26),
    "inotify_add": (254, 27),
    "process_vm_writev": (311, 271),
    "semget": (64, 190),
    "semctl": (66, 191),
    "msgget": (68, 186),
    "msgctl": (71, 187),
    "ioprio_set": (251, 30),
    "add_key": (248, 217),
    "vmsplice": (278, 75),
    "timerfd": (283, 85),
    "personality": (135, 92),
    "kcmp": (312, 272),
    "syslog": (103, 116),
    "name_to_handle": (303, 264),
    "open_by_handle": (304, 265),
}


def numbers() -> dict[str, int]:
    """Return {"nr_<call>": its number on this machine}."""
    machine = syscalls.this_machine()
    assert machine is not None
    known = {**syscalls.NUMBERS, **_NUMBERS}
    return {f"nr_{name}": pair[machine.column] for name, pair in known.items() if pair[machine.column] is not None}


_MAYBE = {
    "set an extended attribute",
    "map a shared gigabyte",
    "use the keyring",
    "handle page faults",
    "compare kernel objects",
    "make an io_uring",
    "list the cgroup file system",
    "take a descriptor of another process",
    "open an IPv6 socket",
    "call through the 32-bit door",
    "call through the x32 door",
    "make a namespace",
    "make a namespace for a thread",
    "use the BPF call",
    "open a raw device",
    "become a real-time process",
    "read the kernel's log",
}
_NEED_ROOT = {*_ROOT, "open a packet socket"}


def all_attacks() -> list[Attack]:
    """Return every attack that this machine's architecture knows."""
    groups = [_FILES, _PROC, _NETWORK, _PROCESSES, _RESOURCES, _SIGNALS, _KERNEL, _INHERITED, _ROOT]
    if syscalls.this_machine() is syscalls.X86_64:
        groups.append(_FOREIGN_CALLS)
    found = []
    for group in groups:
        for name, source in group.items():
            needs = "maybe" if name in _MAYBE else "root" if name in _NEED_ROOT else ""
            found.append(Attack(name, PREAMBLE + source, needs))
    return found
