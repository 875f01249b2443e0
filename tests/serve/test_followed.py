"""Domains that are added, replaced or removed are served accordingly, without a restart."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import houses
import pytest
from command import covnorm, npz
from server import Server, wait_for
from small_ecology import content

from torch_covnorm import records
from torch_covnorm.ecology import Ecology
from torch_covnorm.ecology.manifest import FORMAT, MANIFEST
from torch_covnorm.serve.catalog import version_of

SOON = 1.0 + 2.0  # about a second, plus what a busy machine needs


def truth(ecology: Ecology, name: str, photo: bytes, folder: Path) -> tuple[str, float]:
    """Return the current output of `covnorm predict`."""
    (folder / "photo.png").write_bytes(photo)
    ran = covnorm("predict", name, folder / "photo.png", "--ecology", ecology.folder, "--json")
    return ran.json[0]["label"], pytest.approx(ran.json[0]["probability"], abs=1e-5)


def served_soon(server: Server, name: str, photo: bytes, wanted: object) -> None:
    """Check that the prediction is the wanted one within about a second."""

    def same() -> bool:
        answer = server.predict(name, photo)
        return answer.status == 200 and answer.best == wanted

    took = wait_for(same, f"{name} is served as it is now", server.log_text)
    assert took < SOON


def test_a_domain_that_is_added_is_served_within_a_second(
    writable: SimpleNamespace, photo: bytes, tmp_path: Path
):
    server, ecology = writable.server, writable.ecology
    assert server.predict("new", photo).status == 404
    houses.put(ecology, "new", adapter="residual")
    served_soon(server, "new", photo, truth(ecology, "new", photo, tmp_path))
    listed = {row["domain"]: row for row in server.get("/v1/domains").json["domains"]}
    assert listed["new"]["resident"]
    assert server.get("/v1/domains/new").json["classes"] == ["new-0", "new-1", "new-2"]


def test_a_domain_that_is_replaced_has_new_predictions(
    writable: SimpleNamespace, photo: bytes, tmp_path: Path
):
    server, ecology = writable.server, writable.ecology
    houses.put(ecology, "changing", adapter="residual")
    seen = []
    for seed in (1, 2, 1, 0):  # back to what it was, too
        houses.put(ecology, "changing", adapter="residual", seed=seed, replace=True)
        wanted = truth(ecology, "changing", photo, tmp_path)
        served_soon(server, "changing", photo, wanted)
        seen.append(server.predict("changing", photo).best)
    assert seen[0] == seen[2]
    assert len(set(seen)) == 3


def test_a_rollback_is_served_and_a_removed_domain_comes_back(
    writable: SimpleNamespace, photo: bytes, tmp_path: Path
):
    server, ecology = writable.server, writable.ecology
    houses.put(ecology, "rolled", adapter="residual")
    served_soon(server, "rolled", photo, old := truth(ecology, "rolled", photo, tmp_path))
    houses.put(ecology, "rolled", adapter="residual", seed=1, replace=True)
    served_soon(server, "rolled", photo, new := truth(ecology, "rolled", photo, tmp_path))
    assert server.predict("rolled", photo).best != old
    where = ("--ecology", ecology.folder)
    for wanted in (old, new):
        assert covnorm("rollback", "rolled", *where).code == 0
        served_soon(server, "rolled", photo, wanted)
    assert server.ask("DELETE", "/v1/domains/rolled").status == 204
    wait_for(lambda: server.predict("rolled", photo).status == 404, "404")
    assert covnorm("rollback", "rolled", *where).code == 0
    served_soon(server, "rolled", photo, new)
    assert server.ask("DELETE", "/v1/domains/rolled?purge=true").status == 204
    assert "rolled" not in ecology.versions


def test_a_removed_domain_is_404_and_its_memory_is_freed(writable: SimpleNamespace, photo: bytes):
    server, ecology = writable.server, writable.ecology
    houses.put(ecology, "going", adapter="residual")
    wait_for(lambda: server.predict("going", photo).status == 200, "it is served")
    full = server.metric('covnorm_resident_bytes{worker="0"}')
    ecology.remove(["going"])
    assert wait_for(lambda: server.predict("going", photo).status == 404, "404") < SOON
    wait_for(lambda: server.metric('covnorm_resident_bytes{worker="0"}') < full - 1e6, "free")
    # and it can come back as it was
    houses.put(ecology, "going", adapter="residual")
    wait_for(lambda: server.predict("going", photo).status == 200, "it is served again")


def test_a_joint_basis_that_changed_is_followed(
    writable: SimpleNamespace, photo: bytes, tmp_path: Path
):
    server, ecology = writable.server, writable.ecology
    houses.share(ecology, "left", "right")
    before = {}
    for name in ("left", "right"):
        served_soon(server, name, photo, truth(ecology, name, photo, tmp_path))
        before[name] = server.predict(name, photo).best
    houses.share(ecology, "left", "right", seed=1, replace=True)
    for name in ("right", "left"):
        served_soon(server, name, photo, truth(ecology, name, photo, tmp_path))
        assert server.predict(name, photo).best != before[name]
    ecology.remove(["left", "right"])
    wait_for(lambda: server.predict("left", photo).status == 404, "both are gone")


def test_the_version_of_a_domain_includes_its_basis(house: Ecology, tmp_path: Path):
    """Even if only the basis has changed."""
    copy = Ecology(shutil.copytree(house.folder, tmp_path / "copy"))
    before = {name: version_of(copy.entry(name), copy.bases) for name in copy.domains}
    file = copy.folder / MANIFEST
    made = content(json.loads(file.read_bytes()))
    (basis,) = {copy.entry(name).basis for name in ("north", "south")}
    made["bases"][basis]["tensors"] = copy.entry("roses").blobs["tensors"]
    file.write_bytes(records.sealed(FORMAT, made, indent=None))
    changed = {name for name in before if version_of(copy.entry(name), copy.bases) != before[name]}
    assert changed == {"north", "south"}


def test_a_basis_that_changes_often_under_traffic_causes_no_error(
    writable: SimpleNamespace, photo: bytes, tmp_path: Path
):
    from test_bad_domains import steady

    server, ecology = writable.server, writable.ecology
    houses.share(ecology, "left", "right")
    wait_for(lambda: server.predict("left", photo).status == 200, "it is served")
    with steady(server, "left", photo, 2) as left, steady(server, "right", photo, 2) as right:
        for seed in range(1, 6):
            houses.share(ecology, "left", "right", seed=seed, replace=True)
            time.sleep(0.1)
    assert set(left) == set(right) == {200}, (left, right)
    for name in ("right", "left"):
        served_soon(server, name, photo, truth(ecology, name, photo, tmp_path))


def test_what_covnorm_add_commits_is_served(
    writable: SimpleNamespace, photo: bytes, tmp_path: Path
):
    """The real command, in a separate process."""
    server, ecology = writable.server, writable.ecology
    words = ["-m", "torch_covnorm", "add", "digits", str(npz(tmp_path / "digits.npz", 20, 10))]
    words += ["--ecology", str(ecology.folder), "--epochs", "1", "--size", "32", "--threads", "1"]
    ran = subprocess.run([sys.executable, *words, "--quiet"], capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr.decode()
    took = wait_for(lambda: server.predict("digits", photo).status == 200, "it is served")
    assert took < SOON
    assert server.predict("digits", photo).best == truth(ecology, "digits", photo, tmp_path)
