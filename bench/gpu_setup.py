"""Set up an environment over the torch that a machine has, without a network.

The environment sees every package of the Python that runs this script. What is missing comes from a
folder of wheels (``make gpu-wheels`` fills it); torch is never touched. fxckpt itself is installed
from this tree, editable.

    python bench/gpu_setup.py VENV WHEELS REQUIREMENT...
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def missing(requirements: list[str]) -> list[str]:
    """Return the requirements that this Python does not meet: a name, and a least version."""
    found = []
    for requirement in requirements:
        name, least = re.fullmatch(r"([\w-]+)(?:>=([\d.]+))?.*", requirement).groups()
        try:
            has = numbers(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            found.append(requirement)
            continue
        if has < numbers(least or ""):
            found.append(requirement)
    return found


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with."""
    return tuple(int(part) for part in re.findall(r"\d+", re.match(r"[\d.]*", version)[0]))


def torch_requirement() -> str:
    """Return what fxckpt needs of torch."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        needed = tomllib.load(file)["project"]["dependencies"]
    return next(each for each in needed if each.startswith("torch>="))


def make(folder: Path) -> Path:
    """Create an environment that sees all packages of this Python, and return its Python."""
    if not (folder / "bin/python").exists():
        venv.create(folder, system_site_packages=True, with_pip=True)
    python = folder / "bin/python"
    own = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    if Path(own, "setuptools").exists():
        # Before 3.12, Python puts an old one beside pip, which would hide the machine's.
        command = [str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools"]
        subprocess.run(command, check=True)
    # This Python may itself be an environment's, whose packages a new one does not see.
    paths = dict.fromkeys(p for p in sys.path if p.endswith(("site-packages", "dist-packages")))
    Path(own, "machine.pth").write_text("\n".join(paths) + "\n")
    return python


def main() -> None:
    """Set up the environment, and print what it has."""
    folder, wheels, *requirements = sys.argv[1:]
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"{sys.executable} has no torch: give the Python that has it, PYTHON=...")
    if missing([needed := torch_requirement()]):
        sys.exit(f"{sys.executable} has torch {torch}, and fxckpt needs {needed}.")
    try:
        python = make(Path(folder))
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"{sys.executable} makes no environment in {folder}: {error}. Is venv installed?")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-index", "--find-links", wheels]
    lacking = missing(requirements)
    if lacking and subprocess.run([*pip, *lacking], check=False).returncode != 0:
        sys.exit(
            f"{wheels} lacks what this machine lacks: {', '.join(lacking)}. Run make gpu-wheels "
            "where there is a network, and bring build/wheels along."
        )
    own = [*pip, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)]
    if subprocess.run(own, check=False).returncode != 0:
        sys.exit(f"fxckpt itself could not be installed in {folder}: pip says why above.")
    print(f"torch {torch} as it was; installed: {', '.join(lacking) or 'nothing'}", flush=True)


if __name__ == "__main__":
    main()
