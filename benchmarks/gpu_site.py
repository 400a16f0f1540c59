"""Environment of an SGLang server whose packages lie in a folder instead of an environment."""

from __future__ import annotations

import glob
import os
import shutil
import sys
import tempfile
from pathlib import Path

from glm_lora import __version__

ENTRY_POINTS = "[sglang.srt.plugins]\nglm_lora = glm_lora.rollout.sglang_plugin:register\n"


def announce_plugin(site: Path) -> None:
    """Write the metadata by which SGLang finds the plugin, as an installation would."""
    folder = site / f"glm_lora-{__version__}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: glm-lora\nVersion: {__version__}\n"
    (folder / "METADATA").write_text(metadata, encoding="utf-8")
    (folder / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")


def site_env(site: Path, root: Path) -> dict[str, str]:
    """Variables for a server that finds SGLang in ``site`` and this package in ``root``."""
    announce_plugin(site)
    home = cuda_home()
    env = {
        "PYTHONPATH": f"{site}:{root}",
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }
    path = [os.path.dirname(sys.executable), os.environ.get("PATH", "")]
    if home:
        env["CUDA_HOME"] = str(home)
        path.insert(0, f"{home}/bin")
    env["PATH"] = ":".join(path)
    return env


def cuda_home() -> Path | None:
    """A CUDA root with compiler, headers and runtime; made of links where none is complete."""
    roots = _cuda_roots()
    for root in roots:
        if (root / "lib64/libcudart.so").exists() and (root / "bin/cuobjdump").exists():
            return root
    if not roots:
        return None
    made = Path(tempfile.gettempdir()) / "glm-lora-cuda"
    shutil.rmtree(made, ignore_errors=True)
    (made / "bin").mkdir(parents=True)
    (made / "lib64").mkdir()
    root = roots[0]
    for entry in root.iterdir():
        if entry.name not in ("bin", "lib", "lib64"):
            (made / entry.name).symlink_to(entry)
    for source, target in (("bin", "bin"), ("lib64", "lib64"), ("lib", "lib64")):
        for entry in (root / source).glob("*"):
            _link(made / target / entry.name, entry)
    if found := shutil.which("cuobjdump"):
        _link(made / "bin/cuobjdump", Path(found))
    if not (made / "lib64/libcudart.so").exists():
        import torch

        packages = Path(torch.__file__).parent.parent
        runtimes = [*root.glob("lib*/libcudart.so.*")]
        runtimes += packages.glob("nvidia/*/lib/libcudart.so.*")
        if runtimes:
            _link(made / "lib64/libcudart.so", runtimes[0])
    _link(made / "lib", made / "lib64")
    return made


def _cuda_roots() -> list[Path]:
    candidates = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", "")]
    if compiler := shutil.which("nvcc"):
        candidates += [str(Path(p).parent.parent) for p in (os.path.realpath(compiler), compiler)]
    candidates += ["/usr/local/cuda", *sorted(glob.glob("/usr/local/cuda-*"), reverse=True)]
    usable = [Path(c) for c in candidates if c]
    return [c for c in usable if (c / "bin/nvcc").exists() and (c / "include/cuda.h").exists()]


def _link(link: Path, target: Path) -> None:
    if not (link.exists() or link.is_symlink()):
        link.symlink_to(target)
