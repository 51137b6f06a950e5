"""Build wheel and sdist, and try the wheel in a clean environment of each Python: ``make package``.

The README's program and ``penstock schedule show`` run there, outside of the checkout. torch is installed
first, in the version of the ``Makefile``.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")
TORCH = re.findall(r"^TORCH \?= (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[0]


def run(*command: str | Path, where: Path = ROOT) -> str:
    """Run a command; what it prints. It ends this program if it fails."""
    done = subprocess.run(
        list(map(str, command)), cwd=where, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def build() -> Path:
    """Wheel and sdist, checked for what belongs into them; gives the wheel."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST)
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as opened, tarfile.open(sdist) as archive:
        inside, source = opened.namelist(), archive.getnames()
    for wanted in ("penstock/py.typed", "licenses/LICENSE"):
        assert any(name.endswith(wanted) for name in inside), f"{wanted} is not in {wheel.name}"
    for wanted in ("LICENSE", "README.md", "docs/architecture.md", "tests/conftest.py"):
        assert any(name.endswith(wanted) for name in source), f"{wanted} is not in {sdist.name}"
    assert not [name for name in inside if not name.startswith("penstock")], (
        "the wheel holds other files"
    )
    print(f"{wheel.name}: {len(inside)} files; {sdist.name}: {len(source)} files")
    return wheel


def try_out(python: str, wheel: Path) -> None:
    """Install the wheel into a clean environment, and use it there."""
    with tempfile.TemporaryDirectory(prefix="penstock-package-") as folder:
        place = Path(folder)
        run(python, "-m", "venv", place / "env")
        bin_ = place / "env" / "bin"
        pip = (bin_ / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        run(*pip, TORCH)
        run(*pip, wheel)
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        (place / "program.py").write_text(re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[0])
        run(bin_ / "python", "program.py", where=place)
        shown = run(bin_ / "penstock", "schedule", "show", "ZB-V", where=place)
        assert "rank 3" in shown, shown
        print(f"{python}: {run(bin_ / 'penstock', '--version', where=place).strip()}: works")


def works(python: str) -> bool:
    """Whether there is such a Python here."""
    if shutil.which(python) is None:
        return False
    return (
        subprocess.run([python, "-c", "import venv"], capture_output=True, check=False).returncode
        == 0
    )


def main(pythons: list[str]) -> None:
    """Build, and try the wheel with each Python that is at hand."""
    wheel = build()
    for python in pythons or PYTHONS:
        if works(python):
            try_out(python, wheel)
        else:
            print(f"{python}: not at hand")


if __name__ == "__main__":
    main(sys.argv[1:])
