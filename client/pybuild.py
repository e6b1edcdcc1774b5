"""PEP 517 build backend: compiles the C library and packs it into a wheel with the Python package.

    pip install ./client

It needs a C compiler ($CC, else gcc) and downloads nothing. The wheel runs on every Python that the
package supports, because the package calls the library through ctypes.

$LONGHAUL_WHEEL_LIBRARY: path of a library that is built already; nothing is compiled then.
$LONGHAUL_WHEEL_PLATFORM: platform tag of the wheel, such as "manylinux_2_27_x86_64".
"""

from __future__ import annotations

import base64
import hashlib
import os
import pathlib
import platform
import re
import shlex
import subprocess
import tempfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
PACKAGE = HERE / "python" / "longhaul"
FLAGS = "-std=c99 -O2 -fPIC -shared -pthread -fvisibility=hidden -DLONGHAUL_BUILDING -Wl,--no-undefined -Wl,--as-needed"
SONAME = "liblonghaul.so.0"


def _version() -> str:
    found = re.search(r'__version__ = "([^"]+)"', (PACKAGE / "_version.py").read_text())
    if found is None:
        raise RuntimeError(f"no version in {PACKAGE / '_version.py'}")
    return found[1]


def _metadata() -> bytes:
    lines = [
        "Metadata-Version: 2.1",
        "Name: longhaul",
        f"Version: {_version()}",
        "Summary: One training run across machines that come and go",
        "License: Apache-2.0",
        "Requires-Python: >=3.10",
    ]
    return ("\n".join(lines) + "\n").encode()


def _tag() -> str:
    return "py3-none-" + (os.environ.get("LONGHAUL_WHEEL_PLATFORM") or "linux_" + platform.machine())


def _compile(target: pathlib.Path) -> None:
    subprocess.check_call(
        [
            *shlex.split(os.environ.get("CC") or "gcc"),
            *FLAGS.split(),
            f"-I{HERE.parent}",  # for includes such as "proto/wire/ipc.h"
            f"-Wl,-soname,{SONAME}",
            f"-Wl,--version-script={HERE / 'longhaul.lds'}",
            "-o",
            str(target),
            *sorted(str(source) for source in (HERE / "src").glob("*.c")),
        ]
    )


def _write(path: pathlib.Path, files: dict[str, bytes]) -> None:
    record = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in sorted(files.items()):
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))  # the same input gives the same wheel
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o755 if name.endswith(".so") else 0o644) << 16
            wheel.writestr(entry, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(data)}\n")
        name = next(name for name in files if name.endswith("/WHEEL")).replace("/WHEEL", "/RECORD")
        wheel.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), "".join(record) + f"{name},,\n")


def build_wheel(wheel_directory: str, config_settings: object = None, metadata_directory: str | None = None) -> str:
    info = f"longhaul-{_version()}.dist-info"
    files = {
        "longhaul/" + str(path.relative_to(PACKAGE)): path.read_bytes()
        for path in PACKAGE.rglob("*")
        if path.suffix in (".py", ".typed")
    }
    with tempfile.TemporaryDirectory() as directory:
        library = pathlib.Path(os.environ.get("LONGHAUL_WHEEL_LIBRARY") or pathlib.Path(directory) / "liblonghaul.so")
        if library.parent == pathlib.Path(directory):
            _compile(library)
        files["longhaul/liblonghaul.so"] = library.read_bytes()
    files[f"{info}/METADATA"] = _metadata()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: pybuild\nRoot-Is-Purelib: false\nTag: {_tag()}\n".encode()
    name = f"longhaul-{_version()}-{_tag()}.whl"
    _write(pathlib.Path(wheel_directory) / name, files)
    return name
