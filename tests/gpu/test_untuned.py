"""The configuration files that skip tuning are those that flash-linear-attention reads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.gpu  # no GPU is used, but its packages are

PROGRAM = """
import sys
from pathlib import Path
from tests.gpu.untuned import _tuned_kernels, skip_tuning
names = skip_tuning(Path(sys.argv[1]))
from fla.ops.utils.cache import AutotuneKey, load_cached_config
assert "chunk_kda_bwd_kernel_intra" in names, names
for name, kernel in _tuned_kernels().items():
    config = load_cached_config(name, AutotuneKey((1, "float32")))
    assert config["kwargs"] == kernel.configs[0].kwargs, (name, config)
    kernel.maybe_load_cached_config(AutotuneKey((1,)), nargs={}, runtime_kwargs={})
    chosen = kernel.cache[(1,)]
    assert chosen.all_kwargs() == kernel.configs[0].all_kwargs(), (name, chosen)
print(len(names))
"""


def test_every_kernel_of_kda_takes_its_first_configuration(tmp_path):
    pytest.importorskip("triton", exc_type=ImportError)
    pytest.importorskip("fla", exc_type=ImportError)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "configs")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 10
