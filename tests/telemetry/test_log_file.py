"""The log file: contents, rotation, and tolerance of a full disk."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import stat
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from inferencecenter.config.sections import LogSettings
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.telemetry import logs
from inferencecenter.telemetry.logs import LogFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Restore the loggers, and close the file."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    logs.apply(LogSettings())
    logging.captureWarnings(capture=False)
    root.handlers = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def log_lines(n_lines: int = 1, **values: object) -> None:
    """Log some lines, alternately from the package and from a library."""
    for number in range(n_lines):
        if number % 2:
            logging.getLogger("uvicorn.error").warning("line %d", number)
        else:
            structlog.get_logger("x").warning(f"line {number}", **values)


def test_log_file_gets_every_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines of all loggers are JSON; the terminal gets none, and only the owner may read the file."""
    path = tmp_path / "daemon.log"
    logs.apply(LogSettings(file=path))
    log_lines(4, token="ic_k3x9_" + "Zq-8_s" * 7, text="ü\n")
    assert [line["event"] for line in lines(path)] == ["line 0", "line 1", "line 2", "line 3"]
    assert lines(path)[0]["token"] == "***"
    assert lines(path)[0]["text"] == "ü\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert capsys.readouterr() == ("", "")


def test_log_file_is_appended_to(tmp_path: Path) -> None:
    """Lines of an earlier daemon stay."""
    path = tmp_path / "daemon.log"
    path.write_text('{"event":"before"}\n')
    logs.apply(LogSettings(file=path))
    log_lines()
    assert [line["event"] for line in lines(path)] == ["before", "line 0"]


def test_log_stream_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines go to standard error, or to standard output if that is configured."""
    logs.apply(LogSettings())
    log_lines()
    logs.apply(LogSettings(output="stdout"))
    log_lines(2)
    out, err = capsys.readouterr()
    assert [json.loads(line)["event"] for line in err.splitlines()] == ["line 0"]
    assert [json.loads(line)["event"] for line in out.splitlines()] == ["line 0", "line 1"]


def test_rotation_by_size(tmp_path: Path) -> None:
    """The newest lines are in the file itself, then in ``.1``; at most ``backups`` are kept, all private."""
    path = tmp_path / "daemon.log"
    logs.configure(stream=LogFile(path, max_bytes=1000, backups=2))  # type: ignore[arg-type]
    log_lines(100)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["daemon.log", "daemon.log.1", "daemon.log.2"]
    assert all(file.stat().st_size <= 1000 for file in files)
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    told = [line["event"] for file in reversed(files) for line in lines(file)]
    assert told == [f"line {number}" for number in range(100)][-len(told) :]


def test_without_a_limit_the_file_grows(tmp_path: Path) -> None:
    """``logrotate`` renames it."""
    path = tmp_path / "daemon.log"
    logs.apply(LogSettings(file=path, max_mib=0))
    log_lines(2000)
    assert [file.name for file in tmp_path.iterdir()] == ["daemon.log"]
    assert len(lines(path)) == 2000


def test_reload_opens_a_new_file_after_a_rename(tmp_path: Path) -> None:
    """The old file is closed."""
    path, moved = tmp_path / "daemon.log", tmp_path / "daemon.log-20261122"
    settings = LogSettings(file=path)
    logs.apply(settings)
    log_lines()
    path.rename(moved)
    log_lines(3)
    logs.apply(settings)
    log_lines(2)
    assert (len(lines(moved)), len(lines(path))) == (4, 2)
    open_files = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    assert open_files.count(str(path)) == 1
    assert str(moved) not in open_files


@pytest.mark.parametrize("name", ["no/such/directory.log", ""])
def test_unopenable_log_file_is_an_error(tmp_path: Path, name: str) -> None:
    """The error names the setting, and the log stays unchanged."""
    good = tmp_path / "good.log"
    logs.apply(LogSettings(file=good))
    with pytest.raises(InferenceCenterError) as refused:
        logs.apply(LogSettings(file=tmp_path / name))
    assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID_CONFIG, "log.file")
    log_lines()
    assert len(lines(good)) == 1


@pytest.fixture
def limit_files() -> Iterator[Callable[[int], None]]:
    """Limit the size of files: writes beyond it are cut off, as on a full disk."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda n_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def test_full_disk_drops_lines(
    tmp_path: Path, limit_files: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Callers continue, lines are written whole or not at all, and writing resumes when there is room."""
    path = tmp_path / "daemon.log"
    logs.apply(LogSettings(file=path))
    log_lines()
    limit_files(path.stat().st_size + 10)
    log_lines(3)
    limit_files(2**30)
    log_lines(2, text="room")
    assert [line.get("text") for line in lines(path)] == [None, "room", None]
    assert capsys.readouterr() == ("", "")


def test_full_device_raises_nothing() -> None:
    """On /dev/full every write fails."""
    file = LogFile(Path("/dev/full"), max_bytes=10, backups=1)
    file.write("one\n")
    file.write("two\n")
    file.close()


def test_failed_rotation_keeps_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unwritable directory costs no line."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    path = tmp_path / "daemon.log"
    logs.configure(stream=LogFile(path, max_bytes=300, backups=2))  # type: ignore[arg-type]
    monkeypatch.setattr(os, "rename", refuse)
    log_lines(20)
    monkeypatch.undo()
    assert len(lines(path)) == 20
    log_lines(1)
    assert len(lines(path)) == 1
    assert len(lines(tmp_path / "daemon.log.1")) == 20


def test_concurrent_lines_stay_whole(tmp_path: Path) -> None:
    """They stay whole during a rotation."""
    path = tmp_path / "daemon.log"
    logs.configure(stream=LogFile(path, max_bytes=4000, backups=1000))  # type: ignore[arg-type]
    threads = [threading.Thread(target=log_lines, args=(100,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(len(lines(file)) for file in tmp_path.iterdir()) == 400
