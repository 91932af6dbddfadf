"""Namespaces: a root of its own with the runtime read-only and nothing else, no network, no foreign process.

An ordinary user gets them through a user namespace. Docker's default profile, most Kubernetes pods and Ubuntu 24.04
(AppArmor) refuse that; the server then goes on without, and says so.
"""

from __future__ import annotations

import ctypes
import os
import signal

from . import syscalls
from .libc import PR_SET_KEEPCAPS, PR_SET_PDEATHSIG, check, libc, prctl, raw_syscall
from .privileges import raise_capabilities
from .runtime import Runtime

_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
)
_MNT_DETACH = 2
_INSIDE_ID = 65534
# statvfs flag: mount flag. A user namespace must repeat the flags that it found (they are locked).
_LOCKED = {1: 1, 2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    check(
        libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]),
        f"mount {source} on {target}",
    )


def _mirror_links(root: str) -> None:
    """Repeat links such as /lib -> usr/lib, through which libraries are found."""
    for name in ("lib", "lib64", "lib32", "usr/lib64"):
        source = "/" + name
        target = os.path.join(root, name)
        if os.path.islink(source) and not os.path.lexists(target):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.symlink(os.readlink(source), target)


def _bind(fd: int, target: str) -> None:
    """Show the file or tree behind a descriptor at ``target``, read-only."""
    source = f"/proc/self/fd/{fd}"
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w"):
            pass
    _mount(source, target, None, _MS_BIND | _MS_REC)
    found = os.statvfs(target).f_flag
    kept = sum(flag for bit, flag in _LOCKED.items() if found & bit)
    _mount("none", target, None, kept | _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)


def _new_root(runtime: Runtime) -> None:
    """Make a tmpfs with the runtime in it the root of this mount namespace, and let go of the old one."""
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    # Opened first: what lies under the folder that becomes the root would be hidden.
    sources = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in runtime.roots if os.path.exists(path)}
    root = "/tmp" if os.path.isdir("/tmp") else "/dev"
    _mount("sandbox", root, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "size=1m,nr_inodes=4096,mode=0755")
    _mirror_links(root)
    for path, fd in sources.items():
        _bind(fd, root + path)
        os.close(fd)
    for path in runtime.hidden:
        _mount("hidden", root + path, "tmpfs", _MS_RDONLY | _MS_NOSUID | _MS_NODEV, "size=4k,mode=0755")
    os.makedirs(os.path.join(root, "scratch"), exist_ok=True)
    os.chdir(root)
    machine = syscalls.this_machine()
    assert machine is not None
    dot = ctypes.create_string_buffer(b".")
    # The old root ends up stacked on the new one and is detached: no directory for it is needed.
    raw_syscall(syscalls.number("pivot_root", machine) or 0, ctypes.addressof(dot), ctypes.addressof(dot))
    check(libc.umount2(b".", _MNT_DETACH), "umount of the old root")
    os.chdir("/")
    _mount("none", "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


def _write_maps(process: int, uid: int, gid: int, *, as_root: bool) -> None:
    """Give a process's new user namespace its ids: one, or root's besides while the root file system is laid."""
    keep_root = "0 0 1\n" if as_root else ""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{keep_root}{_INSIDE_ID} {uid} 1\n"),
        ("gid_map", f"{keep_root}{_INSIDE_ID} {gid} 1\n"),
    ):
        with open(f"/proc/{process}/{name}", "w") as file:
            file.write(text)


def _unshare(uid: int, gid: int) -> None:
    """Leave all namespaces; root has a helper outside give it the ids, because only from there it may."""
    as_root = os.geteuid() == 0
    me = os.getpid()
    done_read, done_write = os.pipe()
    helper = 0
    if as_root:
        os.setgroups([])
        go_read, go_write = os.pipe()
        helper = os.fork()
        if helper == 0:
            try:
                os.read(go_read, 1)
                _write_maps(me, uid, gid, as_root=True)
                os.write(done_write, b"k")
            finally:
                os._exit(0)
    try:
        check(libc.unshare(_NEWUSER | _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS | _NEWCGROUP), "unshare")
    finally:
        if as_root:
            os.write(go_write, b"g")
            os.waitpid(helper, 0)
            os.close(go_read)
            os.close(go_write)
    if not as_root:
        _write_maps(me, uid, gid, as_root=False)
    os.close(done_write)
    mapped = not as_root or os.read(done_read, 1) == b"k"
    os.close(done_read)
    if not mapped:
        raise PermissionError("the user namespace got no user ids")


def _set_up(runtime: Runtime) -> None:
    """As process 1: lay the root and become the one ordinary user there is, keeping the rights inside the namespace."""
    _new_root(runtime)
    prctl(PR_SET_KEEPCAPS, 1)
    os.setresgid(_INSIDE_ID, _INSIDE_ID, _INSIDE_ID)
    os.setresuid(_INSIDE_ID, _INSIDE_ID, _INSIDE_ID)
    raise_capabilities()


def probe(uid: int, gid: int, runtime: Runtime) -> str | None:
    """Return None if the whole set-up works here, else the reason why not; done in a child that then ends."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read_end)
            _unshare(uid, gid)
            grandchild = os.fork()
            if grandchild == 0:
                _set_up(runtime)
                os._exit(0)
            if os.waitpid(grandchild, 0)[1] != 0:
                os.write(write_end, b"the first process of the namespace could not set up its root")
        except BaseException as error:
            os.write(write_end, str(error).encode()[:500])
        finally:
            os._exit(1)
    os.close(write_end)
    reason = b""
    while chunk := os.read(read_end, 4096):
        reason += chunk
    os.close(read_end)
    os.waitpid(child, 0)
    return reason.decode(errors="replace") or None


def enter(uid: int, gid: int, runtime: Runtime, control: int) -> None:
    """Continue as process 1 of fresh namespaces; the calling process stays behind and only waits for it.

    Args:
        uid: outside user id of everything inside; root may name any, others only their own.
        gid: outside group id, likewise.
        runtime: what the new root shows.
        control: a descriptor that the waiting process must close, so that its other end sees the server's end.

    Raises:
        OSError: if a step is refused; :func:`probe` said before whether it would be.
    """
    _unshare(uid, gid)
    child = os.fork()
    if child:
        os.close(control)
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _set_up(runtime)


def private_scratch(size_bytes: int, max_files: int) -> str:
    """Mount a small tmpfs that only this process sees and that ends with it; return its path.

    Raises:
        OSError: without the rights of the namespace.
    """
    check(libc.unshare(_NEWNS), "unshare")
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    _mount("scratch", "/scratch", "tmpfs", flags, f"size={size_bytes},nr_inodes={max_files},mode=0700")
    return "/scratch"
