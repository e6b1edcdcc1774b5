"""Makes the backend "longhaul" known to torch.distributed. Two entry points of the package call this module.

`import torch` loads it, so it imports nothing at its top, and longhaul only when a program makes a process group.
"""

from __future__ import annotations

from typing import Any

NAME = "longhaul"


def at_import() -> None:
    """For the entry point torch.backends, which `import torch` calls: registers the backend on torch 2.13.

    Newer versions find it by the entry point torch.distributed.backends when a program names it.
    """
    import torch

    if _version(torch.__version__) < (2, 14):
        register()


def register() -> None:
    """For the entry point torch.distributed.backends, and for `import longhaul.torch`. A second call does nothing."""
    import torch.distributed as dist

    if not dist.is_available() or NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def _create(backend_options: Any, pg_options: Any = None) -> Any:
    from longhaul.torch._process_group import create

    return create(backend_options, pg_options)
