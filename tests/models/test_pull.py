"""Tests of pulling models, from a hub on the loopback through the real library."""

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
from inferencecenter.models.files import find_model, list_models, verify
from inferencecenter.models.hub import ModelHub, hub_of
from inferencecenter.models.pull import INCOMING, Pulled, PullProgress, pull
from tests.models.hub_stub import COMMIT, StubFile, StubHub, serving

if TYPE_CHECKING:
    from pathlib import Path

REPO = "ada/tiny"
CONTENT = random.Random(7).randbytes(300_000)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A directory for models, which does not exist yet."""
    return tmp_path / "models"


class Pulls:
    """Pulls models, and counts how long it would have waited."""

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
        """Pull and return why that is not possible."""
        with pytest.raises(InferenceCenterError) as caught:
            self(reference, **named)
        return caught.value

    def names(self) -> list[str]:
        """What lies in the directory, with what is not whole."""
        found = [path for path in self.directory.rglob("*") if path.is_file()]
        return sorted(str(path.relative_to(self.directory)) for path in found)


@pytest.fixture
def pulls(hub: StubHub, models: Path) -> Pulls:
    """Pulls from a hub with one model."""
    hub.repos[REPO] = {"tiny-Q8_0.gguf": StubFile(CONTENT), "README.md": StubFile(b"# Tiny", is_large=False)}
    return Pulls(hub, models)


def test_a_model_is_there_whole_with_its_receipt(pulls: Pulls) -> None:
    """The file as it is, readable for all, a note of where it came from, and nothing else."""
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


def test_what_is_there_is_not_fetched_again(pulls: Pulls) -> None:
    """A second pull asks only what there is."""
    pulls()
    pulls.hub.heard.clear()
    assert not pulls().fetched
    assert [path for _, path, _, _ in pulls.hub.heard] == [f"/api/models/{REPO}"]


def test_another_name(pulls: Pulls) -> None:
    """What a model is called here is one's own choice; one that is no name for a file is refused first."""
    assert pulls(name="ours").model.name == "ours"
    assert pulls.names() == ["ours.gguf", "ours.json"]
    pulls.hub.heard.clear()
    assert pulls.refused(name="../ours").code is ErrorCode.INVALID_REQUEST
    assert not pulls.hub.heard


def test_a_name_that_another_model_has(pulls: Pulls) -> None:
    """Nothing is overwritten, whether it was pulled or copied."""
    pulls.directory.mkdir()
    (pulls.directory / "tiny-Q8_0.gguf").write_bytes(b"mine")
    error = pulls.refused()
    assert error.code is ErrorCode.INVALID_REQUEST
    assert "another model named tiny-Q8_0" in error.message
    assert (pulls.directory / "tiny-Q8_0.gguf").read_bytes() == b"mine"


def test_a_hostile_path_in_a_repository_stays_in_the_directory(pulls: Pulls) -> None:
    """The hub's folders are left out, and a name that hides or leads elsewhere is refused."""
    pulls.hub.repos[REPO] = {"../../up-Q8_0.gguf": StubFile(CONTENT)}
    assert pulls.refused().code in (ErrorCode.MODEL_NOT_FOUND, ErrorCode.HUB_UNREACHABLE)
    pulls.hub.repos[REPO] = {"sub/.hidden-Q8_0.gguf": StubFile(CONTENT)}
    assert pulls.refused().code is ErrorCode.INVALID_REQUEST
    assert pulls.names() == []


def test_a_split_model(pulls: Pulls) -> None:
    """All parts come, under the names that llama.cpp looks for; progress counts over all of them."""
    parts = {f"big/big-{n:05}-of-00003.gguf": StubFile(CONTENT[: 1000 * n]) for n in (1, 2, 3)}
    pulls.hub.repos[REPO] = dict(parts)
    pulls(f"{REPO}/big/big-00001-of-00003.gguf", name="ours")
    assert pulls.names() == [*(f"ours-{n:05}-of-00003.gguf" for n in (1, 2, 3)), "ours.json"]
    assert pulls.told[-1] == PullProgress("big/big-00003-of-00003.gguf", 6000, 6000)
    model = find_model(pulls.directory, "ours")
    assert (model.size_bytes, model.missing, len(model.manifest.sha256 if model.manifest else {})) == (6000, (), 3)


def test_nothing_of_a_split_model_is_visible_until_all_is_there(pulls: Pulls) -> None:
    """A last part that is wrong leaves no part under its name."""
    good, bad = StubFile(CONTENT[:1000]), StubFile(CONTENT[:1000], claimed="0" * 64)
    pulls.hub.repos[REPO] = {"s-00001-of-00002.gguf": good, "s-00002-of-00002.gguf": bad}
    assert pulls.refused(REPO).code is ErrorCode.INVALID_MODEL_FILE
    assert list_models(pulls.directory) == ()
    assert pulls.names() == [f"{INCOMING}/{hashlib.sha256(CONTENT[:1000]).hexdigest()}.part"]


def test_a_connection_that_breaks_is_gone_on_with(pulls: Pulls) -> None:
    """Each attempt asks for what is missing; one that brought something sets the waiting back."""
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


def test_an_interrupted_pull_is_gone_on_with_by_the_next(pulls: Pulls) -> None:
    """What arrived stays, invisible as a model, and the next pull of it asks for the rest."""
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


def test_a_server_without_ranges(pulls: Pulls) -> None:
    """Is read from the beginning each time, and the file is right."""
    pulls.hub.ignores_range = True
    pulls.hub.cuts = [100_000]
    pulls()
    assert (pulls.directory / "tiny-Q8_0.gguf").read_bytes() == CONTENT


def test_long_files_come_in_ranges(pulls: Pulls, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request is for more than a hub's caches give out, or takes longer than a signed address lives."""
    monkeypatch.setattr(hub_module, "RANGE_BYTES", 120_000)
    pulls()
    assert pulls.hub.ranges() == ["bytes=0-119999", "bytes=120000-239999", "bytes=240000-299999"]
    assert (pulls.directory / "tiny-Q8_0.gguf").read_bytes() == CONTENT


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hub_that_is_busy_is_asked_again(pulls: Pulls, status: int) -> None:
    """A few times, with longer waits."""
    pulls.hub.statuses = [status, status]
    assert pulls().fetched
    assert pulls.waited_s == [1.0, 2.0]


def test_a_hub_that_stays_away(pulls: Pulls) -> None:
    """Is given up after five attempts; the message names it, and not the file's address."""
    pulls.hub.statuses = [503] * 9
    error = pulls.refused()
    assert error.code is ErrorCode.HUB_UNREACHABLE
    assert error.message == "127.0.0.1 cannot be reached: HTTP 503"
    assert len(pulls.hub.ranges()) == 5


def test_nobody_listens(offline: None, models: Path) -> None:
    """A hub that cannot be connected to is named."""
    with serving(StubHub()) as gone:
        url = gone.url
    error = Pulls(StubHub(url=url), models).refused()
    assert error.code is ErrorCode.HUB_UNREACHABLE
    assert "127.0.0.1 cannot be reached" in error.message


def test_a_file_that_is_not_what_the_hub_says(pulls: Pulls) -> None:
    """A wrong checksum leaves nothing, neither under the model's name nor for the next attempt."""
    pulls.hub.repos[REPO]["tiny-Q8_0.gguf"].claimed = "0" * 64
    error = pulls.refused()
    assert error.code is ErrorCode.INVALID_MODEL_FILE
    assert "its checksum is another" in error.message
    assert pulls.names() == []


def test_what_arrived_of_another_content_is_found_out(pulls: Pulls) -> None:
    """A part that was spoiled on the disk fails the checksum, and the next pull begins anew."""
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


def test_a_file_that_git_itself_keeps(pulls: Pulls) -> None:
    """Is checked against git's name for its content, and its manifest has a SHA-256 all the same."""
    pulls.hub.repos[REPO]["tiny-Q8_0.gguf"].is_large = False
    model = pulls().model
    assert model.manifest is not None
    assert model.manifest.sha256["tiny-Q8_0.gguf"] == hashlib.sha256(CONTENT).hexdigest()


def test_files_are_kept_elsewhere_and_the_token_stays(pulls: Pulls) -> None:
    """A redirect to another host is followed, and that host is not shown the token."""
    pulls.hub.token = "hf_secret"
    with serving(StubHub(repos=pulls.hub.repos)) as storage:
        pulls.hub.storage = storage.url.replace("127.0.0.1", "localhost")
        pulls(token="hf_secret")
    assert {token for *_, token in pulls.hub.heard} == {"Bearer hf_secret"}
    assert [(path, token) for _, path, _, token in storage.heard] == [(f"/blob/{REPO}/tiny-Q8_0.gguf", None)]


def test_a_private_repository(pulls: Pulls) -> None:
    """Without the right token it is as unknown as one that is not there, and the token is in no message."""
    pulls.hub.token = "hf_secret"
    errors = [pulls.refused(), pulls.refused(token="hf_wrong"), pulls.refused("ada/none")]
    for error in errors:
        assert error.code is ErrorCode.MODEL_NOT_FOUND
        assert "has no repository ada/" in error.message
        assert "HF_TOKEN" in str(error.hint)
        assert "hf_" not in f"{error!r} {error.hint}".replace("HF_TOKEN", "")
    assert "hf_secret" not in repr(ModelHub(token="hf_secret"))


def test_a_gated_repository(pulls: Pulls) -> None:
    """Says whose conditions are to be accepted."""
    pulls.hub.gated = frozenset({REPO})
    error = pulls.refused()
    assert error.code is ErrorCode.FORBIDDEN
    assert REPO in str(error.hint)


def test_quantizations_that_there_are(pulls: Pulls) -> None:
    """Are listed when another one is asked for."""
    error = pulls.refused(f"{REPO}:Q2_K")
    assert error.code is ErrorCode.MODEL_NOT_FOUND
    assert "Q8_0" in str(error.hint)


def test_a_disk_without_room_is_noticed_before(pulls: Pulls, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has arrived counts, what is missing must fit, and nothing is fetched if it does not."""
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


def test_a_disk_that_fills_up_meanwhile(pulls: Pulls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is told as such and not as the hub's failure; what was written is gone on with."""
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


def test_a_directory_that_cannot_be_made(pulls: Pulls, tmp_path: Path) -> None:
    """Is named, with who may write there."""
    (tmp_path / "file").write_text("")
    pulls.directory = tmp_path / "file" / "models"
    assert pulls.refused().code is ErrorCode.STORAGE_UNAVAILABLE


def test_two_pulls_of_one_file(pulls: Pulls) -> None:
    """The second is refused for as long as the first one runs."""
    part = pulls.directory / INCOMING / f"{hashlib.sha256(CONTENT).hexdigest()}.part"
    part.parent.mkdir(parents=True)
    with part.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        error = pulls.refused()
    assert error.code is ErrorCode.STORAGE_UNAVAILABLE
    assert "another process" in error.message
    assert pulls().fetched


def test_an_address_that_is_no_hub(pulls: Pulls) -> None:
    """Whatever it answers, it is not believed."""
    pulls.hub.repos = {}
    pulls.hub.url += "/elsewhere"
    assert pulls.refused().code is ErrorCode.MODEL_NOT_FOUND


def listing(**changes: object) -> bytes:
    """Return what a hub says of one model, with changes in what it says of the file."""
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
def test_a_hub_that_answers_oddly_is_none(pulls: Pulls, answer: bytes) -> None:
    """One error that names the hub, and nothing in the directory."""
    pulls.hub.listing = answer
    error = pulls.refused()
    assert error.code in (ErrorCode.HUB_UNREACHABLE, ErrorCode.MODEL_NOT_FOUND)
    assert len(error.message) < 500
    assert pulls.names() == []


@pytest.mark.parametrize("said", ["bytes x-y/z", "bytes 5-9/10", f"bytes {'9' * 5000}-1/1", "\xff"])
def test_a_part_of_a_file_that_was_not_asked_for_is_not_taken(pulls: Pulls, said: str) -> None:
    """Also where the answer says which part it is in numbers that cannot be read."""
    pulls.hub.range_said = said
    assert pulls.refused().code is ErrorCode.HUB_UNREACHABLE


def test_an_address_that_is_none_is_an_error_of_the_hub(offline: None, models: Path) -> None:
    """A mistake in HF_ENDPOINT is said, and not a traceback."""
    assert Pulls(StubHub(url="http://[half"), models).refused().code is ErrorCode.HUB_UNREACHABLE


def test_the_environment_names_hub_and_token(offline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """``HF_ENDPOINT`` and ``HF_TOKEN`` are honoured; without them it is huggingface.co without a credential."""
    assert hub_of({}) == ModelHub("https://huggingface.co", None)
    monkeypatch.setenv("HF_TOKEN", "hf_a")
    assert hub_of({"HF_ENDPOINT": "http://mirror/"}) == ModelHub("http://mirror", "hf_a")


def test_a_model_that_was_pulled_is_verified(pulls: Pulls) -> None:
    """Its checksum is that of the manifest; that it is no GGUF file is found as well."""
    verdict = verify(pulls().model)
    assert verdict.checksum_known
    assert ["GGUF" in problem for problem in verdict.problems] == [True]
