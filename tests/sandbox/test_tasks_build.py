"""From definitions to tasks: sources, repositories, hidden suites, errors. Nothing is fetched."""

import subprocess
from pathlib import Path

import pytest

from sandbox.images.cache import built, cache_directory
from sandbox.images.environment import ImageBuildError, build_environment
from sandbox.tasks.__main__ import main
from sandbox.tasks.build import Definitions
from sandbox.tasks.catalog import CatalogError
from sandbox.tasks.recipes import (
    MutationRecipe,
    ReleaseRecipe,
    load_recipes,
    load_suites,
    save_recipes,
    save_suites,
    sha256,
)
from sandbox.tasks.sources import Release, SourceError, fetch, source_tree
from tests.sandbox.mini_project import CODE, LITTER, TESTS, catalogue, release

FIXED = CODE.replace("value > high", "value >= high")
LOW = "tests/test_clip.py::test_low"
HIGH = "tests/test_clip.py::test_high"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JAXRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def definitions(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Definitions:
    first = release(cache, "1.0", {"src/counts.py": CODE, **TESTS, **LITTER})
    second = release(cache, "1.1", {"src/counts.py": FIXED, "src/more.py": "", **TESTS})
    folder = tmp_path / "definitions"
    folder.mkdir()
    (folder / "projects.yaml").write_text(catalogue(first, {"1.1": second}))
    save_suites(folder / "suites.jsonl", {"counts-1.0": {"tests/test_clip.py": [HIGH, LOW]}})
    save_recipes(folder / "mutation.jsonl", [mutation()])
    save_recipes(folder / "release_diff.jsonl", [pair()])
    made = Definitions(folder)
    monkeypatch.setattr(Definitions, "environment", tmp_path / "environment")
    return made


def mutation(**changes: object) -> MutationRecipe:
    start = CODE.index("value < low") + 6
    bad = CODE[:start] + "<=" + CODE[start + 1 :]
    fields = {
        "instance_id": "counts-1.0__one",
        "project": "counts-1.0",
        "tests": ["tests/test_clip.py"],
        "fail_to_pass": [LOW],
        "problem": "Something is wrong.",
        "seconds": 0.1,
        "path": "src/counts.py",
        "operator": "comparison",
        "start": start,
        "end": start + 1,
        "replacement": "<=",
        "before": sha256(CODE.encode()),
        "after": sha256(bad.encode()),
    }
    return MutationRecipe.model_validate({**fields, **changes})


def pair(**changes: object) -> ReleaseRecipe:
    fields = {
        "instance_id": "counts-1.0__two",
        "project": "counts-1.0",
        "fixed": "counts-1.1",
        "code": ["src/counts.py", "src/more.py"],
        "tests": ["tests/test_tally.py"],
        "fail_to_pass": ["tests/test_tally.py::test_add"],
        "pass_to_pass": ["tests/test_tally.py::test_start"],
        "problem": "Something else is wrong.",
        "seconds": 40.0,
    }
    return ReleaseRecipe.model_validate({**fields, **changes})


def git(top: Path, *arguments: str) -> str:
    command = ["git", "-c", f"safe.directory={top}", "-C", str(top), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_mutation_becomes_a_repository_and_a_suite(definitions: Definitions) -> None:
    task, suite = definitions.task(mutation())
    source = task.image.source
    assert source is not None and task.files == {}
    assert "value <= low" in (source / "src/counts.py").read_text()
    assert not (source / "tests/test_clip.py").exists() and (source / "tests/test_tally.py").exists()
    assert suite.reference == {"src/counts.py": CODE.encode()}
    assert suite.fail_to_pass == (LOW,) and suite.pass_to_pass == (HIGH,)
    assert suite.files == {path: TESTS[path].encode() for path in ("tests/test_clip.py", "tests/conftest.py")}
    assert task.tests_timeout == 60 and task.tags["operator"] == "comparison"


def test_the_repository_has_one_commit_and_nothing_of_the_fix(definitions: Definitions) -> None:
    for recipe in definitions.recipes():
        source = definitions.task(recipe)[0].image.source
        assert source is not None
        assert git(source, "log", "--all", "--format=%an %ae %at %s").count("\n") == 1
        assert git(source, "status", "--porcelain") == "" and git(source, "remote") == ""
        assert git(source, "fsck", "--unreachable", "--no-reflogs") == ""
        listed = set(git(source, "ls-files").split())
        assert listed == {p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file()} - {
            p.relative_to(source).as_posix() for p in (source / ".git").rglob("*")
        }
        objects = git(source, "cat-file", "--batch-all-objects", "--batch-check").split("\n")
        blobs = [line.split()[0] for line in objects if " blob " in line]
        contents = "".join(git(source, "cat-file", "blob", blob) for blob in blobs)
        assert "test_low" not in contents or recipe.kind != "mutation"
        assert "value < low" not in contents or recipe.kind != "mutation"
        assert not any(text in contents for text in ("old\n", "Name: counts\nVersion: 1.1"))
        assert not [path for path in listed if "egg-info" in path or path.endswith((".orig", ".pyc"))]


def test_equal_recipes_give_equal_commits(
    definitions: Definitions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = []
    for place in ("cache", "elsewhere"):
        archives = tmp_path / "cache" / "archives"
        if place == "elsewhere":
            (tmp_path / place).mkdir()
            (tmp_path / place / "archives").symlink_to(archives)
        monkeypatch.setenv("JAXRL_CACHE", str(tmp_path / place))
        monkeypatch.setenv("GIT_AUTHOR_NAME", place)
        monkeypatch.setenv("GIT_DIR", str(tmp_path / "no"))
        source = definitions.task(mutation())[0].image.source
        monkeypatch.delenv("GIT_DIR")
        assert source is not None
        heads.append(git(source, "rev-parse", "HEAD"))
    assert heads[0] == heads[1]


def test_a_release_pair_hides_the_new_tests_and_knows_the_fix(definitions: Definitions) -> None:
    task, suite = definitions.task(pair())
    source = task.image.source
    assert source is not None and (source / "src/counts.py").read_text() == CODE
    assert suite.reference == {"src/counts.py": FIXED.encode(), "src/more.py": b""}
    assert task.tests_timeout == 800 and suite.fail_to_pass == ("tests/test_tally.py::test_add",)
    assert (source / "src/counts-1.0.dist-info/METADATA").read_text().endswith("Version: 1.0\n")


def test_sources_are_cleaned_and_readable_by_all(definitions: Definitions) -> None:
    tree = definitions.project("counts-1.0").tree()
    files = sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file())
    assert files == ["src/counts-1.0.dist-info/METADATA", "src/counts.py", *sorted(TESTS)]
    assert all(path.stat().st_mode & 0o444 == 0o444 and not path.is_symlink() for path in tree.rglob("*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"before": "0" * 64}, r"src/counts.py: expected sha256 0{64}, got"),
        ({"after": "0" * 64}, "belongs to another release"),
        ({"replacement": "=="}, "belongs to another release"),
        ({"path": "src/none.py"}, "expected a file of the release, got 'src/none.py'"),
        ({"path": "../../../etc/passwd"}, "expected a file of the release"),
        (
            {"tests": ["tests/test_tally.py"]},
            "suites.jsonl: counts-1.0: expected the ids of tests/test_tally.py",
        ),
        ({"project": "counts-2.0"}, "projects.yaml: expected a project 'counts-2.0'"),
    ],
)
def test_recipes_that_do_not_fit_are_refused(definitions: Definitions, changes: dict, message: str) -> None:
    with pytest.raises(CatalogError, match=message):
        definitions.task(mutation(**changes))


def test_recipes_survive_being_saved(tmp_path: Path) -> None:
    path = tmp_path / "recipes.jsonl"
    save_recipes(path, [mutation(problem="ünïcode\n"), pair()])
    assert load_recipes(path) == [mutation(problem="ünïcode\n"), pair()]
    save_suites(tmp_path / "suites.jsonl", {"b": {"t": ["1"]}, "a": {}})
    assert load_suites(tmp_path / "suites.jsonl") == {"a": {}, "b": {"t": ["1"]}}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["recipes.jsonl", "suites.jsonl"]


def test_an_archive_of_another_hash_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(arguments: list[str], *, doing: str) -> None:
        Path(arguments[arguments.index("--dest") + 1], "x-1.tar.gz").write_bytes(b"other")

    monkeypatch.setattr("sandbox.tasks.sources.pip", download)
    wanted = Release(name="x", version="1", sha256="0" * 64)
    with pytest.raises(SourceError, match="x 1: expected one archive of sha256 0000"):
        fetch(wanted)
    with pytest.raises(SourceError, match="expected one archive"):
        source_tree(wanted)
    assert list(cache_directory("archives").iterdir()) == [] == list(cache_directory("sources").iterdir())


def test_a_damaged_archive_of_the_cache_is_named(cache: Path) -> None:
    wanted = Release(name="counts", version="1.0", sha256=release(cache, "1.0", TESTS))
    archive = fetch(wanted)
    archive.write_bytes(b"junk")
    with pytest.raises(SourceError, match=rf"{wanted.sha256}: expected one archive .* delete the folder"):
        source_tree(wanted)
    archive.unlink()
    with pytest.raises(SourceError, match="it was damaged"):
        source_tree(wanted)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXRL_CACHE", str(tmp_path / "file"))
    with pytest.raises(ImageBuildError, match=r"file/sources: expected a folder .* set JAXRL_CACHE"):
        cache_directory("sources")
    with pytest.raises(ImageBuildError, match=r"/proc: expected a folder that can be written"):
        built(Path("/proc/place"), lambda top: None)


@pytest.mark.parametrize(
    "arguments", [["validate", "--jobs", "0"], ["find", "--count", "-1", "mutation", "x"]], ids=" ".join
)
def test_numbers_below_one_are_refused(arguments: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "expected a whole number of at least 1" in capsys.readouterr().err


def test_a_keyboard_interrupt_is_one_line(
    definitions: Definitions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Definitions, "task", interrupted)
    assert main(["build", "--definitions", str(definitions.folder)]) == 130
    assert capsys.readouterr().err.startswith("stopped; ")


def test_a_report_that_cannot_be_written_is_named_before_any_work(
    definitions: Definitions, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    report = str(tmp_path / "file" / "report.jsonl")
    assert main(["validate", "--definitions", str(definitions.folder), "--report", report]) == 2
    assert capsys.readouterr().err.startswith(f"error: {report}: ")


def test_a_build_that_fails_leaves_nothing_and_one_that_ends_is_kept(tmp_path: Path) -> None:
    def fails(top: Path) -> None:
        (top / "half").write_text("x")
        raise ValueError("stopped")

    with pytest.raises(ValueError, match="stopped"):
        built(tmp_path / "place", fails)
    assert list(tmp_path.iterdir()) == []

    def ends(top: Path) -> None:
        (top / "tool").write_text("x")
        (top / "tool").chmod(0o700)
        (tmp_path / "place").mkdir(exist_ok=True)  # another builder is first
        ((tmp_path / "place") / "tool").write_text("theirs")

    assert built(tmp_path / "place", ends) == tmp_path / "place"
    assert [path.name for path in tmp_path.iterdir()] == ["place"]
    assert built(tmp_path / "place", fails) == tmp_path / "place"
    made = built(tmp_path / "other", lambda top: ends(top) or None)
    assert (made / "tool").stat().st_mode & 0o777 == 0o755


def test_environments_say_what_is_missing(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ImageBuildError, match=r"none.txt: expected a file of pins with hashes"):
        build_environment(tmp_path / "none.txt")
    wrong = tmp_path / "wrong.txt"
    wrong.write_text("no requirement at all\n")
    with pytest.raises(
        ImageBuildError, match=r"could not .*wrong.txt: install its pins with pip: (.|\n)*requirement"
    ):
        build_environment(wrong)
    assert list(cache_directory("environments").iterdir()) == []
