"""The hub that models are pulled from: listing a repository, and reading its files from any offset.

Files are read by plain HTTP range requests because these can be resumed after an interruption: ``huggingface_hub``
itself restarts a file in every process, and its own transport (Xet) in every attempt.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import urlsplit

import httpx2
import msgspec
from huggingface_hub import HfApi, constants, get_session, get_token, hf_hub_url, hf_raise_for_status
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from inferencecenter import __version__
from inferencecenter.config.settings import APP_NAME
from inferencecenter.core.errors import ErrorCode, InferenceCenterError, foreign_input
from inferencecenter.models.reference import RemoteFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from huggingface_hub.hf_api import ModelInfo

RANGE_BYTES: Final = 2**32
"""Bytes per request: a hub's addresses expire, and its caches refuse 50 GB at once."""
DEFAULT_ENDPOINT: Final = "https://huggingface.co"
_TIMEOUT_S: Final = 30.0
_RANGE: Final = re.compile(r"^bytes ([0-9]{1,19})-[0-9]+/")
_PARTIAL, _NOT_FOUND, _TOO_MANY, _SERVER_ERROR = 206, 404, 429, 500
_REFUSALS: Final = (401, 403)


@dataclass(frozen=True, slots=True)
class Listing:
    """A repository's files at one commit; later requests name the commit, so that all parts belong together."""

    repo: str
    commit: Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z]{1,64}$")]
    files: tuple[RemoteFile, ...]


@dataclass(frozen=True, slots=True)
class RangeBody:
    """A response body: chunks of a file, of which the first begins at offset ``start``."""

    start: int
    chunks: Iterator[bytes]


@dataclass(frozen=True, slots=True)
class ModelHub:
    """A hub with huggingface.co's API; the token is sent to no other host and never logged.

    Failures raise ``hub_unreachable`` if a retry may help, else ``model_not_found`` or ``forbidden``.
    """

    endpoint: str = DEFAULT_ENDPOINT
    token: str | None = field(default=None, repr=False)

    def listing(self, repo: str) -> Listing:
        """Return the files of a repository.

        Raises:
            InferenceCenterError: See the class.
        """
        # Else the library stores a list of coding agents in the home directory and tells the hub which one runs it.
        constants.HF_HUB_DISABLE_TELEMETRY = True
        token = self.token or False
        api = HfApi(endpoint=self.endpoint, token=token, library_name=APP_NAME, library_version=__version__)
        with self._failures(repo):
            return _listing(repo, api.model_info(repo, files_metadata=True, timeout=_TIMEOUT_S))

    @contextlib.contextmanager
    def read(self, listing: Listing, file: RemoteFile, *, start: int) -> Iterator[RangeBody]:
        """Yield a file from ``start`` on, at most ``RANGE_BYTES`` of it; a server may ignore the offset and begin at 0.

        Raises:
            InferenceCenterError: See the class; also while the chunks are read.
        """
        url = hf_hub_url(listing.repo, file.path, revision=listing.commit, endpoint=self.endpoint)
        last = min(start + RANGE_BYTES, file.size_bytes) - 1
        headers = {
            "User-Agent": f"{APP_NAME}/{__version__}",
            "Accept-Encoding": "identity",
            "Range": f"bytes={start}-{last}",
        }
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        with contextlib.ExitStack() as stack:
            with self._failures(listing.repo):
                stream = get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT_S)
                response = stack.enter_context(stream)
                hf_raise_for_status(response)
                is_range = response.status_code == _PARTIAL
                if is_range:
                    content_range = _RANGE.match(response.headers.get("Content-Range", ""))
                    if content_range is None or int(content_range[1]) != start:
                        raise self._invalid_response("a range other than the requested one")
            yield RangeBody(start if is_range else 0, self._chunks(listing.repo, response.iter_raw))

    def _chunks(self, repo: str, read: Callable[[], Iterator[bytes]]) -> Iterator[bytes]:
        """Yield chunks; only errors of reading are converted, not those of the consumer."""
        with self._failures(repo):
            yield from read()

    @property
    def _host(self) -> str:
        with contextlib.suppress(ValueError):
            return urlsplit(self.endpoint).hostname or self.endpoint
        return self.endpoint

    @contextlib.contextmanager
    def _failures(self, repo: str) -> Iterator[None]:
        """Convert the library's exceptions, whose messages may contain signed addresses."""
        with foreign_input(lambda reason: self._invalid_response(reason.partition(":")[0])), self._known_failures(repo):
            yield

    @contextlib.contextmanager
    def _known_failures(self, repo: str) -> Iterator[None]:
        try:
            yield
        except GatedRepoError:
            raise InferenceCenterError(
                ErrorCode.FORBIDDEN,
                f"{repo} is only available to accounts that have accepted its conditions",
                hint=f"Accept them at {DEFAULT_ENDPOINT}/{repo}, and set HF_TOKEN to a token of that account.",
            ) from None
        except (RepositoryNotFoundError, HFValidationError):
            raise self._no_such(repo) from None
        except (RevisionNotFoundError, RemoteEntryNotFoundError):
            raise InferenceCenterError(
                ErrorCode.MODEL_NOT_FOUND, f"{repo} has changed during the download", hint="Try again."
            ) from None
        except HfHubHTTPError as error:
            raise self._http_failure(repo, error.response.status_code) from None
        except OfflineModeIsEnabled:
            raise InferenceCenterError(
                ErrorCode.HUB_UNREACHABLE, "HF_HUB_OFFLINE forbids requests to a hub", hint="Unset it."
            ) from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise self._unreachable(str(error) or type(error).__name__) from None

    def _http_failure(self, repo: str, status: int) -> InferenceCenterError:
        if status in _REFUSALS:
            return InferenceCenterError(
                ErrorCode.FORBIDDEN, f"{self._host} refuses {repo} (HTTP {status})", hint="Check HF_TOKEN."
            )
        if status == _NOT_FOUND:
            return self._no_such(repo)
        if status == _TOO_MANY or status >= _SERVER_ERROR:
            return self._unreachable(f"HTTP {status}")
        return InferenceCenterError(ErrorCode.HUB_UNREACHABLE, f"{self._host} answers with HTTP {status}")

    def _no_such(self, repo: str) -> InferenceCenterError:
        return InferenceCenterError(
            ErrorCode.MODEL_NOT_FOUND,
            f"{self._host} has no repository {repo}",
            field="reference",
            hint="Check the spelling; for a private one set HF_TOKEN.",
        )

    def _unreachable(self, why: str) -> InferenceCenterError:
        return InferenceCenterError(
            ErrorCode.HUB_UNREACHABLE,
            f"{self._host} cannot be reached: {why}",
            hint="Try again; downloaded parts are kept, and only the rest is fetched.",
        )

    def _invalid_response(self, why: str) -> InferenceCenterError:
        return InferenceCenterError(
            ErrorCode.HUB_UNREACHABLE,
            f"{self._host} does not respond like a hub ({why})",
            hint="HF_ENDPOINT must be the address of a hub, such as https://huggingface.co.",
        )


def _listing(repo: str, info: ModelInfo) -> Listing:
    """Parse a hub's description of a repository; raises for a value of the wrong type or out of range."""
    files = [
        {
            "path": sibling.rfilename,
            "size_bytes": sibling.size or 0,
            "sha256": sibling.lfs.sha256 if sibling.lfs else None,
            "blob_id": sibling.blob_id,
        }
        for sibling in info.siblings or ()
    ]
    return msgspec.convert({"repo": repo, "commit": info.sha, "files": files}, Listing)


def hub_of(environment: Mapping[str, str]) -> ModelHub:
    """Return the hub of ``HF_ENDPOINT``, with the token of ``HF_TOKEN`` or of ``hf auth login``."""
    endpoint = environment.get("HF_ENDPOINT", "").rstrip("/") or DEFAULT_ENDPOINT
    return ModelHub(endpoint, get_token())
