"""The lock: one holder at a time, among threads too; what goes wrong names the lock file."""

from __future__ import annotations

import threading

import pytest

from torch_covnorm import CovNormError
from torch_covnorm.ecology.work import locked


def test_a_second_holder_waits_for_the_first(tmp_path):
    order = []

    def second():
        with locked(tmp_path / ".lock"):
            order.append("second")

    thread = threading.Thread(target=second)
    with locked(tmp_path / ".lock"):
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


def test_a_busy_lock_is_refused_at_once_with_the_given_message(tmp_path):
    with locked(tmp_path / ".lock"):
        with pytest.raises(CovNormError, match=r"^try again later$"):
            with locked(tmp_path / ".lock", "try again later"):
                pytest.fail("two holders")
    with locked(tmp_path / ".lock", "try again later"):
        pass  # control: a free lock is not busy


def test_a_lock_is_released_after_an_error_inside(tmp_path):
    with pytest.raises(KeyError), locked(tmp_path / ".lock"):
        raise KeyError
    with locked(tmp_path / ".lock", "still held"):
        pass


def test_a_missing_folder_is_an_error_that_names_the_lock_and_is_not_created(tmp_path):
    file = tmp_path / "gone" / ".lock"
    with pytest.raises(CovNormError, match=rf"{file}: No such file or directory"):
        with locked(file):
            pytest.fail("a lock in a folder that is not there")
    assert not file.parent.exists()
