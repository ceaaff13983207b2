"""The notebooks are what their sources say, hold no outputs, and run."""

import json
from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext", reason="needs the extra 'tutorials'")
nbclient = pytest.importorskip("nbclient", reason="needs the extra 'tutorials'")

TUTORIALS = Path(__file__).parent.parent / "tutorials"
SOURCES = sorted(TUTORIALS.glob("[0-9][0-9]_*.py"))


def test_there_are_tutorials():
    assert SOURCES


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_notebook_matches_its_source(source):
    made = jupytext.read(source)
    kept = json.loads(source.with_suffix(".ipynb").read_text())
    assert [c["cell_type"] for c in kept["cells"]] == [c.cell_type for c in made.cells]
    assert ["".join(c["source"]) for c in kept["cells"]] == [c.source for c in made.cells], (
        f"make it again: jupytext --to ipynb tutorials/{source.name}"
    )
    assert not any(c.get("outputs") for c in kept["cells"])


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_notebook_runs(source):
    notebook = jupytext.read(source)
    client = nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": str(TUTORIALS.parent)}}
    )
    client.execute()
    ran = [c for c in notebook.cells if c.cell_type == "code" and c.execution_count]
    assert len(ran) == sum(c.cell_type == "code" for c in notebook.cells) > 0
