"""A device that a CPU plays: its own memory and threads, wherever there is a compiler for C++.

``PENSTOCK_TEST_DEVICE=played make test`` runs the tests on it. As on a GPU, tensors of two devices do not
mix, gloo cannot send its memory, numpy cannot see it, and autograd runs its nodes in threads of its own. Its
numbers are those of the CPU's kernels. It shows no races, which tests/gpu/streams.py plays, and it is slow.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
import types
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)
from torch.utils.cpp_extension import include_paths, library_paths

NAME = "played"
kernels: Callable[[], int] = int
"""The number of kernels that ran on it so far, here and in processes that were started from here."""


def register() -> None:
    """Compile the device, which takes half a minute the first time, and make it known to torch."""
    global kernels
    if torch._C._get_privateuse1_backend_name() == NAME:
        return
    # Shared with the processes that are started from here.
    shared = Path(tempfile.gettempdir(), f"penstock-played-{os.getpid()}")
    os.environ.setdefault("PENSTOCK_PLAYED_CALLS", str(shared))
    native = _compiled()
    kernels = native.calls
    rename_privateuse1_backend(NAME)
    module: Any = types.ModuleType(f"torch.{NAME}")
    for name in ("device_count", "current_device", "set_device"):
        setattr(module, name, getattr(native, name))
    module.set_device = lambda device: native.set_device(_index_of(device))
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.init = module.manual_seed = module.manual_seed_all = lambda *_: None
    # Its kernels are the CPU's, and draw from the CPU's generator.
    module.default_generators = [torch.default_generator] * native.device_count()
    module.get_rng_state = lambda *_: torch.get_rng_state()
    module.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    torch._register_device_module(NAME, module)
    generate_methods_for_privateuse1_backend()


def _compiled() -> Any:
    """The extension, compiled once for each text of it and version of torch."""
    name, source = "penstock_played", Path(__file__).with_name("device.cpp")
    text = source.read_text() + torch.__version__ + sys.version
    folder = Path(tempfile.gettempdir(), f"{name}-{sha256(text.encode()).hexdigest()[:16]}")
    library = folder / f"{name}.so"
    if not library.exists():
        folder.mkdir(exist_ok=True)
        # Several processes may compile at a time; each puts a whole file in place.
        with tempfile.TemporaryDirectory(dir=folder) as private:
            half = Path(private, library.name)
            includes = [*include_paths(), sysconfig.get_paths()["include"]]
            command = ["c++", "-std=c++20", "-O0", "-fPIC", "-shared", str(source), "-o", str(half)]
            command += [f"-I{path}" for path in includes] + [
                f"-L{path}" for path in library_paths()
            ]
            command += ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
            command += [f"-DTORCH_EXTENSION_NAME={name}", "-DTORCH_API_INCLUDE_EXTENSION_H"]
            subprocess.run(command, check=True)
            half.replace(library)
    spec: Any = importlib.util.spec_from_file_location(name, library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _index_of(device: Any) -> int:
    return device if isinstance(device, int) else torch.device(device).index or 0
