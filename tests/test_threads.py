"""Threads of the command and the server: real processes with an affinity, and cgroup files."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch_covnorm.threads import cgroup_quota, usable_cpus

CPUS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
linux = pytest.mark.skipif(not CPUS, reason="affinity and cgroups are Linux's")


def run(
    *command: str, cpus: list[int] | None = None, **variables: str
) -> subprocess.CompletedProcess:
    """Run a process with these OpenMP variables only, and on these CPUs."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_"))}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env={**env, **variables},
        preexec_fn=None if cpus is None else lambda: os.sched_setaffinity(0, cpus),
    )


def python(code: str, **kwargs) -> str:
    ran = run(sys.executable, "-c", code, **kwargs)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def uses_gnu_openmp() -> bool:
    import torch

    return any((Path(torch.__file__).parent / "lib").glob("libgomp*")) or (
        Path("/proc/self/maps").exists() and "libgomp" in Path("/proc/self/maps").read_text()
    )


# ── what idle threads do ─────────────────────────────────────────────────────────────────────

# What the installed script `covnorm` and `python -m torch_covnorm` do, without a command to run.
SCRIPT = "import sys; from torch_covnorm.cli import main; sys.argv = ['covnorm', 'list']; main()"


@pytest.mark.slow
@pytest.mark.skipif(not uses_gnu_openmp(), reason="only GNU's OpenMP shows its settings")
@pytest.mark.parametrize("start", [("-c", SCRIPT), ("-m", "torch_covnorm", "list")])
def test_idle_threads_of_the_command_sleep_unless_the_user_says_otherwise(start, tmp_path):
    shown = {"OMP_DISPLAY_ENV": "VERBOSE", "COVNORM_ECOLOGY": str(tmp_path)}
    ran = run(sys.executable, *start, **shown)
    assert "GOMP_SPINCOUNT = '0'" in ran.stderr, "the library saw it when it was loaded"
    ran = run(sys.executable, *start, OMP_WAIT_POLICY="ACTIVE", **shown)
    assert "OMP_WAIT_POLICY = 'ACTIVE'" in ran.stderr
    assert "GOMP_SPINCOUNT = '0'" not in ran.stderr


@pytest.mark.slow
@pytest.mark.skipif(not uses_gnu_openmp(), reason="only GNU's OpenMP shows its settings")
def test_control_without_the_command_they_spin():
    ran = run(sys.executable, "-c", "import torch_covnorm as cn; cn.fit", OMP_DISPLAY_ENV="VERBOSE")
    assert "GOMP_SPINCOUNT = '300000'" in ran.stderr


@pytest.mark.slow
def test_import_and_use_write_no_environment():
    code = (
        "import os; before = dict(os.environ); import torch_covnorm as cn; cn.fit; "
        "import torch_covnorm.cli.app, torch_covnorm.serve.worker; print(before == os.environ)"
    )
    assert python(code) == "True"


def test_import_alone_does_not_load_torch():
    code = "import sys, torch_covnorm, torch_covnorm.cli; print('torch' in sys.modules)"
    assert python(code) == "False"


@pytest.mark.slow
def test_every_public_name_is_there_and_an_unknown_one_is_an_attribute_error():
    code = (
        "import torch_covnorm as cn; from torch_covnorm import *; "
        "assert all(n in globals() for n in cn.__all__) and set(cn.__all__) <= set(dir(cn)); "
        "print(hasattr(cn, 'fitt'))"
    )
    assert python(code) == "False"


@pytest.mark.slow
def test_a_module_of_the_package_can_be_imported_first():
    assert python("from torch_covnorm.network import files; print('ok')") == "ok"


# ── how many ─────────────────────────────────────────────────────────────────────────────────

THREADS = """
import torch
from torch_covnorm.cli.options import Compute
Compute(threads={given})
print(torch.get_num_threads())
"""


@linux
@pytest.mark.slow
@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_the_command_computes_with_the_cpus_of_its_affinity():
    assert python(THREADS.format(given=None), cpus=CPUS[:1]) == "1"
    assert python(THREADS.format(given=None), cpus=CPUS[:2]) == str(min(2, usable_cpus()))
    assert python(THREADS.format(given=2), cpus=CPUS[:1]) == "2", "--threads wins"
    assert python(THREADS.format(given=None), cpus=CPUS[:1], OMP_NUM_THREADS="2") == "2"


SERVED = """
import torch_covnorm.serve.worker as worker
from torch_covnorm.serve import process
from torch_covnorm.serve.limits import Limits
print(process.threads_of(Limits(workers={workers}, threads={given})))
"""


@linux
@pytest.mark.slow
def test_the_workers_of_a_server_share_the_cpus_of_its_affinity():
    pytest.importorskip("fastapi")
    cases = {(1, 0): len(CPUS), (64, 0): 1, (1, 3): 3}
    for (workers, given), expected in cases.items():
        code = SERVED.format(workers=workers, given=given)
        assert python(code, cpus=CPUS) == str(min(expected, max(usable_cpus(), given)))
    assert python(SERVED.format(workers=1, given=0), OMP_NUM_THREADS="5") == "0", "torch reads it"


def group(root: Path, line: str, files: dict[str, str]) -> Path:
    """Write the files of a cgroup as a process sees them below `root`."""
    for name, text in {"proc/self/cgroup": line + "\n", **files}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


V1 = "sys/fs/cgroup/cpu/docker/a"


@pytest.mark.parametrize(
    ("line", "files", "expected"),
    [
        ("0::/", {"sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),
        ("0::/", {"sys/fs/cgroup/cpu.max": "max 100000"}, math.inf),
        ("0::/", {}, math.inf),
        # A group inside a limited one, and the other way around.
        (
            "0::/work/job",
            {
                "sys/fs/cgroup/work/cpu.max": "50000 100000",
                "sys/fs/cgroup/work/job/cpu.max": "max 100000",
            },
            0.5,
        ),
        ("0::/work", {"sys/fs/cgroup/work/cpu.max": "400000 100000"}, 4.0),
        ("0::/../../other", {"sys/fs/cgroup/cpu.max": "200000 100000"}, 2.0),
        # Version 1, with its path, and in a container that sees its group at the top.
        (
            "4:cpu,cpuacct:/docker/a",
            {f"{V1}/cpu.cfs_quota_us": "250000", f"{V1}/cpu.cfs_period_us": "100000"},
            2.5,
        ),
        (
            "4:cpu,cpuacct:/docker/b",
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            1.0,
        ),
        (
            "4:cpu,cpuacct:/docker/a",
            {f"{V1}/cpu.cfs_quota_us": "-1", f"{V1}/cpu.cfs_period_us": "100000"},
            math.inf,
        ),
        ("4:cpuset:/", {"sys/fs/cgroup/cpu.max": "100000 100000"}, math.inf),
        ("0::/", {"sys/fs/cgroup/cpu.max": "what is this"}, math.inf),
    ],
)
def test_the_quota_of_a_cgroup(line, files, expected, tmp_path):
    assert cgroup_quota(group(tmp_path, line, files)) == expected


@linux
def test_a_quota_rounds_up_and_never_exceeds_the_affinity(tmp_path):
    def cpus(quota: int) -> int:
        return usable_cpus(group(tmp_path, "0::/", {"sys/fs/cgroup/cpu.max": f"{quota} 100000"}))

    assert cpus(1_000) == 1
    assert cpus(100_000) == 1
    assert cpus(150_000) == min(2, len(CPUS))
    assert cpus(100_000_000) == len(CPUS)
