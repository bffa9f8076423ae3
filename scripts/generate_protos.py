"""Write the modules of src/sylvan/rpc: `python scripts/generate_protos.py [--check]`."""

from __future__ import annotations

import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

SOURCE = Path(__file__).parents[1] / "src"
PROTOS = ("sylvan/rpc/common.proto", "sylvan/rpc/scheduler.proto")


def generate(folder: Path) -> list[Path]:
    """Generate into `folder`; returns the files, relative to it."""
    well_known = str(files("grpc_tools") / "_proto")
    words = ["protoc", f"-I{SOURCE}", f"-I{well_known}"]
    words += [f"--python_out={folder}", f"--pyi_out={folder}", *PROTOS]
    if protoc.main(words) != 0:
        raise SystemExit("protoc failed")
    return sorted(path.relative_to(folder) for path in folder.rglob("*_pb2.py*"))


def main() -> int:
    """Rewrite the modules; with --check, only report modules that are out of date."""
    if "--check" not in sys.argv:
        generate(SOURCE)
        return 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        stale = [
            path
            for path in generate(folder)
            if not (SOURCE / path).exists()
            or _code((SOURCE / path).read_text()) != _code((folder / path).read_text())
        ]
    for path in stale:
        sys.stderr.write(f"{path} is out of date: run scripts/generate_protos.py\n")
    return int(bool(stale))


def _code(text: str) -> list[str]:
    """Return a module without the versions of its generator."""
    skipped = ("#", "_runtime_version", "    ", "    '")
    return [line for line in text.splitlines() if not line.startswith(skipped)]


if __name__ == "__main__":
    sys.exit(main())
