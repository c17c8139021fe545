"""Lets polyfed run on Linux as it would on Windows or macOS: `python tests/other_systems.py windows run --rounds 2`

What those systems lack is taken away, and what they refuse is refused: on Windows names that its disks do not have, a rename
onto a file that exists, a rename or removal of a file that is open, a folder that is opened as a file, a file flushed
through a descriptor that only reads, modes of files. Their paths, encodings of file names and processes are not imitated.
"""

import errno
import importlib
import multiprocessing
import os
import re
import shutil
import signal
import stat
import sys
from pathlib import Path

_WINDOWS_LACKS = {
    os: (
        "fork", "forkpty", "register_at_fork", "getuid", "geteuid", "getgid", "getegid", "getpgid", "setsid", "killpg",
        "statvfs", "fstatvfs", "sysconf", "sched_getaffinity", "getloadavg", "nice", "mkfifo", "chown", "fchmod", "uname",
        "pread", "pwrite", "wait", "WNOHANG", "O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK", "O_DIRECTORY", "O_SYNC",
    ),
    signal: ("SIGKILL", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGPIPE", "setitimer", "alarm", "pause"),
}  # fmt: skip
_MACOS_LACKS = {os: ("sched_getaffinity",)}
_POSIX_MODULES = ("fcntl", "pwd", "grp", "resource", "termios", "tty", "pty", "posix", "syslog", "spwd", "crypt")
_IMPORTED_FIRST = (  # they look at the system when they are imported
    "multiprocessing.popen_spawn_posix", "multiprocessing.resource_tracker", "multiprocessing.sharedctypes",
    "matplotlib.pyplot", "pyarrow.parquet", "rich.progress", "scipy.stats", "sklearn.ensemble", "sklearn.linear_model",
    "torch._dynamo",
)  # fmt: skip
_NO_NAME = re.compile(r'[<>:"|?*\\\x00-\x1f]|[ .]$|^(con|prn|aux|nul|com\d|lpt\d)(\..*)?$', re.I)


def imitate(system):
    """Takes away what "windows" or "macos" does not have, once the packages that polyfed uses are imported."""
    for name in _IMPORTED_FIRST:
        importlib.import_module(name)
    sys.platform = {"windows": "win32", "macos": "darwin"}[system]
    multiprocessing.set_start_method("spawn")
    for module, names in (_WINDOWS_LACKS if system == "windows" else _MACOS_LACKS).items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    if system == "windows":
        for name in _POSIX_MODULES:
            sys.modules[name] = None
        del multiprocessing.context._concrete_contexts["fork"], multiprocessing.context._concrete_contexts["forkserver"]
        multiprocessing.heap.Arena._choose_dir = lambda self, size: multiprocessing.util.get_temp_dir()  # statvfs
        _imitate_disk()


def _imitate_disk():
    own = {
        name: getattr(os, name) for name in ("open", "mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "kill")
    }
    os.umask(0)
    shutil._use_fd_functions = False

    def check_name(path):
        if not isinstance(path, int):
            for part in Path(os.fsdecode(path)).parts[1:]:
                if _NO_NAME.search(part):
                    raise OSError(errno.EINVAL, "Invalid argument", str(path))

    def check_closed(path):
        path = os.path.realpath(path)
        mapped = Path("/proc/self/maps").read_text().splitlines()
        used = {line.split(maxsplit=5)[5] for line in mapped if "/" in line}
        for number in os.listdir("/proc/self/fd"):
            try:
                used.add(os.readlink(f"/proc/self/fd/{number}"))
            except FileNotFoundError:
                continue
        if "/pymp-" in path:
            return  # shared memory, which has no file on Windows
        if any(name == path or name.startswith(f"{path}/") for name in used):
            raise PermissionError(errno.EACCES, "The process cannot access the file because it is being used", path)

    def open_(path, flags, mode=0o777, **more):
        check_name(path)
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return own["open"](path, flags, 0o666, **more)

    def mkdir(path, mode=0o777, **more):
        check_name(path)
        own["mkdir"](path, 0o777, **more)

    def rename(source, target, **more):
        check_name(target)
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "Cannot create a file when that file already exists", str(target))
        check_closed(source)
        own["rename"](source, target, **more)

    def replace(source, target, **more):
        check_name(target)
        if os.path.isdir(target):
            raise PermissionError(errno.EACCES, "Access is denied", str(target))
        check_closed(source)
        check_closed(target)
        own["replace"](source, target, **more)

    def unlink(path, **more):
        check_closed(path)
        own["unlink"](path, **more)

    def fsync(descriptor):
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        flags = re.search(r"^flags:\s*(\d+)", Path(f"/proc/self/fdinfo/{number}").read_text(), re.M)[1]
        if int(flags, 8) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        own["fsync"](descriptor)

    def kill(process_id, number):
        assert number, "os.kill(process, 0) sends Ctrl-C on Windows"
        own["kill"](process_id, number)

    os.open, os.mkdir, os.rename, os.replace, os.unlink, os.remove = open_, mkdir, rename, replace, unlink, unlink
    os.fsync, os.kill, os.chmod = fsync, kill, lambda path, mode, **more: None
    assert stat.S_IMODE(os.stat(sys.executable).st_mode)


if __name__ == "__main__":
    imitate(sys.argv[1])
    from polyfed.cli.main import entry

    for command in " ".join(sys.argv[2:]).split(" + "):  # several, since the imports take longest
        print(f"$ polyfed {command}", flush=True)
        sys.argv[1:] = command.split()
        try:
            entry()
        except SystemExit as end:
            if end.code:
                raise
