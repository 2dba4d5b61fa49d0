"""The packages that a recipe says it needs."""

import numpy as np
import pytest

from computeshare.errors import RecipeError
from computeshare.tasks.recipes import requirements
from computeshare.tasks.recipes.bundle import Bundle


def test_requirements_are_read_from_lines_of_their_own_in_python_files() -> None:
    files = {
        "recipe.py": "# requires: numpy >=2\n#requires: nothing-of-this-name\nx = '# requires: y'\n",
        "lib/nets.py": "import numpy\n# requires: numpy>=2\n",
        "notes.txt": "# requires: other\n",
    }
    assert requirements.required(Bundle(files)) == ("nothing-of-this-name", "numpy>=2")


@pytest.mark.parametrize("line", ["torch 2", ">=2", "", "x @ file:///x.whl", "x" * 300])
def test_a_requirement_that_cannot_be_looked_for_is_refused_with_its_line(line: str) -> None:
    with pytest.raises(RecipeError, match=r"recipe\.py: `# requires:"):
        requirements.required(Bundle({"recipe.py": f"# requires: {line}\n"}))


def test_what_is_missing_is_said_with_what_is_there() -> None:
    present = ("numpy>=1", f"numpy=={np.__version__}", 'nothing-of-this-name; python_version < "3"')
    requirements.check(present)
    assert requirements.lacking(("numpy>=99", "nothing-of-this-name", *present)) == [
        f"numpy>=99 ({np.__version__} is installed)",
        "nothing-of-this-name (not installed)",
    ]
    with pytest.raises(RecipeError, match=r"requires numpy>=99 \(.* is installed\): install that"):
        requirements.check(("numpy>=99",))
