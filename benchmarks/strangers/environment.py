"""An environment for PEFT: its packages on top of those that run the benchmark."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from torch_covnorm.errors import CovNormError

from ..fetch import cache

WANTED = ("peft==0.21.2", "transformers==5.23.0", "accelerate==1.15.0")


def python_with_peft() -> Path:
    """Return its interpreter; it is made on the first call.

    A .pth file shows it the packages of this interpreter, so torch is not downloaded again.
    """
    folder = cache() / "strangers" / "peft"
    done = folder / "done"
    if not done.exists() or done.read_text() != _made_of():
        print(f"making an environment with {WANTED[0]} in {folder}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        site = next(folder.glob("lib/python*/site-packages"))
        (site / "benchmarks.pth").write_text(sysconfig.get_path("purelib") + "\n")
        command = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", *WANTED]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise CovNormError(f"{folder}: pip failed: {run.stderr.strip().splitlines()[-1]}")
        done.write_text(_made_of())
    return folder / "bin" / "python"


def _made_of() -> str:
    return f"{sys.executable} {' '.join(WANTED)}"
