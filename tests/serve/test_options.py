"""Invalid options are errors before anything starts; log lines are single lines."""

from __future__ import annotations

import re

import pytest
from command import covnorm
from server import Server, running, wait_for

from torch_covnorm import CovNormError
from torch_covnorm.ecology import Ecology
from torch_covnorm.serve import Limits
from torch_covnorm.serve.log import LineFormatter


@pytest.mark.parametrize(
    "options",
    [
        ["--deadline", "nan"],
        ["--deadline", "inf"],
        ["--resident", "nan"],
        ["--resident", "inf"],
        ["--wait", "nan"],
        ["--batch", "0"],
        ["--queue", "-1"],
        ["--workers", "0"],
        ["--port", "70000"],
        ["--logs", "xml"],
        ["--host", "no.such.host.invalid"],
        ["--keys", "nowhere"],
        ["--pin", "nobody"],
    ],
    ids=" ".join,
)
def test_an_invalid_option_is_exit_2(options: list[str], house: Ecology):
    ran = covnorm("serve", house.folder, "--port", 0, *options)
    assert ran.code == 2
    assert options[1].removesuffix(".invalid") in ran.err or options[0] in ran.err
    assert "Traceback" not in ran.err


def test_idle_threads_of_the_server_and_its_workers_sleep(house: Ecology, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("OMP_DISPLAY_ENV", "VERBOSE")  # GNU's OpenMP shows its settings when loaded
    with running(house.folder, "--workers", 2) as server:
        wait_for(lambda: server.get("/ready").status == 200, "the workers have started")
        seen = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", server.log_text())
    if not seen:
        pytest.skip("torch uses another OpenMP here")
    assert seen == ["0"] * 3


def test_serve_finds_its_ecology_as_every_command_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = covnorm("serve")
    assert (ran.code, "no ecology here or above" in ran.err) == (2, True)
    monkeypatch.setenv("COVNORM_ECOLOGY", "elsewhere")
    ran = covnorm("serve")
    assert (ran.code, "elsewhere" in ran.err) == (2, True)


@pytest.mark.parametrize(
    "wrong",
    [{"batch": 0}, {"batch": 1.5}, {"queue": True}, {"deadline": 0}, {"body": float("inf")}],
    ids=str,
)
def test_limits_are_numbers_above_0(wrong: dict[str, object]):
    with pytest.raises(CovNormError, match=next(iter(wrong))):
        Limits(**wrong)  # type: ignore[arg-type]


def test_a_log_record_is_always_one_line():
    import logging

    record = logging.LogRecord("x", logging.WARNING, "f", 1, "one\ntwo", None, None)
    record.fields = {"why": "a\nb"}  # type: ignore[attr-defined]
    text = LineFormatter(as_json=False).format(record)
    assert "\n" not in text
    assert re.match(r"^\d{4}-\d\d-\d\dT[\d:.]+Z warning one \| two why=a \| b$", text)
    assert "\n" not in LineFormatter(as_json=True).format(record)


def test_every_log_line_has_a_time_and_a_level(server: Server):
    assert all(line["time"].endswith("Z") and line["level"] for line in server.lines())
