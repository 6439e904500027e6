"""The persistent compilation cache: where it is, who may read it, what is counted."""

import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jaxlib
import pytest

from minfer_jax.graph import disk

SCRIPT = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from minfer_jax.graph import disk
print(disk.enable(Path(sys.argv[1])))
jax.jit(lambda x: x * 2 + 1).lower(jnp.ones(3)).compile()
print(*disk.lookups())
"""


def run(root: Path, **env: str) -> list[str]:
    command = [sys.executable, "-c", SCRIPT, str(root)]
    environment = {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", **env}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return result.stdout.splitlines()


def test_second_process_loads_what_the_first_compiled(tmp_path):
    folder, first = run(tmp_path)
    assert Path(folder) == tmp_path / disk.cache_key()
    hits, misses = map(int, first.split())
    assert hits == 0 and misses > 0
    hits, misses = map(int, run(tmp_path)[1].split())
    assert hits > 0 and misses == 0


def test_a_damaged_entry_is_thrown_away_and_not_fatal(tmp_path):
    folder = Path(run(tmp_path)[0])
    for entry in folder.glob("*-cache"):
        entry.write_bytes(entry.read_bytes()[:100])
    script = SCRIPT.replace("jax.jit", "with disk.guarded(): jax.jit")
    command = [sys.executable, "-W", "error", "-c", script, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stderr.startswith("note: emptied the cache of compiled graphs: Error reading")
    assert len(result.stderr.splitlines()) == 1
    assert list(folder.iterdir()) == []


def test_other_warnings_pass_through():
    with pytest.warns(UserWarning, match="something else"), disk.guarded():
        warnings.warn("something else", stacklevel=1)


def test_folder_is_private_and_named_after_what_matters(tmp_path):
    folder = Path(run(tmp_path)[0])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert f"jax{jax.__version__}-jaxlib{jaxlib.__version__}-" in folder.name


def test_cpu_features_are_part_of_the_key(monkeypatch):
    monkeypatch.setattr(disk, "_cpu_features", lambda: "flags: avx2")
    first = disk.cache_key()
    monkeypatch.setattr(disk, "_cpu_features", lambda: "flags: avx2 avx512f")
    assert disk.cache_key() != first


def test_a_cache_that_the_user_configured_stays(tmp_path):
    folder, _ = run(tmp_path / "ours", JAX_COMPILATION_CACHE_DIR=str(tmp_path / "theirs"))
    assert Path(folder) == tmp_path / "theirs"
    assert not (tmp_path / "ours").exists()


def test_an_unusable_folder_means_no_cache(tmp_path):
    (tmp_path / "file").write_text("")
    assert run(tmp_path / "file") == ["None", "0 0"]


@pytest.mark.parametrize("event", ["/jax/compilation_cache/cache_hits"])
def test_other_events_are_not_counted(event):
    hits, misses = disk.lookups()
    disk._count("/jax/something/else")
    assert disk.lookups() == (hits, misses)
    disk._count(event)
    assert disk.lookups() == (hits + 1, misses)
    disk._counts[event] -= 1
