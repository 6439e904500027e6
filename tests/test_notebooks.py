"""Every notebook runs from top to bottom."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "notebooks"


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.ipynb")))
def test_runs(name, smollm2_path, tmp_path, monkeypatch):
    # The kernel finds the model where the fixture has it, and keeps its graphs to itself.
    monkeypatch.setenv("MINFER_HOME", str(tmp_path))
    (tmp_path / "models").symlink_to(smollm2_path.parent)
    for variable in ("JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION"):
        monkeypatch.delenv(variable)  # a notebook's user has jax as it comes
    notebook = nbformat.read(FOLDER / name, as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")


def test_there_is_one():
    assert (FOLDER / "quickstart.ipynb").is_file()
