"""build_once: a folder is whole or absent, whoever dies and whoever comes at the same time."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from twinpool.checkpoints.cache import build_once, user_cache_dir
from twinpool.core.errors import ModelError

BUILD_SLOWLY = """
import sys, time
from pathlib import Path
from twinpool.checkpoints.cache import build_once

def build(folder):
    (folder / "part").write_text("x")
    with open(sys.argv[2], "a") as log:
        log.write("built\\n")
    time.sleep(0.3)
    (folder / "rest").write_text("y")

print(sorted(path.name for path in build_once(Path(sys.argv[1]), build, print).iterdir()))
"""
DIE_HALFWAY = BUILD_SLOWLY.replace("time.sleep(0.3)", "import os; os._exit(9)")


def silent(message: str) -> None:
    del message


def write_whole(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def test_it_is_built_once_and_then_only_found(tmp_path: Path) -> None:
    calls: list[Path] = []

    def build(folder: Path) -> None:
        calls.append(folder)
        write_whole(folder)

    first = build_once(tmp_path / "models" / "a", build, silent)
    second = build_once(tmp_path / "models" / "a", build, silent)

    assert first == second == tmp_path / "models" / "a"
    assert (first / "config.json").read_text() == "{}"
    assert len(calls) == 1


def test_the_finished_folder_appears_all_at_once(tmp_path: Path) -> None:
    built: list[int] = []

    def build(folder: Path) -> None:
        write_whole(folder)
        built.append(folder.stat().st_ino)

    target = build_once(tmp_path / "a", build, silent)

    assert [target.stat().st_ino] == built, "copied instead of renamed"


def test_of_processes_that_come_together_one_builds(tmp_path: Path) -> None:
    target, log = tmp_path / "a", tmp_path / "log"
    command = [sys.executable, "-c", BUILD_SLOWLY, str(target), str(log)]

    together = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = [process.communicate(timeout=60)[0].splitlines()[-1] for process in together]

    assert answers == ["['part', 'rest']"] * 3
    assert log.read_text() == "built\n"


def test_a_waiting_process_says_so(tmp_path: Path) -> None:
    inside, may_end = threading.Event(), threading.Event()
    said: list[str] = []

    def build(folder: Path) -> None:
        inside.set()
        assert may_end.wait(30)
        write_whole(folder)

    def say(message: str) -> None:
        said.append(message)
        may_end.set()

    first = threading.Thread(target=build_once, args=(tmp_path / "a", build, silent))
    first.start()
    assert inside.wait(30)
    build_once(tmp_path / "a", write_whole, say)
    first.join(30)

    assert said == ["waiting for another process that prepares the same model"]


def test_one_that_was_killed_leaves_nothing_that_is_taken_as_good(tmp_path: Path) -> None:
    target = tmp_path / "a"
    command = [sys.executable, "-c", DIE_HALFWAY, str(target), str(tmp_path / "log")]

    done = subprocess.run(command, check=False, timeout=60)
    assert done.returncode == 9
    assert not target.exists()
    assert [path for path in tmp_path.iterdir() if path.is_dir()] != []

    build_once(target, write_whole, silent)

    assert [path.name for path in target.iterdir()] == ["config.json"]
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [target]


def test_a_build_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise ModelError("--model", "cannot be read")

    with pytest.raises(ModelError, match="cannot be read"):
        build_once(tmp_path / "a", build, silent)

    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_cache_that_cannot_be_written_is_an_error_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ModelError, match=r"--model: cannot write .*file/models/a"):
        build_once(tmp_path / "file" / "models" / "a", write_whole, silent)


def test_the_cache_is_where_the_user_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINPOOL_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    monkeypatch.setenv("HOME", "/c")
    assert user_cache_dir() == Path("/a")

    monkeypatch.delenv("TWINPOOL_CACHE")
    assert user_cache_dir() == Path("/b/twinpool")

    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache_dir() == Path("/c/.cache/twinpool")
