"""The search order for files: root, $HETU_DATA, an installed package, the shipped file, an error that helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetu.core.errors import DataError
from hetu.data import sources


@pytest.fixture(autouse=True)
def _no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HETU_DATA", raising=False)
    sources._announced.cache_clear()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data package on the path that breaks when it is imported."""
    site = tmp_path / "site"
    (site / "flowers").mkdir(parents=True)
    (site / "flowers" / "__init__.py").write_text("raise RuntimeError('imported')")
    (site / "flowers" / "data.csv").write_text("1\n")
    (site / "flowers-1.0.dist-info").mkdir()
    (site / "flowers-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: flowers\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(site)
    return site / "flowers" / "data.csv"


def find(**given) -> sources.Source:
    return sources.find("mnist", ["a.txt"], mini="mnist5k.npz", **given)


def test_root_comes_first_and_takes_gz(tmp_path: Path, installed: Path) -> None:
    (tmp_path / "a.txt.gz").touch()
    assert find(root=tmp_path, package=("flowers", "flowers/data.csv")) == ("root", (tmp_path / "a.txt.gz",))


def test_home_folder_comes_before_the_package(tmp_path: Path, installed: Path, monkeypatch) -> None:
    monkeypatch.setenv("HETU_DATA", str(tmp_path))
    assert find(package=("flowers", "flowers/data.csv")).kind == "package"  # nothing there yet
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "a.txt").touch()
    assert find(package=("flowers", "flowers/data.csv")) == ("root", (tmp_path / "mnist" / "a.txt",))


def test_an_installed_package_is_located_and_not_imported(installed: Path) -> None:
    assert find(package=("flowers", "flowers/data.csv")) == ("package", (installed,))


def test_the_shipped_file_comes_last(installed: Path) -> None:
    assert find(package=("flowers", "flowers/other.csv")).kind == "mini"
    assert find(package=("not-installed-anywhere", "x")).files[0].name == "mnist5k.npz"


def test_the_source_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    find()
    find()
    printed = capsys.readouterr().err
    assert printed.count("mnist: mini data from") == 1


def test_a_root_without_the_files_is_an_error_even_if_a_mini_exists(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="lacks a.txt"):
        find(root=tmp_path)


def test_nothing_found_names_the_pip_line_and_the_files() -> None:
    with pytest.raises(DataError) as caught:
        sources.find("roses", ["roses.csv"], package=("flowers-data==1.2", "x"))
    assert 'pip install --no-deps "flowers-data==1.2"' in caught.value.fix
    assert "roses.csv" in caught.value.fix and "$HETU_DATA/roses" in caught.value.fix
