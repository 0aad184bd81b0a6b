"""Model references, and the models in a repository."""

from __future__ import annotations

import contextlib
import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.models.reference import (
    ModelReference,
    RemoteFile,
    check_name,
    choose,
    choose_projector,
    file_names,
    list_variants,
    parse_reference,
)


def files(*paths: str) -> tuple[RemoteFile, ...]:
    """Return files of a repository."""
    return tuple(RemoteFile(path=path, size_bytes=1, sha256="00") for path in paths)


def refused(reference: str, *paths: str) -> InferenceCenterError:
    """Return why a reference matches none of these files."""
    with pytest.raises(InferenceCenterError) as caught:
        choose(parse_reference(reference), files(*paths))
    return caught.value


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("ada/tiny", ModelReference("ada/tiny")),
        ("ada/tiny:Q4_K_M", ModelReference("ada/tiny", quant="Q4_K_M")),
        ("ada/tiny.v2-GGUF:q8_0", ModelReference("ada/tiny.v2-GGUF", quant="q8_0")),
        ("ada/tiny/a.gguf", ModelReference("ada/tiny", file="a.gguf")),
        ("ada/tiny/BF16/a-00001-of-00002.gguf", ModelReference("ada/tiny", file="BF16/a-00001-of-00002.gguf")),
    ],
)
def test_reference_forms(text: str, meant: ModelReference) -> None:
    """A reference is a repository, alone or with a quantization or a file, which may be in a folder."""
    assert parse_reference(text) == meant


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tiny",
        "ada/",
        "/tiny",
        "ada/tiny:",
        "ada/tiny/",
        "ada/tiny/a.bin",
        "https://hf.co/ada/tiny",
        "ada/ti ny",
        "ada/tiny\n",
    ],
)
def test_invalid_reference_lists_the_forms(text: str) -> None:
    """The error has the valid forms."""
    with pytest.raises(InferenceCenterError) as caught:
        parse_reference(text)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert "owner/repo:Q4_K_M" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("path", "name", "quant"),
    [
        ("tiny-Q4_K_M.gguf", "tiny-Q4_K_M", "Q4_K_M"),
        ("tiny.q8_0.gguf", "tiny.q8_0", "Q8_0"),
        ("Qwen3-8B-UD-Q4_K_XL.gguf", "Qwen3-8B-UD-Q4_K_XL", "UD-Q4_K_XL"),
        ("x-IQ2_XXS.gguf", "x-IQ2_XXS", "IQ2_XXS"),
        ("gpt-oss-20b-MXFP4.gguf", "gpt-oss-20b-MXFP4", "MXFP4"),
        ("BF16/tiny.gguf", "tiny", "BF16"),
        ("Q6K-maker-f16.gguf", "Q6K-maker-f16", "F16"),
        ("tiny.gguf", "tiny", None),
    ],
)
def test_quantization_is_in_the_name(path: str, name: str, quant: str | None) -> None:
    """The name is that of the file or of its folder."""
    (variant,) = list_variants(files(path))
    assert (variant.name, variant.quant) == (name, quant)


def test_split_model_is_one_variant() -> None:
    """Its parts are ordered; an incomplete model is none."""
    paths = [f"big-Q8_0-{number:05}-of-00003.gguf" for number in (3, 1, 2)]
    (variant,) = list_variants(files(*paths, "torn-00001-of-00002.gguf", "README.md"))
    assert (variant.name, variant.quant, variant.size_bytes) == ("big-Q8_0", "Q8_0", 3)
    assert [file.path for file in variant.files] == sorted(paths)
    assert refused("ada/tiny/torn-00001-of-00002.gguf", *paths, "torn-00001-of-00002.gguf").code is (
        ErrorCode.MODEL_NOT_FOUND
    )


@pytest.mark.parametrize(
    ("reference", "paths", "chosen"),
    [
        ("ada/tiny", ["only.gguf"], "only"),
        ("ada/tiny", ["a-Q8_0.gguf", "a-Q4_K_M.gguf"], "a-Q4_K_M"),
        ("ada/tiny", ["a-Q8_0.gguf", "mmproj-a-f16.gguf", "imatrix.gguf"], "a-Q8_0"),
        ("ada/tiny:q8_0", ["a-Q8_0.gguf", "a-Q4_K_M.gguf"], "a-Q8_0"),
        ("ada/tiny:Q4_K_XL", ["a-UD-Q4_K_XL.gguf", "a-Q4_K_M.gguf"], "a-UD-Q4_K_XL"),
        ("ada/tiny:Q4_K_M", ["a-UD-Q4_K_M.gguf", "a-Q4_K_M.gguf"], "a-Q4_K_M"),
        ("ada/tiny/mmproj-a-f16.gguf", ["a-Q8_0.gguf", "mmproj-a-f16.gguf"], "mmproj-a-f16"),
        ("ada/tiny/s-00002-of-00002.gguf", ["s-00001-of-00002.gguf", "s-00002-of-00002.gguf"], "s"),
    ],
)
def test_matching_variant(reference: str, paths: list[str], chosen: str) -> None:
    """It is the only variant, the one in Q4_K_M, the one of the given quantization, or the given file."""
    assert choose(parse_reference(reference), files(*paths)).name == chosen


@pytest.mark.parametrize(
    ("reference", "paths", "message", "listed"),
    [
        ("ada/tiny:Q2_K", ["a-Q8_0.gguf", "a-Q4_K_M.gguf"], "no model in Q2_K", "Q4_K_M, Q8_0"),
        ("ada/tiny", ["a-Q8_0.gguf", "a-Q6_K.gguf"], "none in Q4_K_M", "Q6_K, Q8_0"),
        ("ada/tiny", ["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"], "2 models in Q4_K_M", "a-Q4_K_M.gguf, b-Q4_K_M.gguf"),
        ("ada/tiny", ["a.safetensors"], "no GGUF model", "Models of other forms"),
        ("ada/tiny/b.gguf", ["a.gguf"], "the file b.gguf", "a.gguf"),
    ],
)
def test_error_lists_the_variants(reference: str, paths: list[str], message: str, listed: str) -> None:
    """Quantizations are listed where they differ, otherwise files."""
    error = refused(reference, *paths)
    assert error.code is ErrorCode.MODEL_NOT_FOUND
    assert message in error.message
    assert listed in str(error.hint)


@example("a\n")
@given(st.text(max_size=40) | st.text("ab1._-+/:\\ \n", max_size=140))
def test_file_names_are_safe(name: str) -> None:
    """No name leaves the directory, hides, or has special characters of a shell."""
    safe = (
        name.isascii()
        and name[:1].isalnum()
        and not set(name) - set(".-_+") - set(string.ascii_letters + string.digits)
    )
    with contextlib.nullcontext() if safe and len(name) <= 128 else pytest.raises(InferenceCenterError):
        assert check_name(name) == name


def test_file_names_of_a_model() -> None:
    """Parts get the names that llama.cpp expects."""
    assert file_names("a", 1) == ("a.gguf",)
    assert file_names("a", 2) == ("a-00001-of-00002.gguf", "a-00002-of-00002.gguf")


@pytest.mark.parametrize(
    ("model", "others", "chosen"),
    [
        ("a-Q8_0.gguf", [], None),
        ("a-Q8_0.gguf", ["mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf"], "mmproj-F16.gguf"),
        ("a-Q8_0.gguf", ["mmproj-a-Q8_0.gguf", "mmproj-a-f16.gguf"], "mmproj-a-f16.gguf"),
        ("a-Q8_0.gguf", ["mmproj-F32.gguf", "mmproj-BF16.gguf"], "mmproj-BF16.gguf"),
        ("a-Q8_0.gguf", ["mmproj-a-Q8_0.gguf", "mmproj-a-F32.gguf"], "mmproj-a-F32.gguf"),
        ("a-Q8_0.gguf", ["mmproj-a-Q4_0.gguf", "mmproj-a-Q8_0.gguf"], "mmproj-a-Q8_0.gguf"),
        ("a-Q8_0.gguf", ["a-mmproj.gguf"], "a-mmproj.gguf"),
        ("a-Q8_0.gguf", ["mmproj-model-f16.gguf"], "mmproj-model-f16.gguf"),
        ("a-7B-Q8_0.gguf", ["mmproj-a-3B-f16.gguf", "mmproj-a-7B-f16.gguf"], "mmproj-a-7B-f16.gguf"),
        ("b-Q8_0.gguf", ["mmproj-a-3B-f16.gguf", "mmproj-a-7B-f16.gguf"], None),
        ("q8/a-Q8_0.gguf", ["mmproj-F16.gguf", "q8/mmproj-F32.gguf"], "q8/mmproj-F32.gguf"),
        ("q8/a-Q8_0.gguf", ["mmproj-F16.gguf"], "mmproj-F16.gguf"),
        ("q8/a-Q8_0.gguf", ["b/mmproj-F16.gguf"], None),
        ("a-Q8_0.gguf", ["mmproj-00001-of-00002.gguf", "mmproj-00002-of-00002.gguf"], None),
    ],
)
def test_matching_projector(model: str, others: list[str], chosen: str | None) -> None:
    """It is of the model's folder and name; F16 is preferred to BF16, F32, Q8_0 and others."""
    variant = choose(parse_reference(f"ada/tiny/{model}"), files(model, *others))
    projector = choose_projector(variant, files(model, *others))
    assert (projector and projector.path) == chosen
