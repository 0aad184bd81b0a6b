"""Pulling models from a hub on the loopback through the real library."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import random
import shutil
from collections import namedtuple
from typing import TYPE_CHECKING

import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.models import hub as hub_module
from inferencecenter.models.files import copy, find_model, list_models, remove, verify
from inferencecenter.models.hub import ModelHub, hub_of
from inferencecenter.models.pull import INCOMING, Pulled, PullProgress, pull
from tests.models.hub_stub import COMMIT, StubFile, StubHub, serving

if TYPE_CHECKING:
    from pathlib import Path

REPO = "ada/tiny"
CONTENT = random.Random(7).randbytes(300_000)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A directory for models, not created yet."""
    return tmp_path / "models"


class Puller:
    """Pulls models, and records how long it would have waited."""

    def __init__(self, hub: StubHub, directory: Path) -> None:
        self.hub = hub
        self.directory = directory
        self.waited_s: list[float] = []
        self.told: list[PullProgress] = []

    def __call__(self, reference: str = f"{REPO}:Q8_0", *, name: str | None = None, token: str | None = None) -> Pulled:
        """Pull."""
        return pull(
            ModelHub(self.hub.url, token),
            reference,
            directory=self.directory,
            name=name,
            report=self.told.append,
            sleep=self.waited_s.append,
            clock=lambda: 1_000.0,
        )

    def refused(self, reference: str = f"{REPO}:Q8_0", **named: str) -> InferenceCenterError:
        """Pull and return the error."""
        with pytest.raises(InferenceCenterError) as caught:
            self(reference, **named)
        return caught.value

    def names(self) -> list[str]:
        """The directory's files, partial ones included."""
        found = [path for path in self.directory.rglob("*") if path.is_file()]
        return sorted(str(path.relative_to(self.directory)) for path in found)


@pytest.fixture
def pulls(hub: StubHub, models: Path) -> Puller:
    """A puller and a hub with one model."""
    hub.repos[REPO] = {"tiny-Q8_0.gguf": StubFile(CONTENT), "README.md": StubFile(b"# Tiny", is_large=False)}
    return Puller(hub, models)


def test_pulled_model_has_a_manifest(pulls: Puller) -> None:
    """The file is complete and world-readable, the manifest has its source, and nothing else is left."""
    pulled = pulls()
    path = pulls.directory / "tiny-Q8_0.gguf"
    assert pulled.fetched
    assert path.read_bytes() == CONTENT
    assert path.stat().st_mode & 0o777 == 0o644
    assert pulls.names() == ["tiny-Q8_0.gguf", "tiny-Q8_0.json"]
    manifest = find_model(pulls.directory, "tiny-Q8_0").manifest
    assert manifest is not None
    assert (manifest.source, manifest.commit, manifest.pulled_at) == (f"{REPO}/tiny-Q8_0.gguf", COMMIT, 1_000.0)
    assert manifest.sha256 == {"tiny-Q8_0.gguf": hashlib.sha256(CONTENT).hexdigest()}
    assert pulls.told[-1] == PullProgress("tiny-Q8_0.gguf", len(CONTENT), len(CONTENT))
    done = [progress.done_bytes for progress in pulls.told]
    assert done == sorted(done)


def test_second_pull_downloads_nothing(pulls: Puller) -> None:
    """It only requests the listing."""
    pulls()
    pulls.hub.heard.clear()
    assert not pulls().fetched
    assert [path for _, path, _, _ in pulls.hub.heard] == [f"/api/models/{REPO}"]


def test_model_can_be_renamed_on_pull(pulls: Puller) -> None:
    """An invalid file name is refused first."""
    assert pulls(name="ours").model.name == "ours"
    assert pulls.names() == ["ours.gguf", "ours.json"]
    pulls.hub.heard.clear()
    assert pulls.refused(name="../ours").code is ErrorCode.INVALID_REQUEST
    assert not pulls.hub.heard


def test_name_of_another_model_is_refused(pulls: Puller) -> None:
    """No pulled or copied file is overwritten."""
    pulls.directory.mkdir()
    (pulls.directory / "tiny-Q8_0.gguf").write_bytes(b"mine")
    error = pulls.refused()
    assert error.code is ErrorCode.INVALID_REQUEST
    assert "another model named tiny-Q8_0" in error.message
    assert (pulls.directory / "tiny-Q8_0.gguf").read_bytes() == b"mine"


def test_repository_path_cannot_leave_the_directory(pulls: Puller) -> None:
    """Folders are dropped, and hidden or escaping names refused."""
    pulls.hub.repos[REPO] = {"../../up-Q8_0.gguf": StubFile(CONTENT)}
    assert pulls.refused().code in (ErrorCode.MODEL_NOT_FOUND, ErrorCode.HUB_UNREACHABLE)
    pulls.hub.repos[REPO] = {"sub/.hidden-Q8_0.gguf": StubFile(CONTENT)}
    assert pulls.refused().code is ErrorCode.INVALID_REQUEST
    assert pulls.names() == []


def test_split_model_is_pulled_whole(pulls: Puller) -> None:
    """Parts get the names that llama.cpp expects; progress covers all of them."""
    parts = {f"big/big-{n:05}-of-00003.gguf": StubFile(CONTENT[: 1000 * n]) for n in (1, 2, 3)}
    pulls.hub.repos[REPO] = dict(parts)
    pulls(f"{REPO}/big/big-00001-of-00003.gguf", name="ours")
    assert pulls.names() == [*(f"ours-{n:05}-of-00003.gguf" for n in (1, 2, 3)), "ours.json"]
    assert pulls.told[-1] == PullProgress("big/big-00003-of-00003.gguf", 6000, 6000)
    model = find_model(pulls.directory, "ours")
    assert (model.size_bytes, model.missing, len(model.manifest.sha256 if model.manifest else {})) == (6000, (), 3)


def test_split_model_appears_atomically(pulls: Puller) -> None:
    """A wrong last part leaves no part under its name."""
    good, bad = StubFile(CONTENT[:1000]), StubFile(CONTENT[:1000], claimed="0" * 64)
    pulls.hub.repos[REPO] = {"s-00001-of-00002.gguf": good, "s-00002-of-00002.gguf": bad}
    assert pulls.refused(REPO).code is ErrorCode.INVALID_MODEL_FILE
    assert list_models(pulls.directory) == ()
    assert pulls.names() == [f"{INCOMING}/{hashlib.sha256(CONTENT[:1000]).hexdigest()}.part"]


def test_broken_download_resumes(pulls: Puller) -> None:
    """Each attempt requests the missing range; progress resets the backoff."""
    pulls.hub.cuts = [100_000, 50_000, 0]
    pulls()
    assert (pulls.directory / "tiny-Q8_0.gguf").read_bytes() == CONTENT
    last = len(CONTENT) - 1
    assert pulls.hub.ranges() == [
        f"bytes=0-{last}",
        f"bytes=100000-{last}",
        f"bytes=150000-{last}",
        f"bytes=150000-{last}",
    ]
    assert pulls.waited_s == [1.0, 1.0, 2.0]


def test_next_pull_resumes_an_interrupted_one(pulls: Puller) -> None:
    """The partial file is not listed as a model."""
    pulls.hub.cuts = [100_000, 0, 0, 0, 0]
    error = pulls.refused()
    assert error.code is ErrorCode.HUB_UNREACHABLE
    assert "only the rest is fetched" in str(error.hint)
    assert list_models(pulls.directory) == ()
    pulls.hub.heard.clear()
    pulls()
    assert pulls.hub.ranges() == [f"bytes=100000-{len(CONTENT) - 1}"]
    assert (pulls.directory / "tiny-Q8_0.gguf").read_bytes() == CONTENT
    assert pulls.names() == ["tiny-Q8_0.gguf", "tiny-Q8_0.json"]


def test_server_without_ranges(pulls: Puller) -> None:
    """Each attempt starts at the beginning, and the file is right."""
    pulls.hub.ignores_range = True
    pulls.hub.cuts = [100_000]
    pulls()
    assert (pulls.directory / "tiny-Q8_0.gguf").read_bytes() == CONTENT


def test_long_files_are_requested_in_ranges(pulls: Puller, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request exceeds what caches serve or outlives a signed address."""
    monkeypatch.setattr(hub_module, "RANGE_BYTES", 120_000)
    pulls()
    assert pulls.hub.ranges() == ["bytes=0-119999", "bytes=120000-239999", "bytes=240000-299999"]
    assert (pulls.directory / "tiny-Q8_0.gguf").read_bytes() == CONTENT


@pytest.mark.parametrize("status", [429, 500, 503])
def test_busy_hub_is_retried_with_backoff(pulls: Puller, status: int) -> None:
    """The pull succeeds after two refusals, with longer pauses each time."""
    pulls.hub.statuses = [status, status]
    assert pulls().fetched
    assert pulls.waited_s == [1.0, 2.0]


def test_unreachable_hub_is_given_up(pulls: Puller) -> None:
    """It is given up after five attempts; the message names the hub, not the address of the file."""
    pulls.hub.statuses = [503] * 9
    error = pulls.refused()
    assert error.code is ErrorCode.HUB_UNREACHABLE
    assert error.message == "127.0.0.1 cannot be reached: HTTP 503"
    assert len(pulls.hub.ranges()) == 5


def test_refused_connection_names_the_hub(offline: None, models: Path) -> None:
    """The message names a hub that cannot be reached."""
    with serving(StubHub()) as gone:
        url = gone.url
    error = Puller(StubHub(url=url), models).refused()
    assert error.code is ErrorCode.HUB_UNREACHABLE
    assert "127.0.0.1 cannot be reached" in error.message


def test_wrong_checksum_leaves_no_file(pulls: Puller) -> None:
    """Neither the model's file nor a partial file stays."""
    pulls.hub.repos[REPO]["tiny-Q8_0.gguf"].claimed = "0" * 64
    error = pulls.refused()
    assert error.code is ErrorCode.INVALID_MODEL_FILE
    assert "its checksum does not match" in error.message
    assert pulls.names() == []


def test_corrupted_partial_file_fails_the_checksum(pulls: Puller) -> None:
    """The next pull starts over."""
    pulls.hub.cuts = [100_000, 0, 0, 0, 0]
    pulls.refused()
    (part,) = (pulls.directory / INCOMING).iterdir()
    spoiled = bytearray(part.read_bytes())
    spoiled[5] ^= 1
    part.write_bytes(spoiled)
    assert pulls.refused().code is ErrorCode.INVALID_MODEL_FILE
    assert pulls().fetched
    part.parent.mkdir()
    part.write_bytes(CONTENT * 2)
    (pulls.directory / "tiny-Q8_0.gguf").unlink()
    assert pulls().fetched, "a part that is longer than the file is not believed"


def test_git_file_is_checked_by_its_blob_hash(pulls: Puller) -> None:
    """Its manifest has a SHA-256 all the same."""
    pulls.hub.repos[REPO]["tiny-Q8_0.gguf"].is_large = False
    model = pulls().model
    assert model.manifest is not None
    assert model.manifest.sha256["tiny-Q8_0.gguf"] == hashlib.sha256(CONTENT).hexdigest()


def test_token_is_not_sent_to_another_host(pulls: Puller) -> None:
    """A redirect to another host is followed without it."""
    pulls.hub.token = "hf_secret"
    with serving(StubHub(repos=pulls.hub.repos)) as storage:
        pulls.hub.storage = storage.url.replace("127.0.0.1", "localhost")
        pulls(token="hf_secret")
    assert {token for *_, token in pulls.hub.heard} == {"Bearer hf_secret"}
    assert [(path, token) for _, path, _, token in storage.heard] == [(f"/blob/{REPO}/tiny-Q8_0.gguf", None)]


def test_private_repository_looks_missing(pulls: Puller) -> None:
    """The token is missing or wrong, and is in no message."""
    pulls.hub.token = "hf_secret"
    errors = [pulls.refused(), pulls.refused(token="hf_wrong"), pulls.refused("ada/none")]
    for error in errors:
        assert error.code is ErrorCode.MODEL_NOT_FOUND
        assert "has no repository ada/" in error.message
        assert "HF_TOKEN" in str(error.hint)
        assert "hf_" not in f"{error!r} {error.hint}".replace("HF_TOKEN", "")
    assert "hf_secret" not in repr(ModelHub(token="hf_secret"))


def test_gated_repository_names_its_conditions(pulls: Puller) -> None:
    """The error says what to accept."""
    pulls.hub.gated = frozenset({REPO})
    error = pulls.refused()
    assert error.code is ErrorCode.FORBIDDEN
    assert REPO in str(error.hint)


def test_unknown_quantization_lists_the_available(pulls: Puller) -> None:
    """The error has the choices."""
    error = pulls.refused(f"{REPO}:Q2_K")
    assert error.code is ErrorCode.MODEL_NOT_FOUND
    assert "Q8_0" in str(error.hint)


def test_disk_space_is_checked_before_the_download(pulls: Puller, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the missing part must fit, and nothing is downloaded otherwise."""
    usage = namedtuple("usage", "total used free")
    pulls.hub.cuts = [200_000, 0, 0, 0, 0]
    pulls.refused()
    pulls.hub.heard.clear()
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(0, 0, 99_999))
    error = pulls.refused()
    assert error.code is ErrorCode.STORAGE_UNAVAILABLE
    assert "free" in error.message
    assert pulls.hub.ranges() == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(0, 0, 100_000))
    assert pulls().fetched


def test_disk_that_fills_up_during_a_pull(pulls: Puller, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the disk; the partial file is resumed later."""
    write = os.pwrite

    def full(descriptor: int, data: memoryview, at: int) -> int:
        if at + len(data) > 100_000:
            if at < 100_000:
                return write(descriptor, data[: 100_000 - at], at)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data, at)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        error = pulls.refused()
    assert error.code is ErrorCode.STORAGE_UNAVAILABLE
    assert "is full" in error.message
    assert list_models(pulls.directory) == ()
    pulls()
    assert (pulls.directory / "tiny-Q8_0.gguf").read_bytes() == CONTENT


def test_uncreatable_directory_is_named(pulls: Puller, tmp_path: Path) -> None:
    """The message has the user that needs write access."""
    (tmp_path / "file").write_text("")
    pulls.directory = tmp_path / "file" / "models"
    assert pulls.refused().code is ErrorCode.STORAGE_UNAVAILABLE


def test_concurrent_pulls_of_one_file_are_refused(pulls: Puller) -> None:
    """While the first one runs."""
    part = pulls.directory / INCOMING / f"{hashlib.sha256(CONTENT).hexdigest()}.part"
    part.parent.mkdir(parents=True)
    with part.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        error = pulls.refused()
    assert error.code is ErrorCode.STORAGE_UNAVAILABLE
    assert "another process" in error.message
    assert pulls().fetched


def test_address_that_is_no_hub(pulls: Puller) -> None:
    """Its answers are refused."""
    pulls.hub.repos = {}
    pulls.hub.url += "/elsewhere"
    assert pulls.refused().code is ErrorCode.MODEL_NOT_FOUND


def listing(**changes: object) -> bytes:
    """Return a hub's listing of one model, with changes to the file's entry."""
    file = {"rfilename": "tiny-Q8_0.gguf", "size": 5, "blobId": "0" * 40, "lfs": {"size": 5, "sha256": "0" * 64}}
    return json.dumps({"id": REPO, "sha": COMMIT, "siblings": [file | changes]}).encode()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"id": "ada/tiny", "sha": "../x", "siblings": []}',
        b'{"id": "ada/tiny", "sha": 5, "siblings": []}',
        b'{"id": "ada/tiny", "sha": "0", "siblings": {}}',
        b'{"id": "ada/tiny", "sha": "0", "siblings": [5]}',
        b'{"id": "ada/tiny", "sha": "0", "siblings": [{}]}',
        b'{"id": "ada/tiny", "sha": "0", "createdAt": "yesterday", "siblings": []}',
        listing(rfilename=5),
        listing(rfilename=""),
        listing(rfilename="a" * 5000 + ".gguf"),
        listing(size=-1),
        listing(size="5"),
        listing(size=1.5),
        listing(size=2**60),
        listing(size=float("nan")),
        listing(lfs=5),
        listing(lfs={"sha256": "0" * 64}),
        listing(lfs={"size": 5, "sha256": 7, "pointerSize": 1}),
        listing(lfs={"size": 5, "sha256": "../../../etc/passwd", "pointerSize": 1}),
        listing(lfs=None, blobId="0" * 5000),
        listing(lfs=None, blobId={}),
    ],
    ids=range(25),
)
def test_malformed_listing_is_refused(pulls: Puller, answer: bytes) -> None:
    """One error names the hub, and the directory stays empty."""
    pulls.hub.listing = answer
    error = pulls.refused()
    assert error.code in (ErrorCode.HUB_UNREACHABLE, ErrorCode.MODEL_NOT_FOUND)
    assert len(error.message) < 500
    assert pulls.names() == []


@pytest.mark.parametrize("said", ["bytes x-y/z", "bytes 5-9/10", f"bytes {'9' * 5000}-1/1", "\xff"])
def test_unrequested_range_is_refused(pulls: Puller, said: str) -> None:
    """A malformed Content-Range is refused, too."""
    pulls.hub.range_said = said
    assert pulls.refused().code is ErrorCode.HUB_UNREACHABLE


def test_invalid_hub_address_is_an_error(offline: None, models: Path) -> None:
    """A mistake in HF_ENDPOINT gives a message and no traceback."""
    assert Puller(StubHub(url="http://[half"), models).refused().code is ErrorCode.HUB_UNREACHABLE


def test_hub_and_token_come_from_the_environment(offline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """``HF_ENDPOINT`` and ``HF_TOKEN`` set them; the default is huggingface.co without a token."""
    assert hub_of({}) == ModelHub("https://huggingface.co", None)
    monkeypatch.setenv("HF_TOKEN", "hf_a")
    assert hub_of({"HF_ENDPOINT": "http://mirror/"}) == ModelHub("http://mirror", "hf_a")


def test_pulled_model_can_be_verified(pulls: Puller) -> None:
    """The manifest has its checksum; a file that is not a GGUF is detected as well."""
    verdict = verify(pulls().model)
    assert verdict.checksum_known
    assert ["GGUF" in problem for problem in verdict.problems] == [True]


PROJECTOR = random.Random(8).randbytes(50_000)


def test_projector_is_pulled_with_its_model(pulls: Puller) -> None:
    """It is named after the model, counted in the progress, verified, copied and removed with it."""
    pulls.hub.repos[REPO] |= {"mmproj-F32.gguf": StubFile(CONTENT), "mmproj-F16.gguf": StubFile(PROJECTOR)}
    pulled = pulls(name="ours")
    assert pulled.fetched
    assert pulls.names() == ["mmproj-ours.gguf", "ours.gguf", "ours.json"]
    assert pulls.told[-1] == PullProgress("mmproj-F16.gguf", 350_000, 350_000)
    (model,) = list_models(pulls.directory)
    assert (model.name, model.size_bytes) == ("ours", 350_000)
    assert model.mmproj == pulls.directory / "mmproj-ours.gguf"
    assert model.mmproj.read_bytes() == PROJECTOR
    assert not pulls(name="ours").fetched
    copy(model, "copied")
    assert (pulls.directory / "mmproj-copied.gguf").read_bytes() == PROJECTOR
    remove(pulls.directory, "copied", configured={})
    model.mmproj.write_bytes(PROJECTOR[:-1] + b"?")
    assert any("mmproj-ours.gguf has changed" in problem for problem in verify(model).problems)
    with pytest.raises(InferenceCenterError, match=r"is the file of models\.other\.mmproj"):
        remove(pulls.directory, "ours", configured={model.mmproj: "models.other.mmproj"})
    remove(pulls.directory, "ours", configured={})
    assert pulls.names() == []


def test_missing_projector_is_pulled_later(pulls: Puller) -> None:
    """The model is not downloaded again, and a projector that is there is not replaced."""
    pulls()
    pulls.hub.repos[REPO]["mmproj-F16.gguf"] = StubFile(PROJECTOR)
    pulls.hub.heard.clear()
    assert pulls().fetched
    assert [path for _, path, _, _ in pulls.hub.heard if "resolve" in path] == [
        f"/{REPO}/resolve/{COMMIT}/mmproj-F16.gguf"
    ]
    (model,) = list_models(pulls.directory)
    assert model.manifest is not None
    assert sorted(model.manifest.sha256) == ["mmproj-tiny-Q8_0.gguf", "tiny-Q8_0.gguf"]
    pulls.hub.repos[REPO]["mmproj-F16.gguf"] = StubFile(CONTENT)
    assert not pulls().fetched
    assert model.mmproj is not None
    assert model.mmproj.read_bytes() == PROJECTOR


def test_projector_can_be_declined_or_pulled_alone(pulls: Puller) -> None:
    """It is then a file with a name of its own."""
    pulls.hub.repos[REPO]["mmproj-F16.gguf"] = StubFile(PROJECTOR)
    pull(ModelHub(pulls.hub.url), f"{REPO}:Q8_0", directory=pulls.directory, with_projector=False)
    assert pulls.names() == ["tiny-Q8_0.gguf", "tiny-Q8_0.json"]
    pulls(f"{REPO}/mmproj-F16.gguf")
    assert pulls.names() == ["mmproj-F16.gguf", "mmproj-F16.json", "tiny-Q8_0.gguf", "tiny-Q8_0.json"]


def test_interrupted_pull_of_a_projector_installs_nothing(pulls: Puller) -> None:
    """A model does not appear without the projector that was wanted; the next pull resumes."""
    pulls.hub.repos[REPO]["mmproj-F16.gguf"] = StubFile(PROJECTOR, claimed="0" * 64)
    assert pulls.refused().code is ErrorCode.INVALID_MODEL_FILE
    assert list_models(pulls.directory) == ()
    pulls.hub.repos[REPO]["mmproj-F16.gguf"] = StubFile(PROJECTOR)
    pulls.told.clear()
    assert pulls().fetched
    assert pulls.told[0].done_bytes == len(CONTENT)
