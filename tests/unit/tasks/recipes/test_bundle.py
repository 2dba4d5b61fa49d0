"""A recipe's files, their digest and what is refused."""

from pathlib import Path

import pytest

from computeshare.errors import RecipeError
from computeshare.tasks.recipes import bundle
from computeshare.tasks.recipes.bundle import Bundle


def test_a_file_alone_and_in_a_folder_is_the_same_recipe(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for path in (tmp_path / "net.py", tmp_path / "mine" / "recipe.py"):
        path.write_text("x = 1\n")
    assert bundle.read(tmp_path / "net.py") == bundle.read(tmp_path / "mine")


def test_the_digest_changes_with_each_file_and_not_with_their_order() -> None:
    files = {"recipe.py": "a", "lib/nets.py": "b"}
    assert Bundle(files).digest == Bundle(dict(reversed(files.items()))).digest
    by_hand = "7468bd7eacb5d96c3758ab2608efe1666e03b4b1554773991ef44a7041a3c154"  # of {"recipe.py":"x = 1\\n"}
    assert Bundle({"recipe.py": "x = 1\n"}).digest == f"sha256:{by_hand}"
    assert len({Bundle(files | {name: "c"}).digest for name in (*files, "other.txt")}) == 3


def test_hidden_files_and_caches_are_left_out(tmp_path: Path) -> None:
    for name in ("recipe.py", "lib/nets.py", ".git/config", "__pycache__/recipe.pyc", "lib/.DS_Store"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert sorted(bundle.read(tmp_path).files) == ["lib/nets.py", "recipe.py"]


def test_the_files_are_written_as_they_were_read(tmp_path: Path) -> None:
    files = {"recipe.py": "# \u00e9\r\n", "lib/nets.py": "b"}
    Bundle(files).write(tmp_path)
    assert bundle.read(tmp_path).files == files


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../x", "./x", "a//b", "a\\b", "c:x", "a\nb", "", "x" * 201])
def test_a_path_that_may_lead_out_of_the_folder_is_refused(path: str) -> None:
    with pytest.raises(RecipeError, match="not a path inside"):
        Bundle({"recipe.py": "", path: ""}).checked()


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"net.py": ""}, "has no recipe.py"),
        ({"recipe.py": "\0"}, "not text"),
        ({"recipe.py": "\ud800"}, "UTF-8"),
        ({"recipe.py": "x" * 1_000_001}, "at most 1,000,000 bytes"),
        ({"recipe.py": ""} | {f"{number}.py": "" for number in range(200)}, "at most 200 files, not 201"),
    ],
)
def test_what_is_no_recipe_is_refused_with_the_reason(files: dict[str, str], told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        Bundle(files).checked()


def test_what_cannot_be_read_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="there is no file or folder"):
        bundle.read(tmp_path / "none.py")
    (tmp_path / "recipe.py").write_bytes(b"\xff\xfe")
    with pytest.raises(RecipeError, match=r"recipe\.py is not text in UTF-8"):
        bundle.read(tmp_path)


def test_a_folder_with_too_many_files_is_refused_before_all_are_read(tmp_path: Path) -> None:
    for number in range(201):
        (tmp_path / f"{number}.py").touch()
    with pytest.raises(RecipeError, match="more than 200 files"):
        bundle.read(tmp_path)
